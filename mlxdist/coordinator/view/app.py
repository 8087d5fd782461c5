"""The page's server: read-only routes below a random token, and the news of the runs as server-sent events."""

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
from anyio.to_thread import run_sync
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxdist.coordinator.overview.find import is_held
from mlxdist.coordinator.view.facts import facts_of, names_of, timeline_of
from mlxdist.coordinator.view.watched_run import WatchedRun

PAGE = Path(__file__).parent / "page"
LOOK_SECONDS = 0.5  # between two looks at the files
PING_SECONDS = 15
MOST_PIXELS, MOST_NAMES = 4000, 400
HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",  # the address has the token in it
    b"x-content-type-options": b"nosniff",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Guard:
    """Lets in requests whose path begins with the token; all others get 404. Adds the headers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].lower() not in HEADERS]
                message["headers"] = [*kept, *HEADERS.items()]
            await send(message)

        if scope["type"] == "http":
            given = scope["path"].lstrip("/").split("/")[0].encode()
            if not secrets.compare_digest(given, self._token):
                await JSONResponse({"error": "not found"}, 404)(scope, receive, with_headers)
                return
        await self._app(scope, receive, with_headers)


def page_app(runs: Sequence[WatchedRun], token: str) -> Starlette:
    """Returns the application that shows `runs` below /`token`/. It answers GET alone, and to no other host name."""
    names = names_of([run.folder.path for run in runs])

    def run_at(request: Request) -> WatchedRun:
        try:
            run = runs[number(request, "run", 0, 0, len(runs) - 1)]
            run.refresh()
        except OSError as error:
            raise HTTPException(503, f"the run cannot be read: {error.strerror}") from None
        return run

    def page(request: Request) -> FileResponse:
        return FileResponse(PAGE / "index.html")

    def facts(request: Request) -> JSONResponse:
        run = run_at(request)
        return JSONResponse({"name": names[runs.index(run)], **facts_of(run)})

    def curves(request: Request) -> JSONResponse:
        run = run_at(request)
        asked = request.query_params.getlist("name")[:MOST_NAMES]
        pixels = number(request, "pixels", 600, 10, MOST_PIXELS)
        first, last = number(request, "from", 0, 0, 10**12), number(request, "to", 10**12, 0, 10**12)
        with run.lock:
            known = [(name, run.told.curves[name]) for name in asked if name in run.told.curves]
            return JSONResponse({name: curve.points(first, last, pixels) for name, curve in known})

    def timeline(request: Request) -> JSONResponse:
        run = run_at(request)
        wanted = number(request, "step", 0, 0, 10**12) if "step" in request.query_params else None
        return JSONResponse(timeline_of(run, wanted))

    def listed(request: Request) -> JSONResponse:
        return JSONResponse({"runs": names})

    def news(request: Request) -> EventSourceResponse:
        return EventSourceResponse(versions(runs), ping=PING_SECONDS)

    routes = [
        Route("/", page),
        Route("/runs", listed),
        Route("/facts", facts),
        Route("/curves", curves),
        Route("/timeline", timeline),
        Route("/news", news),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return Starlette(
        routes=[Mount(f"/{token}", routes=routes)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False),
            Middleware(Guard, token=token),
        ],
    )


async def versions(runs: Sequence[WatchedRun]) -> AsyncIterator[dict[str, Any]]:
    """Yields an event with the version and state of each run, at first and whenever one of them has changed."""
    before: list[Any] = []
    while True:
        now = [await run_sync(look_at, run) for run in runs]
        if now != before:
            before = now
            yield {"event": "changed", "data": json.dumps(now)}
        await anyio.sleep(LOOK_SECONDS)


def look_at(run: WatchedRun) -> tuple[int, bool]:
    """Returns the version of a run, and true while a coordinator writes in it; -1 where it cannot be read now."""
    try:
        return run.refresh(), is_held(run.folder) is True
    except OSError:
        return -1, False


def number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Returns a whole number of the query. Raises HTTPException for one that is none, or outside [least, most]."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and least <= int(text) <= most):
        raise HTTPException(400, f"{name} takes a whole number in [{least}, {most}]")
    return int(text)
