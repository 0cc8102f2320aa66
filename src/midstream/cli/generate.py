"""Ask a model, and print its answer as it comes. A dropped connection is mended, at the exact token.

The answer goes to stdout, as it is (made safe where that is a terminal); everything else to stderr. When it
stops early, by Ctrl-C or because the gateway stays away, the command that prints the rest stands on stderr:
the generation itself goes on.

With --position FILE a killed run can be resumed, too: FILE holds the cursor of what has been printed, replaced
after each token that has left this process. Killed between the two, a resumed run prints that one token again;
it never leaves one out.

Over gRPC an answer can be given a name, --session NAME, which stands for its stream from then on; over the other
transports that is the stream's id. Where a reader stands is told at the end and on each drop, as in
  session="demo" last_token_index=41 (resume with --resume-from 42)
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from midstream.cli import exits
from midstream.cli.gateway import KEY_VARIABLE, add_gateway, key_of, refusal
from midstream.cli.terminal import Console, Interrupted, Interrupts, OutputFailed, command, save
from midstream.client import Client, Cursor, GaveUp, Lost, Record, Resumed, Stream, Unreachable
from midstream.client.sync import GRPC_PORT, Transport
from midstream.codec.inference import index_of, position_of
from midstream.cursor import decode
from midstream.errors import BadCursor, MidstreamError, PositionError, UnknownStream
from midstream.wire import CANCELLED, DONE, FAILED, OPEN, TOKEN

HELP = "ask a model and print its answer, across dropped connections"

# An ack is a courtesy: while the gateway is away the answer matters more.
_ACK_TIMEOUT = 5.0
# What the gateway names its streams; whatever else is a session's name.
_STREAM_ID = re.compile(r"[0-9a-f]{32}")
# A wait that a person notices, in seconds.
_LONG = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to ask; - reads it from stdin")
    add_gateway(parser)
    asked = parser.add_argument_group("the request")
    asked.add_argument("--model", help="the model to ask (default: the gateway's first)")
    asked.add_argument("--system", metavar="TEXT", help="instructions in front of the prompt")
    asked.add_argument("--max-tokens", type=_positive, metavar="N", help="end the answer after N tokens")
    asked.add_argument("--temperature", type=float, metavar="T", help="how freely the model chooses")
    asked.add_argument("--seed", type=int, metavar="N", help="the same answer again, where the model can")
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--transport",
        choices=("sse", "ws", "grpc"),
        help="what the answer comes over: server-sent events, a WebSocket, or gRPC, which carries its text alone "
        "(default: sse; grpc for a --session that has a name)",
    )
    reading.add_argument(
        "--grpc", metavar="HOST:PORT", help=f"where the gateway's gRPC is (default: port {GRPC_PORT} of its host)"
    )
    reading.add_argument(
        "--session", metavar="NAME", help="the answer's name, or the id of its stream: asked with a PROMPT, or resumed"
    )
    reading.add_argument(
        "--resume-from",
        type=_index,
        metavar="K",
        help="with --session: print the answer from its K-th token on, counted from 0; a PROMPT is not asked again",
    )
    reading.add_argument(
        "--resume", metavar="CURSOR", help="print the rest of an answer instead; @FILE reads the cursor from FILE"
    )
    reading.add_argument("--position", metavar="FILE", type=Path, help="keep the cursor of what was printed in FILE")
    reading.add_argument(
        "--ack-every",
        type=_positive,
        metavar="N",
        help="acknowledge every N records: the gateway may then drop what was printed, and only what follows can be "
        "resumed",
    )
    reading.add_argument("--json", action="store_true", help="print the records, one JSON object per line")
    reading.add_argument("--show-reasoning", action="store_true", help="print the model's thinking aloud to stderr")


def _index(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print an answer; returns an exit code of `exits`."""
    console = Console()
    with Interrupts() as interrupts:
        try:
            question = _question(args)
            answer = _Run(args, console, interrupts)
        except (ValueError, OSError, BadCursor) as error:
            console.talk(f"midstream generate: {_reason(error)}")
            return exits.USAGE
        except Interrupted as signalled:
            return signalled.code
        return answer.run(question)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@dataclass(frozen=True, slots=True)
class _Session:
    """What is to be resumed: a session's name or a stream's id, and the token wanted next."""

    name: str
    token: int


