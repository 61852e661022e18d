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
from shardwise.watch.page_data import page_data
from shardwise.watch.report_page import CONTENT_SECURITY_POLICY, render_page, render_run_list
from shardwise.watch.run_data import RunData

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RunRegistry:
    """The runs that a server shows: one, or those below a folder; each is read on from where it was."""

    def __init__(self, single_run: Path | None, runs_folder: Path = Path("runs")):
        self.single_run, self.runs_folder = single_run, runs_folder
        self._runs: dict[str, RunData] = {}
        self._cache: dict[str, tuple[tuple[Any, ...], str]] = {}
        self._lock = threading.Lock()
        if single_run is not None:
            run = RunData(single_run)
            self._runs[run.name] = run
        elif not runs_folder.is_dir():
            raise JobError(f"there is no folder {runs_folder}; name a run folder: shardwise watch RUN.")

    def paths(self) -> dict[str, Path]:
        if self.single_run is not None:
            return {next(iter(self._runs)): self.single_run}
        return {path.parent.name: path.parent for path in sorted(self.runs_folder.glob("*/job.toml"))}

    def find(self, name: str) -> RunData | None:
        path = self.paths().get(name)
        if path is None:
            return None
        with self._lock:
            if name not in self._runs:
                self._runs[name] = RunData(path)
            return self._runs[name]

    def run_state(self, name: str) -> tuple[str, str] | None:
        """A run's state as JSON, and a version of it; made anew where files have changed."""
        run = self.find(name)
        if run is None:
            return None
        with self._lock:
            run.read()
            version = (*(log.offset for log in run.logs), run.status.replace(" ", "_"), run.config_version)
            if name not in self._cache or self._cache[name][0] != version:
                version_text = "-".join(map(str, version))
                self._cache[name] = version, json.dumps(page_data(run) | {"version": version_text}, allow_nan=False)
            return self._cache[name][1], "-".join(map(str, version))

    def list_runs(self) -> list[dict[str, Any]]:
        found = []
        for name in self.paths():
            try:
                run = self.find(name)
                assert run is not None
                run.read()
                step = f"{run.steps[-1] if run.steps else 0} of {run.job.total_steps}"
                about = {"layout": run.plan.get("layout", ""), "step": step, "loss": run.last_record.get("loss", "")}
                found.append({"name": name, "status": run.status, **about})
            except Exception as error:  # noqa: BLE001 - one bad folder must not hide the others
                found.append({"name": name, "status": str(error), "layout": "", "step": "", "loss": ""})
        return found


def make_handler(registry: RunRegistry, bind_host: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "shardwise", ""

        def do_GET(self) -> None:  # noqa: N802 - the library's name
            try:
                self._route()
            except (BrokenPipeError, ConnectionResetError):
                pass  # whoever asked has gone
            except Exception as error:  # noqa: BLE001 - a file or a request that nobody thought of
                self._send(str(error), "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR)

        do_HEAD = do_GET

        def _route(self) -> None:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if bind_host in LOOPBACK and host not in LOOPBACK:
                return self._send(f"{host!r} is no name of this machine.", "text/plain", HTTPStatus.FORBIDDEN)
            url = urlsplit(self.path)
            parts = [unquote(part) for part in url.path.split("/") if part]
            if not parts and registry.single_run is None:
                return self._send(render_run_list(registry.list_runs()), "text/html")
            if not parts:
                parts = ["run", next(iter(registry.paths()))]
            found = registry.run_state(parts[1]) if len(parts) in (2, 3) and parts[0] == "run" else None
            if found is None or parts[2:] not in ([], ["data"]):
                return self._send("There is no such page.", "text/plain", HTTPStatus.NOT_FOUND)
            text, version = found
            if parts[2:]:
                if parse_qs(url.query).get("version") == [version]:
                    return self._send("", "text/plain", HTTPStatus.NO_CONTENT)
                return self._send(text, "application/json")
            data_url = f"/run/{quote(parts[1], safe='')}/data"
            return self._send(render_page(json.loads(text), parts[1], live_url=data_url), "text/html")

        def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                ("Content-Security-Policy", CONTENT_SECURITY_POLICY), ("Referrer-Policy", "no-referrer"),
            ):  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD" and status != HTTPStatus.NO_CONTENT:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the terminal is for people."""

    return Handler


def make_server(run: Path | None, port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    registry = RunRegistry(run)
    try:
        server = ThreadingHTTPServer((host, port), make_handler(registry, host))
    except OSError as error:
        raise JobError(f"port {port} of {host} cannot be had: {error.strerror}; name another with --port.") from None
    server.daemon_threads = True
    return server


def serve_runs(run: Path | None, port: int, host: str, say: Callable[[str], None]) -> None:
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
