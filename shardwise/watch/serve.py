"""The live page of a run, and the list of all runs: a local HTTP server that shows run folders and no other files.

A name in a URL is looked up among the known runs and never becomes a path. Bound to a loopback address, the server
answers only requests whose Host header names a loopback address, which prevents DNS rebinding.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from shardwise.errors import JobError, UserError
from shardwise.files import parse_record, parse_toml
from shardwise.job import load_job
from shardwise.watch.page_data import page_data
from shardwise.watch.report_page import CONTENT_SECURITY_POLICY, render_page, render_run_list
from shardwise.watch.run_data import END_EVENTS, RunData, is_running

TAIL_BYTES = 1 << 16  # of a log; its last record is shorter


@lru_cache(maxsize=1 << 16)
def _load(path: Path, time_ns: int, size: int) -> Any:
    """Returns what the list shows of a file; `time_ns` and `size` say which version of it."""
    if path.name == "job.toml":
        return load_job(path).total_steps
    if path.name == "plan.toml":  # the layout stands before the first table: tables are most of the file
        return str(parse_toml(path.read_text(encoding="utf-8").partition("\n[")[0]).get("layout", ""))
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        records = (parse_record(line, str) for line in reversed(file.read().splitlines()))
        return next((record for record in records if record is not None), {})


def list_row(path: Path) -> dict[str, Any]:
    """Returns the columns of a run; an error of one run is its status and does not hide the others."""
    found: dict[str, Any] = {}
    errors = []
    for name in ("job.toml", "plan.toml", "metrics.jsonl", "events.jsonl"):
        try:
            stat = (path / name).stat()
            found[name] = _load(path / name, stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, UserError) as error:
            errors.append(str(error))
    metrics, status = found.get("metrics.jsonl", {}), found.get("events.jsonl", {}).get("event")
    if status not in END_EVENTS:
        status = "running" if is_running(path) else "not finished"
    step = f"{metrics.get('step', 0)} of {found.get('job.toml', 0)}"
    return {"status": " ".join(errors) or status, "layout": found.get("plan.toml", ""), "step": step,
            "loss": metrics.get("loss", "")}  # fmt: skip


LOOPBACK = ("127.0.0.1", "localhost", "::1")
LIST_SECONDS = 1.0  # a list of many runs shows, after this time, the rest as "not read yet"; the page reloads itself


class RunRegistry:
    """The runs that the server shows: a single one, or all in a folder. Each is read incrementally."""

    def __init__(self, single_run: Path | None):
        self.single_run, self.runs_folder = single_run, Path("runs")
        self._runs: dict[str, RunData] = {}
        self._listed: set[str] = set()
        self._cache: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()
        if single_run is not None:
            run = RunData(single_run)
            self._runs[run.name] = run
        elif not self.runs_folder.is_dir():
            raise JobError(f"there is no folder {self.runs_folder}; pass a run folder: shardwise watch RUN.")

    def paths(self) -> dict[str, Path]:
        if self.single_run is not None:
            return {next(iter(self._runs)): self.single_run}
        return {path.parent.name: path.parent for path in sorted(self.runs_folder.glob("*/job.toml"))}

    def run_state(self, name: str) -> tuple[str, str] | None:
        """Returns the page data of a run as JSON, and its version; None if there is no such run. Cached per version."""
        path = self.paths().get(name)
        if path is None:
            return None
        with self._lock:
            run = self._runs[name] = self._runs.get(name) or RunData(path)
            run.read()
            state = (*(log.offset for log in run.logs), run.status.replace(" ", "_"), run.config_version)
            version = "-".join(map(str, state))
            if name not in self._cache or self._cache[name][1] != version:
                self._cache[name] = json.dumps(page_data(run) | {"version": version}, allow_nan=False), version
            return self._cache[name]

    def list_runs(self) -> list[dict[str, Any]]:
        """Returns a row per run, in the order of their names; the newest runs are read first."""
        deadline, rows = time.monotonic() + LIST_SECONDS, []
        with self._lock:
            for name, path in reversed(self.paths().items()):
                row = {"name": name, "status": "not read yet", "layout": "", "step": "", "loss": ""}
                if name in self._listed or time.monotonic() < deadline:
                    self._listed.add(name)
                    row |= list_row(path)
                rows.append(row)
        return rows[::-1]


def make_handler(registry: RunRegistry, bind_host: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "shardwise", ""

        def do_GET(self) -> None:  # noqa: N802 - the name http.server calls
            try:
                self._route()
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client disconnected
            except Exception as error:  # noqa: BLE001 - one bad request must not end the server
                self._send(str(error), "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR)

        do_HEAD = do_GET

        def _route(self) -> None:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if bind_host in LOOPBACK and host not in LOOPBACK:
                return self._send(f"Host {host!r} is not a loopback name.", "text/plain", HTTPStatus.FORBIDDEN)
            url = urlsplit(self.path)
            parts = [unquote(part) for part in url.path.split("/") if part]
            if not parts and registry.single_run is None:
                return self._send(render_run_list(registry.list_runs()), "text/html")
            if not parts:
                parts = ["run", next(iter(registry.paths()))]
            state = registry.run_state(parts[1]) if len(parts) in (2, 3) and parts[0] == "run" else None
            if state is None or parts[2:] not in ([], ["data"]):
                return self._send("Page not found.", "text/plain", HTTPStatus.NOT_FOUND)
            text, version = state
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
            """Logs nothing: requests would clutter the terminal."""

    return Handler


def make_server(run: Path | None, port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    registry = RunRegistry(run)

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        return Server((host, port), make_handler(registry, host))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host.") from None


def serve_runs(run: Path | None, port: int, host: str, say: Callable[[str], None]) -> None:
    server = make_server(run, port, host)
    address = f"{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
    say(f"serving {run or 'all runs in runs/'} at http://{address}/ (Ctrl-C to stop)")
    if host not in LOOPBACK:
        say(f"note: anyone who can reach {host} can read this page.")
    with suppress(KeyboardInterrupt), server:
        server.serve_forever(poll_interval=0.5)
