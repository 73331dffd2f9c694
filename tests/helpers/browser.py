"""A headless Chromium that types and clicks as a reader would, by its debugging protocol.

Keeps what the page complains of and every address that it asks for.
"""

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
         "--disable-dev-shm-usage", "--remote-allow-origins=*", "--remote-debugging-port=0")
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, ""),
        "ArrowLeft": (37, ""), " ": (32, " ")}  # fmt: skip


class Gone(Exception):
    """The page that was asked has been replaced by the next one."""


class Page:
    """One page. `errors`: what its console and its scripts complain of; `asked`: addresses."""

    def __init__(self, address):
        import websocket

        self.socket = websocket.create_connection(address, timeout=30)
        self.number, self.errors, self.asked = 0, [], []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """Call a method of the protocol; its result. Events that come before it are kept."""
        self.number += 1
        self.socket.send(json.dumps(
            {"id": self.number, "method": method, "params": parameters}))
        while True:
            said = json.loads(self.socket.recv())
            self._note(said)
            if said.get("id") == self.number:
                if "navigated" in said.get("error", {}).get("message", ""):
                    raise Gone
                assert "error" not in said, said
                return said["result"]

    def _note(self, said):
        method, what = said.get("method"), said.get("params", {})
        if method == "Network.requestWillBeSent":
            self.asked.append(what["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(what["exceptionDetails"].get("exception", {}).get("description"))
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(what["entry"]["text"])

    def run(self, script):
        """The value of an expression of the page's, awaited."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True,
                          returnByValue=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script, seconds=30):
        """Wait until an expression is true."""
        end, came = time.monotonic() + seconds, False
        while not came:
            with contextlib.suppress(Gone):  # then the next one is asked
                came = self.run(script)
            assert came or time.monotonic() < end, f"{script} did not come true in {seconds} s"
            time.sleep(0.05)

    def open(self, url, width=1000, height=900, phone=False, dark=False):
        """Show a page in a window of this size."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=2 if phone else 1, mobile=phone)  # fmt: skip
        self.send("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def type(self, text):
        """Type into whatever has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key, shift=False):
        """Press a key and let it go."""
        code, text = KEYS[key]
        how = dict(key=key, code=key, windowsVirtualKeyCode=code, modifiers=8 if shift else 0)
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **how)
        self.send("Input.dispatchKeyEvent", type="keyUp", **how)

    def shot(self, path, whole=False):
        """Save a picture: of the window, or of the whole page."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser():
    """A `Page` of a browser that is started for it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen([CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            named, end = Path(folder) / "DevToolsActivePort", time.monotonic() + 30
            while not (named.exists() and named.read_text().count("\n")):
                assert time.monotonic() < end, "the browser did not start"
                time.sleep(0.05)
            port = named.read_text().split("\n")[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list") as said:
                pages = json.load(said)
            page = next(each for each in pages if each["type"] == "page")
            yield Page(page["webSocketDebuggerUrl"])
        finally:
            process.terminate()
            process.wait(timeout=20)
