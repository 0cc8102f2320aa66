"""One of the processes of `midstream serve --workers N`; only `supervisor` starts it, and it takes no arguments.

It is handed its settings through a pipe on standard input, says on standard output that it serves, and from then on
does what the pipe says.  For the rest it is a gateway like any other, signals included.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys

from midstream.cli.logs import log_to_stderr
from midstream.cli.serve_start import exit_code
from midstream.cli.supervisor import KEYS, LEAVE, NOW, READY, SIZE_BYTES, Handed
from midstream.server.app import Gateway
from midstream.server.serving import Server, serve
from midstream.server.siblings import Siblings

_log = logging.getLogger("midstream")
_ORDERS = 0  # the descriptor of standard input


def main() -> int:
    handed: Handed = pickle.loads(_read(int.from_bytes(_read(SIZE_BYTES), "big")))
    log_to_stderr(verbose=handed.verbose, process=True)
    return exit_code(handed.settings, _serve(handed))


def _read(size: int) -> bytes:
    """So many bytes of what is handed over, and none of what is told later."""
    parts = []
    while size and (part := os.read(_ORDERS, size)):
        parts.append(part)
        size -= len(part)
    if size:
        raise SystemExit("this program is a part of `midstream serve --workers`; start that")
    return b"".join(parts)


async def _serve(handed: Handed) -> None:
    gateway = Gateway(handed.settings, os.environ)
    siblings = Siblings(handed.directory, handed.number, gateway.observer.page)
    gateway.metrics = siblings.page
    async with siblings.offered():
        await serve(gateway, _say_ready, shared=True, attend=lambda server: _obey(gateway, server))


def _say_ready(_: str) -> None:
    os.write(sys.stdout.fileno(), READY)


def _obey(gateway: Gateway, server: Server) -> None:
    """Do what is told from now on."""
    loop = asyncio.get_running_loop()

    def told() -> None:
        orders = os.read(_ORDERS, 64)
        if not orders:
            _log.error("the process that started this one is gone: it leaves, too")
            loop.remove_reader(_ORDERS)
            server.leave()
        for order in map(bytes, zip(orders)):
            if order == KEYS:
                gateway.reload_keys()
            elif order in (LEAVE, NOW):
                server.leave()
                if order == NOW:
                    server.handle_exit(signal.SIGTERM, None)

    loop.add_reader(_ORDERS, told)


if __name__ == "__main__":
    sys.exit(main())
