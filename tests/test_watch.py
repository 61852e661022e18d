"""What a run shows of itself: time goes to the right cause and rank, pages are whole, bad input is a sentence."""

from __future__ import annotations

import csv
import json
import math
import re
import socket
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.comm import host_staged
from shardwise.comm.collectives import StepTimer
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import SampleStream
from shardwise.errors import JobError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.metrics.rank_metrics import PHASES, RankMetricsWriter, metrics_row
from shardwise.metrics.trackers import PrometheusWriter, check_tracker_installed
from shardwise.parallel.prepare import prepare
from shardwise.train.local_machine import choose_plan, plan_record
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.watch.page_data import page_data, pipeline_data, seconds_by_rank
from shardwise.watch.report_page import render_page, time_table, write_report
from shardwise.watch.run_data import TIME_CATEGORIES, RunData, goodput
from shardwise.watch.serve import RunRegistry, _load, list_row, make_server

SMALL = {
    "steps": 8, "model": {"layers": 2, "width": 32, "heads": 2, "vocab": 61, "sequence": 16},
    "data": {"source": "synthetic"}, "batch": {"samples": 8}, "validation": {"samples": 4},
}  # fmt: skip
PLANTED = 0.3  # seconds, in each step; a step without takes a tenth of it
FEW = 5  # steps that show where this time goes


def make_run(folder: Path, layout: str, fault: str, **changes: Any) -> RunData:
    """A whole run with a planted fault."""
    job = make_job(SMALL | {"layout": layout, "run": {"folder": str(folder), "device": "cpu"}} | changes)
    run = RunFolder.create(job)
    plan, source = choose_plan(job)
    run.write_plan(plan_record(job, plan, source))
    backend = host_staged.BACKEND if fault == "link" else "gloo"
    run_world(_train, Layout.parse(layout).world, str(run.path), layout, fault, backend=backend)
    return RunData(run.path)


def _train(folder: str, layout: str, fault: str) -> None:
    run = RunFolder.open(Path(folder))
    trainer = TrainingLoop(prepare(run.job(), Layout.parse(layout)), run, torch.device("cpu"))
    if fault == "straggler" and trainer.engine.mesh.rank == 1:
        compute = trainer.engine.run

        def slow(*args: Any) -> Any:
            time.sleep(PLANTED)
            return compute(*args)

        trainer.engine.run = slow  # type: ignore[method-assign]
    if fault == "data" and trainer.engine.mesh.rank == 1:
        read = SampleStream.read

        def late(stream: SampleStream, places: Any) -> Any:
            time.sleep(PLANTED)
            return read(stream, places)

        SampleStream.read = late  # type: ignore[method-assign]
    if fault == "link":  # in the transport, below everything that measures
        for name in (
            "allreduce",
            "_allgather_base",
            "all_gather_single",
            "_reduce_scatter_base",
            "reduce_scatter_single",
        ):
            _slow_link(name, trainer.engine.mesh["tensor"].group.group_name)
    trainer.run()


def _slow_link(name: str, tensor_group: str) -> None:
    send = getattr(host_staged.HostStagedBackend, name)

    def late(group: Any, *args: Any) -> Any:
        if group.group_name == tensor_group:
            time.sleep(PLANTED / 10)
        return send(group, *args)

    setattr(host_staged.HostStagedBackend, name, late)


def seconds(run: RunData) -> dict[str, list[float]]:
    """Of a step, by part, of each rank: the median over the run but its first step, so that noise is left out."""
    middle = np.median(np.stack(run.category_seconds[1:]), axis=0)
    return {f"{kind} {name}": row.tolist() for (kind, name), row in zip(TIME_CATEGORIES, middle, strict=True)}


def waits(run: RunData, rank: int) -> float:
    return sum(row[rank] for name, row in seconds(run).items() if name.startswith("wait_seconds"))


def slowest(run: RunData) -> list[tuple[int, str]]:
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [(record["slowest"]["rank"], record["slowest"]["phase"]) for record in records if "slowest" in record]


