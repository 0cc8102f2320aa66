"""The composition root: settings in, one ASGI application out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.journal import open_journal
from midstream.producers.sources import Sources as ModelSources
from midstream.producers.sources import upstreams
from midstream.records import StreamState
from midstream.server.auth import Gate, Keys, is_loopback, read_keys
from midstream.server.guard import Guard
from midstream.server.observe import Observer
from midstream.server.proceed import proceed
from midstream.server.settings import Settings, upstream_keys
from midstream.streams import Streams
from midstream.transports.asking import Sources
from midstream.transports.connect import ConnectApi
from midstream.transports.grpc import GrpcServer
from midstream.transports.http import NO_STORE, header, json_response, query
from midstream.transports.inference import Inference
from midstream.transports.native import NativeApi
from midstream.transports.openapi import describe
from midstream.transports.websocket import WebSocketApi
from midstream.wire import GRPC_SERVICE, SESSION_COOKIE, SESSION_TERM
from midstream.writer import Producer

_log = logging.getLogger("midstream")

# The page loads nothing from elsewhere and no other page may frame it.
_CSP = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
_PAGE_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Gateway:
    """A gateway made from settings.  An ASGI application; `start` and `stop` around its use.

    `sources` stand in for the upstreams of the settings: a test's own, say.
    Raises ValueError for settings that contradict each other, OSError for files that cannot be read.
    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        sources: Sources | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.keys = read_keys(settings.keys_file) if settings.keys_file else Keys()
        if self.keys.open and not settings.insecure and not is_loopback(settings.host):
            raise ValueError(
                f"--host {settings.host} would let anyone in: give --keys-file, or --insecure if that is meant"
            )
        self.observer = Observer(clock)
        self.journal = open_journal(settings.journal, clock, settings.bounds)
        keys = upstream_keys(environ, len(settings.upstream))
        self.upstreams = ModelSources(
            upstreams(settings.upstream, keys, settings.upstream_limits), settings.continuation
        )
        self.sources: Sources = self.upstreams if sources is None else sources
        observer = self.observer
        self.streams = Streams(
            self.journal, clock, settings.limits, observer.ended, self._proceed, on_resume=observer.resumed
        )
        self.observer.watch(self.streams)
        self.inference = Inference(self.streams, self.sources)
        self.ready = False
        self.app: ASGIApp = self._guarded()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _proceed(self, state: StreamState) -> Producer | None:
        return await proceed(self.streams, self.sources, state)

    async def start(self) -> None:
        """Open the journal.  Raises JournalInUse, JournalCorrupt."""
        await self.streams.start()
        self.ready = True

    async def drain(self) -> None:
        """Nothing new; let open streams finish for `--drain` seconds, then end them as `cancelled` `shutdown`."""
        self.ready = False
        await self.streams.drain(self.settings.drain)

    async def stop(self) -> None:
        """Let go of journal and upstreams."""
        self.ready = False
        await self.streams.close()
        await self.upstreams.close()

    def grpc_server(self, options: Sequence[tuple[str, Any]] = ()) -> GrpcServer:
        """The gateway over gRPC; `options` are grpcio's own.  To be bound and started beside what serves HTTP."""
        return GrpcServer(
            self.inference,
            lambda authorization, apikey: self.keys.identify(authorization, apikey),
            max_body=self.settings.max_body,
            ready=self._can_open,
            refused=self.observer.refused,
            options=options,
        )

    def _can_open(self) -> bool:
        return self.ready and self.journal.available()

    def reload_keys(self) -> None:
        """Read the keys file again.  A file that is not good changes nothing: the keys before stay in force."""
        if self.settings.keys_file is None:
            return
        try:
            self.keys = read_keys(self.settings.keys_file)
        except (OSError, ValueError) as error:
            _log.error("keys not re-read, the ones before stay: %s", error)
        else:
            _log.info("keys re-read")

    # --- routes -----------------------------------------------------------------------------------------------------

    def _guarded(self) -> ASGIApp:
        native = NativeApi(self.streams, self.sources, self.settings.max_body)
        socket = WebSocketApi(
            self.streams,
            self.sources,
            self.settings.max_body,
            lambda key: self.keys.identify(None, key),
            self.observer.refused,
        )
        web = files("midstream") / "web"
        router = Router(
            [
                *native.routes(),
                socket.route(),
                Mount(f"/{GRPC_SERVICE}", ConnectApi(self.inference, self.settings.max_body, self.observer.refused)),
                Route("/v1/session", self._session, methods=["POST"]),
                Route("/healthz", self._healthz, methods=["GET"]),
                Route("/readyz", self._readyz, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/openapi.json", self._openapi, methods=["GET"]),
                Route("/", self._page, methods=["GET"]),
                Mount("/web", _Static(str(web))),
            ],
            # A redirect would name the host that the caller named, and make a POST of another path.
            redirect_slashes=False,
        )
        gate = Gate(
            frozenset(self.settings.cors_origin),
            frozenset(self.settings.allowed_host),
            any_host=not self.keys.open,
        )
        return Guard(router, lambda: self.keys, gate, self.clock, self.observer.refused)

    async def _session(self, request: Request) -> Response:
        """POST: a cookie for pages whose EventSource or WebSocket cannot send a key."""
        query(request.scope, ())
        authorization, apikey = header(request.scope, b"authorization"), header(request.scope, b"apikey")
        value = self.keys.session(authorization, apikey, self.clock())
        response = Response(status_code=204, headers=NO_STORE)
        if value is not None:
            forwarded = header(request.scope, b"x-forwarded-proto")
            secure = request.scope["scheme"] == "https" or forwarded == "https"
            response.set_cookie(
                SESSION_COOKIE,
                value,
                max_age=SESSION_TERM,
                path="/v1",
                secure=secure,
                httponly=True,
                samesite="strict",
            )
        return response

    async def _healthz(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def _readyz(self, request: Request) -> Response:
        if self._can_open():
            return json_response({"status": "ready", "journal": self.journal.traits.name})
        return json_response({"status": "not ready"}, 503, {"retry-after": "1"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.observer.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        return json_response(describe(version("midstream")))

    async def _page(self, request: Request) -> Response:
        page = (files("midstream") / "web" / "index.html").read_bytes()
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")


class _Static(StaticFiles):
    """The page's own files, with the page's own headers."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory=directory)

    async def get_response(self, path: str, scope: Scope) -> Response:
        # Whole files only (RFC 9110, section 14.2): a range that is none would be answered in text.
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"range"]
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response
