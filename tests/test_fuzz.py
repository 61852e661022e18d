"""Bad input ends in a sentence: random jobs, layouts and command lines find no traceback and start no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.cli import main
from shardwise.errors import UserError
from shardwise.job import Job, load_job, make_job
from shardwise.layout import RECOMPUTE, SCHEDULES, Layout
from shardwise.models.registry import BUILT_IN
from shardwise.parallel.prepare import prepare
from shardwise.train.auto_layout import choose_plan

junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(), st.text(max_size=8), st.just([]), st.just({})
)
small = st.integers(-1, 12)
DEGREES = ["pipeline", "replicate", "shard", "tensor", "virtual", "micro_batch", "zero"]
model_values = {
    "name": st.sampled_from(["gpt", "gpt2", "llama3-8b", "nope", 3, *BUILT_IN, "mixtral-8x7b", "t5-11b"]),
    "experts": small, "layers": small, "width": st.integers(-8, 64),
    "heads": small, "kv_heads": small, "head_dim": small, "ffn": st.integers(-1, 70), "vocab": st.integers(0, 130),
    "sequence": st.integers(0, 40), "positions": st.sampled_from(["learned", "rotary", "none"]),
    "norm": st.sampled_from(["layer", "rms", ""]), "activation": st.sampled_from(["gelu", "swiglu", 1]),
    "bias": junk, "tied": st.booleans(), "dropout": st.floats(-0.2, 1.2),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
}  # fmt: skip
layout_words = st.lists(
    st.one_of(
        st.builds("{}={}".format, st.sampled_from(DEGREES), small),
        st.builds("schedule={}".format, st.sampled_from([*SCHEDULES, "1f2b"])),
        st.builds("recompute={}".format, st.sampled_from([*RECOMPUTE, "0.5", "2", "x"])),
        st.builds("stages={}".format, st.sampled_from(["1,1", "2,2", "0,4", "-1,5", "a"])),
        st.text(max_size=6),
    ),
    max_size=5,
).map(" ".join)  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, object]:
    values: dict[str, object] = {}
    if draw(st.booleans()):
        values["layout"] = draw(st.one_of(layout_words, junk))
    values["model"] = draw(st.one_of(st.fixed_dictionaries({}, optional=model_values), junk))
    values["batch"] = draw(
        st.fixed_dictionaries({}, optional={"samples": st.integers(-1, 48), "tokens": st.one_of(junk, st.just("1K"))})
    )
    values["optimizer"] = draw(
        st.fixed_dictionaries({}, optional={"lr": junk, "betas": junk, "warmup": junk, "schedule": junk})
    )
    for key in ("seed", "steps", "tokens", "precision", "data", "checkpoint", "run", "validation", "nonsense"):
        if draw(st.integers(0, 6)) == 0:
            values[key] = draw(junk)
    return values


@given(jobs())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_job_is_taken_or_refused_in_words(values: dict[str, object]) -> None:
    try:
        job = make_job(values)
        prepare(job, choose_plan(job)[0].best.layout)
    except UserError as error:
        message = str(error)
        assert message and "Traceback" not in message and len(message) < 4000


@given(layout_words)
@settings(max_examples=300, deadline=None)
def test_any_layout_is_taken_or_refused_in_words(text: str) -> None:
    try:
        layout = Layout.parse(text)
        assert Layout.parse(str(layout)) == layout
        prepare(Job(), layout)
    except UserError as error:
        assert str(error)


@given(st.text(max_size=20), st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_override_is_taken_or_refused_in_words(key: str, value: str) -> None:
    try:
        load_job(None, [f"{key}={value}"])
    except UserError as error:
        assert str(error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "missing.toml"], ["train", "bad.toml"], ["train", "--set", "model.layer=3"],
        ["train", "--set", "layout=tensor=3"], ["train", "--resume", "nowhere"], ["train", "--resum", "x"],
        ["verify", "--layout", "pipeline=99"], ["verify", "--layout", "nonsense"], ["verify", "--steps", "1"],
        ["sample", "nowhere"], ["data", "out.bin", "--set", "data.source=text", "--set", "data.path=nowhere"],
        ["train", "--set", "data.source=jsonl", "--set", "data.path=bad.jsonl"],
        ["train", "--set", "data.tokenizer=bpe:99999"], ["train", "--set", "run.device=tpu"],
        ["train", "--set", "run.folder=/proc/nope"], ["frobnicate"], ["train", "bad.toml", "--resume", "x"],
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("steps = = 3")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = "".join(capfd.readouterr())
    assert end.value.code == 2, said
    assert "Traceback" not in said
    assert 0 < len(said.strip().splitlines()) <= 8, said
    assert not (tmp_path / "runs").exists(), "a run folder was left behind"


def test_a_mistake_as_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "train", "--set", "model.layer=3"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 2
    assert "layers" in done.stderr and "Traceback" not in done.stderr
