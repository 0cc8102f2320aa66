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
which counts the pieces in which the answer came: mostly a token each, but some models send several together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from midstream.cli import exits
from midstream.cli.gateway import add_gateway
from midstream.cli.generate_question import question_of
from midstream.cli.generate_run import Run
from midstream.cli.terminal import Console, Interrupted, Interrupts
from midstream.client.sync import GRPC_PORT
from midstream.errors import BadCursor


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
        help="with --session: print the answer from its K-th token on, counted from 0 as last_token_index is; a PROMPT "
        "is not asked again",
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
            question = question_of(args)
            answer = Run(args, console, interrupts)
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