def transport_of(args: argparse.Namespace) -> Transport:
    """The one that was asked for; else gRPC for a session that has a name, which only it knows."""
    named = args.session is not None and not _STREAM_ID.fullmatch(args.session)
    chosen: Transport = args.transport or ("grpc" if named else "sse")
    if named and chosen != "grpc":
        raise ValueError("over this transport --session is a stream's id; names for answers need --transport grpc")
    return chosen


def _question(args: argparse.Namespace) -> Cursor | _Session | dict[str, Any]:
    """Where to resume, or what to ask.  Raises ValueError, OSError, BadCursor."""
    options = {name: getattr(args, name) for name in ("model", "max_tokens", "temperature", "seed")}
    if args.resume_from is not None and args.session is None:
        raise ValueError("--resume-from counts in the answer that --session names")
    if args.session is not None and (args.resume_from or args.prompt is None):
        if args.resume is not None:
            raise ValueError("--resume and --session both say where to go on; give one")
        return _Session(args.session, args.resume_from or 0)
    if args.resume is not None:
        if args.prompt is not None or args.system is not None or any(v is not None for v in options.values()):
            raise ValueError("--resume goes on with an answer: it takes no PROMPT and nothing of a request")
        return _cursor(args.resume)
    if transport_of(args) == "grpc" and (args.system or options | {"model": None} != dict.fromkeys(options)):
        raise ValueError("over gRPC a request is a PROMPT and maybe a --model, nothing more")
    if args.session is not None and transport_of(args) != "grpc":
        raise ValueError("a new answer gets its stream's id from the gateway; names need --transport grpc")
    if args.prompt is None:
        raise ValueError("what should be asked? Give a PROMPT, - for stdin, or --resume CURSOR")
    prompt = args.prompt if args.prompt != "-" else sys.stdin.buffer.read().decode()
    for text in filter(None, (prompt, args.system, args.model)):
        text.encode()  # an argument that is no UTF-8 comes in with lone surrogates
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if args.system is None:
        return {"prompt": prompt, **options}
    system = {"role": "system", "content": args.system}
    return {"messages": [system, {"role": "user", "content": prompt}], **options}


def _cursor(given: str) -> Cursor:
    token = Path(given[1:]).read_text(encoding="ascii").strip() if given.startswith("@") else given
    try:
        return decode(token)
    except BadCursor as error:
        where = given if given.startswith("@") else "--resume"
        raise BadCursor(f"{where}: not a cursor: {error.detail}") from None


@dataclass(slots=True)
class _Tally:
    """What this run has printed."""

    tokens: int = 0
    began: float = 0.0
    records: int = 0
    thinking: bool = False
    other_choices: bool = False
    long_wait: bool = False


