"""The folder that leaves: card, proof, profile, reference sample, gates, smoke test; and drift from the profile."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from browser import CHROMIUM, Browser
from safetensors.torch import load_file, save_file
from test_docs import ROOT
from test_eval import TINY, train_run
from test_train import train

from shardwise.cli import app
from shardwise.data.criteo import ClickBatch
from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import job_stream
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.errors import JobError, RunError, UserError
from shardwise.export.drift import compare_columns, drift, drift_page, profile_samples, profile_text, read_profile, thin
from shardwise.export.handover import hand_over, measured
from shardwise.export.smoke import smoke_test
from shardwise.job import make_job
from shardwise.train.export import PROGRAM_TOLERANCE, compare, open_checkpoint
from shardwise.train.run_folder import RunFolder
from shardwise.verify.reference import dlrm_loss

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Path]:
    folder = tmp_path_factory.mktemp("handover")
    texts = [f"Document {n} of {n * n % 97} words is about {'the sea and ' * (n % 13)}the land." for n in range(400)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"source": "jsonl", "path": str(folder / "corpus.jsonl"), "tokenizer": "bpe:300"}
    run = train_run(folder / "run", {"vocab": 300}, data=data, export={"gates": {"validation": {"loss": "<= 50"}}})
    told = list(hand_over(run.path, folder / "out", "", "float32", 10**9, True, False, []))
    assert "checked" in told[1] and "smoke test" in told[2]
    return run, folder / "out"


def test_folder_has_card_proof_profile_and_reference(exported: tuple[RunFolder, Path]) -> None:
    run, out = exported
    card = (out / "README.md").read_text()
    _, loss = run.validations()[-1]
    assert f"| loss | {loss:.6g} |" in card and "corpus.jsonl" in card and "kWh" in card and "{" not in card
    assert re.search(r"\| time \| [\d.]+ m?s of steps \|", card)
    proof = json.loads((out / "proof.json").read_text())
    assert proof["step"] == 2 and proof["metrics"]["validation.loss"] == loss and "logits differ" in proof["checked"]
    # A wheel's metadata may lack the name of the build that PyTorch itself states: 2.15.0 and 2.15.0+cu132.
    assert proof["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert proof["sha256"]["model.safetensors"]
    reference = json.loads((out / "reference.json").read_text())
    assert len(reference["greedy_ids"]) >= 8 and smoke_test(out) == ""
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(reference["greedy_ids"]) == reference["text"] and tokenizer.eos_token == "<|end|>"
    profile = read_profile(out / "data-profile.json")
    quantiles = profile["quantiles"]
    assert profile["samples"] == "held-out"
    assert all(len(values) == 21 and values == sorted(values) for values in quantiles.values())
    assert 0.0 < quantiles["entropy"][10] < np.log(300) and quantiles["loss"][0] < loss < quantiles["loss"][20]
    assert "pipeline_model_type: " in (out / "MLmodel").read_text()
    assert set(read_profile(out / "data-profile.json")["columns"]) >= {"length", "tokens", "letters", "duplicate"}


def test_metrics_of_the_last_step_and_of_the_last_validation(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number, axis, more in ((1, "tensor", {"validation": {"loss": 3.0}}), (2, "replicate", {}), (3, "world", {})):
        folder.log_metrics({"step": number, "loss": 2.0, "wait_seconds": {axis: 0.5}, **more})
    assert measured(folder, 2) == {"step": 2, "loss": 2.0, "wait_seconds.replicate": 0.5, "validation.loss": 3.0}


@pytest.mark.cluster
def test_quantiles_of_a_run_without_held_out_samples_are_of_training(tmp_path: Path) -> None:
    data = {"source": "text", "path": str(tmp_path / "corpus.txt"), "validation_fraction": 0.0}
    run = train_run(tmp_path / "run", data=data)
    list(hand_over(run.path, tmp_path / "out", "", "float32", 10**9, True, False, []))
    profile = read_profile(tmp_path / "out/data-profile.json")
    assert profile["samples"] == "training" and len(profile["quantiles"]["loss"]) == 21


def test_smoke_test_finds_changed_weights(exported: tuple[RunFolder, Path], tmp_path: Path) -> None:
    for file in exported[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    next(iter(weights.values()))[0, 0] += 0.5
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert "differ" in smoke_test(tmp_path)


@pytest.mark.parametrize("gate", ["validation.loss <= 0.001", "validation.accuracy >= 0.5"])
def test_gates_refuse(exported: tuple[RunFolder, Path], gate: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing is exported") as error:
        list(hand_over(exported[0].path, tmp_path / "out", "", "auto", 10**9, False, False, [gate]))
    assert error.value.exit_code == 1 and not list(tmp_path.iterdir())
    with pytest.raises(JobError, match="is no condition"):
        list(hand_over(exported[0].path, tmp_path / "out", "", "auto", 10**9, False, False, ["loss = 3"]))
    with pytest.raises(JobError, match="export"):
        make_job({"export": {"gates": {"validation": {"loss": 2.1}}}})


def run_drift(*arguments: str) -> int:
    return int(app(["drift", *arguments], standalone_mode=False) or 0)


def test_drift_command(exported: tuple[RunFolder, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, profile = exported[0], str(exported[1] / "data-profile.json")
    assert run_drift(profile, run.job().data.path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["drifted"] and all(column["psi"] < 1e-9 for column in found["columns"])
    (tmp_path / "new.jsonl").write_text("".join(json.dumps({"text": f"Ωδε {n} μέγα"}) + "\n" for n in range(200)))
    assert run_drift(profile, str(tmp_path / "new.jsonl"), "--html", str(tmp_path / "page.html")) == 1
    assert "drifted: " in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert "prefers-color-scheme: dark" in page and "http" not in page
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    assert {one["column"] for one in data["columns"] if one["drifted"]} >= {"beyond_ascii", "length"}
    assert data["columns"][0]["drifted"] and sum(data["columns"][0]["new"]["counts"]) == 200
    assert run_drift(str(exported[1]), profile) == 0
    for arguments in ([profile, str(tmp_path / "gone.jsonl")], [str(tmp_path / "new.jsonl"), profile]):
        with pytest.raises(UserError):
            run_drift(*arguments)


def test_a_profile_skips_bad_records_and_says_what_it_lacks(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("{bad\n" + "".join(json.dumps({"text": f"{n} and more of it" * 3}) + "\n" for n in range(99)))
    run = train_run(tmp_path / "run", data={"source": "jsonl", "path": str(corpus), "on_bad_record": "skip"})
    export = lambda out: list(hand_over(run.path, tmp_path / out, "", "auto", 10**9, False, False, []))  # noqa: E731
    assert len(export("full")) == 1 and "holds histograms" in (tmp_path / "full/README.md").read_text()
    assert read_profile(tmp_path / "full/data-profile.json")["columns"]["length"]["rows"] == 99
    assert run_drift(str(tmp_path / "full/data-profile.json"), str(corpus)) == 0
    corpus.rename(tmp_path / "moved.jsonl")
    _, told = export("empty")
    card = (tmp_path / "empty/README.md").read_text()
    assert told.startswith("no data profile: data.path = ")
    assert "no such file" in card and "holds histograms" not in card
    with pytest.raises(UserError, match="has no histograms.*no such file"):
        run_drift(str(tmp_path / "empty/data-profile.json"), str(tmp_path / "moved.jsonl"))


def load_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("drift_benchmark", ROOT / "benchmarks" / "drift.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_planted_shifts_are_found_and_resamples_are_not() -> None:
    """A few trials of benchmarks/drift.py, which runs a hundred."""
    benchmark = load_benchmark()
    results = [benchmark.trial(seed, 200) for seed in range(8)]
    assert not any(result["resample"] for result in results)
    for result in results:
        assert "length" in result["length"] and "duplicate" in result["duplicates"]
        assert "beyond_ascii" in result["language"] and "tokens_per_byte" in result["tokenizer"]


@pytest.mark.parametrize("model", [
    {"name": "resnet", "image_size": 8, "num_classes": 10}, {"name": "dlrm"},
])  # fmt: skip
def test_images_and_clicks_have_a_column_per_feature(model: dict[str, Any]) -> None:
    job = make_job({"model": model, "data": {"source": "synthetic", "samples": 600}})
    columns = profile_samples(job)
    other = profile_samples(make_job({"model": model, "data": {"source": "synthetic", "samples": 500}}), like=columns)
    assert len(columns) > 3 and not any(one.drifted for one in compare_columns(columns, other))
    shifted = {name: {**column, "counts": column["counts"][::-1]} for name, column in columns.items()}
    shifted = {name: {**c, "counts": [sum(c["counts"]), *[0] * (len(c["counts"]) - 1)]} for name, c in shifted.items()}
    found = compare_columns(columns, shifted)
    assert any(one.drifted for one in found) and "label" in drift_page(found, columns, shifted, "x")


PROGRAMS: dict[str, dict[str, Any]] = {
    "resnet": {"name": "resnet", "stem": "cifar", "depth": 18, "width": 4, "image_size": 16, "num_classes": 5},
    "bert": {"name": "bert", "layers": 2, "width": 16, "heads": 2, "vocab": 61, "sequence": 12},
    "dlrm": {"name": "dlrm", "tables": 3, "rows": [7, 40, 5], "width": 4, "lookups": 2, "bottom": [8], "top": [8]},
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_model_that_transformers_does_not_know_becomes_a_program(kind: str, tmp_path: Path) -> None:
    values = {"model": PROGRAMS[kind], "run": {"folder": str(tmp_path / "run")}, "steps": 2, "precision": "float64"}
    run = train(make_job({**values, "batch": {"samples": 4}, "data": {"source": "synthetic"}}), "shard=2 zero=1")
    told = list(hand_over(run.path, tmp_path / "out", "", "float64", 10**9, True, False, []))
    assert "a fresh process loads model.pt2" in told[1] and not (tmp_path / "out" / "MLmodel").exists()
    assert "library_name: pytorch" in (tmp_path / "out" / "README.md").read_text()
    job, saved = run.job(), open_checkpoint(run, dtype=torch.float64)
    samples = job_stream(job, synthetic_source(job, 5)).read(np.arange(5))
    program, model = torch.export.load(tmp_path / "out" / "model.pt2").module(), saved.load(torch.float64)
    if kind == "dlrm":
        batch = ClickBatch.unpack(samples, job.model)
        logits = program(batch.dense_features, batch.sparse_ids, batch.weights)
        tables = {f"table{n}": torch.empty(rows, 4, device="meta") for n, rows in enumerate((7, 40, 5))}
        expected = dlrm_loss(job, model, list(saved.read(tables).values()), samples)
        found = F.binary_cross_entropy_with_logits(logits, batch.labels.double())
    else:
        found = program(samples.tokens.double() if kind == "resnet" else samples.tokens)
        expected = model(samples.tokens, ids=samples.ids).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    tensors = load_file(tmp_path / "out" / "reference.safetensors")
    save_file({**tensors, "output": tensors["output"] * 1.001}, tmp_path / "out" / "reference.safetensors")
    assert compare(tmp_path / "out") > PROGRAM_TOLERANCE


def test_thin_keeps_rows_of_the_whole() -> None:
    rows = thin(range(100_000), 1000)
    assert 500 <= len(rows) <= 1001 and rows[0] == 0 and rows[-1] > 99_000 and len(np.unique(np.diff(rows))) == 1
    assert thin(range(5), 1000) == [0, 1, 2, 3, 4]


def test_profile_is_written_without_the_data(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", {"sequence": TINY["sequence"]})
    (tmp_path / "corpus.txt").unlink()
    list(hand_over(run.path, tmp_path / "out", "", "auto", 10**9, False, False, []))
    profile = json.loads((tmp_path / "out" / "data-profile.json").read_text())
    assert profile["columns"] == {} and "corpus.txt" in profile["problem"]
    text = "Zürich, 東京 \n\t🙂"  # of a run on bytes
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(text).input_ids == ByteTokenizer().encode(text).tolist() and tokenizer.eos_token_id == 0
    assert tokenizer.decode(list(text.encode())) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.bos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id) == (None, 0, 0)
    with pytest.raises(UserError, match="has no histograms"):
        drift(tmp_path / "out" / "data-profile.json", str(tmp_path / "out" / "data-profile.json"))


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_drift_page_in_a_browser(dark: bool, tmp_path: Path) -> None:
    benchmark = load_benchmark()
    rng, tokenizer = np.random.default_rng(0), ByteTokenizer()
    old = profile_text(benchmark.documents(rng, 300), tokenizer)
    new = profile_text(benchmark.documents(rng, 200, "accents"), tokenizer, old)
    (tmp_path / "page.html").write_text(drift_page(compare_columns(old, new), old, new, "<new> against old"))
    with Browser(dark=dark) as browser:
        browser.open((tmp_path / "page.html").as_uri())
        browser.wait("document.querySelectorAll('section').length === 8")
        assert browser.js("document.querySelectorAll('section.drifted').length") >= 3
        assert browser.js("[...document.querySelectorAll('.bars')].every((one) => one.children.length > 0)")
        assert browser.js("document.querySelector('h1').textContent") == "<new> against old"
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
        paint = browser.js("getComputedStyle(document.body).backgroundColor")
        assert paint == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)") and not browser.console