# Known truth


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2", "shard=2 zero=3", "tensor=2"])
def test_a_straggler_shows_by_its_own_time_and_the_others_by_waiting(layout: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", layout, "straggler", steps=FEW)
    spent = seconds(run)
    quick, slow = spent["phase_seconds compute"]
    assert slow - quick > 0.5 * PLANTED
    assert waits(run, 0) - waits(run, 1) > 0.5 * PLANTED
    assert statistics.mode(slowest(run)) == (1, "compute")
    told = page_data(run)
    assert told["ranks"]["stragglers"] == [1] and any("rank 1 computes" in words.lower() for words in told["summary"])


def test_a_data_stall_is_data_on_its_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "replicate=2", "data", steps=FEW)
    quick, slow = seconds(run)["phase_seconds data"]
    assert slow > 0.5 * PLANTED > quick and waits(run, 0) > 0.5 * PLANTED
    assert statistics.mode(slowest(run)) == (1, "data")
    assert any("rank 1 spends" in words.lower() and "data" in words for words in page_data(run)["summary"])


def test_a_slow_link_is_its_axis_and_no_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "replicate=2 tensor=2", "link", steps=FEW)
    spent = seconds(run)
    step = sum(row[0] for row in spent.values())
    for rank in range(4):
        assert spent["wait_seconds tensor"][rank] > 0.5 * step
        others = [row[rank] for name, row in spent.items() if name.startswith("wait_seconds") and "tensor" not in name]
        assert max(others) < 0.5 * spent["wait_seconds tensor"][rank]
    assert max(spent["phase_seconds compute"]) < 0.5 * min(spent["wait_seconds tensor"])
    assert any("on the tensor axis" in words for words in page_data(run)["summary"])
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["wait_seconds"]["tensor"] > 0.5 * last["seconds"]


@pytest.mark.cluster
def test_an_uneven_stage_computes_and_the_other_has_the_bubble(tmp_path: Path) -> None:
    shape = {"layers": 12, "width": 96, "heads": 4, "vocab": 61, "sequence": 64}
    run = make_run(tmp_path / "run", "pipeline=2 stages=2,10 micro_batch=1", "", model=shape, steps=13)
    spent = seconds(run)
    light, heavy = spent["phase_seconds compute"]
    assert heavy > 1.5 * light
    assert spent["wait_seconds pipeline"][0] > 2 * spent["wait_seconds pipeline"][1]
    assert statistics.mode(slowest(run)) == (1, "compute")
    found = pipeline_data(run)
    assert found is not None and found["measured"]["steps"] == 2
    assert len(found["measured"]["actions"]) == len(found["predicted"]["actions"]) == 2 * 2 * 8
    assert found["measured"]["bubble"] > 0.2
    assert 0 < found["predicted"]["bubble"] < 1


