# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-web
"""The server as a web application: paths, limits, streams. Starlette and uvicorn do the rest.

They are imported when a server is made, since not every installation has the extra `serve`.
"""

import asyncio
import ipaddress
import json
import re
import selectors
import socket
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig, count_parameters
from nanoeuler.model.weights import Weights
from nanoeuler.paths import shipped
from nanoeuler.serve.attention import look
from nanoeuler.serve.queue import Full, Job, Worker
from nanoeuler.serve.request import Refusal, Request, read_request
from nanoeuler.serve.responses import DONE, Response, error, event
from nanoeuler.serve.streaming import End, Piece, write
from nanoeuler.tokenizer.chat_template import USER
from nanoeuler.tokenizer.tokenizer import Tokenizer

BODY = 1 << 18  # bytes of a request: fifty thousand words, more than any context of ours
SECONDS = 20  # for a request to arrive or an answer to leave: 256 KB in that time is 105 kbit/s
READ = 1 << 14  # bytes to read from a connection at a time: as long as a head may be
GRACE = 0.1  # seconds for reading what a crowd has sent, before the idle are dropped: see _heard
LOOKS = 8  # requests for attention maps at a time: a page rarely has two open
CURE = "pip install 'nanoeuler[serve]' brings them"


@dataclass(frozen=True)
class Service:
    """A model under its name, the worker that generates, and the most tokens of an answer."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    weights: Weights
    worker: Worker
    tokens: int

    def about(self) -> dict[str, Any]:
        """The model in the protocol's format, with what our page needs to know about it."""
        c = self.config
        own = {"parameters": count_parameters(c), "context": c.context, "layers": c.n_layers,
               "heads": c.n_heads, "guesses": c.n_predict - 1, "tokens": self.tokens,
               "chat": bool(self.tokenizer.template) or USER in self.tokenizer.special}  # fmt: skip
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "nanoeuler",
                "nanoeuler": own}  # fmt: skip


async def events(service: Service, wanted: Request) -> AsyncIterator[Piece | End]:
    """What the worker yields for a request. Raises `Full`, or the error that ended the text."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def put(thing: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, thing)

    job = Job(partial(write, wanted, service.tokenizer, service.weights), put)
    service.worker.submit(job)
    try:
        while (each := await queue.get()) is not None:
            if isinstance(each, Exception):
                raise each
            yield each
            if not queue.empty():  # let others have a turn, and notice if the client has left
                await asyncio.sleep(0)
    finally:
        job.cancel()


def problem(raised: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error response; our own mistakes show only their kind."""
    if isinstance(raised, Full):
        return 503, error(str(raised), "overloaded")
    if isinstance(raised, UserError):
        status, field = getattr(raised, "status", 400), getattr(raised, "field", None)
        return status, error(str(raised), field=field)
    return 500, error(f"an error inside the server: {type(raised).__name__}", "server_error")


