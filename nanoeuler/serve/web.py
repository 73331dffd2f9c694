# Made from book/16b-a-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-web
"""The server as a web application: paths, limits, streams. Starlette and uvicorn do the rest.

They are fetched when a server is made, since not every installation has them: the extra `serve`.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig, count_parameters
from nanoeuler.model.weights import Weights
from nanoeuler.paths import shipped
from nanoeuler.serve.answer import DONE, Answer, error, event
from nanoeuler.serve.attention import look
from nanoeuler.serve.desk import Desk, Full, Order
from nanoeuler.serve.request import Asked, Refusal, read_request
from nanoeuler.serve.writing import End, Piece, write
from nanoeuler.tokenizer.template import USER
from nanoeuler.tokenizer.tokenizer import Tokenizer

BODY = 1 << 18  # bytes of a request: fifty thousand words, more than any context of ours
SECONDS = 20  # for a body to come: 256 KB in that time is a slow modem
CURE = "pip install 'nanoeuler[serve]' brings them"
# The page may load what comes from here, and nothing else; and be shown in no other page.
PAGE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}  # fmt: skip
KINDS = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


@dataclass(frozen=True)
class Service:
    """What is served: a model by its name, the desk that writes, and how long texts may be."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    weights: Weights
    desk: Desk
    tokens: int

    def about(self) -> dict[str, Any]:
        """The model, in the protocol's form, and what our page wants to know of it."""
        c = self.config
        own = {"parameters": count_parameters(c), "context": c.context, "layers": c.n_layers,
               "heads": c.n_heads, "guesses": c.n_predict - 1, "tokens": self.tokens,
               "chat": USER in self.tokenizer.special}  # fmt: skip
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "nanoeuler",
                "nanoeuler": own}  # fmt: skip


async def events(service: Service, asked: Asked) -> AsyncIterator[Piece | End]:
    """What is written for a request, as it is written. `Full`, or what was wrong, is raised."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def put(thing: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, thing)

    order = Order(partial(write, asked, service.tokenizer, service.weights), put)
    service.desk.hand_in(order)
    try:
        while (each := await queue.get()) is not None:
            if isinstance(each, Exception):
                raise each
            yield each
    finally:
        order.leave()


def problem(raised: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body that tell of an exception; of our own mistakes, that it was one."""
    if isinstance(raised, Full):
        return 503, error(str(raised), "overloaded")
    if isinstance(raised, UserError):
        status, field = getattr(raised, "status", 400), getattr(raised, "field", None)
        return status, error(str(raised), field=field)
    return 500, error(f"a mistake of the server's: {type(raised).__name__}", "server_error")


