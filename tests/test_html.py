"""The web pages build without a warning and load nothing from another host."""

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "html"
drawn = pytest.mark.skipif(
    browser.CHROMIUM is None or importlib.util.find_spec("websocket") is None,
    reason="there is no Chromium here, or no websocket-client",
)
LOADING = {  # tag -> the attribute through which a browser fetches something by itself
    "script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src",
    "video": "src", "audio": "src", "embed": "src", "object": "data", "use": "href",
}  # fmt: skip
NOT_FETCHED = {"next", "prev", "index", "search", "canonical", "author"}  # <link rel=...>


class Loads(HTMLParser):
    """Collects the addresses a page makes a browser load, and its inline styles and scripts."""

    def __init__(self):
        super().__init__()
        self.addresses, self.inline, self.open_tag = [], "", None

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.open_tag = tag
        self.inline += attributes.get("style") or ""
        if tag == "link" and set((attributes.get("rel") or "").split()) & NOT_FETCHED:
            return
        if tag in LOADING and attributes.get(LOADING[tag]):
            self.addresses.append(attributes[LOADING[tag]])
        choices = (attributes.get("srcset") or "").split(",")
        self.addresses += [choice.split()[0] for choice in choices if choice.strip()]

    def handle_data(self, data):
        if self.open_tag in ("style", "script"):
            self.inline += data


def outside(address):
    return re.match(r"(?:https?:)?//", address.strip()) is not None


def outside_in_text(text):
    """Addresses of other hosts that a style sheet or an inline script loads."""
    address = r"((?:https?:)?//[^'\")]+)"
    styles = re.findall(r"url\(\s*['\"]?" + address, text)
    return styles + re.findall(r"(?:import|fetch|importScripts)\s*\(?\s*['\"]" + address, text)


@pytest.fixture(scope="module")
def pages():
    """All pages of the book, built from nothing: an older chapter's page would stay."""
    shutil.rmtree(PAGES, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "nanoeuler.book", "html"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    made = [page for page in sorted(PAGES.rglob("*.html")) if "_static" not in page.parts]
    assert len(made) > 12
    return made


@pytest.mark.long
def test_pages_stay_at_home(pages):
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert not [address for address in loads.addresses if outside(address)], page
        assert not outside_in_text(loads.inline), page
    for sheet in (PAGES / "_static").rglob("*.css"):
        assert not outside_in_text(sheet.read_text(encoding="utf-8")), sheet


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Gives out the pages, and says nothing."""

    def log_message(self, *words):
        pass


def all_of(what):
    return f"document.querySelectorAll('{what}')"


@pytest.mark.long
@drawn
@pytest.mark.parametrize("width, phone, dark", [(1280, False, False), (390, True, True)])
def test_a_browser_shows_every_page_without_an_error(pages, width, phone, dark):
    """Also: all formulas are set, and no page is wider than a window."""
    handler = functools.partial(Quiet, directory=PAGES)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        browser.browser() as page,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            for path in pages:
                name = path.relative_to(PAGES).as_posix()
                page.open(f"http://127.0.0.1:{server.server_port}/{name}", width, 900, phone, dark)
                page.until(f"![...{all_of('.math')}].some(m => !m.querySelector('mjx-container'))")
                assert page.errors == [], name
                wider = page.run("document.documentElement.scrollWidth - window.innerWidth")
                assert wider <= 0, f"{name} is {wider} pixels too wide"
        finally:
            server.shutdown()


def test_the_detector_detects():
    loads = Loads()
    loads.feed(
        '<link rel="stylesheet" href="https://a.example/x.css"><script src="//b.example/y.js">'
        '</script><img srcset="https://c.example/z.png 2x"><link rel="next" href="//d.example">'
        '<a href="https://e.example">follow</a><style>@import url(//f.example)</style>'
    )
    assert [outside(address) for address in loads.addresses] == [True, True, True]
    assert outside_in_text(loads.inline) == ["//f.example"]
    assert outside_in_text("import('https://g.example/m.js')") == ["https://g.example/m.js"]