async def lines(answer: Response, first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """The lines of a stream, whose first event is already here."""
    try:
        if answer.request.chat:
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


class Handlers:
    """The functions behind all paths. `http` is Starlette's module of responses."""

    def __init__(self, service: Service):
        from starlette import requests, responses

        self.service, self.http, self.gone = service, responses, requests.ClientDisconnect
        self.looking, self.looks = asyncio.Lock(), 0  # one at a time, and how many there are

    async def body(self, request: Any) -> bytes:
        """The body of a POST; `Refusal` if it is too long, breaks off, or is not called JSON."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal("expected a body with content-type application/json", 415)
        found = bytearray()
        try:
            async for part in request.stream():
                found += part
                if len(found) > BODY:
                    raise Refusal(f"expected a body of at most {BODY} bytes: shorten it", 413)
        except self.gone:
            raise Refusal("the client has left", 499) from None
        return bytes(found)

    async def text(self, chat: bool, request: Any) -> Any:
        """A completion, or the next turn of a chat."""
        s = self.service
        wanted = read_request(
            await self.body(request), chat, s.config, s.tokenizer, s.name, s.tokens
        )
        answer, found = Response(wanted, s.tokenizer, s.name), events(s, wanted)
        if not wanted.stream:
            *pieces, end = await unless_gone(request, _all(found))
            return self.http.JSONResponse(answer.whole(pieces, end))
        kept = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # for proxies in between
        first = await unless_gone(request, anext(found))
        return self.http.StreamingResponse(
            lines(answer, first, found), media_type="text/event-stream", headers=kept
        )

    async def attention(self, request: Any) -> Any:
        """Attention maps of a layer, one request after another: each is a pass in NumPy."""
        body, s = await self.body(request), self.service
        if self.looks >= LOOKS:
            raise Full(f"{LOOKS} attention maps are asked for already: ask again in a moment")
        self.looks += 1
        try:
            async with self.looking:
                found = await asyncio.to_thread(look, body, s.config, s.weights, s.tokenizer)
        finally:
            self.looks -= 1
        return self.http.JSONResponse(found)

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
        worker = self.service.worker
        return self.http.JSONResponse({
            "status": "ok", "writing": len(worker.running), "waiting": len(worker.waiting),
            "slots": worker.slots,
        })  # fmt: skip

    async def file(self, name: str, request: Any) -> Any:
        """A file of the page, always whole."""
        return self.http.Response(shipped(name).read_bytes(), media_type=KINDS[name], headers=PAGE)

    async def wrong(self, request: Any, raised: Exception) -> Any:
        """The response to an error."""
        if hasattr(raised, "detail"):  # Starlette's own: no such path, or not by this method
            status, said = raised.status_code, error(f"{raised.detail}: see /v1/models")
        else:
            status, said = problem(raised)
        retry = {"Retry-After": "1"} if status == 503 else {}
        return self.http.JSONResponse(said, status, headers=retry)


# %% sec-serve-web
# The page may load only what comes from this server, and may not be shown inside another page.
PAGE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}  # fmt: skip
KINDS = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


async def _all(found):
    """All of an answer, as a list."""
    return [each async for each in found]


async def unless_gone(request: Any, doing: Awaitable[Any]) -> Any:
    """The result of `doing`; if the client leaves first, cancel it and raise `Refusal`."""

    async def leaves():
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(each) for each in (doing, leaves())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Refusal("the client has left", 499)
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def is_fixed(host: str) -> bool:
    """Whether no name server decides which machine this is: an address, or localhost (RFC 6761)."""
    try:
        return bool(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host == "localhost"


class Guard:
    """An application that passes on requests addressed to, and coming from, one of `hosts`.

    hosts: names without a port; None: any. origins: other sites whose pages may send requests.
    """

    def __init__(self, app: Any, hosts: Collection[str] | None, origins: Collection[str]):
        self.app, self.hosts, self.origins = app, hosts, origins

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, as ASGI has it."""
        if (wrong := self.refused(scope["headers"])) is None:
            await self.app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        said, close = error(str(wrong)), {"Connection": "close"}
        await JSONResponse(said, wrong.status, headers=close)(scope, receive, send)

    def refused(self, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
        """Why a request with these headers is not let in; None if it is."""
        hosts, origins, chunks = (
            [value.decode("latin-1") for key, value in headers if key == name]
            for name in (b"host", b"origin", b"transfer-encoding")
        )
        if chunks:
            return Refusal("expected a body with a Content-Length, got chunks", 411)
        if len(hosts) > 1 or len(origins) > 1:
            return Refusal("expected one Host and one Origin at most, got more", 403)
        host, origin = "".join(hosts).lower(), "".join(origins)
        name = re.sub(r":[0-9]*$", "", host)
        if self.hosts is not None and name not in self.hosts:
            return Refusal(f"this server is not called {host!r:.60}", 403)
        own = (f"http://{host}", f"https://{host}") if self.hosts or is_fixed(name) else ()
        if origin and origin not in (*own, *self.origins):
            why = (f"pages of {origin!r:.60} may not use this server: to allow them, start it "
                   "with --allow-origin")
            return Refusal(why, 403)
        return None


def application(
    service: Service, hosts: Collection[str] | None, origins: Sequence[str] = ()
) -> Guard:
    """The server of `service`, as an ASGI application. UserError without the extra `serve`."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"serving needs starlette and uvicorn, but {missing[0]} is missing: {CURE}")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Route

    handlers = Handlers(service)
    routes = [
        ("/v1/chat/completions", partial(handlers.text, True), "POST"),
        ("/v1/completions", partial(handlers.text, False), "POST"),
        ("/v1/models", handlers.models, "GET"), ("/v1/models/{name:path}", handlers.models, "GET"),
        ("/attention", handlers.attention, "POST"), ("/health", handlers.health, "GET"),
        ("/", partial(handlers.file, "page.html"), "GET"),
        *((f"/{name}", partial(handlers.file, name), "GET") for name in ("page.css", "page.js")),
    ]  # fmt: skip
    app = Starlette(
        routes=[Route(path, do, methods=[method]) for path, do, method in routes],
        exception_handlers={
            kind: handlers.wrong for kind in (HTTPException, UserError, Exception)
        },
    )
    app.router.redirect_slashes = False  # a path has one name
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=["*"],
                           allow_headers=["*"])  # fmt: skip
    return Guard(app, hosts, origins)


class Connection(asyncio.Protocol):
    """A uvicorn connection that waits SECONDS for its client, or until its place is needed."""

    most: int  # connections at a time
    # What the client has to do, and in which request (uvicorn's `cycle`); None: it is our turn.
    stage: Any = None
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take a new client in."""
        super().connection_made(transport)
        transport.max_size = READ
        self._watch()
        if len(self.connections) > self.most:
            self.loop.call_later(GRACE, self._make_room)

    def connection_lost(self, error: Exception | None) -> None:
        """The end."""
        super().connection_lost(error)
        if self.timer:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Something has come."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer is written; the next request may have come already."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The network takes no more at present."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """The network takes more."""
        super().resume_writing()
        self._watch()

    def _watch(self) -> None:
        """Start the timer if the client has something new to do, and stop it if it has nothing."""
        stage, cycle = None, self.cycle
        if cycle is None or cycle.response_complete:
            stage = "ask", cycle
        elif cycle.more_body:
            stage = "say all", cycle
        elif self.flow.write_paused:
            stage = "take the answer", cycle
        if stage != self.stage:
            if self.timer:
                self.timer.cancel()
            self.stage = stage
            self.timer = self.loop.call_later(SECONDS, self._give_up) if stage else None

    def _heard(self) -> bool:
        """Whether we have read all that the client has sent; in a crowd we sometimes haven't."""
        with selectors.DefaultSelector() as arrivals:
            arrivals.register(self.transport.get_extra_info("socket"), selectors.EVENT_READ)
            return not arrivals.select(0)

    def _make_room(self) -> None:
        """Drop the clients that we have waited for longest, until `most` connections are left."""
        waiting = [each for each in self.connections if each.timer and each._heard()]
        waiting.sort(key=lambda each: each.timer.when())
        for each in waiting[: max(0, len(self.connections) - self.most)]:
            self.connections.discard(each)
            each.transport.abort()

    def eof_received(self) -> None:
        """The client has left: tell the code that works on its answer."""
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn does when it cannot read a request."""
        self._hang_up("400 Bad Request", f"{msg} Expected HTTP/1.1, with a head of at most 16 KB.")

    def _give_up(self):
        """Do not wait any longer."""
        self.timer = None
        if self.conn.trailing_data[0] or self.stage[0] == "say all":
            self._hang_up("408 Request Timeout", f"the request did not come within {SECONDS} s")
        self.transport.abort()

    def _hang_up(self, status, message):
        """Answer with an error where an answer is due, and close."""
        import h11

        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            said = json.dumps(error(message))
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            head += f"Content-Length: {len(said)}\r\n\r\n"
            self.transport.write(f"{head}{said}".encode())
        self.eof_received()
        self.transport.close()


# %% sec-serve-web
def listener(host: str, port: int) -> socket.socket:
    """A listening socket at this address; port 0: any that is free."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=kind, backlog=256)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {host} port {port} ({why}): choose another") from None


def server(app: Guard, worker: Worker) -> Any:
    """uvicorn's server for an application. It logs errors only."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            worker.close()
            super().handle_exit(sig, frame)

    # Connections: twice the texts, since refused clients connect as well, and some for the page.
    most = 2 * (worker.slots + worker.max_waiting) + 64
    return Server(uvicorn.Config(
        app, http=type("Connection", (Connection, H11Protocol), {"most": most}), ws="none",
        loop="asyncio", log_level="error", access_log=False, lifespan="off", server_header=False,
        proxy_headers=False, timeout_keep_alive=SECONDS, timeout_graceful_shutdown=5,
    ))  # fmt: skip


def run(app: Guard, door: socket.socket, worker: Worker) -> None:
    """Serve until a signal says to stop."""
    server(app, worker).run(sockets=[door])
