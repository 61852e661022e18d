"""The job file: all problems at once, each in a sentence; resolved text reads back to the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import JobError
from shardwise.job import Job, load_job, make_job
from shardwise.layout import Layout
from shardwise.models.config import PRESETS
from shardwise.models.registry import BUILT_IN
from shardwise.peer_words import JOB_WORDS, LAYOUT_WORDS


def problem(values: dict[str, object]) -> str:
    with pytest.raises(JobError) as caught:
        make_job(values)
    return str(caught.value)


def test_every_key_has_a_default_and_the_resolved_job_reads_back(tmp_path: Path) -> None:
    job = Job()
    (tmp_path / "job.toml").write_text(job.to_toml())
    assert load_job(tmp_path / "job.toml") == job


@pytest.mark.parametrize("name", PRESETS)
def test_presets_resolve_and_read_back(name: str, tmp_path: Path) -> None:
    job = make_job({"model": {"name": name}})
    (tmp_path / "job.toml").write_text(job.to_toml())
    assert load_job(tmp_path / "job.toml") == job


def test_explicit_keys_win_over_a_preset() -> None:
    assert make_job({"model": {"name": "llama3-8b", "layers": 2}}).model.layers == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"layer": 3}}, ["model.layer", "'model.layers'"]),
        ({"step": 3}, ["step", "'steps'"]),
        ({"model": {"name": "lama3-8b"}}, ["lama3-8b", "llama3-8b"]),
        ({"model": {"width": 100, "heads": 7}}, ["width (100)", "heads (7)"]),
        ({"model": {"heads": 8, "kv_heads": 3}}, ["heads (8)", "kv_heads (3)"]),
        ({"model": {"attention_dropout": 0.1}}, ["attention"]),
        ({"steps": 3, "tokens": "1M"}, ["steps or tokens"]),
        ({"batch": {"samples": 3, "tokens": 9}}, ["samples or tokens"]),
        ({"batch": {"tokens": "half a million"}}, ["half a million", "0.5M"]),
        ({"layout": "pipline=2"}, ["pipline", "pipeline"]),
        ({"layout": "tensor=two"}, ["tensor", "two"]),
        ({"layout": " "}, ["layout is empty", "replicate=1"]),
        ({"precision": "bf17"}, ["precision", "bf16"]),
        ({"optimizer": {"lr": -1}}, ["optimizer.lr"]),
        ({"model": 3}, ["model"]),
    ],
)
def test_a_mistake_is_told_with_its_place_and_remedy(values: dict[str, object], words: list[str]) -> None:
    message = problem(values)
    assert all(word in message for word in words), message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ({"model": {"hidden_size": 512}}, "unknown key 'model.hidden_size'; did you mean model.width?"),
        ({"hidden_size": 512}, "unknown key 'hidden_size'; did you mean model.width?"),
        ({"model": {"name": "t5", "num_hidden_layers": 3}}, "did you mean model.layers?"),
        ({"gradient_accumulation_steps": 4}, "set batch.samples (the global batch) and micro_batch in layout"),
        ({"learning_rate": 1e-3}, "did you mean optimizer.lr?"),
        ({"optimizer": {"learning_rate": 1e-3}}, "did you mean optimizer.lr?"),
        ({"max_grad_norm": 1.0}, "did you mean optimizer.clip?"),
        ({"bf16": True}, 'did you mean precision = "bf16"?'),
        ({"num_train_epochs": 3}, "set steps or tokens"),
        ({"per_device_train_batch_size": 4}, "did you mean micro_batch=4 in layout?"),
        ({"tensor_model_parallel_size": 2}, "did you mean tensor=2 in layout?"),
        ({"tensor": 2}, "did you mean tensor=2 in layout?"),
        ({"gradient_checkpointing": True}, "did you mean recompute=full or recompute=selective in layout?"),
        ({"resume_from_checkpoint": "runs/1"}, "shardwise train --resume RUN_FOLDER"),
        ({"training": {"steps": 3}}, "use steps, precision, [batch], [optimizer] and [data]"),
        ({"training": {"steps": 3}}, "unknown key 'training.steps'; did you mean 'steps'?"),
        (
            {"training": {"local_batch_size": 8}},
            "'training.local_batch_size'; it belongs to the layout; did you mean micro_batch=8 (with a pipeline",
        ),
        ({"training": {"seq_len": 64}}, "unknown key 'training.seq_len'; did you mean model.sequence?"),
        ({"compile": {"enable": True}}, "compile: it is a value, not a section; set compile = ... above"),
        ({"model": {"name": "llama3", "flavor": "8B"}}, "unknown key 'model.flavor'; did you mean model.name?"),
        ({"checkpoint": {"enable_checkpoint": True}}, "checkpoints are always written, at the end and every"),
        ({"training": {"frobnicate": 1}}, "unknown key 'training.frobnicate'; no key here has this name."),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "'optimizer.params.betas'; did you mean optimizer.beta"),
    ],
)
def test_a_key_of_another_framework_is_answered_with_ours(values: dict[str, object], answer: str) -> None:
    assert answer in problem(values)


def test_set_answers_a_key_of_another_framework() -> None:
    with pytest.raises(JobError, match=r"did you mean optimizer\.warmup\?"):
        load_job(None, ["warmup_steps=100"])


def test_every_answer_to_a_foreign_key_names_a_key_of_ours() -> None:
    keys = {key for key in Job.model_fields if key != "model"}
    keys |= {f"model.{key}" for family in BUILT_IN.values() for key in family.config.model_fields}
    for name, field in Job.model_fields.items():
        keys |= {f"{name}.{key}" for key in getattr(field.annotation, "model_fields", {})}
    for answer in JOB_WORDS:
        if not answer.endswith("."):
            named = [word for word in answer.split(" (")[0].split(" = ")[0].split(" or ") if "=" not in word]
            assert named and all(word in keys for word in named), answer


def test_no_foreign_word_hides_a_key_of_ours() -> None:
    words = [word for words in (*JOB_WORDS.values(), *LAYOUT_WORDS.values()) for word in words.split()]
    ours = {key for family in BUILT_IN.values() for key in family.config.model_fields} | set(Job.model_fields)
    assert not ours & set(words)
    # A word in both tables is answered as a key of a job; only the layout's own `schedule` may mean either.
    assert {word for word in words if words.count(word) > 1} <= {
        "schedule"
    } and "schedule" in Layout.__dataclass_fields__


def test_all_problems_are_told_at_once() -> None:
    assert problem({"precison": "bf16", "layout": "pipeline=2 tensro=2", "steps": -3}).count("\n") == 2
    message = problem({"stepps": 1, "optimizer": {"lr": -1}, "model": {"layers": 0}})
    assert message.count("\n") == 2


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('tokens = "1M"\n[batch]\ntokens = "64K"\n')
    job = load_job(path, ["layout=pipeline=2 tensor=2", "model.layers=3", "batch.samples=8", "steps=5"])
    assert (job.layout, job.model.layers, job.samples, job.total_steps) == ("pipeline=2 tensor=2", 3, 8, 5)


def test_the_file_is_blamed_for_its_own_keys_only(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("seed = -1\n")
    with pytest.raises(JobError) as caught:
        load_job(path, ["steps=abc", "layout=tensor=0", "model.layrs=3"])
    begins = {line.split(" ")[0] for line in str(caught.value).splitlines()}
    assert begins == {f"{path}:", "layout", "steps", "unknown"}


@pytest.mark.parametrize(
    ("tokens", "samples"), [("2M", 480), (2**21, 512), ("1M", 240), (4096 * 7, 7), (30000, 7), (100, 1)]
)
def test_a_batch_of_tokens_is_one_that_layouts_divide(tokens: int | str, samples: int) -> None:
    job = make_job({"model": {"sequence": 4096}, "batch": {"tokens": tokens}})
    assert job.samples == samples
    assert bool(job.rounding) == (job.batch.tokens != 4096 * samples)


@pytest.mark.parametrize("override", ["", "steps", "=3", "steps.x=3"])
def test_bad_overrides(override: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("steps = 3\n")
    with pytest.raises(JobError):
        load_job(path, [override])


def test_unreadable_files(tmp_path: Path) -> None:
    for name, content in {"a": b"steps = ", "b": b"\xff\xfe\x00", "c": b"steps = 1\nsteps = 2"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(JobError):
            load_job(tmp_path / name)
    with pytest.raises(JobError, match="does not exist"):
        load_job(tmp_path / "missing.toml")
    with pytest.raises(JobError):
        load_job(tmp_path)
