"""The settings, each declared once: flag, environment variable, `--help` and the page in docs/ all come from here.

Precedence: flag, then `MIDSTREAM_…`, then the default.  Secrets are read from the environment or a file, never from a
flag (flags show in the process list), and do not stand in a `repr`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from ipaddress import ip_address
from typing import Any

from midstream.admission import Limits
from midstream.producers.continuation import Continuation
from midstream.producers.continuation import continuation as parse_continuation
from midstream.producers.upstream import UpstreamLimits
from midstream.rules import Bounds
from midstream.wire import RETAIN_CAP

_LEAST_ROOM = 64 * 1024
_UNITS = {"": 1, "k": 1024, "kib": 1024, "m": 1024**2, "mib": 1024**2, "g": 1024**3, "gib": 1024**3}


def size(text: str) -> int:
    """Bytes: `8388608`, `8MiB`, `1g`.  Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]{1,18})\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower().removesuffix("b").removesuffix("i") not in ("", "k", "m", "g"):
        raise ValueError("not a size; write bytes, or 512KiB, 8MiB, 1GiB")
    return int(match[1]) * _UNITS[match[2].lower().removesuffix("b").removesuffix("i")]


def seconds(text: str) -> float:
    """A positive number of seconds.  Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("not a number of seconds") from None
    if not 0 < value < 1e9:
        raise ValueError("must be above 0 seconds")
    return value


def term(text: str) -> float:
    """Seconds for which something is kept, of which there is a most.  Raises ValueError."""
    value = seconds(text)
    if value > RETAIN_CAP:
        raise ValueError(f"must be at most {RETAIN_CAP:g} seconds (24 h)")
    return value


def room(text: str) -> int:
    """Memory that streams are kept in.  Raises ValueError: in less than that there is no room for one."""
    value = size(text)
    if value < _LEAST_ROOM:
        raise ValueError(f"must be at least {_LEAST_ROOM // 1024}KiB")
    return value


def count(text: str) -> int:
    """A positive integer.  Raises ValueError."""
    value = _whole(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def tcp_port(text: str) -> int:
    """A TCP port; 0: any free one, or off.  Raises ValueError."""
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise ValueError("must be from 0 to 65535")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("not a whole number") from None


def origin(text: str) -> str:
    """A web origin, exactly as browsers send it.  Raises ValueError: `*` would let every page in."""
    if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", text):
        raise ValueError("not an origin; write https://app.example")
    return text.lower()


def host_name(text: str) -> str:
    """A name or an address as it stands in a `Host` header, without a port.  Raises ValueError."""
    name = text.lower()
    if not re.fullmatch(r"[a-z0-9._-]+", name):
        try:
            ip_address(name)
        except ValueError:
            raise ValueError("not a host; write gateway.example, without a scheme or a port") from None
    return name


def _setting(default: Any, parse: Callable[[str], Any], metavar: str, help: str, **more: Any) -> Any:
    metadata = {"parse": parse, "metavar": metavar, "help": help, **more}
    if isinstance(default, tuple):
        return field(default=default, metadata=metadata | {"many": True})
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `midstream serve` can be told."""

    host: str = _setting("127.0.0.1", str, "ADDRESS", "address to listen on")
    port: int = _setting(8400, tcp_port, "PORT", "port for HTTP; 0 takes a free one")
    grpc_port: int = _setting(8401, tcp_port, "PORT", "port for gRPC; 0 is off")
    grpc_tls_cert: str | None = _setting(
        None, str, "FILE", "certificate chain (PEM) of the gRPC port, which without one speaks cleartext HTTP/2"
    )
    grpc_tls_key: str | None = _setting(None, str, "FILE", "private key (PEM) of that certificate")
    upstream: tuple[str, ...] = _setting(
        (),
        str,
        "[PATTERN=]URL",
        "an OpenAI-compatible endpoint, such as http://127.0.0.1:8080/v1, for the models that match PATTERN (all "
        "without one); may be given several times, the first that matches serves; `scripted:` is a simulation",
    )
    journal: str = _setting(
        "sqlite:///midstream.db",
        str,
        "URL",
        "where records are kept: memory:, sqlite:///FILE or, shared by several gateways, redis://HOST",
    )
    pool: str | None = _setting(
        None,
        str,
        "URL",
        "let workers pull jobs, for the models that no upstream serves; the URL is where jobs and outcomes are kept: "
        "sqlite:///FILE or, with the extra `postgres` (pip install 'midstream[postgres]'), postgresql://USER@HOST/NAME",
    )
    keys_file: str | None = _setting(
        None, str, "FILE", "keys, one `name:key` or `name:key:admin` a line; SIGHUP re-reads"
    )
    heartbeat: float = _setting(15.0, seconds, "S", "seconds of silence after which a reader is sent a sign of life")
    retain: float = _setting(600.0, term, "S", "seconds a finished stream is kept after its last access (24 h at most)")
    abandon_after: float | None = _setting(
        None,
        seconds,
        "S",
        "cancel a generation that nobody has read or asked for in so many seconds (default: never)",
    )
    continuation: tuple[Continuation, ...] = _setting(
        (),
        parse_continuation,
        "[PATTERN=]MODE",
        "go on with a broken answer of the models that match PATTERN by assistant prefill: prefill, prefill-echo (the "
        "upstream repeats what it is given) or off; may be given several times, the first that matches counts",
        flag="--continue",
    )
    upstream_connect: float = _setting(5.0, seconds, "S", "seconds an upstream may take to accept a connection")
    upstream_first_token: float = _setting(300.0, seconds, "S", "seconds an upstream may take to its first token")
    upstream_idle: float = _setting(120.0, seconds, "S", "seconds an upstream may be silent between two bytes")
    upstream_total: float = _setting(1800.0, seconds, "S", "seconds an upstream may take for a whole answer")
    drain: float = _setting(30.0, seconds, "S", "seconds that open streams have to finish at SIGTERM")
    max_stream_bytes: int = _setting(8 * 1024**2, room, "BYTES", "memory of one stream; past it the oldest records go")
    max_stream_records: int = _setting(100_000, count, "N", "records of one stream; past it the oldest go")
    max_streams: int = _setting(10_000, count, "N", "open streams of this process")
    max_streams_per_owner: int = _setting(1_000, count, "N", "open streams of one owner in this process")
    max_jobs_per_owner: int = _setting(
        1_000, count, "N", "generations that one owner may wait for by polling, over all gateways of a pool"
    )
    max_bytes: int = _setting(
        1024**3, room, "BYTES", "memory of all streams; past it finished ones go, then new ones wait"
    )
    max_body: int = _setting(8 * 1024**2, size, "BYTES", "largest request body")
    cors_origin: tuple[str, ...] = _setting(
        (), origin, "ORIGIN", "a web origin whose pages may use this gateway; may be given several times"
    )
    allowed_host: tuple[str, ...] = _setting(
        (),
        host_name,
        "HOST",
        "without keys: a Host this gateway answers for, besides localhost; may be given several times",
    )
    workers: int = _setting(
        1,
        count,
        "N",
        "processes of this gateway, which share its ports (a pool's workers are `midstream worker`); more than one "
        "need a journal that they can share, redis://HOST",
    )
    insecure: bool = _setting(False, bool, "", "listen beyond loopback although there are no keys")

    @property
    def limits(self) -> Limits:
        return Limits(self.max_streams, self.max_streams_per_owner, self.heartbeat, self.retain, self.abandon_after)

    @property
    def upstream_limits(self) -> UpstreamLimits:
        return UpstreamLimits(self.upstream_connect, self.upstream_first_token, self.upstream_idle, self.upstream_total)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.max_stream_bytes, self.max_stream_records, self.max_bytes)


