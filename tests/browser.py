"""A real browser for tests: Chromium without a window, spoken to over a pipe in its own protocol (CDP).

What it logs and every request that it makes is kept. No driver and no library: messages are JSON, each ends in a zero.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


class Browser:
    def __init__(self, width: int = 1200, height: int = 900, dark: bool = False):
        self.folder = tempfile.TemporaryDirectory(prefix="shardwise-browser-", ignore_cleanup_errors=True)
        here, theirs = os.pipe(), os.pipe()  # what it reads, what it writes

        def inside() -> None:
            ends = os.dup(here[0]), os.dup(theirs[1])
            for end, place in zip(ends, (3, 4), strict=True):
                os.dup2(end, place)

        flags = [*QUIET, f"--window-size={width},{height}", f"--user-data-dir={self.folder.name}"]
        self.process = subprocess.Popen(
            [CHROMIUM, *flags, "--remote-debugging-pipe", "about:blank"], preexec_fn=inside, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(here[0])
        os.close(theirs[1])
        self.out, self.into, self.rest, self.number = here[1], theirs[0], b"", 0
        self.requests: list[str] = []
        self.console: list[str] = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{room}.enable")
        self.scheme(dark)
        self.size(width, height)

    def scheme(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        for attempt in range(160):  # a page that has just been opened may not take it yet
            try:
                self.ask("Emulation.setDeviceMetricsOverride", **metrics)
                return
            except AssertionError:
                if attempt == 159:
                    raise
                time.sleep(0.25)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if hasattr(self, "session"):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            for told in self._told(deadline):
                if told.get("id") == self.number:
                    assert "error" not in told, told["error"]
                    return told["result"]

    def _told(self, deadline: float) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self.into], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "the browser does not answer"
        *whole, self.rest = (self.rest + os.read(self.into, 1 << 20)).split(b"\0")
        found = [json.loads(one) for one in whole]
        for one in found:
            params = one.get("params", {})
            if one.get("method") == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            elif one.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif one.get("method") == "Runtime.exceptionThrown":
                self.console.append(json.dumps(params["exceptionDetails"]))
            elif one.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                self.console.append(str(params["args"]))
        return found

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.querySelector('h1') !== null")

    def js(self, text: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, text=text or (key if len(key) == 1 else ""))

    def drag(self, x: float, y: float, to: float, modifiers: int = 0) -> None:
        """Moves the mouse from one place to another with its button down. Modifiers: 8 is Shift."""
        steps = [("mouseMoved", x, "none"), ("mousePressed", x, "left"), ("mouseMoved", (x + to) / 2, "left"),
                 ("mouseMoved", to, "left"), ("mouseReleased", to, "left")]  # fmt: skip
        for kind, place, button in steps:
            place = {"x": place, "y": y, "button": button, "buttons": int(button == "left"), "clickCount": 1}
            self.ask("Input.dispatchMouseEvent", type=kind, modifiers=modifiers, **place)

    def wait(self, text: str, seconds: float = 60.0) -> Any:
        """Until a text of JavaScript is true."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.js(text)
            if found:
                return found
            assert time.monotonic() < deadline, f"never true: {text}"
            time.sleep(0.1)

    def shoot(self, path: Path, selector: str = "html") -> None:
        place = f"document.querySelector('{selector}').getBoundingClientRect()"
        box = self.js(f"(b => ({{ x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height }}))({place})")
        clip = {**box, "scale": 1}
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        os.close(self.out)
        os.close(self.into)
        self.folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
