"""The live page of a run, and the list of all runs: a local HTTP server that shows run folders and no other files.

A name in a URL is looked up among the known runs and never becomes a path. Bound to a loopback address, the server
answers only requests whose Host header names a loopback address, which prevents DNS rebinding."""

import json
import math
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from shardwise.errors import JobError, UserError
from shardwise.files import parse_record, parse_toml, write_text
from shardwise.job import load_job
from shardwise.run_job import check_job_file
from shardwise.watch.page_data import compare, page_data
from shardwise.watch.report_page import CONTENT_SECURITY_POLICY, render_page
from shardwise.watch.run_data import RunData, parse_notes, run_status, to_float

TAIL_BYTES = 1 << 16  # of a log: its last record is shorter; notes are no longer either
CURVE_POINTS = 40  # of the small curve in the list
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
           "Content-Security-Policy": CONTENT_SECURITY_POLICY, "Referrer-Policy": "no-referrer"}  # fmt: skip
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LIST_SECONDS = 1.0  # a list of many runs shows, after this time, the rest as "not read yet"; the page reloads itself


@lru_cache(maxsize=1 << 14)
def _load(path: Path, time_ns: int, size: int) -> Any:
    """Returns what the list shows of a file; `time_ns` and `size` say which version of it."""
    if path.name == "job.toml":  # the whole job only if need be: a thousand take seconds
        head = path.read_text(encoding="utf-8").partition("\n[")[0]
        if not re.search(r"^seed = ", head, re.MULTILINE):  # a run's own has it
            check_job_file(path.parent)
        steps = re.search(r"^steps = (\d+)$", head, re.MULTILINE)
        return int(steps[1]) if steps and "\ntokens" not in head else load_job(path).total_steps
    if path.name == "plan.toml":  # the layout stands before the first table: tables are most of the file
        return str(parse_toml(path.read_text(encoding="utf-8").partition("\n[")[0]).get("layout", ""))
    if path.name == "notes.json":
        return parse_notes(path.read_bytes())
    lines = []
    with path.open("rb") as file:
        for place in range(0, size, size // (CURVE_POINTS if path.stem == "metrics" else 1) + 1):  # a few records do
            file.seek(place)
            lines.append(file.readline() and file.readline() if place else file.readline())
        file.seek(max(0, size - TAIL_BYTES))
        lines += file.read().splitlines()[-2:]
    records = [record for line in lines if (record := parse_record(line, str)) is not None] or [{}]
    curve = {record.get("step", 0): to_float(record.get("loss")) for record in records}
    return {"begin": records[0].get("time"), "curve": [float(f"{y:.4g}") for y in curve.values() if math.isfinite(y)],
            **{key: records[-1].get(key) for key in ("step", "loss", "time", "event")}}  # fmt: skip


def list_row(path: Path) -> dict[str, Any]:
    """Returns the columns of a run; an error of one run is its status and does not hide the others."""
    found, errors = dict[str, Any](), list[str]()
    for name in ("job.toml", "plan.toml", "metrics.jsonl", "events.jsonl", "notes.json"):
        try:
            stat = (path / name).stat()
            found[name] = _load(path / name, stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, UserError) as error:
            errors.append(str(error))
    metrics, events = found.get("metrics.jsonl", {}), found.get("events.jsonl", {})
    times = [time for log in (events, metrics) for time in (log.get("begin"), log.get("time")) if to_float(time) > 0]
    return {"status": " ".join(errors) or run_status(path, events.get("event")), "layout": found.get("plan.toml", ""),
            "step": metrics.get("step") or 0, "steps": found.get("job.toml", 0), "loss": metrics.get("loss"),
            "curve": metrics.get("curve", []), "begin": min(times, default=None),
            "seconds": max(times) - min(times) if times else None, **found.get("notes.json", {})}  # fmt: skip


class RunRegistry:
    """The runs that the server shows: a single one, or all in a folder. Each is read incrementally."""

    def __init__(self, single_run: Path | None):
        self.single_run, self.runs_folder = single_run, Path("runs")
        self._runs = {run.name: run for run in ([RunData(single_run)] if single_run is not None else [])}
        self._listed: set[str] = set()
        self._cache: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def paths(self) -> dict[str, Path]:
        if self.single_run is not None:
            return {next(iter(self._runs)): self.single_run}
        return {path.parent.name: path.parent for path in sorted(self.runs_folder.glob("*/job.toml"))}

    def page_state(self, page: str, names: list[str]) -> tuple[str, str] | None:
        """Returns the data of a page as JSON, and its version; None if there is no such page. Cached per version."""
        paths = self.paths()
        if page == "list" and self.single_run is None:
            text = json.dumps(self.list_runs())
            return f'{{"list": {text}, "version": "{(version := str(zlib.crc32(text.encode())))}"}}', version
        if not set(names) <= set(paths) or (page, len(names)) != ("run", 1) and (page != "compare" or len(names) < 2):
            return None
        with self._lock:
            for name in names:
                self._runs[name] = self._runs.get(name) or RunData(paths[name])
                self._runs[name].read()
            runs = [self._runs[name] for name in names]
            state = ((*(log.offset for log in run.logs), run.status, run.config_version) for run in runs)
            version, key = "-".join(str(value).replace(" ", "_") for values in state for value in values), repr(names)
            if key not in self._cache or self._cache[key][1] != version:
                data = page_data(runs[0]) if page == "run" else compare([run.path for run in runs], runs)
                self._cache[key] = json.dumps(data | {"version": version}, allow_nan=False), version
            return self._cache[key]

    def list_runs(self) -> list[dict[str, Any]]:
        """Returns a row per run, in the order of their names; the newest runs are read first."""
        deadline, rows = time.monotonic() + LIST_SECONDS, []
        with self._lock:
            for name, path in reversed(self.paths().items()):
                row: dict[str, Any] = {"name": name, "status": "not read yet"}
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
                host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
                if bind_host in LOOPBACK and host not in LOOPBACK:
                    self._send(f"Host {host!r} is not a loopback name.", "text/plain", HTTPStatus.FORBIDDEN)
                else:
                    self._save_notes() if self.command == "POST" else self._route()
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client disconnected
            except Exception as error:  # noqa: BLE001 - one bad request must not end the server
                self._send(str(error), "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR)

        do_HEAD = do_POST = do_GET

        def _route(self) -> None:
            url = urlsplit(self.path)
            query, parts = parse_qs(url.query), [unquote(part) for part in url.path.split("/") if part]
            data_url = url.path.rstrip("/") + "/data" + (f"?{url.query}" if url.query else "")
            if parts[:1] not in (["run"], ["compare"]):
                run = registry.single_run and next(iter(registry.paths()))
                parts = [*(["run", run] if run else ["list"]), *parts]
            page, names, rest = parts[0], query.get("run", []), parts[1:]
            if page == "run":
                names, rest = parts[1:2], parts[2:]
            state = registry.page_state(page, names)
            if state is None or rest not in ([], ["data"]):
                return self._send("Page not found.", "text/plain", HTTPStatus.NOT_FOUND)
            text, version = state
            if not rest:
                return self._send(render_page(json.loads(text), ", ".join(names) or "Runs", data_url), "text/html")
            if query.get("version") == [version]:
                return self._send("", "text/plain", HTTPStatus.NO_CONTENT)
            return self._send(text, "application/json")

        def _save_notes(self) -> None:
            """Writes the tags and notes of a run. Only this server's own pages on this machine may: a page from
            elsewhere cannot send JSON here without asking first, and its browser names the page's origin."""
            name = re.fullmatch("/run/([^/]+)/notes", self.path)
            path = registry.paths().get(unquote(name[1])) if name else None
            is_own = self.headers.get("Origin") == f"http://{self.headers.get('Host')}" and bind_host in LOOPBACK
            size = self.headers.get("Content-Length", "")
            if not is_own or self.headers.get("Content-Type") != "application/json":
                return self._send("Only the page on this machine may do this.", "text/plain", HTTPStatus.FORBIDDEN)
            if path is None or not path.is_dir() or not size.isdigit() or int(size) > TAIL_BYTES:
                return self._send("These notes cannot be kept.", "text/plain", HTTPStatus.BAD_REQUEST)
            write_text(path / "notes.json", json.dumps(parse_notes(self.rfile.read(int(size)))))
            return self._send("", "text/plain", HTTPStatus.NO_CONTENT)

        def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
            body = text.encode()
            self.send_response(status)
            headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **HEADERS}
            for name, value in headers.items():
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
