"""The live page: a server on this machine that shows run folders, and nothing else of the disk.

Names in an address are looked up among the runs that there are; none of them becomes a path. On this machine's own
address it answers only those who call it by a name of that, so that no page elsewhere can read it through the browser
(DNS rebinding).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from shardwise.errors import JobError
from shardwise.watch.page import POLICY, document, listing
from shardwise.watch.read import Run
from shardwise.watch.state import state

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Watched:
    """The runs that a server shows: one, or those below a folder; each is read on from where it was."""

    def __init__(self, one: Path | None, below: Path = Path("runs")):
        self.one, self.below = one, below
        self._open: dict[str, Run] = {}
        self._told: dict[str, tuple[tuple[Any, ...], str]] = {}
        self._lock = threading.Lock()
        if one is not None:
            run = Run(one)
            self._open[run.name] = run
        elif not below.is_dir():
            raise JobError(f"there is no folder {below}; name a run folder: shardwise watch RUN.")

    def paths(self) -> dict[str, Path]:
        if self.one is not None:
            return {next(iter(self._open)): self.one}
        return {path.parent.name: path.parent for path in sorted(self.below.glob("*/job.toml"))}

    def find(self, name: str) -> Run | None:
        path = self.paths().get(name)
        if path is None:
            return None
        with self._lock:
            if name not in self._open:
                self._open[name] = Run(path)
            return self._open[name]

    def news(self, name: str) -> tuple[str, str] | None:
        """A run's state as JSON, and a version of it; made anew where files have changed."""
        run = self.find(name)
        if run is None:
            return None
        with self._lock:
            run.read()
            version = (*(log.place for log in run.logs), run.status.replace(" ", "_"), run.made)
            if name not in self._told or self._told[name][0] != version:
                words = "-".join(map(str, version))
                self._told[name] = version, json.dumps(state(run) | {"version": words}, allow_nan=False)
            return self._told[name][1], "-".join(map(str, version))

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for name in self.paths():
            try:
                run = self.find(name)
                assert run is not None
                run.read()
                step = f"{run.steps[-1] if run.steps else 0} of {run.job.total_steps}"
                about = {"layout": run.plan.get("layout", ""), "step": step, "loss": run.last.get("loss", "")}
                found.append({"name": name, "status": run.status, **about})
            except Exception as error:  # noqa: BLE001 - one bad folder must not hide the others
                found.append({"name": name, "status": str(error), "layout": "", "step": "", "loss": ""})
        return found


def handler(watched: Watched, own: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "shardwise", ""

        def do_GET(self) -> None:  # noqa: N802 - the library's name
            try:
                self._answer()
            except (BrokenPipeError, ConnectionResetError):
                pass  # whoever asked has gone
            except Exception as error:  # noqa: BLE001 - a file or a request that nobody thought of
                self._send(str(error), "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR)

        do_HEAD = do_GET

        def _answer(self) -> None:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if own in LOOPBACK and host not in LOOPBACK:
                return self._send(f"{host!r} is no name of this machine.", "text/plain", HTTPStatus.FORBIDDEN)
            url = urlsplit(self.path)
            parts = [unquote(part) for part in url.path.split("/") if part]
            if not parts and watched.one is None:
                return self._send(listing(watched.rows()), "text/html")
            if not parts:
                parts = ["run", next(iter(watched.paths()))]
            found = watched.news(parts[1]) if len(parts) in (2, 3) and parts[0] == "run" else None
            if found is None or parts[2:] not in ([], ["data"]):
                return self._send("There is no such page.", "text/plain", HTTPStatus.NOT_FOUND)
            text, version = found
            if parts[2:]:
                if parse_qs(url.query).get("have") == [version]:
                    return self._send("", "text/plain", HTTPStatus.NO_CONTENT)
                return self._send(text, "application/json")
            place = f"/run/{quote(parts[1], safe='')}/data"
            return self._send(document(json.loads(text), parts[1], live=place), "text/html")

        def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                ("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"),
            ):  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD" and status != HTTPStatus.NO_CONTENT:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the terminal is for people."""

    return Handler


def make_server(run: Path | None, port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    watched = Watched(run)
    try:
        server = ThreadingHTTPServer((host, port), handler(watched, host))
    except OSError as error:
        raise JobError(f"port {port} of {host} cannot be had: {error.strerror}; name another with --port.") from None
    server.daemon_threads = True
    return server


def watch(run: Path | None, port: int, host: str, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C."""
    server = make_server(run, port, host)
    say(f"watching {run or 'all runs below runs'}: http://{host}:{server.server_address[1]}/  (Ctrl-C ends it)")
    if host not in LOOPBACK:
        say(f"note: everyone who reaches {host} can read this.")
    try:
        server.serve_forever(poll_interval=0.5)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
