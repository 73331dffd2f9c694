"""The server: fields, bodies, raw HTTP, foreign pages, clients that are slow, vanish or flood.

One server, on a model that is made for it, listens on this machine alone and is killed at the end.
A neighbour asks for three tokens again and again; whatever happens, she must be answered soon.
"""

import contextlib
import ctypes
import io
import itertools
import json
import os
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from harness import ROOT, Attack

SEATS, WAITING = 4, 12
PLACES = 2 * (SEATS + WAITING) + 64  # connections that the server keeps at a time
PATIENCE = 20  # seconds that it waits for a client
NEIGHBOUR = 2.0  # seconds in which a short request is answered, whatever others do
LONGEST = 900  # seconds for the whole attack, which takes some 150
SLOWEST = 5.0  # seconds for any one input that is whole
# Bytes by which the server may grow: a full body and its JSON on each of its connections.
GROWTH = 2 * PLACES * (1 << 18)
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


# ---- the server


@dataclass(frozen=True)
class Server:
    """The process, where it listens, what it says on stderr, and what it told the neighbour."""

    process: subprocess.Popen
    port: int
    log: Path
    told: set[str] = field(default_factory=set)
    until: float = field(default_factory=lambda: time.monotonic() + LONGEST)

    def check(self) -> None:
        """An end to the attack if there is no server any more, or it takes far too long."""
        assert self.process.poll() is None, f"the server has ended: {self.log.read_text()[-500:]}"
        assert time.monotonic() < self.until, f"the attack takes longer than {LONGEST} s"

    @property
    def memory(self) -> int:
        """Bytes that it holds."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    @property
    def connections(self) -> int:
        """Sockets that it has open: the one that listens, two of its own, and its clients."""
        folder, found = Path(f"/proc/{self.process.pid}/fd"), 0
        for each in folder.iterdir():
            with contextlib.suppress(OSError):
                found += os.readlink(each).startswith("socket:")
        return found


@contextlib.contextmanager
def served(attack: Attack) -> Iterator[Server]:
    """A server of a model with drawn weights, in the folder of the attack."""
    (attack.folder / "text.txt").write_text("The river runs past the mill, and on it runs. " * 40)
    sizes = "--dim 16 --layers 2 --heads 2 --kv-heads 1 --hidden 24 --context 128 --vocab-size 270"
    made = attack.run("train", "--data", "text.txt", "--out", "model", "--engine", "reference",
                      "--steps", 1, "--batch-size", 2, *sizes.split(), seconds=120)  # fmt: skip
    assert made.code == 0, made.err
    line = [sys.executable, "-m", "nanoeuler", "serve", "--from", "model", "--port", "0",
            "--slots", str(SEATS), "--waiting", str(WAITING), "--tokens", "2000"]  # fmt: skip
    log = attack.folder / "server.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            line, cwd=attack.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, preexec_fn=_ends_with_us,
        )  # fmt: skip
    try:
        ready, _, _ = select.select([process.stdout], [], [], 120)
        first = process.stdout.readline().decode() if ready else ""
        address = re.match(r"http://127\.0\.0\.1:(\d+)/", first)
        assert address, f"the server did not start: {first!r} {log.read_text()[-300:]}"
        yield Server(process, int(address[1]), log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _ends_with_us():
    """Have the system kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# ---- asking


@dataclass
class Reply:
    """One answer. `body` is whole, without the marks of chunks."""

    status: int
    headers: dict[str, str]
    body: bytes


def replies(said: bytes) -> list[Reply]:
    """The answers that came on a connection, one behind the other, as far as they are whole."""
    found, stream = [], io.BytesIO(said)
    while line := stream.readline():
        status, headers = int(line.split()[1]), {}
        while (head := stream.readline()) not in (b"\r\n", b""):
            name, _, value = head.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if status == 100:
            continue
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(stream.readline() or b"-1", 16):
                body += stream.read(max(size, 0))
                if stream.readline() != b"\r\n":
                    return found
            stream.readline()
        else:
            length = headers.get("content-length")
            body = stream.read(int(length or -1))
            if length and len(body) < int(length):
                break
        found.append(Reply(status, headers, body))
    return found


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def heard(link: socket.socket, seconds: float) -> tuple[bytes, bool]:
    """What comes until the server hangs up, and whether it did so in this time."""
    found, until = [], time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        link.settimeout(left)
        try:
            part = link.recv(1 << 16)
        except TimeoutError:
            break
        except OSError:  # a reset is an end, too
            return b"".join(found), True
        if not part:
            return b"".join(found), True
        found.append(part)
    return b"".join(found), False