async def lines(answer: Answer, first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """The lines of a stream, of which the first event has come already."""
    try:
        if answer.asked.chat:
            yield event(answer.begin())
        each = first
        while True:
            if isinstance(each, End):
                for chunk in answer.last(each):
                    yield event(chunk)
                yield DONE
                return
            yield event(answer.chunk(each))
            each = await anext(rest)
    except Exception as raised:  # too late for a status
        yield event(problem(raised)[1])
    finally:
        await rest.aclose()


class Bodies:
    """What a request brings. `http` is Starlette's module of responses."""

    def __init__(self, service: Service):
        self.service, self.http = service, import_module("starlette.responses")
        self.looking = asyncio.Lock()

    async def body(self, request: Any) -> bytes:
        """The body of a POST; `Refusal` where it is too long, too slow or no JSON by its name."""
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise Refusal("expected a body with content-type application/json", 415)
        found = bytearray()
        try:
            async with asyncio.timeout(SECONDS):
                async for part in request.stream():
                    found += part
                    if len(found) > BODY:
                        raise Refusal(f"expected a body of at most {BODY} bytes: shorten it", 413)
        except TimeoutError:
            raise Refusal(f"the body did not come within {SECONDS} s", 408) from None
        return bytes(found)


class Model(Bodies):
    """The paths on which the model works."""

    async def text(self, chat: bool, request: Any) -> Any:
        """A completion, or the next turn of a chat."""
        s = self.service
        asked = read_request(
            await self.body(request), chat, s.config, s.tokenizer, s.name, s.tokens
        )
        answer, found = Answer(asked, s.tokenizer, s.name), events(s, asked)
        if not asked.stream:
            *pieces, end = await unless_gone(request, _all(found))
            return self.http.JSONResponse(answer.whole(pieces, end))
        kept = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # by whoever is between
        first = await unless_gone(request, anext(found))
        return self.http.StreamingResponse(
            lines(answer, first, found), media_type="text/event-stream", headers=kept
        )

    async def look(self, request: Any) -> Any:
        """Attention maps of a layer, one request after another: each is a pass in NumPy."""
        body, s = await self.body(request), self.service
        async with self.looking:
            found = await asyncio.to_thread(look, body, s.config, s.weights, s.tokenizer)
        return self.http.JSONResponse(found)


class Paths(Model):
    """The functions behind all paths."""

    async def models(self, request: Any) -> Any:
        """The list of models, or the one that is named."""
        name, about = request.path_params.get("name"), self.service.about()
        if name is None:
            return self.http.JSONResponse({"object": "list", "data": [about]})
        if name != self.service.name:
            raise Refusal(f"there is no model {name!r:.60} here", 404, "model")
        return self.http.JSONResponse(about)

    async def health(self, request: Any) -> Any:
        """How busy the server is."""
        desk = self.service.desk
        busy = {"writing": len(desk.seated), "waiting": len(desk.orders), "seats": desk.seats}
        return self.http.JSONResponse({"status": "ok"} | busy)

    async def file(self, name: str, request: Any) -> Any:
        """A file of the page."""
        return self.http.FileResponse(shipped(name), media_type=KINDS[name], headers=PAGE)

    async def wrong(self, request: Any, raised: Exception) -> Any:
        """What is answered instead of an answer."""
        if hasattr(raised, "detail"):  # Starlette's own: no such path, or not by this method
            status, said = raised.status_code, error(f"{raised.detail}: see /v1/models")
        else:
            status, said = problem(raised)
        retry = {"Retry-After": "1"} if status == 503 else {}
        return self.http.JSONResponse(said, status, headers=retry)


async def _all(found):
    """All of an answer, as a list."""
    return [each async for each in found]


async def unless_gone(request: Any, doing: Awaitable[Any]) -> Any:
    """What `doing` gives; but if the asker leaves before, it is cancelled, and so are we."""

    async def leaves():
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(each) for each in (doing, leaves())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Refusal("the asker has left", 499)
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


class Guard:
    """An application that passes on what is addressed to one of `hosts` and comes from one of them.

    hosts: names without a port; None: any. origins: those that may come from elsewhere besides.
    """

    def __init__(self, app: Any, hosts: Collection[str] | None, origins: Collection[str]):
        self.app, self.hosts, self.origins = app, hosts, origins

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http" or not (wrong := self.refused(dict(scope["headers"]))):
            await self.app(scope, receive, send)
            return
        http = import_module("starlette.responses")
        await http.JSONResponse(error(wrong), 403)(scope, receive, send)

    def refused(self, headers: dict[bytes, bytes]) -> str:
        """Why a request with these headers is not let in; empty if it is."""
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if self.hosts is not None and re.sub(r":\d*$", "", host) not in self.hosts:
            return f"this server is not called {host!r:.60}"
        if origin and origin.partition("://")[2] != host and origin not in self.origins:
            return f"pages of {origin!r:.60} may not ask here: start with --allow-origin"
        return ""


def application(
    service: Service, hosts: Collection[str] | None, origins: Sequence[str] = ()
) -> Guard:
    """The server of `service`, as an ASGI application. UserError without Starlette."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"a server needs starlette and uvicorn, but {missing[0]} is absent: {CURE}")
    routing, cors = import_module("starlette.routing"), import_module("starlette.middleware.cors")
    errors, apps = (import_module(f"starlette.{name}") for name in ("exceptions", "applications"))
    paths = Paths(service)
    routes = [
        ("/v1/chat/completions", partial(paths.text, True), "POST"),
        ("/v1/completions", partial(paths.text, False), "POST"),
        ("/v1/models", paths.models, "GET"), ("/v1/models/{name:path}", paths.models, "GET"),
        ("/attention", paths.look, "POST"), ("/health", paths.health, "GET"),
        ("/", partial(paths.file, "page.html"), "GET"),
        *((f"/{name}", partial(paths.file, name), "GET") for name in ("page.css", "page.js")),
    ]  # fmt: skip
    app = apps.Starlette(
        routes=[routing.Route(path, do, methods=[method]) for path, do, method in routes],
        exception_handlers={
            kind: paths.wrong for kind in (errors.HTTPException, UserError, Exception)
        },
    )
    if origins:
        app.add_middleware(cors.CORSMiddleware, allow_origins=[*origins], allow_methods=["*"],
                           allow_headers=["*"])  # fmt: skip
    return Guard(app, hosts, origins)


def listener(host: str, port: int) -> socket.socket:
    """A door at this address that nobody goes through yet; port 0: any that is free."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=kind, backlog=256)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {host} port {port} ({why}): choose another") from None


def run(app: Guard, door: socket.socket, desk: Desk) -> None:
    """Serve until a signal says to stop."""
    uvicorn = import_module("uvicorn")

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            desk.close()
            super().handle_exit(sig, frame)

    most = 2 * (desk.seats + desk.waiting) + 64  # connections: also of those that are told "full"
    Server(uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", server_header=False,
        limit_concurrency=most, timeout_keep_alive=15, timeout_graceful_shutdown=5,
    )).run(sockets=[door])  # fmt: skip
