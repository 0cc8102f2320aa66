"""What `midstream generate` is asked to do: a new answer, or the rest of one."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.client.sync import Transport
from midstream.cursor import Cursor, decode
from midstream.errors import BadCursor

# What the gateway names its streams; whatever else is a session's name.
_STREAM_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Session:
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


def question_of(args: argparse.Namespace) -> Cursor | Session | dict[str, Any]:
    """Where to resume, or what to ask.  Raises ValueError, OSError, BadCursor."""
    options = {name: getattr(args, name) for name in ("model", "max_tokens", "temperature", "seed")}
    if args.resume_from is not None and args.session is None:
        raise ValueError("--resume-from counts in the answer that --session names")
    if args.session is not None and (args.resume_from or args.prompt is None):
        if args.resume is not None:
            raise ValueError("--resume and --session both say where to go on; give one")
        return Session(args.session, args.resume_from or 0)
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
