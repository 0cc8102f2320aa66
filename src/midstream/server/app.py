"""The composition root: settings in, one ASGI application out."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.clock import Clock
from midstream.journal import open_journal
from midstream.producers.sources import ModelSources, upstreams
from midstream.records import Producer, StreamState
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
from midstream.transports.openai_chat import ChatApi
from midstream.transports.openai_responses import ResponsesApi
from midstream.transports.openapi import describe
from midstream.transports.openapi_pool import with_pool
from midstream.transports.pool_view import PoolView
from midstream.transports.websocket import WebSocketApi
from midstream.transports.workers import WorkersApi
from midstream.wire import GRPC_SERVICE, SESSION_COOKIE, SESSION_TERM

if TYPE_CHECKING:
    from midstream.pool.pool import Pool
    from midstream.server.pooled import Pooled

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
        clock: Callable[[], float] | None = None,
        sources: Sources | None = None,
    ) -> None:
        self.settings = settings
        clock = clock or Clock(time.time, time.monotonic)
        self.clock = clock
        self.keys = read_keys(settings.keys_file) if settings.keys_file else Keys()
        if self.keys.open and not settings.insecure and not is_loopback(settings.host):
            raise ValueError(
                f"--host {settings.host} would let anyone in: give --keys-file, or --insecure if that is meant"
            )
        self.observer = Observer(clock)
        self.journal = open_journal(settings.journal, clock, settings.bounds)
        keys = upstream_keys(environ, len(settings.upstream))
        self.pooled = _pooled(settings, clock)
        self.upstreams = ModelSources(
            upstreams(settings.upstream, keys, settings.upstream_limits),
            settings.continuation,
            self.pooled.source if self.pooled is not None else None,
        )
        self.sources: Sources = self.upstreams if sources is None else sources
        observer = self.observer
        self.streams = Streams(
            self.journal, clock, settings.limits, observer.ended, self._proceed, on_resume=observer.resumed
        )
        self.observer.watch(self.streams)
        if self.pooled is not None:
            self.pooled.watch(self.streams)
            self.observer.watch_pool(self.pooled.pool)
        self.inference = Inference(self.streams, self.sources)
        self.ready = False
        self.metrics: Callable[[], Awaitable[bytes]] = self._own_metrics
        self.app: ASGIApp = self._guarded()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    @property
    def pool(self) -> Pool | None:
        """The worker pool, where there is one."""
        return self.pooled.pool if self.pooled is not None else None

    @property
    def is_fed(self) -> bool:
        """Whether what open streams wait for is posted to this process, and can be to no other."""
        return self.pooled is not None and not self.pooled.pool.shared

    async def _proceed(self, state: StreamState) -> Producer | None:
        return await proceed(self.streams, self.sources, state)

    async def start(self) -> None:
        """Open the journal, and the pool's stores.  Raises JournalInUse, JournalCorrupt, JournalError."""
        if self.pooled is None:
            await self.streams.start()
        else:
            await self._start_pooled(self.pooled)
        self.ready = True

    async def _start_pooled(self, pooled: Pooled) -> None:
        """The pool first: streams that are taken over at once ask it how to go on."""
        await pooled.start()
        try:
            await self.streams.start()
        except BaseException:
            await pooled.stop()
            raise
        try:
            await pooled.begin()
        except BaseException:
            await self.stop()
            raise

    async def drain(self) -> None:
        """Nothing new; let open streams finish for `--drain` seconds, then end them as `cancelled` `shutdown`."""
        self.ready = False
        if still := len(self.streams.writers):
            answers = "1 open answer" if still == 1 else f"{still:,} open answers"
            _log.info(
                "stopping: waiting for %s, %g s at most; a second signal is at once", answers, self.settings.drain
            )
        await self.streams.drain(self.settings.drain)

    async def stop(self) -> None:
        """Let go of journal and upstreams."""
        self.ready = False
        if self.pooled is not None:
            await self.pooled.rest()
        await self.streams.close()
        if self.pooled is not None:
            await self.pooled.stop()
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
                *self._worker_routes(),  # first, since routes are tried in order, and posts come by the thousand
                *native.routes(),
                *ChatApi(self.streams, self.sources, self.settings.max_body).routes(),
                *ResponsesApi(
                    self.streams, self.sources, self.settings.max_body, self.settings.max_stream_bytes
                ).routes(),
                socket.route(),
                Mount(f"/{GRPC_SERVICE}", ConnectApi(self.inference, self.settings.max_body, self.observer.refused)),
                Route("/v1/session", self._session, methods=["POST"]),
                Route("/healthz", self._healthz, methods=["GET"]),
                Route("/readyz", self._readyz, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/openapi.json", self._openapi, methods=["GET"]),
                Route("/", _page("index.html"), methods=["GET"]),
                Route("/pool", _page("pool.html"), methods=["GET"]),
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
        return Guard(_Routes(router), lambda: self.keys, gate, self.clock, self.observer.refused)

    def _worker_routes(self) -> list[Route]:
        if self.pooled is None:
            return []
        workers = WorkersApi(
            self.pooled.pool,
            self.settings.max_body,
            lambda authorization, apikey: self.keys.identify(authorization, apikey),
            lambda authorization, apikey: self.keys.digest(authorization, apikey),
            self.observer.refused,
        )
        return [*workers.routes(), *PoolView(self.pooled.pool).routes()]

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

    async def _own_metrics(self) -> bytes:
        return self.observer.page()

    async def _metrics(self, request: Request) -> Response:
        return Response(await self.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        document = describe(version("midstream"))
        return json_response(document if self.pooled is None else with_pool(document))


class _Routes:
    """The router, and before it a table of the paths that are one route each.

    The router tries its routes in order, each with a regular expression.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._plain: dict[tuple[str, str], ASGIApp] = {}
        for route in router.routes:
            if isinstance(route, Route) and not route.param_convertors:
                for method in route.methods or ():
                    self._plain.setdefault((route.path, method), route.app)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._plain.get((scope["path"], scope.get("method", "")), self._router)
        return app(scope, receive, send)


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        content = (files("midstream") / "web" / name).read_bytes()
        return Response(content, headers=_PAGE_HEADERS, media_type="text/html")

    return page


def _pooled(settings: Settings, clock: Callable[[], float]) -> Pooled | None:
    if settings.pool is None:
        return None
    from midstream.server.pooled import Pooled  # only where it is needed, see there

    return Pooled(settings, clock)


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