def env_name(setting: Field[Any]) -> str:
    """`max_body` -> `MIDSTREAM_MAX_BODY`."""
    return "MIDSTREAM_" + flag_name(setting).removeprefix("--").replace("-", "_").upper()


def flag_name(setting: Field[Any]) -> str:
    """`max_body` -> `--max-body`; `continue` is a word of the language, and therefore no name of a field."""
    return str(setting.metadata.get("flag") or "--" + setting.name.replace("_", "-"))


def add_arguments(parser: argparse.ArgumentParser, only: Container[str] | None = None) -> None:
    """Give the parser one flag per setting.  Nothing is defaulted here: `load` knows what was given.

    only  names of the settings that `--help` shows, where it is not to show all
    """
    for setting in fields(Settings):
        more = setting.metadata
        hidden = only is not None and setting.name not in only
        if more["parse"] is bool:
            told = argparse.SUPPRESS if hidden else more["help"]
            parser.add_argument(flag_name(setting), action="store_true", default=None, help=told)
            continue
        default = "" if setting.default in (None, ()) else f" (default: {shown(setting.default)})"
        parser.add_argument(
            flag_name(setting),
            dest=setting.name,
            action="append" if more.get("many") else "store",
            metavar=more["metavar"],
            help=argparse.SUPPRESS if hidden else (more["help"] + default).replace("%", "%%"),
        )


def shown(value: Any) -> str:
    """A default for people: sizes with their unit."""
    if type(value) is int:
        for unit, step in (("GiB", 1024**3), ("MiB", 1024**2)):
            if value and value % step == 0:
                return f"{value // step}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(args: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Flags over environment over defaults.  Raises ValueError that names the setting and what it takes."""
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        given = getattr(args, setting.name, None)
        name = flag_name(setting)
        if given is None and env_name(setting) in environ:
            name, text = env_name(setting), environ[env_name(setting)]
            given = text.split() if setting.metadata.get("many") else text
        if given is not None:
            values[setting.name] = _parsed(setting, name, given)
    _refuse_unknown(environ)
    return Settings(**values)


def _parsed(setting: Field[Any], name: str, given: str | bool | Sequence[str]) -> Any:
    parse = setting.metadata["parse"]
    try:
        if parse is bool:
            return given if isinstance(given, bool) else _boolean(str(given))
        if setting.metadata.get("many"):
            return tuple(parse(text) for text in given)  # type: ignore[union-attr]  # appended flags are lists
        return parse(given)
    except ValueError as error:
        told = given if isinstance(given, (str, bool)) else " ".join(given)
        raise ValueError(f"{name} {told!r}: {error}") from None


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("must be 1 or 0")


# Read elsewhere, and therefore no mistake of the user's.
_OTHER_ENV = re.compile(r"MIDSTREAM_(UPSTREAM_KEY(_\d+)?|KEY|GATEWAY)")


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {env_name(setting) for setting in fields(Settings)}
    for name in environ:
        if name.startswith("MIDSTREAM_") and name not in known and not _OTHER_ENV.fullmatch(name):
            raise ValueError(f"{name}: no such setting; see midstream serve --help")


def upstream_keys(environ: Mapping[str, str], upstreams: int) -> list[str | None]:
    """The key of each upstream, in order: `MIDSTREAM_UPSTREAM_KEY_1`, `_2`, …, or `MIDSTREAM_UPSTREAM_KEY` for all."""
    every = environ.get("MIDSTREAM_UPSTREAM_KEY")
    return [environ.get(f"MIDSTREAM_UPSTREAM_KEY_{at + 1}", every) or None for at in range(upstreams)]
