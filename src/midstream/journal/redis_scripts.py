"""The scripts that change a store, one file each in `lua/`, and how they are called and answer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from hashlib import sha1
from importlib.resources import files

from hiredis import pack_command

from midstream.journal.redis_keys import FIELDS


class Code(IntEnum):
    """What a script's reply begins with."""

    OK = 0
    AGAIN = 1  # it was done before
    UNKNOWN = 2  # no such stream, unless a part of it is lost
    STALE = 3  # another epoch is in force: it follows
    OVER = 4  # the stream has ended: its status follows
    SEQUENCE = 5  # not the next number, which follows
    AHEAD = 6  # above the highest, which follows
    TAKEN = 7  # another stream, which follows, has the name
    CHANGED = 8  # the store is not as the caller thought: look again


def command(*parts: bytes | str | int) -> bytes:
    """A command as it goes over the wire."""
    packed: bytes = pack_command(parts)  # type: ignore[arg-type]  # its stub says that a command has one part
    return packed


def _source(name: str) -> str:
    return (files("midstream.journal") / "lua" / f"{name}.lua").read_text("utf-8")


_CODES = "".join(f"local {code.name} = {code.value}\n" for code in Code)
_FIELDS = "local FIELDS = {{ {} }}\n".format(", ".join(f"'{field}'" for field in FIELDS))


_PRELUDE = _FIELDS + _source("prelude")
_HERE = "--@prelude\n"


class Script:
    """A script by its name and its text."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest().encode()

    def call(self, keys: Sequence[bytes], *args: bytes | str | int) -> bytes:
        """The command that runs it."""
        return command(b"EVALSHA", self.sha, len(keys), *keys, *args)


def _script(name: str, *, about_stream: bool = True) -> Script:
    """A script by its file's name.  `about_stream`: it is given the keys of one stream, in their order, and what such
    scripts share stands before it, or where it says.
    """
    source = _source(name)
    if about_stream:
        source = source.replace(_HERE, _PRELUDE) if _HERE in source else _PRELUDE + source
    return Script(name, _CODES + source)


CREATE = _script("create")
APPEND = _script("append")
CANCEL = _script("cancel")
CLAIM = _script("claim")
ACK = _script("ack")
DROP = _script("drop")
TOUCH = _script("touch")
KEEP = _script("keep")
EXPIRE = _script("expire")
HOLD = _script("hold")
LOOK = _script("look", about_stream=False)
RECOUNT = _script("recount", about_stream=False)
BIND = _script("bind", about_stream=False)
UNBIND = _script("unbind", about_stream=False)

SCRIPTS: tuple[Script, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Script))
