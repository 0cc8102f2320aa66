"""One run of `midstream generate`: follows a stream, prints it, and keeps the position of what was printed."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import orjson

from midstream.cli import exits
from midstream.cli.gateway import code_of, key_of
from midstream.cli.generate_question import Session, transport_of
from midstream.cli.generate_words import ended, facts, go_on, refused
from midstream.cli.terminal import Console, Interrupted, Interrupts, OutputFailed, command, save
from midstream.cli.waiting import Waiting
from midstream.client import Client, Cursor, Lost, Record, Resumed, Stream, Unreachable
from midstream.codec.inference import index_of, position_of
from midstream.errors import MidstreamError, PositionError, UnknownStream
from midstream.wire import CANCELLED, DONE, FAILED, OPEN, TOKEN

# An ack is a courtesy: while the gateway is away the answer matters more.
_ACK_TIMEOUT = 5.0
# A wait that a person notices, in seconds.
_LONG = 2.0
_CODES = {DONE: exits.OK, FAILED: exits.GENERATION_FAILED, CANCELLED: exits.CANCELLED, OPEN: exits.FAILED}


@dataclass(slots=True)
class _Tally:
    """What this run has printed."""

    chunks: int = 0
    began: float = 0.0
    records: int = 0
    thinking: bool = False
    other_choices: bool = False
    long_wait: bool = False


class Run:
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
        self._waiting = Waiting(_LONG, self._say_waiting if console.err_is_terminal else None)
        self._file_is_good = False
        self.kept: Cursor | None = None

    def run(self, question: Cursor | Session | dict[str, Any]) -> int:
        """Print what is asked for.  Returns an exit code of `exits`."""
        try:
            with self._waiting:
                code = self._follow(self._open(question))
            self._console.close()
            return code
        except Interrupted as signalled:
            self._console.echoed()
            told = "stopped reading; the generation goes on" if self.kept is not None else "stopped before any answer"
            return self._stopped(told, signalled.code)
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
            return self._stopped(refused(error, self._args, begun=self.kept is not None), code_of(error))

    # --- the answer -------------------------------------------------------------------------------------------------

    def _open(self, question: Cursor | Session | dict[str, Any]) -> Stream:
        self._tally.began = time.monotonic()
        if isinstance(question, dict):
            stream = self._client.generate(idempotency_key=self._args.session, **question)
        else:
            stream = self._client.resume(self._place(question) if isinstance(question, Session) else question)
        with self._interrupts.held():
            self._keep(stream.position)
        if isinstance(question, dict):
            self._announce(stream.position)
        return stream

    def _place(self, session: Session) -> Cursor:
        """The position of who wants this token next: past all before it, and of the first, past nothing."""
        named = transport_of(self._args) == "grpc"
        stream_id = self._client.find(session.name, session.token) if named else session.name
        return Cursor(stream_id, position_of(session.token) if session.token else 0)

    def _announce(self, position: Cursor) -> None:
        """What is needed when this process can no longer say it."""
        stream_id = position.stream_id
        if self._args.ack_every and self._args.position is None:
            # The command would name the beginning, which the first ack makes nobody's.
            self._console.talk(f"stream {stream_id} · killed, a run that acks goes on only with --position FILE", "dim")
            return
        given, line = self._go_on(position)
        self._console.talk(f"stream {stream_id} · should this run be killed, go on{given} with:", "dim")
        self._console.talk(f"  {line}", "dim")

    def _say_waiting(self) -> None:
        """From another thread, while this run only waits."""
        if self.kept is None:
            what = f"{self._args.gateway} to answer"
        else:
            what = "the first token" if index_of(self.kept.seq) < 0 else "the next token"
        self._console.talk(f"waiting for {what} …", "dim")

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
        if record.event == TOKEN or record.terminal:
            self._waiting.over()
        if "seam" in record.data:
            self._console.talk("from here on the answer is the work of another run of the model", "yellow")
        if record.event == TOKEN:
            self._tally.chunks += 1
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

    def _ended(self, outcome: Record, stream_id: str) -> int:
        for line, style in ended(outcome, self._tally.chunks, time.monotonic() - self._tally.began):
            self._console.talk(line, style)
        self._console.talk(facts(self._args, Cursor(stream_id, outcome.seq - 1)), "dim")
        return _CODES.get(outcome.event, exits.OK)

    def _ended_before(self, state: dict[str, Any]) -> int:
        """Resumed from the very end: there is nothing to print, and how it ended has to be asked for."""
        status = str(state.get("status"))
        self._console.talk(f"nothing follows this position: the answer has ended ({status})", "dim")
        return _CODES.get(status, exits.FAILED)

    def _stopped(self, message: str, code: int) -> int:
        self._console.talk(message, "yellow" if code >= exits.INTERRUPTED else "red")
        if self.kept is not None:
            self._console.talk(facts(self._args, self.kept))
            given, line = self._go_on(self.kept)
            self._console.talk(f"go on{given} with:")
            self._console.talk(f"  {line}")
        return code

    def _go_on(self, position: Cursor) -> tuple[str, str]:
        return go_on(self._args, position, from_file=self._args.position is not None and self._file_is_good)

    def _gone(self, error: PositionError) -> int:
        self._console.talk(f"this position cannot be resumed: {error}", "red")
        if self.kept is not None:
            look = command("inspect", "--gateway", self._args.gateway, self.kept.stream_id, "--text")
            self._console.talk("the answer as far as it has been kept is printed by:")
            self._console.talk(f"  {look}")
        return exits.POSITION_GONE

    # --- drops ------------------------------------------------------------------------------------------------------

    def _notice(self, told: Lost | Resumed) -> None:
        if isinstance(told, Resumed):
            self._tally.long_wait = False
            index = index_of(told.position.seq) - 1
            where = f"after token {index}" if index >= 0 else "before the first token"
            lost = "connection lost" if self._tally.records else "no connection at first"
            self._console.talk(f"{lost}; resumed {where}, {told.seconds:.2f} s later", "cyan")
            return
        if told.failures == 1 and self.kept is not None:
            self._console.talk(facts(self._args, self.kept), "dim")
        if told.wait >= _LONG and not self._tally.long_wait:
            self._waiting.over()
            self._tally.long_wait = True
            self._console.talk(f"no connection ({told.reason}): trying again …", "yellow")
