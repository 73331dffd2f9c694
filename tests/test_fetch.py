"""Fetching from servers that drop, truncate, lie, refuse and change; the catalogue's own rules."""

import errno
import gzip
import hashlib
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from unittest import mock
from urllib.parse import urlparse

import pytest
from hostile_server import Hostile, hang_up, nonsense, reply
from urllib3 import HTTPResponse

from nanoeuler.data import download
from nanoeuler.data.catalogue import FORMATS, File, Source, catalogue
from nanoeuler.data.download import CHUNK, RETRIES
from nanoeuler.data.fetch import fetch
from nanoeuler.errors import UserError
from nanoeuler.files import project_root, sha256_of

BODY = random.Random(0).randbytes(200_000)  # more than two chunks; no two parts look alike
SHA256 = hashlib.sha256(BODY).hexdigest()
OTHER = bytes(reversed(BODY))
WAITS = [0, 1, 2, 4, 8, 16]  # seconds before each further attempt
DATA = Path(os.environ.get("NANOEULER_DATA", project_root() / ".." / "shared" / "data"))


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def source(url="https://nowhere.invalid/file", size=200_000, sha256=SHA256):
    file = File("file.bin", url, size, sha256)
    return Source("thing", "A thing", "MIT", "for tests", "text", (file,))


class Client:
    """Fetches into tmp_path, notes what it is told and how long it waits, and waits for nothing."""

    def __init__(self, folder):
        self.folder, self.notes, self.waits = folder, [], []
        self.path = folder / "thing" / "file.bin"
        self.part = folder / "thing" / ".file.bin.part"

    def __call__(self, server=None, copy_from=None, **facts):
        what = source(server.url, **facts) if server else source(**facts)
        return fetch(what, self.folder, copy_from, self.report, pause=self.waits.append)

    def report(self, name, have, size, note):
        assert name == "file.bin" and have >= 0
        if note:
            self.notes.append(note)


@pytest.fixture
def client(tmp_path):
    return Client(tmp_path)


def files(client):
    """The names of the files in the client's folder, but for the lock, which stays."""
    return [path.name for path in client.path.parent.iterdir() if path.suffix != ".lock"]


def assert_only_the_file(client):
    assert client.path.read_bytes() == BODY and files(client) == ["file.bin"]
    assert client.path.stat().st_mode & 0o777 == 0o666 & ~UMASK


UMASK = os.umask(0o022)
os.umask(UMASK)


