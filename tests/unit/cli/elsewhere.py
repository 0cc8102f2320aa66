"""Servers that are no gateway's HTTP port: each answers whatever comes with the same bytes."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# The SETTINGS frame with which a gRPC port greets, unasked.
GRPC = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x40\x00\x00"
# The alert of a TLS port that was sent no TLS.
TLS = b"\x15\x03\x01\x00\x02\x02\x46"
SMTP = b"220 mail.example ESMTP\r\n"


def page(status: str, title: str = "") -> bytes:
    """A web server's error page."""
    body = f"<html>\r\n<head><title>{title or status}</title></head>\r\n<body>nginx</body></html>\r\n".encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def whole(status: str, body: bytes) -> bytes:
    """An answer in JSON."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """The address, host:port, of a server that answers so."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(20)
            with suppress(OSError):
                self.request.recv(65_536)
                self.request.sendall(raw)
                self.request.shutdown(socket.SHUT_WR)
                while self.request.recv(65_536):  # closed with something unread, it would be a reset
                    pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(5)