@pytest.mark.thin(8)
@pytest.mark.parametrize("layout", ["replicate=2", "pipeline=1", "pipeline=2 schedule=zbv", "shard=2 zero=2"])
def test_parts_add_up_to_the_step(layout: str, tmp_path: Path) -> None:
    shape = {"layers": 4, "width": 128, "heads": 4, "vocab": 256, "sequence": 128}
    run = make_run(tmp_path / "run", layout, "", model=shape, checkpoint={"every": 3}, steps=6)
    table = seconds_by_rank(run)
    rows = [json.loads(line) for line in (run.path / "ranks.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert table[-1].sum() < 0.03 * table.sum()  # what no part has
    assert (table > -1e-4).all()
    assert table[PHASES.index("checkpoint")][0] > 0
    for record in map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()):
        parts = [*record["phase_seconds"].values(), *record.get("wait_seconds", {}).values()]
        assert sum(parts) == pytest.approx(record["seconds"], rel=1e-3)
    held = run.memory
    assert all(0 < held["weights"][0] < held["peak"][0] and held[part][0] > 0 for part in ("gradients", "optimizer"))


def test_rows_of_long_runs_are_sums_of_windows(tmp_path: Path) -> None:
    rows = RankMetricsWriter(tmp_path / "ranks.jsonl", 5000, 1)
    spent = dict.fromkeys(("compute", "optimizer", "data", "checkpoint", "validation"), 0.0)
    words = []
    for step in range(1, 2001):
        each = [metrics_row(step, 1.0, {**spent, "compute": seconds}, {}, {}) for seconds in (0.2, 0.9)]
        words += rows.add(step, np.array(each))
    rows.flush(2000)
    lines = [json.loads(line) for line in (tmp_path / "ranks.jsonl").read_text().splitlines()]
    assert lines[0]["steps"] == 1 and lines[-2]["steps"] == 5 and len(lines) < 1000
    assert sum(line["steps"] for line in lines) == sum(line["seconds"][1] for line in lines) == 2000
    assert lines[-2]["phase_seconds"] == {"compute": [1.0, 4.5]}
    assert words == ["rank 1 computes 4.5 times as long as its peers, which wait 70% of each step for it."]


class Tick:
    """An event of a GPU whose clock is told."""

    clock = 0.0

    def __init__(self, enable_timing: bool = False, external: bool = False):
        self.at = 0.0

    def record(self) -> None:
        self.at = Tick.clock

    def query(self) -> bool:
        return self.at <= Tick.clock

    def elapsed_time(self, end: Tick) -> float:
        return 1e3 * (end.at - self.at)


def test_the_meter_of_a_gpu_counts_spans_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Tick)
    monkeypatch.setattr(Tick, "clock", 0.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    timer = StepTimer(torch.device("cuda"))
    timer.begin_step()
    timer.begin_phase("compute")
    Tick.clock = 1.0
    with timer.waiting("tensor"):
        Tick.clock = 1.5
        with timer.waiting("shard"):  # within a wait: none of its own
            Tick.clock = 2.0
    timer.begin_wait()
    Tick.clock = 2.25
    timer.end_wait("replicate")
    timer.begin_phase("optimizer")
    Tick.clock = 3.0
    timer.begin_phase("")
    spent, waited = timer.elapsed()
    assert waited == {"tensor": 1.0, "replicate": 0.25} and spent == {"compute": 1.0, "optimizer": 0.75}


def test_a_replayed_graph_has_its_parts_and_a_failed_capture_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Tick)
    monkeypatch.setattr(Tick, "clock", 0.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    timer = StepTimer(torch.device("cuda"))
    timer.begin_step()
    timer.begin_capture()
    timer.begin_phase("optimizer")
    timer.cancel_capture()
    assert timer.elapsed() == ({}, {})
    timer.begin_capture()
    timer.begin_phase("optimizer")
    spans = timer.end_capture()
    assert timer.elapsed() == ({}, {}), "a capture runs nothing"
    for number in (1, 2):
        timer.begin_step()
        for span, at in zip(spans, (0.0, 2.0), strict=True):  # what the graph's nodes record
            span[2].at, span[3].at = Tick.clock + at, Tick.clock + at + number
        Tick.clock += 4.0
        timer.add_replay(spans)
        timer.begin_phase("data", overlapped=True)
        Tick.clock += 0.5
        timer.begin_phase("")
        assert timer.elapsed()[0] == {"compute": number, "optimizer": number, "data": 0.5}


# Goodput


def write_run(folder: Path, metrics: list[dict[str, Any]], events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(make_job(SMALL).to_toml())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return folder


def step(number: int, at: float, seconds: float = 1.0) -> dict[str, Any]:
    record = {"step": number, "samples": 8 * number, "loss": 5.0 / number, "tokens_per_s": 100.0}
    return {**record, "seconds": seconds, "time": at}


def test_goodput_by_cause(tmp_path: Path) -> None:
    metrics = [step(1, 13.0, 3.0), step(2, 14.0), step(3, 17.5), step(4, 27.5), step(5, 130.5)]
    events = [
        {"time": 8.0, "event": "started", "message": ""},
        {"time": 16.0, "event": "checkpoint", "message": "", "stall_seconds": 1.5},
        {"time": 20.0, "event": "killed", "message": ""}, {"time": 25.0, "event": "resumed", "message": ""},
        {"time": 28.0, "event": "stopped", "message": ""}, {"time": 128.0, "event": "warning", "message": ""},
        {"time": 128.0, "event": "resumed", "message": ""},
        {"time": 131.5, "event": "validation", "message": "", "seconds": 1.0},
    ]  # fmt: skip
    found = goodput(RunData(write_run(tmp_path / "run", metrics, events)))
    assert found.productive_seconds == pytest.approx(5.0)
    expected = {"startup": 4.0, "checkpoint": 1.5, "between steps": 1.0, "restart": 11.0, "validation": 1.0}
    assert found.lost_seconds == pytest.approx(expected)
    assert found.wall_seconds == pytest.approx(
        131.5 - 8.0 - 100.0, abs=0.01
    )  # the time in which it was stopped does not count


def test_checkpoint_seconds_of_goodput_are_those_of_the_breakdown(tmp_path: Path) -> None:
    """A save has an event with its seconds; a snapshot and the wait for the last save have none."""
    metrics = [step(n, 100.0 + 1.5 * n) for n in range(1, 11)]  # half a second between two steps
    events = [{"time": 107.75, "event": "checkpoint", "message": "", "stall_seconds": 0.25}]
    lines = [rank_line(n, 2, "replicate") for n in range(1, 11)]
    for line in lines:
        line["phase_seconds"]["checkpoint"] = [0.2, 0.3]
    folder = write_run(tmp_path / "run", metrics, events)
    before = goodput(RunData(folder))
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunData(folder)
    found, index = goodput(run), TIME_CATEGORIES.index(("phase_seconds", "checkpoint"))
    assert before.lost_seconds["checkpoint"] == pytest.approx(0.25)
    assert found.lost_seconds["checkpoint"] == pytest.approx(10 * seconds_by_rank(run)[index].mean())
    assert (found.wall_seconds, found.share) == pytest.approx((before.wall_seconds, before.share))


def test_a_clock_jump_is_not_lost_time(tmp_path: Path) -> None:
    year = 365 * 86_400.0
    metrics = [step(1, 13.0), step(2, 14.0), step(3, year + 15.5), step(4, year + 16.5), step(5, 17.5)]
    events = [
        {"time": 11.0 - year, "event": "started", "message": ""}, {"time": 12.0, "event": "resumed", "message": ""},
        {"time": year + 4016.5, "event": "validation", "message": "", "seconds": 4000.0},
    ]  # fmt: skip
    found = goodput(RunData(write_run(tmp_path / "jumps", metrics, events)))
    assert found.productive_seconds == pytest.approx(5.0) and found.wall_seconds < 10_000
    found = goodput(RunData(write_run(tmp_path / "ahead", metrics[:4], events[:2])))
    assert found.share == pytest.approx(1.0)  # each jump hides what was lost in that gap, and nothing else


# Pages


def test_the_list_of_runs_reads_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(30):
        write_run(tmp_path / "runs" / f"{number:04d}", [step(1, 1.0)], [{"time": 1.0, "event": "finished"}])
    registry = RunRegistry(None)
    _load.cache_clear()
    first, count_read = registry.list_runs(), lambda: _load.cache_info().misses
    assert len(first) == 30 and count_read() == 90
    assert (first[0]["step"], first[0]["steps"], first[0]["status"]) == (1, 8, "finished")
    assert registry.list_runs() == first and count_read() == 90
    with (tmp_path / "runs/0007/metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(2, 2.0)) + '\n{"step": 3, "lo')
    assert [row["step"] for row in registry.list_runs()[6:9]] == [1, 2, 1]
    assert count_read() == 91
    changed = registry.list_runs()[7]
    assert changed["curve"] == [5.0, 2.5] and (changed["begin"], changed["seconds"]) == (1.0, 1.0)
    metrics = [step(n, 100.0 + n) for n in range(1, 5001)]
    write_run(tmp_path / "runs" / "long", metrics, [{"time": 100.0, "event": "started"}])
    row = list_row(tmp_path / "runs" / "long")
    assert row["curve"][0] == 5.0 and row["curve"][-1] == row["loss"] == 0.001 and 30 < len(row["curve"]) <= 42
    assert row["curve"] == sorted(row["curve"], reverse=True) and (row["step"], row["seconds"]) == (5000, 5000.0)
    monkeypatch.setattr("shardwise.watch.serve.LIST_SECONDS", 0.0)
    assert RunRegistry(None).list_runs()[0]["status"] == "not read yet"


def test_watching_begins_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = make_server(None, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        assert get(f"{address}/")[0] == 200
        write_run(tmp_path / "runs" / "0001", [step(1, 1.0)], [])
        assert "0001" in get(f"{address}/")[1]
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_is_served_on_ipv6(tmp_path: Path) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    server = make_server(write_run(tmp_path / "run", [step(1, 1.0)], []), 0, "::1")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert get(f"http://[::1]:{server.server_address[1]}/")[0] == 200
    finally:
        server.shutdown()
        server.server_close()


def long_run(folder: Path, ranks: int = 100, steps: int = 100_000, lines: int = 1000) -> Path:
    write_run(folder, [], [{"time": 1.0, "event": "started", "message": "", "step": 0}])
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(1, steps + 1):
            loss = 50.0 if number == steps * 54_321 // 100_000 else 3.0 + math.sin(number / 1000)
            file.write(json.dumps({**step(number, number * 0.1, 0.1), "loss": loss}) + "\n")
    with (folder / "ranks.jsonl").open("w") as file:
        for number in range(1, lines + 1):
            compute = [6.0 + 4.0 * (rank == 42) for rank in range(ranks)]
            line = {
                "step": number * steps // lines,
                "steps": steps // lines,
                "start": [number * 10.0] * ranks,
                "seconds": [10.0] * ranks,
                "phase_seconds": {"compute": compute},
                "wait_seconds": {"shard": [10.0 - one for one in compute]},
                "memory_gib": [1.0] * ranks,
                "memory_by_kind_gib": {},
                "gpu_temperature": [61.0] * ranks,
            }
            file.write(json.dumps(line) + "\n")
    return folder


def test_a_hundred_ranks_and_ten_steps_for_each_point_stay_small(tmp_path: Path) -> None:
    run = RunData(long_run(tmp_path / "run", steps=20_000))
    told = page_data(run)
    assert len(json.dumps(told)) < 1_500_000
    assert len(told["series"]["step"]) <= 2000 and max(told["series"]["loss_high"]) == 50.0  # a spike of one step
    assert len(told["heatmap"]["values"]) == 100 and told["ranks"]["stragglers"] == [42]
    assert told["memory"]["gib"]["gpu_temperature"] == [61.0] * 100
    before = run.logs[0].offset
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(20_001, 2_001.0)) + '\n{"step": 20002, "lo')
    run.read()
    assert run.steps[-1] == 20_001 and run.logs[0].offset > before
    (run.path / "metrics.jsonl").write_text(json.dumps(step(1, 1.0)) + "\n")  # the run begins again
    run.read()
    assert list(run.steps) == [1]


@pytest.fixture
def serve() -> Iterator[Callable[[Path | None], str]]:
    servers = []

    def start(run: Path | None) -> str:
        server = make_server(run, 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server_shows_runs_and_nothing_else(
    serve: Callable[[Path | None], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("secret")
    for name in ("0001", "<b>0002"):
        write_run(tmp_path / "runs" / name, [step(1, 1.0)], [])
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "job.toml").write_text("steps = [")
    address = serve(None)
    status, text = get(f"{address}/")
    assert (
        status == 200 and "0001" in text and "\\u003cb>0002" in text and "<b>" not in text and "not valid TOML" in text
    )
    assert get(f"{address}/run/0001")[0] == 200 and get(f"{address}/run/%3Cb%3E0002")[0] == 200
    status, text = get(f"{address}/run/0001/data")
    version = json.loads(text)["version"]
    assert get(f"{address}/run/0001/data?version={version}") == (204, "")
    for path in (
        "/secret.txt", "/run/../secret.txt", "/run/..%2f..%2fsecret.txt", "/run/0001/../../secret.txt", "/run/%2e%2e",
        "/run/0001/job.toml", "/run//etc/passwd", "/run/0001/data/more", "/etc/passwd", "/run/0003",
    ):  # fmt: skip
        status, text = get(address + path)
        assert status == 404 and "secret" not in text
    assert get(f"{address}/", Host="evil.example")[0] == 403
    with pytest.raises(JobError, match="--port"):
        make_server(None, int(address.rpartition(":")[2]))
    one = serve(tmp_path / "runs" / "0001")
    assert get(f"{one}/")[0] == 200 and get(f"{one}/run/%3Cb%3E0002")[0] == 404


def test_notes_are_saved_for_the_own_page_alone(
    serve: Callable[[Path | None], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "a b", [step(1, 1.0)], [])
    write_run(tmp_path / "runs" / "other", [step(1, 1.0)], [])
    address = serve(None)
    own = {"Origin": address, "Content-Type": "application/json"}

    def post(path: str, text: str, **headers: str) -> int:
        request = urllib.request.Request(address + path, data=text.encode(), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    text = json.dumps({"tags": ["good", "<b>"], "notes": "first\nsecond"})
    for headers in ({}, own | {"Origin": "http://evil.example"}, own | {"Content-Type": "text/plain"},
                    own | {"Host": "evil.example"}, {"Content-Type": "application/json"}):  # fmt: skip
        assert post("/run/a%20b/notes", text, **headers) == 403
    for path in ("/run/nothing/notes", "/run/a%20b", "/run/..%2f..%2fetc/notes", "/"):
        assert post(path, text, **own) == 400
    assert post("/run/a%20b/notes", "x" * 70_000, **own) == 400 and not (run / "notes.json").exists()
    version = json.loads(get(f"{address}/run/a%20b/data")[1])["version"]
    assert post("/run/a%20b/notes", text, **own) == 204
    told = json.loads(get(f"{address}/run/a%20b/data?version={version}")[1])
    assert told["notes"] == {"tags": ["good", "<b>"], "notes": "first\nsecond"}
    listed = {row["name"]: row for row in json.loads(get(f"{address}/data")[1])["list"]}
    assert listed["a b"]["tags"] == ["good", "<b>"] and "tags" not in listed["other"]
    for broken in ("[]", "{", '{"tags": 3}'):
        (run / "notes.json").write_text(broken)
        assert json.loads(get(f"{address}/run/a%20b/data")[1])["notes"] == {"tags": [], "notes": ""}
    status, page = get(f"{address}/compare?run=a%20b&run=other")
    assert status == 200 and '"differences"' in page
    told = json.loads(get(f"{address}/compare/data?run=a%20b&run=other")[1])
    assert [run["name"] for run in told["runs"]] == ["a b", "other"]
    for path in ("/compare", "/compare?run=other", "/compare?run=other&run=nothing", "/compare/x?run=a%20b&run=other"):
        assert get(address + path)[0] == 404


def rank_line(at: int, ranks: int, waits: str) -> dict[str, Any]:
    return {
        "step": at, "steps": 1, "start": [100.0 + at] * ranks, "seconds": [1.0 + at % 3] * ranks,
        "phase_seconds": {"compute": [0.5] * ranks}, "wait_seconds": {waits: [0.5 + at % 3] * ranks},
        "memory_gib": [float(ranks)] * ranks, "memory_by_kind_gib": {},
    }  # fmt: skip


def test_layouts_of_a_resumed_run_are_not_mixed(tmp_path: Path) -> None:
    first, second = "pipeline=2 tensor=2", "shard=2"
    events = [
        {"time": 100.0, "event": "started", "layout": first, "step": 0},
        {"time": 105.0, "event": "resumed", "layout": first, "step": 3},  # the same layout: no change
        {"time": 110.0, "event": "resumed", "layout": "tensor=4", "step": 8},  # whose steps are taken again
        {"time": 112.0, "event": "resumed", "layout": second, "step": 6},
    ]
    folder = write_run(tmp_path / "run", [step(n, 100.0 + n) for n in range(1, 11)], events)
    lines = [rank_line(n, *((4, "tensor") if n <= 6 else (2, "shard"))) for n in range(1, 11)]
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plan.toml").write_text(f'layout = "{second}"\nreason = "new"\n[predicted]\nstep_seconds = 2.0\n')
    (folder / "plans").mkdir()
    old = f'layout = "{first} micro_batch=2"\nreason = "old"\n[predicted]\nstep_seconds = 1.0\n'
    (folder / "plans" / "100.toml").write_text(old)
    (folder / "plans" / "111.toml").write_text("broken = ")
    told = page_data(RunData(folder))
    (before,) = told["segments"]
    assert (before["before"], told["before"]) == (0, 6) and (before["world"], told["world"]) == (4, 2)
    assert before["layout"] == f"{first} micro_batch=2" and told["layout"] == second
    assert set(before["mesh"]["waits"]) == {"tensor"} and set(told["mesh"]["waits"]) == {"shard"}
    assert "tensor" in before["summary"][0] and "tensor" not in " ".join(told["summary"])
    assert (before["plan"]["reason"], told["plan"]["reason"]) == ("old", "new")
    assert (before["plan"]["predicted"]["step_seconds"], told["plan"]["predicted"]["step_seconds"]) == (1.0, 2.0)
    assert before["heatmap"]["step"] == [1, 2, 3, 4, 5, 6] and told["heatmap"]["step"] == [7, 8, 9, 10]
    assert (before["memory"]["gib"]["peak"], told["memory"]["gib"]["peak"]) == ([4.0] * 4, [2.0] * 2)
    assert before["pipeline"] is None and told["series"]["step"] == list(range(1, 11))
    with pytest.raises(StopIteration):  # what is printed at the end of the run is of its last layout
        next(line for line in time_table(RunData(folder).segment(-1)) if "tensor" in line)


@pytest.mark.parametrize(("last", "words"), [(4, r"1 s \(last layout\)"), (10, "unknown")])
def test_a_comparison_tells_speeds_of_the_last_layout(last: int, words: str, tmp_path: Path) -> None:
    """After 4 of 10 steps or after all of them, the run is resumed in another layout."""
    events = [{"time": 100.0, "event": "started", "layout": "shard=2", "step": 0},
              {"time": 105.0, "event": "resumed", "layout": "tensor=2", "step": last}]  # fmt: skip
    steps = [step(n, 100.0 + n, 1.0) for n in range(1, 11)]
    folders = [str(write_run(tmp_path / name, steps, events[:count])) for name, count in (("one", 1), ("two", 2))]
    shown = CliRunner().invoke(app, ["compare", *folders]).output
    assert re.search(rf"mean step time *│1 s *│{words} *│", shown) and "nan" not in shown
    one, two = json.loads(CliRunner().invoke(app, ["compare", *folders, "--json"]).output)["rows"]
    assert "(last layout)" not in " ".join(one) and two[7:9].count(None) == (2 if last == 10 else 0)
    assert (page_data(RunData(Path(folders[1])))["summary"][0] == "No step was made in this layout.") == (last == 10)


def test_the_step_time_is_what_its_causes_add_up_to(tmp_path: Path) -> None:
    """Steps of one, two and three seconds: the mean is two, the median of the last ones is not."""
    folder = write_run(tmp_path / "run", [step(n, 100.0 + n, 1.0) for n in range(1, 11)], [])
    lines = [rank_line(n, 2, "replicate") for n in range(1, 11)]
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = page_data(RunData(folder))
    mean = statistics.mean(line["seconds"][0] for line in lines[1:])  # the first line is the start
    assert told["figures"]["step_seconds"] == pytest.approx(mean)
    assert sum(row[0] for row in told["ranks"]["values"]) == pytest.approx(mean, rel=1e-3)
    sentence = told["summary"][0]
    assert sentence.startswith(f"A step takes {mean:.3g} s on average: ")
    parts = re.findall(r"([\d.]+) (ms|s) \D", sentence.partition(": ")[2])
    assert sum(float(value) / (1000 if unit == "ms" else 1) for value, unit in parts) == pytest.approx(mean, rel=0.01)


def test_the_report_is_one_file_and_markup_is_text(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    folder = write_run(tmp_path / "a<b>run", [step(1, 1.0)], [{"time": 1.0, "event": evil, "message": evil, "step": 1}])
    text = write_report(folder).read_text()
    assert evil not in text and "<b>run" not in text and "onerror=alert(1)>" in text
    assert not re.search(r"(src|href)=['\"](?!data:,)", text) and "@import" not in text
    assert "NaN" not in json.loads(re.search(r'id="state">(.*?)</script>', text, re.DOTALL)[1])["name"]  # type: ignore[index]
    assert render_page({"a": "<"}, "<")  # nothing in it is taken for markup


def invoke(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(arguments))
    if isinstance(found.exception, JobError):
        return found.exception.exit_code, str(found.exception)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def test_bad_folders_are_a_sentence(tmp_path: Path) -> None:
    nothing, empty = tmp_path / "no", write_run(tmp_path / "empty", [], [])
    for command in (["report"], ["watch"], ["trace"], ["compare", str(empty)]):
        code, text = invoke(*command, str(nothing))
        assert code == 2 and "is not a run folder" in text
    assert invoke("report", str(empty))[0] == 0
    code, text = invoke("trace", str(empty))
    assert code == 2 and "no per-rank step times" in text
    assert invoke("compare", str(empty))[0] == 2
    assert invoke("compare", str(empty), str(empty))[0] == 0
    code, text = invoke("compare", str(empty), str(empty), "--html", str(tmp_path / "no" / "page.html"))
    assert code == 2 and "does not exist" in text
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.toml").write_text("model = 3")
    assert invoke("report", str(tmp_path / "job"))[0] == 2
    lines = [
        "{",
        "3",
        "null",
        '{"step": "x"}',
        '{"step": 1}',
        '{"step": 2, "loss": "nan", "seconds": null}',
        '{"step": 3, "lo',
    ]
    (empty / "metrics.jsonl").write_text("\n".join(lines))
    (empty / "ranks.jsonl").write_text('{"step": 1, "steps": 1}\n{"step": 2, "steps": 1, "seconds": "x"}\n')
    (empty / "events.jsonl").write_text('{"event": 3}\n{"time": 1, "event": 3}\n')
    (empty / "plan.toml").write_text("layout = 3\npredicted = {}\n")
    assert invoke("report", str(empty))[0] == 0
    assert list(RunData(empty).steps) == [1, 2]


# Elsewhere


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return make_run(tmp_path_factory.mktemp("runs") / "piped", "pipeline=2", "", tracker="csv", steps=5)


def test_the_trace_has_all_ranks_on_one_clock(pipelined: RunData, tmp_path: Path) -> None:
    code, text = invoke("trace", str(pipelined.path), "--out", str(tmp_path / "trace.json"))
    assert code == 0 and "events" in text
    boxes = [one for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"]
    steps = [[one for one in boxes if one["pid"] == rank and one["tid"] == 0] for rank in (0, 1)]
    assert [len(row) for row in steps] == [5, 5] and all(one["ts"] >= 0 for one in boxes)
    for mine, other in zip(*steps, strict=True):  # steps of two ranks of one machine lie over each other
        assert abs(mine["ts"] - other["ts"]) < 0.5 * mine["dur"]
    actions = [one for one in boxes if one["tid"] == 2]
    span = next(one for one in steps[0] if one["name"] == "step 3")
    assert len(actions) == 2 * 2 * 8  # ranks, a forward and a backward, micro-batches
    assert all(span["ts"] - 5e4 <= one["ts"] <= span["ts"] + span["dur"] + 5e4 for one in actions)


def test_runs_are_compared(pipelined: RunData, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [step(n, float(n)) for n in range(1, 7)], [])
    code, text = invoke("compare", str(pipelined.path), str(other), "--html", str(tmp_path / "both.html"))
    assert code == 0 and "layout" in text and "tracker" in text and "loss over samples" in text
    assert "piped" in (tmp_path / "both.html").read_text()
    found = json.loads(invoke("compare", str(pipelined.path), str(other), "--json")[1])
    assert found["runs"][1]["samples"] == [8, 16, 24, 32, 40, 48] and found["runs"][1]["loss"][1] == 2.5
    assert ["tracker", "csv", ""] in found["differences"]


def test_trackers(pipelined: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (pipelined.path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    assert (
        float(rows[2]["phase_seconds.compute"]) > 0
        and float(rows[2]["wait_seconds.pipeline"]) >= 0
        and float(rows[4]["loss"]) > 0
    )
    out = PrometheusWriter(make_job(SMALL), tmp_path)
    out({"step": 1, "loss": 2.5, "lr": 1e-3, "phase_seconds": {"compute": 0.5}, "slowest": {"rank": 1}})
    text = (tmp_path / "metrics.prom").read_text()
    assert re.search(r'^shardwise_loss\{run="[^"]*"\} 2.5$', text, re.MULTILINE)
    assert 'part="compute"} 0.5' in text and all(re.fullmatch(r"#.*|\w+\{.*\} \S+", line) for line in text.splitlines())
    for name in ("tensorboard", "wandb"):
        monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
        with pytest.raises(JobError, match=f"needs the package {name}"):
            check_tracker_installed(name)
    with pytest.raises(JobError, match="tracker"):
        make_job(SMALL | {"tracker": "csw"})


def test_a_tracker_that_breaks_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").mkdir()  # so that it cannot be written
    run = make_run_in(
        tmp_path / "run", make_job(SMALL | {"tracker": "csv", "steps": 3, "run": {"folder": str(tmp_path / "run")}})
    )
    assert len(run.steps) == 3 and [one["event"] for one in run.events].count("tracker_failed") == 1


def make_run_in(folder: Path, job: Job) -> RunData:
    RunFolder.create(job)
    run_world(_train, 1, str(folder), "pipeline=1", "")
    return RunData(folder)