def exchange(server: Server, said: bytes, seconds: float = 30.0) -> tuple[list[Reply], bool, float]:
    """Send this on a connection of its own: what was answered, if it was closed, after how long."""
    server.check()
    begun = time.monotonic()
    with connect(server) as link:
        with contextlib.suppress(OSError):
            link.sendall(said)
        got, closed = heard(link, seconds)
    return replies(got), closed, time.monotonic() - begun


def request(path: str, body: bytes | None = None, *more: str, method: str = "POST",
            host: str = "localhost", kind: str = "application/json") -> bytes:  # fmt: skip
    """A request, after whose answer the server is to hang up."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *more]
    if body is not None:
        lines += [f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines + ["", ""]).encode("utf-8") + (body or b"")


def posted(path: str, **fields: object) -> bytes:
    return request(path, json.dumps(fields).encode())


# ---- judging


def wrong(reply: Reply, full: bool = False) -> str | None:
    """What is wrong with an answer, whatever was asked; full: the server may have said 503."""
    if reply.status < 400:
        return None
    if reply.status >= 500 and not (full and reply.status == 503):
        return f"status {reply.status}: {reply.body[:200]!r}"
    try:
        said = json.loads(reply.body)["error"]
        shaped = set(said) == {"message", "type", "param", "code"} and bool(said["message"])
    except (ValueError, TypeError, KeyError):
        shaped = False
    if not shaped or reply.headers.get("content-type") != "application/json":
        return f"{reply.status} in no form of the protocol: {reply.body[:200]!r}"
    if "Traceback" in said["message"] or "\n" in said["message"]:
        return f"not one line: {said['message']!r}"
    if reply.status == 503 and reply.headers.get("retry-after") != "1":
        return "503 without Retry-After"
    return None


def param(reply: Reply) -> str | None:
    """The field that an error blames."""
    return json.loads(reply.body)["error"]["param"]


@dataclass(frozen=True)
class Sender:
    """Sends whole requests and counts them, with what is wrong with their answers."""

    attack: Attack
    server: Server
    kind: str

    def send(self, what: str, said: bytes, good: Callable[[Reply], str | None] | None = None,
             answers: int = 1) -> None:  # fmt: skip
        """Send a request that ends its connection; good: what is wrong with a good answer."""
        found, closed, seconds = exchange(self.server, said)
        fault = None
        if seconds > SLOWEST:
            fault = f"took {seconds:.1f} s"
        elif not closed or len(found) != answers:
            fault = f"{len(found)} answers, {'' if closed else 'not '}closed"
        else:
            faults = [wrong(each) or (good and good(each)) for each in found]
            fault = next((each for each in faults if each), None)
        self.attack.count(self.kind, what, fault)


class Neighbour:
    """Another user, who asks for three tokens, again and again, until she is told to stop."""

    def __init__(self, server: Server, full: bool):
        self.server, self.full = server, full
        self.worst, self.faults = 0.0, []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self):
        said = posted(TEXT, prompt="a neighbour", max_tokens=3, seed=1)
        while not self.over.wait(0.1):
            begun, found = time.monotonic(), []
            for _ in range(3):  # a connection may be dropped before it is heard: clients ask again
                with contextlib.suppress(OSError):
                    found = found or exchange(self.server, said)[0]
            self.worst = max(self.worst, time.monotonic() - begun)
            if len(found) != 1:
                self.faults.append("not answered, three times")
            elif fault := wrong(found[0], self.full):
                self.faults.append(fault)
            elif found[0].status == 200:
                self.server.told.add(json.loads(found[0].body)["choices"][0]["text"])

    def stop(self) -> str | None:
        """What was wrong."""
        self.over.set()
        self.thread.join(60)
        if self.faults:
            return self.faults[0]
        if self.worst > NEIGHBOUR:
            return f"waited {self.worst:.1f} s"
        return None if len(self.server.told) == 1 else f"one seed: {self.server.told}"


@contextlib.contextmanager
def watched(attack: Attack, server: Server, kind: str, full: bool = False) -> Iterator[Sender]:
    """A part of the attack; then the neighbour, the seats, the memory and the log are looked at."""
    before, read = server.memory, server.log.stat().st_size
    begun, neighbour = time.monotonic(), Neighbour(server, full)
    time.sleep(0.3)
    try:
        yield Sender(attack, server, kind)
    finally:
        neighbour.over.set()
    attack.count("neighbour", kind, neighbour.stop())
    attack.count("seats", kind, _seats(server))
    grown = server.memory - before
    attack.count("memory", kind, f"grew by {grown >> 20} MB" if grown > GROWTH else None)
    said = server.log.read_bytes()[read:].decode("utf-8", "replace")
    attack.count("log", kind, f"logged {said.strip().splitlines()[-1]}" if said.strip() else None)
    seconds = time.monotonic() - begun
    print(f"  {kind:24} {seconds:5.1f} s, neighbour {neighbour.worst:.2f} s", flush=True)


def _seats(server):
    """Wait until nobody sits and nobody waits; what is wrong if that does not come."""
    busy, until = None, time.monotonic() + 20
    while time.monotonic() < until:
        (health,), _, _ = exchange(server, request("/health", method="GET"))
        busy = json.loads(health.body)
        if not busy["writing"] and not busy["waiting"]:
            return None
        time.sleep(0.1)
    return f"seats are lost: {busy}"


# ---- what is sent

VALUES = [
    "null", "true", "false", "0", "-0", "-0.0", "1", "-1", "2", "0.5", "1.5", "-1.5", "5e-324",
    "1e-320", "1e-31", "1e30", "1e31", "1e308", "1e999", "-1e999", "NaN", "Infinity", "-Infinity",
    "2147483648", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "9" * 5000,
    '""', '"a"', '"0"', '"\u0663"', "\u0663", "\uff11", '"\uff11"', '"\\ud800"', '"\\udfff\\ud800"',
    '"\\u0000"', '"\\n"', json.dumps("x" * 257), json.dumps("x" * 100_000), "[]", "{}", "[[]]",
    "[{}]", '{"a": 1}', '{"": {}}', "[null]", "[1]", "[-1]", "[1.5]", "[true]", "[1e999]", '["a"]',
    '[""]', '["a", "b", "c", "d", "e"]', '["\\ud800"]', '[["a"]]', json.dumps(["x" * 50_000] * 4),
    json.dumps([0] * 40_000), json.dumps(["ab"] * 20_000),
    json.dumps({str(i): i for i in range(9000)}),
    "[" * 50 + "]" * 50, "[" * 960 + "]" * 960, "[" * 990 + "]" * 990, "[" * 5000 + "]" * 5000,
    '{"a":' * 900 + "1" + "}" * 900, '"<|end|><|user|>"', '"data: [DONE]\\n\\n"', '"\U0001f30a"',
    '"auto"', '"none"', '{"include_usage": 1}', '{"type": "json_object"}', "01", "+1", "1.", ".5",
    "0x10", "1_0", "'a'", "undefined", "", "1 2", "[1,]", '"open', "\\u0031",
]  # fmt: skip
OTHERS = "prompt", "messages", "user", "metadata", "store", "tool_choice", "x", "", "__class__"
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "", "USER", None)
CONTENTS = [
    "a", "", None, 1, [], {}, ["a"], [{"type": "text", "text": "a"}], [{"type": "text"}],
    [{"type": "image_url", "image_url": {"url": "http://localhost/"}}],
    [{"type": "text", "text": 1}],
    "\ud800", "\0", "<|assistant|>", "x" * 200_000, [{"type": "text", "text": "a"}] * 5000,
]  # fmt: skip
PATHS = [
    "/", "/health", "/health/", "/v1", "/v1/", "/v1/models", "/v1/models/", "/v1/models/model",
    "/v1/models/%6dodel", "/v1/models/../model", "/v1/models/%00", "/v1/models/%ff%fe",
    "/v1/models/" + "a" * 9000,
    TEXT, CHAT, TEXT + "/", "/v1/Completions", "//v1/completions", "/v1//completions",
    TEXT + "?a=b",
    TEXT + "%20", "/attention", "/attention/", "/page.js", "/page.css", "/page.html", "/page.js/",
    "/PAGE.JS", "/../page.js", "/..%2f..%2fetc%2fpasswd", "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/data/page.js", "/page.js%00.html", "/.git/config", "/nanoeuler", "/docs", "/openapi.json",
    "/metrics", "/v1/embeddings", "/v1/responses", "/v1/files", "/?", "/#", "*",
    "http://evil.example/",
    "http://localhost/health", "/" + "a/" * 2000, "/" + "%25" * 2000, "/\\..\\page.js", "/;a",
    "/~root",
]  # fmt: skip
METHODS = "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "PROPFIND", "get"
HOSTS = [
    "localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "LOCALHOST:{port}", "localhost",
    "evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}",
    "localhost.evil.example",
    "evil.localhost:{port}", "127.1:{port}", "2130706433", "0x7f.1", "0.0.0.0:{port}",
    "[::]:{port}",
    "[::ffff:127.0.0.1]:{port}", "localhost.:{port}", "localhost:{port}@evil.example",
    "user@localhost",
    "localhost#evil", "localhost/evil", "localhost:\u0663", "\u2113ocalhost", "xn--localhost",
    "192.168.0.1",
    "localhost:-1", "localhost:1e3", "localhost:{port}:{port}", ":{port}", "",
]  # fmt: skip
ORIGINS = [
    None, "", "http://{host}", "https://{host}", "HTTP://{host}", "evil://{host}", "://{host}",
    "{host}",
    "http://{host}/", "http://{host}.evil.example", "http://evil@{host}", "http://evil.example",
    "null",
    "file://", "http://localhost:1", "chrome-extension://{host}", "*",
]  # fmt: skip
# Names by which a page or a program may call it; all other hosts are foreign, whoever asks.
OURS = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]*)?", re.I)
BODY = json.dumps({"prompt": "a", "max_tokens": 2, "seed": 1}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
OPEN = HEAD + b"Content-Length: 200000\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def fields(attack: Attack, server: Server, rng: random.Random) -> None:
    """Every field of the protocol with every odd value, in both kinds of request."""
    from nanoeuler.serve.request import CANNOT, FIELDS, SAMPLING

    names = [*FIELDS, *SAMPLING, *CANNOT, *OTHERS]
    with watched(attack, server, "fields") as sender:
        for name, value, path in itertools.product(names, VALUES, (TEXT, CHAT)):
            said = {"max_tokens": "2", "seed": "1", "temperature": "0.5"}
            said |= {"messages": '[{"role": "user", "content": "a"}]'} if path == CHAT else {}
            said[name] = value
            _send_field(sender, path, said, name, value)
        for name, value in itertools.product(("ids", "layer"), VALUES):
            _send_field(sender, "/attention", {"ids": "[1, 2]", name: value}, name, value)


def _send_field(sender, path, said, name, value):
    """Send fields, whose values are JSON or are not, of which one is odd."""
    body = f"{{{', '.join(f'{json.dumps(key)}: {each}' for key, each in said.items())}}}"
    sender.send(f"{path} {name}: {value[:60]}", request(path, body.encode()),
                lambda reply: _field(reply, name, value, body))  # fmt: skip


def _field(reply, name, value, body):
    """What is wrong with the answer to a request with one odd field."""
    try:
        json.loads(body, parse_constant=lambda each: int(each))
        blamed = [name]
    except (ValueError, RecursionError):
        blamed = [None]
    if max(map(value.count, '[{')) > 800:  # how deep is too deep for JSON depends on the stack
        blamed = [name, None]
    if reply.status == 200:
        return None if blamed != [None] else "took what is no JSON"
    if reply.status not in (400, 404):
        return f"status {reply.status}"
    return None if param(reply) in blamed else f"blames {param(reply)}: {reply.body[:150]!r}"


def bodies(attack: Attack, server: Server, rng: random.Random) -> None:
    """Bodies that are no JSON, in other encodings, too long, or spoiled in a few places."""
    most = 1 << 18
    odd = [
        b"", b"{", b"}", b"{}", b"[]", b"null", b'"a"', b"\xff", b"\xef\xbb\xbf" + BODY, b"\0" * 99,
        BODY + BODY, b"{'prompt': 'a'}", b'{"prompt": "a", "prompt": 1}', b'{"a": [' * 50_000,
        b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xff"}', b'{"seed": 1, "seed": 2}',
        b'{"prompt":"a"' + b',"x":1' * 40_000 + b"}", b'{"\\u0070rompt": "a"}', b"[" * most,
        b"\x1f\x8b\x08" + BODY,
    ]  # fmt: skip
    codings = "utf-16", "utf-16-be", "utf-32", "utf-7", "cp037"
    odd += [BODY.decode().encode(coding) for coding in codings]
    odd += [BODY + b" " * (most + each - len(BODY)) for each in (-1, 0, 1, 1000)]
    for _ in range(250):
        spoiled = bytearray(BODY)
        for _ in range(rng.randint(1, 4)):
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        odd.append(bytes(spoiled[: rng.choice((len(BODY), rng.randrange(len(BODY))))]))
    with watched(attack, server, "bodies") as sender:
        for body in odd:
            sender.send(repr(body[:80]), request(TEXT, body))
        for kind in ("APPLICATION/JSON", "application/json;charset=utf-8", "text/plain", "", "a/b",
                     "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
                     "application/json, text/plain", ";", "\u0130"):  # fmt: skip
            allowed = kind.split(";")[0].lower() == "application/json"
            sender.send(f"content-type {kind}", request(TEXT, BODY, kind=kind),
                        _has(200 if allowed else 415))  # fmt: skip


def _has(*wanted):
    """What is wrong with an answer unless it has one of these statuses."""
    return lambda reply: None if reply.status in wanted else f"status {reply.status}"


def roles(attack: Attack, server: Server, rng: random.Random) -> None:
    """All conversations of up to three messages, and odd things in the place of a message."""
    users = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    with watched(attack, server, "roles") as sender:
        for length in (1, 2, 3):
            for said in itertools.product(ROLES, repeat=length):
                _say(sender, f"{said}", [{"role": role, "content": "a"} for role in said])
        for content, extra in itertools.product(CONTENTS, ({}, {"name": "x"}, {"role": ["user"]})):
            message = {"role": "user", "content": content} | extra
            _say(sender, f"{content!r:.60} {extra}", [message])
        for count in (10, 1000, 2700):
            _say(sender, f"{count} turns", users * count + users[:1])


def _say(sender, what, messages):
    """Send a conversation, of which nothing else can be wrong."""
    sender.send(what, posted(CHAT, messages=messages, max_tokens=1), lambda reply: None
                if reply.status == 200 or param(reply) == "messages" else "blames another field")


def paths(attack: Attack, server: Server, rng: random.Random) -> None:
    """Paths and methods that there are and that there are not."""
    with watched(attack, server, "paths") as sender:
        for path, method in itertools.product(PATHS, METHODS):
            body = BODY if method in ("POST", "PUT", "PATCH") else None
            said = request(path, body, method=method)
            if method != "HEAD":
                sender.send(f"{method} {path[:60]}", said)
                continue
            with connect(server) as link:
                link.sendall(said)
                got, closed = heard(link, 30)
            good = closed and re.match(rb"HTTP/1\.1 [234]", got) and got.endswith(b"\r\n\r\n")
            attack.count("paths", f"HEAD {path[:60]}", None if good else f"{got[:200]!r}")


def hosts(attack: Attack, server: Server, rng: random.Random) -> None:
    """Pages and names of others: DNS rebinding, and requests across origins."""
    with watched(attack, server, "hosts and origins") as sender:
        for host, origin in itertools.product(HOSTS, ORIGINS):
            name = host.format(port=server.port)
            page = None if origin is None else origin.format(host=name, port=server.port)
            own = page in (None, "", f"http://{name.lower()}", f"https://{name.lower()}")
            allowed = bool(OURS.fullmatch(name)) and own
            more = [] if page is None else [f"Origin: {page}"]
            said = request(TEXT, BODY, *more, host=name)
            wanted = (200,) if allowed else (403, 400)  # 400: h11 does not take such a header
            sender.send(f"Host {name} Origin {page}", said, _has(*wanted))
        for more in (["Host: localhost"], ["Host: evil.example"], ["Origin: http://localhost"] * 2,
                     ["Origin: http://localhost", "Origin: http://evil.example"],
                     ["Origin: http://evil.example", "Origin: http://localhost"]):  # fmt: skip
            sender.send(f"{more}", request(TEXT, BODY, *more), _has(400, 403))
        preflight = request(TEXT, None, "Origin: http://evil.example",
                            "Access-Control-Request-Method: POST", method="OPTIONS")  # fmt: skip
        sender.send("preflight", preflight, lambda reply: "allowed" if reply.status < 400 or
                    "access-control-allow-origin" in reply.headers else None)  # fmt: skip


def raw(attack: Attack, server: Server, rng: random.Random) -> None:
    """What is no HTTP, or barely: malformed, spoiled, pipelined, chunked, too long."""
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    odd = [
        b"\0", b"\0" * 20_000, b"\r\n" * 9000, b"\n\n", b"GET\r\n\r\n", b"GET /\r\n\r\n",
        b"\xff" * 99 + b"\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/11.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"\0" * 300,
        b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /he alth HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        line + b"X" * 99_000, line + b"X: " + b"x" * 99_000 + b"\r\n\r\n",
        line + b"A: b\r\n" * 20_000 + b"\r\n",
        line + b"A: b\r\n" * 2000 + b"\r\n", line + b" folded\r\n\r\n", line + b"A : b\r\n\r\n",
        line + b": b\r\n\r\n",
        line + b"A\r\n\r\n", line + b"A: \0\r\n\r\n", line + b"A: b\rc\r\n\r\n",
        line + b"Host: localhost\r\n\r\n",
        line + b"Content-Length: -1\r\n\r\n", line + b"Content-Length: 1e9\r\n\r\n",
        line + b"Content-Length: \xd9\xa3\r\n\r\n",
        line + b"Content-Length: 9" + b"9" * 30 + b"\r\n\r\n",
        line + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na",
        line + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        line + b"Transfer-Encoding: gzip\r\n\r\n",
        line + b"Transfer-Encoding: chunked, chunked\r\n\r\n",
        line + b"Transfer-Encoding: xchunked\r\n\r\n",
        line + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: YQ==\r\n"
        b"Sec-WebSocket-Version: 13\r\n\r\n",
        line + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n\r\n",
        line + b"Expect: 200-maybe\r\n\r\n",
        HEAD + b"\r\n", b"HEAD" + CHUNKED[4:] + b"zz\r\n",
    ]  # fmt: skip
    chunks = [
        b"zz\r\n", b"-1\r\n", b"1\r\nab\r\n", b"1;a=b\r\n{\r\n0\r\n\r\n", b"0x5\r\n", b"\r\n",
        b"5\r\n{    \r\n0\r\nA: b\r\n\r\n", b"f" * 20 + b"\r\n", b"F" * 200 + b"\r\n",
        b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", b"1\r\n{\r\nzz\r\n", b"1\r\n \r\n" * 60_000,
        f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n",
        b"1;" + b"a" * 50_000 + b"\r\n{\r\n", b"0\r\n" + b"A: b\r\n" * 9000 + b"\r\n",
    ]  # fmt: skip
    odd += [CHUNKED + each for each in chunks]
    odd += [CHUNKED.replace(b"/v1/completions", b"/nowhere") + each for each in chunks]
    behind = b"garbage\r\n\r\n", WHOLE, b"\0" * 999, line + b"\r\n"
    odd += [line + b"\r\n" + each for each in behind]
    for _ in range(300):
        spoiled = bytearray(WHOLE)
        for _ in range(rng.randint(1, 3)):
            at, more = rng.randrange(len(HEAD) + 25), rng.randint(0, 3)
            spoiled[at : at + rng.randint(0, 2)] = rng.choices(b"\0\r\n :;,/\x80\xffaA019", k=more)
        odd.append(bytes(spoiled))
    with watched(attack, server, "raw") as sender, ThreadPoolExecutor(12) as many:
        answers = many.map(lambda each: exchange(server, each, 1.0), odd)
        for said, (found, _, _) in zip(odd, answers, strict=True):
            fault = next(filter(None, map(wrong, found)), None)
            attack.count("raw", repr(said[:200]), fault)
        for count in (2, 10, 100):
            keep = [WHOLE.replace(b"Connection: close\r\n", b"")] * (count - 1)
            sender.send(f"{count} in a row", b"".join(keep) + WHOLE, answers=count)
        sender.send("HTTP/1.0", WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))
        asks_first = WHOLE.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n", 1)
        sender.send("Expect: 100-continue", asks_first)


# ---- clients that are slow, that vanish, that flood

STREAM = posted(TEXT, prompt="a", max_tokens=2000, temperature=0, stream=True)
WRITING = posted(TEXT, prompt="a", max_tokens=2000, temperature=0)


def slow(attack: Attack, server: Server, rng: random.Random) -> None:
    """Connections that are idle, and requests that come a byte at a time: slowloris."""
    stages = {"nothing": b"", "a letter": b"G", "half a head": WHOLE[:70], "a head": HEAD,
              "no body": WHOLE[: -len(BODY)], "half a body": OPEN + BODY[:5]}  # fmt: skip
    with watched(attack, server, "slow"):
        base, links = server.connections, []
        for what, said in stages.items():
            for _ in range(PLACES // 2):
                link = connect(server)
                with contextlib.suppress(OSError):
                    link.sendall(said)
                links.append((what, link))
        time.sleep(2)
        held = server.connections
        attack.count("slow", f"{len(links)} connections",
                     f"{held} are held" if held > PLACES + 8 else None)  # fmt: skip
        until = time.monotonic() + PATIENCE + 5
        dripping = [link for what, link in links if what != "nothing"][-PLACES:]
        while time.monotonic() < until and server.connections > base + 2:
            for link in dripping:
                with contextlib.suppress(OSError):
                    link.send(b"a", socket.MSG_DONTWAIT)
            time.sleep(0.5)
        for what, link in links:
            with link:
                got, closed = heard(link, 0.5)
            fault = next(filter(None, map(wrong, replies(got))), None)
            attack.count("slow", what, fault or (None if closed else "is still held"))


def vanishing(attack: Attack, server: Server, rng: random.Random) -> None:
    """Clients that leave: by RST, by FIN, half, in a head, in a body, while a text is written."""
    with watched(attack, server, "vanishing", full=True):
        for number in range(300):
            said = rng.choice((STREAM, WRITING, WHOLE, OPEN + b"{"))
            said = said[: rng.choice((len(said), len(said), rng.randrange(1, len(said))))]
            how, pause = rng.choice(("reset", "end", "half")), rng.choice((0, 0, 0.005, 0.03))
            link = connect(server)
            link.sendall(said)
            time.sleep(pause)
            if pause and rng.random() < 0.5:
                heard(link, 0.01)
            if how == "reset":
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "half":
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_WR)
                    heard(link, 0.02)
            link.close()
            attack.count("vanishing", f"{number} {how} {said[:40]!r}", None)


def streams(attack: Attack, server: Server, rng: random.Random) -> None:
    """More streams than seats: with one seed there is one text, and who is refused hears it."""
    said = posted(TEXT, prompt="The river", max_tokens=40, seed=7, stream=True)
    with watched(attack, server, "streams", full=True), ThreadPoolExecutor(200) as many:
        found, texts = [*many.map(lambda _: exchange(server, said), range(200))], set[str]()
        for number, (got, closed, _) in enumerate(found):
            fault = "not answered" if len(got) != 1 else wrong(got[0], full=True)
            if not fault and got[0].status == 200:
                lines = [each for each in got[0].body.split(b"\n\n") if each]
                events = [each.removeprefix(b"data: ") for each in lines]
                whole = events[-1] == b"[DONE]" and closed
                texts.add("".join(json.loads(each)["choices"][0]["text"] for each in events[:-1]))
                fault = None if whole else "the stream has no end"
            attack.count("streams", f"{number} of 200", fault)
        attack.count("streams", "one seed", None if len(texts) == 1 else f"{len(texts)} texts")


def unread(attack: Attack, server: Server, rng: random.Random) -> None:
    """Streams that nobody reads: endless ones on all seats but one, then many short ones."""
    long = posted(TEXT, prompt="a", max_tokens=2000, temperature=0, logprobs=20, stream=True)
    short = posted(TEXT, prompt="a", max_tokens=4, stream=True)
    with watched(attack, server, "unread", full=True), contextlib.ExitStack() as links:
        for said in [long] * (SEATS - 1) + [short] * PLACES:
            link = links.enter_context(socket.socket())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            link.connect(("127.0.0.1", server.port))
            with contextlib.suppress(OSError):
                link.sendall(said)
        time.sleep(0.5)
        attack.count("unread", f"{SEATS - 1} long streams, {PLACES} short", _seats(server))


def heavy(attack: Attack, server: Server, rng: random.Random) -> None:
    """Requests that are as much work as a request may be, many at a time."""
    words = "".join(rng.choice("abcdefgh \u00e9\u4e00") for _ in range(40_000))
    turns = [{"role": role, "content": "a"} for _ in range(2800) for role in ("user", "assistant")]
    many, long = [f"{i:x}" for i in range(20_000)], {"max_tokens": 300, "temperature": 0}
    loads = {
        "a long stop": posted(TEXT, prompt="a", max_tokens=1000, stop=["x" * 200_000]),
        "many stops": posted(TEXT, prompt="a", max_tokens=1000, stop=many),
        "the longest stops": posted(TEXT, prompt="a", stop=["e" * 256] * 4, **long),
        "a long text": posted(TEXT, prompt=words, max_tokens=5),
        "many ids, a penalty": posted(TEXT, prompt=[1] * 60_000, max_tokens=50,
                                      repetition_penalty=1.1),
        "many turns": posted(CHAT, messages=turns + turns[:1], max_tokens=5),
        "logprobs": posted(TEXT, prompt="a", logprobs=20, stream=True, **long),
        "guesses": posted(TEXT, prompt="a", guesses=3, **long),
        "maps": posted("/attention", ids=[*range(250)] * 100),
        "no map": posted("/attention", ids=[1] * 80_000 + [9999]),
    }  # fmt: skip
    for what, said in loads.items():  # a seat is left, else the neighbour would wait for her turn
        with watched(attack, server, what), ThreadPoolExecutor(SEATS - 1) as many:
            for found, closed, _ in many.map(lambda _, s=said: exchange(server, s, 60), range(9)):
                fault = "not answered" if len(found) != 1 else wrong(found[0])
                attack.count("heavy", what, fault or (None if closed else "not closed"))


PARTS = fields, bodies, roles, paths, hosts, raw, vanishing, streams, unread, heavy, slow


def attack(attack: Attack, seed: int) -> None:
    """All parts, against one server; each draws from a generator of its own."""
    with served(attack) as server:
        exchange(server, WHOLE)  # whatever is compiled at a first request is compiled now
        for part in PARTS:
            part(attack, server, random.Random(f"{seed} {part.__name__}"))
        attack.count("alive", "after all of it", _alive(server))


def _alive(server):
    """Whether it still answers, and ends at a signal, without a word."""
    (found,), _, _ = exchange(server, WHOLE)
    server.process.send_signal(signal.SIGINT)
    try:
        code = server.process.wait(20)
    except subprocess.TimeoutExpired:
        return "does not end at Ctrl-C"
    return wrong(found) or (None if code == 0 else f"exit code {code}")
