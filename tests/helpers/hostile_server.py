"""A web server on this machine that serves one file, and misbehaves as a test asks it to.

    with Hostile(body, reply(cut=100), reply()) as server:   # drops the first connection
        ...server.url, server.ranges...

Each request takes the next reply; the last one is used for all that follow.
"""

import http.server
import socket
import struct
import threading
import time

TRUE = object()  # the Content-Length that is right


def reply(
    status=None, *, cut=None, body=None, ranges=True, length=TRUE, content_range=None, reset=False,
    stall=0.0, chunked=False, endless=False, headers=(),
):  # fmt: skip
    """A function that answers one request for a file.

    status: instead of 200 or 206. cut: bytes of body sent before the connection ends (with a reset
    instead of a close, if `reset`). body: instead of the server's own. ranges: whether Range is
    obeyed. length: the announced Content-Length, None for no such header. content_range: instead
    of the true one. stall: seconds of silence after `cut` bytes, and then the rest is sent.
    chunked: the transfer encoding. endless: a body that never ends. headers: further (name, value).
    """

    def answer(request, own):
        data = own if body is None else body
        asked = request.headers["Range"]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and ranges else 0
        if start >= len(data) > 0:
            return request.send_error(416)
        request.send_response(status or (206 if start else 200))
        if start or content_range:
            true = f"bytes {start}-{len(data) - 1}/{len(data)}"
            request.send_header("Content-Range", content_range or true)
        if chunked:
            request.send_header("Transfer-Encoding", "chunked")
        elif length is not None:
            size = len(data) - start if length is TRUE else length
            request.send_header("Content-Length", str(size))
        for name, value in headers:
            request.send_header(name, value)
        request.end_headers()
        _send(request, data[start:], cut, reset, stall, chunked, endless)

    return answer


def _send(request, data, cut, reset, stall, chunked, endless):
    first = data[:cut] if cut is not None else data
    request.wfile.write(b"%x\r\n%s" % (len(data), first) if chunked else first)
    if chunked and cut is None:
        request.wfile.write(b"\r\n0\r\n\r\n")
    if stall:
        request.wfile.flush()
        request.server.ended.wait(stall)
        request.wfile.write(data[cut:])
    while endless:
        request.wfile.write(bytes(1 << 16))
    if reset:
        request.wfile.flush()
        time.sleep(0.05)  # what was sent should arrive before the reset, which overtakes it
        linger = struct.pack("ii", 1, 0)
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request.connection.close()


def hang_up(request, own):
    """Close the connection without a word."""


def nonsense(request, own):
    """Answer with something that is not HTTP, and that a terminal would obey."""
    request.wfile.write(b"\x1b[2J no such protocol\r\n\r\n")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        answers = server.moved if self.path != "/file" else server.answers
        server.ranges.append(self.headers["Range"])
        server.headers.append(dict(self.headers))
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self, server.body)

    def log_message(self, *args):
        pass


class Hostile(http.server.ThreadingHTTPServer):
    """A server of `body` that gives `answers` in turn; other paths than `url` get `moved`."""

    daemon_threads = True

    def __init__(self, body, *answers, moved=()):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body, self.answers, self.moved = body, list(answers or [reply()]), list(moved)
        self.ranges, self.headers = [], []  # of each request that came
        self.ended = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/file"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that hangs up first is part of most tests."""