class _Run:
    """One run of the verb.  `kept` is the position of what has left this process."""

    def __init__(self, args: argparse.Namespace, console: Console, interrupts: Interrupts) -> None:
        self._args = args
        self._console = console
        self._interrupts = interrupts
        transport = transport_of(args)
        self._client = Client(args.gateway, key=key_of(args), notify=self._notice, transport=transport, grpc=args.grpc)
        self._acks: Client | None = Client(
            args.gateway, key=key_of(args), timeout=_ACK_TIMEOUT, transport=transport, grpc=args.grpc
        )
        self._tally = _Tally()
        self._file_is_good = False
        self.kept: Cursor | None = None

    def run(self, question: Cursor | _Session | dict[str, Any]) -> int:
        try:
            code = self._follow(self._open(question))
            self._console.close()
            return code
        except Interrupted as signalled:
            self._console.echoed()
            return self._stopped("stopped reading; the generation goes on", signalled.code)
        except OutputFailed as error:
            if error.broken_pipe:
                return self._stopped("stdout was closed by its reader; the generation goes on", exits.BROKEN_PIPE)
            return self._stopped(f"cannot write the answer: {error}", exits.OUTPUT_FAILED)
        except PositionError as error:
            return self._gone(error)
        except UnknownStream as error:
            self._console.talk(str(error), "red")
            return exits.REFUSED
        except MidstreamError as error:
            return self._stopped(self._wording(error), exits.of(error))

    # --- the answer -------------------------------------------------------------------------------------------------

    def _open(self, question: Cursor | _Session | dict[str, Any]) -> Stream:
        self._tally.began = time.monotonic()
        if isinstance(question, dict):
            stream = self._client.generate(idempotency_key=self._args.session, **question)
        else:
            stream = self._client.resume(self._place(question) if isinstance(question, _Session) else question)
        with self._interrupts.held():
            self._keep(stream.position)
        if isinstance(question, dict):
            self._announce(stream.stream_id)
        return stream

    def _place(self, session: _Session) -> Cursor:
        """The position of who wants this token next: past all before it, and of the first, past nothing."""
        named = transport_of(self._args) == "grpc"
        stream_id = self._client.find(session.name, session.token) if named else session.name
        return Cursor(stream_id, position_of(session.token) if session.token else 0)

    def _announce(self, stream_id: str) -> None:
        """What is needed when this process can no longer say it."""
        if self._args.ack_every and self._args.position is None:
            # The command would name the beginning, which the first ack makes nobody's.
            self._console.talk(f"stream {stream_id} · killed, a run that acks goes on only with --position FILE", "dim")
            return
        self._console.talk(f"stream {stream_id} · should this run be killed, go on{self._needs()} with:", "dim")
        self._console.talk(f"  {self._resume_command()}", "dim")

    def _follow(self, stream: Stream) -> int:
        for record in stream:
            with self._interrupts.held():
                self._show(record)
                self._keep(stream.position)
            self._ack(record)
        if stream.outcome is None:
            return self._ended_before(stream.state())
        return self._ended(stream.outcome, stream.stream_id)

    def _show(self, record: Record) -> None:
        self._tally.records += 1
        if "seam" in record.data:
            self._console.talk("from here on the answer is the work of another run of the model", "yellow")
        if record.event == TOKEN:
            self._tally.tokens += 1
        if self._args.json:
            fields = {"seq": record.seq, "event": record.event, "data": record.data}
            self._console.json(orjson.dumps(fields))
        elif record.event == TOKEN:
            self._show_token(record)

    def _show_token(self, record: Record) -> None:
        if record.choice:
            if not self._tally.other_choices:
                self._tally.other_choices = True
                self._console.talk("this stream has several answers; here is the first (--json prints all)", "yellow")
            return
        if record.reasoning:
            if self._args.show_reasoning:
                self._console.aside(record.reasoning)
            elif not self._tally.thinking and self._console.err_is_terminal:
                self._console.talk("the model is thinking (--show-reasoning shows it) …", "dim")
            self._tally.thinking = True
        refusal = record.data.get("refusal")
        self._console.text(record.text + (refusal if isinstance(refusal, str) else ""))

    def _keep(self, position: Cursor) -> None:
        """What has been printed is safe from here on: tell the file."""
        self.kept = position
        if self._args.position is not None:
            try:
                save(self._args.position, position.encode() + "\n")
            except OSError as error:
                self._file_is_good = False
                raise OutputFailed(f"the position file {self._args.position}: {error.strerror or error}") from error
            self._file_is_good = True

    def _ack(self, record: Record) -> None:
        every = self._args.ack_every
        if every is None or self._acks is None or not (record.seq % every == 0 or record.terminal):
            return
        assert self.kept is not None
        try:
            self._acks.ack(self.kept.stream_id, record.seq)
        except Unreachable:
            pass  # the next one covers it
        except MidstreamError as error:
            self._acks = None
            self._console.talk(f"the gateway takes no acks: {error}", "yellow")

    # --- the end ----------------------------------------------------------------------------------------------------

    def _facts(self, position: Cursor) -> str:
        """Where this reader stands; tokens count from 0, and that of record 2 is the first."""
        last = max(index_of(position.seq), -1)
        session = self._args.session or position.stream_id
        return f'session="{session}" last_token_index={last} (resume with --resume-from {last + 1})'

    def _ended(self, outcome: Record, stream_id: str) -> int:
        facts = self._facts(Cursor(stream_id, outcome.seq - 1))
        spent = f"{_plural(self._tally.tokens, 'token')} in {time.monotonic() - self._tally.began:.1f} s"
        if outcome.event == DONE:
            reason = outcome.data.get("finish_reason") or "no finish reason"
            self._console.talk(f"done ({reason}): {spent}{_usage(outcome.data.get('usage'))}", "dim")
        elif outcome.event == FAILED:
            self._console.talk(f"failed: {_failure(outcome.data)}", "red")
            self._console.talk(spent, "dim")
        else:
            self._console.talk(f"cancelled ({outcome.data.get('reason')}): {spent}", "yellow")
        self._console.talk(facts, "dim")
        return _CODES.get(outcome.event, exits.OK)

    def _ended_before(self, state: dict[str, Any]) -> int:
        """Resumed from the very end: there is nothing to print, and how it ended has to be asked for."""
        status = str(state.get("status"))
        self._console.talk(f"nothing follows this position: the answer has ended ({status})", "dim")
        return _CODES.get(status, exits.FAILED)

    def _stopped(self, message: str, code: int) -> int:
        self._console.talk(message, "yellow" if code >= exits.INTERRUPTED else "red")
        if self.kept is not None:
            self._console.talk(self._facts(self.kept))
            self._console.talk(f"go on{self._needs()} with:")
            self._console.talk(f"  {self._resume_command()}")
        return code

    def _gone(self, error: PositionError) -> int:
        self._console.talk(f"this position cannot be resumed: {error}", "red")
        if self.kept is not None:
            look = command("inspect", "--gateway", self._args.gateway, self.kept.stream_id, "--text")
            self._console.talk("the answer as far as it has been kept is printed by:")
            self._console.talk(f"  {look}")
        return exits.POSITION_GONE

    def _wording(self, error: MidstreamError) -> str:
        if isinstance(error, GaveUp) and self.kept is None:
            tried = _plural(error.attempts, "attempt")
            # An answer, if only that of a proxy: it says itself what is wrong.
            hint = "" if error.reason.startswith("status ") else "; is the gateway running?"
            return f"no stream from {self._args.gateway}: {error.reason} ({tried}){hint}"
        return refusal(error, self._args)

    def _needs(self) -> str:
        return f", {KEY_VARIABLE} being set," if self._args.key else ""

    def _resume_command(self) -> str:
        assert self.kept is not None
        args = self._args
        words = ["generate", "--gateway", args.gateway]
        words += ["--transport", transport_of(args)] if transport_of(args) != "sse" else []
        words += ["--grpc", args.grpc] if args.grpc else []
        words += ["--json"] if args.json else []
        words += ["--show-reasoning"] if args.show_reasoning else []
        words += [f"--ack-every={args.ack_every}"] if args.ack_every else []
        if args.position is not None and self._file_is_good:
            words += [f"--position={args.position}", f"--resume=@{args.position}"]
        else:
            words += ["--resume", self.kept.encode()]
        return command(*words)

    # --- drops ------------------------------------------------------------------------------------------------------

    def _notice(self, told: Lost | Resumed) -> None:
        if isinstance(told, Resumed):
            self._tally.long_wait = False
            index = told.position.seq - 3
            where = f"after token {index}" if index >= 0 else "before the first token"
            lost = "connection lost" if self._tally.records else "no connection at first"
            self._console.talk(f"{lost}; resumed {where}, {told.seconds:.2f} s later", "cyan")
            return
        if told.failures == 1 and self.kept is not None:
            self._console.talk(self._facts(self.kept), "dim")
        if told.wait >= _LONG and not self._tally.long_wait:
            self._tally.long_wait = True
            self._console.talk(f"no connection ({told.reason}): trying again …", "yellow")


_CODES = {DONE: exits.OK, FAILED: exits.GENERATION_FAILED, CANCELLED: exits.CANCELLED, OPEN: exits.FAILED}


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _usage(usage: Any) -> str:
    if not isinstance(usage, dict):
        return ""
    counts = [f"{usage[name]} {name.removesuffix('_tokens')}" for name in _COUNTED if isinstance(usage.get(name), int)]
    return f" · usage {', '.join(counts)}" if counts else ""


_COUNTED = ("prompt_tokens", "completion_tokens")


def _failure(data: dict[str, Any]) -> str:
    error = data.get("error")
    if not isinstance(error, dict):
        return "for no given reason"
    hint = " (asking again may succeed)" if error.get("retryable") is True else ""
    return f"{error.get('code')}: {error.get('message')}{hint}"
