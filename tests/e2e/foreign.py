"""Pages of another origin than the gateway's, for what a browser does across origins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.javascript import FOLDER, MODULES


@asynccontextmanager
async def origin(html: str) -> AsyncIterator[str]:
    """An origin of its own, with this page at `/`, and the scripts and packages it imports at `/js` and `/modules`."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_static("/js", FOLDER)
    app.router.add_static("/modules", MODULES)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