# Each: what the server does, request by request, and the ranges that must have been asked for.
CURED = {
    "honest": ([reply()], [None]),
    "drops in the middle": ([reply(cut=70_000), reply()], [None, 70_000]),
    "drops at once": ([reply(cut=0), reply()], [None, None]),
    "drops thrice": (
        [reply(cut=50_000), reply(cut=50_000), reply(cut=50_000), reply()],
        [None, 50_000, 100_000, 150_000],
    ),
    "one byte missing": ([reply(cut=len(BODY) - 1), reply()], [None, len(BODY) - 1]),
    "truncates under a right length of its own": (
        [reply(cut=70_000, length=70_000), reply()], [None, 70_000],
    ),
    "announces less than it sends": ([reply(length=1000), reply()], [None, 1000]),
    "announces more than it has": ([reply(length=10 * len(BODY))], [None]),
    "announces more, and drops": ([reply(cut=9, length=10**15), reply()], [None, 9]),
    "sends more than the file": ([reply(body=BODY + OTHER)], [None]),
    "never stops": ([reply(length=None, endless=True)], [None]),
    "announces nothing and drops": ([reply(cut=70_000, length=None), reply()], [None, 70_000]),
    "chunked and dropped": ([reply(chunked=True, cut=70_000), reply()], [None, "some"]),
    "resets": ([reply(cut=70_000, reset=True), reply()], [None, "some"]),
    "ignores ranges": ([reply(cut=70_000), reply(ranges=False)], [None, 70_000]),
    "another range": (
        [reply(cut=70_000), reply(content_range="bytes 5-9/10"), reply()], [None, 70_000, None],
    ),
    "a range that begins too early": (
        [reply(cut=70_000), reply(content_range="bytes 69999-199999/200000"), reply()],
        [None, 70_000, None],
    ),
    "a range in nonsense": (
        [reply(cut=70_000), reply(content_range="bytes \x1b[2J"), reply()], [None, 70_000, None],
    ),
    "416": ([reply(cut=70_000), reply(416), reply()], [None, 70_000, None]),
    "hangs up": ([hang_up, reply()], [None, None]),
    "not HTTP": ([nonsense, reply()], [None, None]),
    "500 then fine": ([reply(500), reply()], [None, None]),
    "502, 503, 504 then fine": (
        [reply(502), reply(503), reply(504), reply()], [None, None, None, None],
    ),
    "changed in between": ([reply(cut=70_000, body=OTHER), reply()], [None, 70_000, None]),
    "changed, and dropped again": (
        [reply(cut=70_000, body=OTHER), reply(), reply(cut=60_000), reply()],
        [None, 70_000, None, 60_000],
    ),
    "many drops, each with progress": (
        [*[reply(cut=20_000)] * 9, reply()], [None, *range(20_000, 200_000, 20_000)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CURED)
def test_a_bad_server_costs_time_and_no_byte(name, client):
    answers, ranges = CURED[name]
    with Hostile(BODY, *answers) as server:
        assert client(server) == [client.path]
    assert_only_the_file(client)
    asked = [int(r.removeprefix("bytes=")[:-1]) if r else None for r in server.ranges]
    assert len(asked) == len(ranges)
    for got, wanted in zip(asked, ranges, strict=True):
        assert got == wanted if wanted != "some" else got is None or 0 < got <= 70_000
    assert client.notes[-1] == "whole"
    assert all("\x1b" not in note and "\n" not in note for note in client.notes)


# Each: what the server always does, what the message says, how many requests that may take.
REFUSED = {
    "404": ([reply(404)], "404 Not Found: look for the file's new address", 1),
    "499, in no table": ([reply(499)], "answers 499: look", 1),
    "204": ([reply(204)], "answers 204 No Content", 1),
    "404 in the middle": ([reply(cut=70_000), reply(404)], "404 Not Found", 2),
    "another file": ([reply(body=OTHER)], f"a file with sha256 {SHA256} from http", 1),
    "a wrong byte": ([reply(body=BODY[:-1] + b"x")], "another version or damaged", 1),
    "always 500": ([reply(500)], "answers 500 Internal Server Error", 7),
    "always drops at one place": (
        [reply(cut=70_000, ranges=False)], "at byte 70,000 of 200,000.*70,000 bytes are kept", 7,
    ),
    "always hangs up": ([hang_up], "Remote end closed", 7),
    "a shorter file": ([reply(body=BODY[:100]), reply(416)], "answers 416 .* try again later", 7),
    "a page": ([reply(body=b"<html>log in</html>", ranges=False)], "at byte 19 of 200,000", 7),
    "always another range": (
        [reply(cut=70_000), *[reply(cut=70_000), reply(content_range="bytes 0-1/2")] * 5],
        "at byte 70,000 of 200,000|with range 'bytes 0-1/2'", 9,
    ),
    "an hour": ([reply(429, headers=[("Retry-After", "3600")])], "asks for 3600 s: run", 1),
    "never the same": (
        [reply(cut=70_000, body=OTHER), reply(), reply(cut=70_000, body=OTHER), reply()],
        "another version or damaged", 4,
    ),
    "redirects in a circle": ([reply(302, headers=[("Location", "/file")])], "30 redirects", 31),
    "redirects to a file": (
        [reply(302, headers=[("Location", "file:///etc/hostname")])], "lead to a file, but No", 1,
    ),
    "redirects to no address": (
        [reply(302, headers=[("Location", "http://[::1/file")])], "lead to a file, but", 1,
    ),
    "redirects nowhere": ([reply(302)], "the server answers 302", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_said_in_one_line(name, client):
    answers, message, requests = REFUSED[name]
    with Hostile(BODY, *answers) as server, pytest.raises(UserError, match=message) as error:
        client(server)
    assert str(error.value).isprintable() and len(str(error.value)) < 400
    assert len(server.ranges) <= requests
    assert not client.path.exists()
    assert sum(client.waits) <= 2 * sum(WAITS)


def test_waits_double_and_add_up_to_what_the_chapter_says(client):
    with Hostile(BODY, reply(503)) as server, pytest.raises(UserError):
        client(server)
    assert client.waits == WAITS and sum(client.waits) == 2**5 - 1
    assert len(server.ranges) == 7 == RETRIES.total + 1


def test_progress_starts_the_waits_anew_and_lack_of_it_does_not(client):
    answers = [reply(503), reply(503), reply(cut=1000), reply(503), reply(cut=1000), reply()]
    with Hostile(BODY, *answers) as server:
        client(server)
    assert client.waits == [0, 1, 0, 1, 0]


def test_the_same_half_again_is_no_progress(client):
    """Ignores ranges, dies at a place a little earlier each time: nothing new ever comes."""
    answers = [reply(cut=70_000 - i, ranges=False) for i in range(50)]
    with Hostile(BODY, *answers) as server, pytest.raises(UserError):
        client(server)
    assert len(server.ranges) == 7


@pytest.mark.parametrize(
    "asked, wait", [("7", 7), ("120", 120), ("0", 0), ("soon", 0), ("", 0), ("9" * 5000, 0)]
)
def test_retry_after_in_seconds(asked, wait, client):
    answers = reply(429, headers=[("Retry-After", asked)]), reply()
    with Hostile(BODY, *answers) as server:
        client(server)
    assert client.waits == [wait]


def test_retry_after_as_a_date(client):
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    with Hostile(BODY, reply(503, headers=[("Retry-After", at)]), reply()) as server:
        client(server)
    assert 50 < client.waits[0] <= 60  # dates have whole seconds, and this test may be slow
    past = format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)
    client.path.unlink()
    with Hostile(BODY, reply(503, headers=[("Retry-After", past)]), reply()) as server:
        client(server)
    assert client.waits[1:] == [0]


def test_a_redirect_keeps_the_range(client):
    to = [("Location", "/elsewhere")]
    with Hostile(BODY, reply(cut=70_000), reply(302, headers=to), moved=[reply()]) as server:
        client(server)
    assert server.ranges == [None, "bytes=70000-", "bytes=70000-"]
    assert_only_the_file(client)


def test_the_bytes_asked_for_are_those_of_the_file(client):
    with Hostile(BODY) as server:
        client(server)
    (headers,) = server.headers
    assert headers["Accept-Encoding"] == "identity"
    assert headers["User-Agent"].startswith("nanoeuler/")


def test_silence_is_a_dropped_connection(client, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with Hostile(BODY, reply(cut=70_000, stall=30.0), reply()) as server:
        client(server)
    assert server.ranges == [None, "bytes=70000-"]
    assert "ended at byte 70,000" in client.notes[0]
    assert_only_the_file(client)


def test_memory_stays_at_a_chunk(client, monkeypatch):
    asked, read = [], HTTPResponse.read1
    monkeypatch.setattr(HTTPResponse, "read1",
                        lambda self, n: (asked.append(n), read(self, n))[1])  # fmt: skip
    with Hostile(BODY) as server:
        client(server)
    assert max(asked) <= CHUNK < len(BODY)


# ------------------------------------------------------------------ without a network


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
    ],
)
def test_without_a_network_one_clear_line_at_once(error, client, monkeypatch):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(UserError, match="no connection .* --from DIR") as raised:
        client(size=5, sha256=SHA256)
    assert error.strerror in str(raised.value) and "nowhere.invalid" in str(raised.value)
    assert client.waits == []


def test_a_network_that_goes_away_in_the_middle_is_waited_for(client, monkeypatch):
    look_up, calls = socket.getaddrinfo, []

    def sometimes(*args, **kwargs):
        calls.append(args)
        if len(calls) in (2, 3):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", sometimes)
    with Hostile(BODY, reply(cut=70_000), reply()) as server:
        client(server)
    assert client.waits == [0, 1, 2] and server.ranges == [None, "bytes=70000-"]


def test_a_server_that_is_not_there_is_said_at_once_and_what_came_is_kept(client):
    client.part.parent.mkdir()
    client.part.write_bytes(BODY[:9])
    with Hostile(BODY) as server:
        pass  # and its port is closed again
    refused = "no connection .Connection refused.: try again later .9 bytes are kept"
    with pytest.raises(UserError, match=refused):
        client(server)
    assert client.waits == [] and client.part.read_bytes() == BODY[:9]


# ------------------------------------------------------------------ stopped and gone on with


def test_killed_in_the_middle_it_goes_on(client):
    with Hostile(BODY, reply(cut=150_000, stall=60.0), reply()) as server:
        child = fetching(server, client.folder)
        end = time.monotonic() + 60
        while not (client.part.exists() and client.part.stat().st_size > 100_000):
            assert child.poll() is None and time.monotonic() < end, "the fetch did not begin"
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not client.path.exists()
        kept = client.part.stat().st_size
        client(server)
    assert server.ranges == [None, f"bytes={kept}-"] and 100_000 < kept <= 150_000
    assert client.path.read_bytes() == BODY and not client.part.exists()


def test_interrupted_while_the_disk_writes_nothing_is_fetched_again(client, monkeypatch):
    with Hostile(BODY) as server:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "fsync", mock.Mock(side_effect=KeyboardInterrupt))
            client(server)
        assert client.part.read_bytes() == BODY
        client(server)
    assert len(server.ranges) == 1
    assert_only_the_file(client)


def test_given_up_it_goes_on_later(client):
    with Hostile(BODY, reply(cut=70_000), reply(503)) as server, pytest.raises(UserError):
        client(server)
    assert client.part.read_bytes() == BODY[:70_000]
    with Hostile(BODY) as server:
        client(server)
    assert server.ranges == ["bytes=70000-"]
    assert_only_the_file(client)


@pytest.mark.parametrize(
    "part, ranges",
    [
        (BODY[:70_000], ["bytes=70000-"]),
        (BODY, []),  # killed between the last byte and the rename
        (OTHER[:70_000], ["bytes=70000-", None]),
        (OTHER, [None]),
        (BODY + b"x", [None]),
        (b"", [None]),
    ],
)
def test_whatever_part_is_found_the_file_is_right(part, ranges, client):
    client.part.parent.mkdir()
    client.part.write_bytes(part)
    with Hostile(BODY) as server:
        client(server)
    assert server.ranges == ranges
    assert_only_the_file(client)


def test_a_fetched_file_is_left_alone_and_a_spoilt_one_is_fetched_again(client):
    with Hostile(BODY) as server:
        client(server)
        client(server)
        assert len(server.ranges) == 1 and client.notes == ["whole", "already there"]
        client.path.write_bytes(OTHER)
        client(server)
        client.path.write_bytes(BODY[:5])
        client(server)
    assert len(server.ranges) == 3
    assert_only_the_file(client)


def test_a_spoilt_file_stays_until_the_right_one_is_there(client):
    client.path.parent.mkdir()
    client.path.write_bytes(b"mine")
    with Hostile(BODY, reply(404)) as server, pytest.raises(UserError):
        client(server)
    assert client.path.read_bytes() == b"mine"


# ------------------------------------------------------------------ unknown size or digest


def test_without_a_size_what_the_server_announces_is_the_measure(client):
    with Hostile(BODY, reply(cut=70_000), reply()) as server:
        client(server, size=None)
    assert server.ranges == [None, "bytes=70000-"]
    assert_only_the_file(client)


def test_without_any_size_the_digest_decides(client):
    with Hostile(BODY, reply(length=None)) as server:
        client(server, size=None)
    assert_only_the_file(client)
    client.path.unlink()
    with Hostile(BODY, reply(length=None, cut=70_000)) as server, pytest.raises(UserError):
        client(server, size=None)
    assert not client.path.exists()


# ------------------------------------------------------------------ the disk


class Full(io.FileIO):
    """A file on a disk with room for 100,000 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 100_000:
            super().write(data[: 100_000 - self.tell()])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_full_disk_is_said_and_what_came_is_kept(client, monkeypatch):
    with Hostile(BODY) as server:
        with monkeypatch.context() as patch:
            patch.setattr(download, "open", Full, raising=False)
            with pytest.raises(UserError, match="No space left on device: make room") as error:
                client(server)
            assert "\n" not in str(error.value) and client.waits == []
        assert client.part.read_bytes() == BODY[:100_000]
        client(server)
    assert server.ranges == [None, "bytes=100000-"]
    assert_only_the_file(client)


def test_a_folder_that_cannot_be_made(client):
    (client.folder / "thing").write_text("a file where the folder should be")
    with Hostile(BODY) as server, pytest.raises(UserError, match="expected to write"):
        client(server)


# ------------------------------------------------------------------ --from DIR


@pytest.fixture
def offline(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("--from must ask no server")

    monkeypatch.setattr(download.requests, "get", never)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "thing"])
def test_from_takes_files_plain_or_packed(place, end, client, tmp_path, offline):
    there = tmp_path / "from" / place / f"file.bin{end}"
    there.parent.mkdir(parents=True)
    there.write_bytes(gzip.compress(BODY) if end else BODY)
    client(copy_from=tmp_path / "from")
    assert_only_the_file(client)
    client(copy_from=tmp_path / "from")
    assert client.notes == ["whole", "already there"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("file.bin", OTHER, "from .*from, but file.bin there has another"),
        ("file.bin", BODY[:-1], "has another"),
        ("file.bin", BODY + b"x", "has another"),
        ("file.bin", b"", "has another"),
        ("file.bin.gz", gzip.compress(BODY, mtime=0)[:-20], "expected a gzip file"),
        ("file.bin.gz", b"not gzip at all", "expected a gzip file"),
        ("file.bin.gz", gzip.compress(BODY, mtime=0)[:50] + bytes(50), "expected a gzip file"),
        ("file.bin.gz", gzip.compress(BODY, mtime=0)[:10] + b"\xff" * 50, "expected a gzip file"),
        ("file.bin.gz", gzip.compress(bytes(50_000_000), mtime=0), "has another"),
        ("other.bin", BODY, "expected file.bin or file.bin.gz in .* neither is there"),
    ],
)
def test_from_refuses_what_is_not_the_file(name, content, message, client, tmp_path, offline):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / name).write_bytes(content)
    client.path.parent.mkdir()
    client.path.write_bytes(b"what was there")
    with pytest.raises(UserError, match=message) as error:
        client(copy_from=tmp_path / "from")
    assert "\n" not in str(error.value)
    assert client.path.read_bytes() == b"what was there"
    assert files(client) == ["file.bin"]


def test_from_unpacks_no_further_than_it_must(client, tmp_path, offline, monkeypatch):
    (tmp_path / "file.bin.gz").write_bytes(gzip.compress(bytes(50_000_000)))
    read, sizes = gzip.GzipFile.read, []
    monkeypatch.setattr(
        gzip.GzipFile, "read", lambda self, n: (sizes.append(n), read(self, n))[1]
    )
    with pytest.raises(UserError):
        client(copy_from=tmp_path)
    assert len(BODY) < sum(sizes) <= len(BODY) + CHUNK


# ------------------------------------------------------------------ two at once


def test_two_programs_at_once_bring_one_file_once(tmp_path):
    with Hostile(BODY, reply(cut=150_000, stall=60.0), reply()) as server:
        both = [fetching(server, tmp_path) for _ in range(2)]
        waits = [said_by(child) for child in both]
        while not any("waiting" in "".join(lines) for lines in waits):
            assert all(child.poll() is None for child in both)
            time.sleep(0.01)
        server.ended.set()  # and the first one goes on
        assert [child.wait(60) for child in both] == [0, 0]
    assert (tmp_path / "thing" / "file.bin").read_bytes() == BODY
    assert server.ranges == [None]


PROGRAM = """
import sys
from pathlib import Path
from nanoeuler.data.catalogue import File, Source
from nanoeuler.data.fetch import fetch
url, folder, size, sha256 = sys.argv[1:]
file = File("file.bin", url, int(size), sha256)
say = lambda name, have, size, note: note and print(note, flush=True)
fetch(Source("thing", "t", "l", "a", "text", (file,)), Path(folder), report=say)
"""


def fetching(server, folder):
    """A process that fetches BODY into `folder`."""
    words = [sys.executable, "-c", PROGRAM, server.url, str(folder), str(len(BODY)), SHA256]
    return subprocess.Popen(words, cwd=project_root(), stdout=subprocess.PIPE, text=True)


def said_by(child):
    """A list that grows with the lines that a process says."""
    lines = []
    read = threading.Thread(target=lambda: lines.extend(iter(child.stdout.readline, "")))
    read.start()
    return lines


def test_sha256_of_is_that_of_the_standard(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    assert sha256_of(tmp_path / "abc") == expected


# ------------------------------------------------------------------ the catalogue


def test_the_books_own_catalogue():
    sources = catalogue()
    assert {"gutenberg", "tinyshakespeare", "alpaca", "fineweb-edu"} <= sources.keys()
    assert {source.format for source in sources.values()} == set(FORMATS)
    for source_ in sources.values():
        assert source_.licence and source_.about and source_.files
        for file in source_.files:
            assert urlparse(file.url).scheme == "https" and len(file.sha256) == 64


def test_the_size_of_a_source():
    assert catalogue()["tinyshakespeare"].bytes == 1_115_394  # shared/data/MANIFEST.tsv
    known, unknown = File("a", "https://x/a", 3), File("b", "https://x/b")
    assert Source("s", "t", "l", "a", "text", (known, known)).bytes == 6
    assert Source("s", "t", "l", "a", "text", (known, unknown)).bytes is None


HEAD = '[x]\ntitle = "t"\nlicence = "l"\nabout = "a"\nformat = "text"\n'
FILE = f'[[x.files]]\nname = "a.txt"\nurl = "https://a.b/c"\nsha256 = "{SHA256}"\n'


def test_a_small_catalogue(tmp_path):
    (tmp_path / "c.toml").write_text(HEAD + FILE + "bytes = 3\n")
    file = File("a.txt", "https://a.b/c", 3, SHA256)
    assert catalogue(tmp_path / "c.toml") == {"x": Source("x", "t", "l", "a", "text", (file,))}


@pytest.mark.parametrize(
    "text, message",
    [
        *[
            (HEAD + FILE.replace("a.txt", name), "file 1: expected a plain file name")
            for name in ("../a", "/a", "a/b", "a\\\\b", ".a", "", "..", "a\\u0000", "a b", "a\\n")
        ],
        (HEAD + FILE.replace("https", "http"), "begins with https://"),
        (HEAD + FILE.replace("https://a.b/c", "file:///etc/passwd"), "begins with https://"),
        (HEAD + FILE.replace("https://a.b/c", "https://a.b/c d"), "begins with https://"),
        (HEAD + FILE + "bytes = 0", "a size above 0"),
        (HEAD + FILE + "bytes = -3", "a size above 0"),
        (HEAD + FILE + 'bytes = "3"', "a size above 0"),
        (HEAD + FILE + "bytes = true", "a size above 0"),
        (HEAD + FILE.replace(SHA256, SHA256[:-1]), "64 hexadecimal digits"),
        (HEAD + FILE.replace(SHA256, SHA256.upper()), "64 hexadecimal digits"),
        (HEAD + FILE.replace("sha256", "bytes").replace(f'"{SHA256}"', "3"), "a field 'sha256'"),
        (HEAD + FILE + 'sha1 = "x"', "there is 'sha1': remove it"),
        (HEAD + FILE + FILE.replace("a.txt", "A.TXT"), "each file's name once"),
        (HEAD + "files = []", "expected a list of tables|a list"),
        (HEAD + FILE.replace("https://", "https://ä"), "an address in ASCII"),
        (HEAD + 'files = ["a.txt"]', "file 1: expected a table"),
        (HEAD, "a field 'files'"),
        (HEAD.replace('"text"', '"html"') + FILE, "one of gutenberg, text, parquet, pairs"),
        (HEAD.replace('licence = "l"\n', "") + FILE, "a field 'licence'"),
        (HEAD.replace('title = "t"', 'title = " "') + FILE, "text as title"),
        (HEAD.replace('title = "t"', 'title = "\\u001b[2J"') + FILE, "printable text as title"),
        (HEAD.replace('title = "t"', f'title = {["y" * 40_000]}') + FILE, "printable text as ti"),
        ("x = " + "[" * 100_000, "expected TOML"),
        ("x = 1\n" + "y" * 100_000, "expected TOML"),
        (f"{'y' * 100_000} = 1", "expected"),
        (HEAD.replace("[x]", '["../x"]') + FILE.replace("x.", '"../x".'), "a plain name for a"),
        ("x = 3", "expected a table"),
        ("x = ", "expected TOML"),
        ("\udcff", "expected TOML"),
    ],
)
def test_a_wrong_catalogue_is_refused_in_one_line(text, message, tmp_path):
    (tmp_path / "c.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message) as error:
        catalogue(tmp_path / "c.toml")
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_no_catalogue(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "none.toml"))):
        catalogue(tmp_path / "none.toml")


# ------------------------------------------------------------------ real files


def needs(*names):
    missing = [name for name in names if not (DATA / name).exists()]
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {', '.join(missing)} in {DATA} (NANOEULER_DATA)"
    )


@needs("gutenberg")
def test_every_book_of_the_catalogue_is_what_its_digest_says(tmp_path, offline):
    books = catalogue()["gutenberg"]
    paths = fetch(books, tmp_path, copy_from=DATA / "gutenberg")
    assert [path.name for path in paths] == [file.name for file in books.files]
    assert sum(path.stat().st_size for path in paths) == books.bytes


@needs("tinyshakespeare.txt")
def test_tinyshakespeare_is_what_its_digest_says(tmp_path, offline):
    (path,) = fetch(catalogue()["tinyshakespeare"], tmp_path, copy_from=DATA)
    assert path.read_bytes() == (DATA / "tinyshakespeare.txt").read_bytes()
