"""What `midstream generate` says of where its reader stands, how to go on, and how an answer ended.  No I/O."""

from __future__ import annotations

import argparse
from typing import Any, Final

from midstream.cli.gateway import KEY_VARIABLE, refusal, silence
from midstream.cli.generate_question import transport_of
from midstream.cli.terminal import command
from midstream.client import Cursor, GaveUp, Record
from midstream.client.surface import address
from midstream.client.sync import GRPC_PORT
from midstream.codec.inference import index_of
from midstream.errors import MidstreamError
from midstream.wire import DONE, FAILED

_COUNTED: Final = ("prompt_tokens", "completion_tokens")

# A line, and its style.
Said = tuple[str, str]


def facts(args: argparse.Namespace, position: Cursor) -> str:
    """Where this reader stands; tokens count from 0, and that of record 2 is the first."""
    last = max(index_of(position.seq), -1)
    session = args.session or position.stream_id
    return f'session="{session}" last_token_index={last} (resume with --resume-from {last + 1})'


def go_on(args: argparse.Namespace, position: Cursor, *, from_file: bool) -> tuple[str, str]:
    """What must be given for it, and the command that prints the rest; `from_file`: the position file is up to date."""
    transport = transport_of(args)
    words = ["generate", "--gateway", args.gateway]
    words += ["--transport", transport] if transport != "sse" else []
    words += ["--grpc", args.grpc] if args.grpc else []
    words += ["--json"] if args.json else []
    words += ["--show-reasoning"] if args.show_reasoning else []
    words += [f"--ack-every={args.ack_every}"] if args.ack_every else []
    if from_file:
        words += [f"--position={args.position}", f"--resume=@{args.position}"]
    else:
        words += ["--resume", position.encode()]
    return f", {KEY_VARIABLE} being set," if args.key else "", command(*words)


def ended(outcome: Record, chunks: int, seconds: float) -> list[Said]:
    """How an answer ended, of which this run has printed so many chunks."""
    spent = f"{_plural(chunks, 'chunk')} in {seconds:.1f} s"
    if outcome.event == DONE:
        reason = outcome.data.get("finish_reason") or "no finish reason"
        return [(f"done ({reason}): {spent}{_usage(outcome.data.get('usage'))}", "dim")]
    if outcome.event == FAILED:
        return [(f"failed: {_failure(outcome.data)}", "red"), (spent, "dim")]
    return [(f"cancelled ({outcome.data.get('reason')}): {spent}", "yellow")]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _usage(usage: Any) -> str:
    """The model's own count of tokens, of which a chunk may hold several."""
    if not isinstance(usage, dict):
        return ""
    counts = [f"{usage[name]} {name.removesuffix('_tokens')}" for name in _COUNTED if isinstance(usage.get(name), int)]
    return f" · tokens: {', '.join(counts)}" if counts else ""


def _failure(data: dict[str, Any]) -> str:
    error = data.get("error")
    if not isinstance(error, dict):
        return "for no given reason"
    hint = " (asking again may succeed)" if error.get("retryable") is True else ""
    return f"{error.get('code')}: {error.get('message')}{hint}"


def refused(error: MidstreamError, args: argparse.Namespace, *, begun: bool) -> str:
    """Why there is no answer, or no more of it; `begun`: there was a stream."""
    if not isinstance(error, GaveUp) or begun:
        return refusal(error, args)
    if transport_of(args) != "grpc":
        return f"no stream from {silence(error, args.gateway)}"
    place = args.grpc or address(args.gateway)._replace(port=GRPC_PORT).authority
    hint = "does the gateway's gRPC port stand there? --grpc HOST:PORT names another"
    return f"no stream over gRPC from {silence(error, place, hint)}"
