"""Scaling laws: the published re-analysis is found again, known laws too, and bad data gets a sentence."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import call
from threadpoolctl import threadpool_limits

from shardwise.errors import DataError, JobError
from shardwise.job import load_job, make_job
from shardwise.laws.budget import (
    batch_size_for_budget,
    design_grid,
    make_template,
    model_of_size,
    parse_budget,
    recommend,
    recommend_with_plan,
    write_grid,
)
from shardwise.laws.fit import (
    CONSTANTS,
    Runs,
    ScalingLaw,
    ScalingLawFit,
    best_fit,
    bootstrap,
    count_parameters,
    fit_as_dict,
    fit_scaling_law,
    parse_fitted_law,
    published_law,
    read_fitted_law,
    read_runs,
)
from shardwise.planner.costs.model_shape import shape_of

ROOT = Path(__file__).parent.parent
PAPER = ROOT.parent / "shared" / "data" / "chinchilla_runs.csv"
# Of the published constants (Besiroglu et al. 2024).
PUBLISHED_STANDARD_ERRORS = {"E": 0.026, "A": 124.0, "B": 1293.0, "alpha": 0.015, "beta": 0.021}
TRUTH = ScalingLaw(1.8, 480.0, 2000.0, 0.35, 0.366)

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]
from gradient_noise import solve_noise_scale  # noqa: E402
from plot_law import draw_fit  # noqa: E402


def made(noise: float = 0.0, law: ScalingLaw = TRUTH, budgets: int = 5, sizes: int = 7, seed: int = 0) -> Runs:
    """An iso-FLOP grid of a known law."""
    flops = np.repeat(np.geomspace(1e18, 1e21, budgets), sizes)
    N = np.sqrt(flops / 120) * np.tile(np.geomspace(1 / 8, 8, sizes), budgets)
    D = flops / 6 / N
    loss = law.loss(N, D) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(N)))
    return Runs(tuple(f"run {n}" for n in range(len(N))), N, D, loss, flops)


def write_csv(path: Path, rows: str) -> Path:
    path.write_text(rows, encoding="utf-8")
    return path


# The law


def test_the_optimum_is_the_lowest_loss_of_its_budget() -> None:
    N, D = TRUTH.compute_optimal(1e22)
    assert pytest.approx(1e22) == 6 * N * D
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert TRUTH.loss(N * factor, D / factor) > TRUTH.loss(N, D)
    assert TRUTH.tokens_to_reach(N, TRUTH.loss(N, D)) == pytest.approx(D)
    assert TRUTH.tokens_to_reach(1e6, 1.9) == math.inf


def test_numbers_checked_by_hand() -> None:
    """L = 1 + 8 / N^(1/2) + 8 / D^(1/2): N = D = (C / 6)^(1/2), and 100 of each give 2.6."""
    law = ScalingLaw(1.0, 8.0, 8.0, 0.5, 0.5)
    assert law.compute_optimal(6e4) == pytest.approx((100.0, 100.0))
    assert law.loss(100.0, 100.0) == pytest.approx(2.6)
    # Half the size: 8 / 50^(1/2) = 1.1314 leaves 0.4686 for 8 / D^(1/2), so D = 291.4.
    assert law.tokens_to_reach(50.0, 2.6) == pytest.approx(291.4, rel=1e-3)


def test_the_rounded_constants_of_the_first_paper_ask_for_five_times_the_tokens() -> None:
    N, D = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28).compute_optimal(5.9e23)
    assert pytest.approx(93, abs=1) == D / N
    N, D = published_law().law.compute_optimal(5.9e23)
    assert pytest.approx(18.4, abs=0.1) == D / N


# The fit


@pytest.fixture(scope="module")
def paper() -> ScalingLawFit:
    if not PAPER.exists():
        pytest.skip(f"{PAPER.name} is not beside the repository")
    return fit_scaling_law(read_runs([PAPER]), bootstrap_samples=100)


def test_the_published_reanalysis_is_found(paper: ScalingLawFit) -> None:
    assert (len(paper.runs), len(paper.dropped)) == (240, 5)
    assert paper.runs.loss.max() < paper.dropped.loss.min()
    for name, error in PUBLISHED_STANDARD_ERRORS.items():
        assert abs(getattr(paper.law, name) - getattr(published_law().law, name)) < error, name
    N, D = paper.law.compute_optimal(5.9e23)
    assert pytest.approx(18, abs=1) == D / N
    constants = fit_as_dict(paper)
    for name, (low, high) in {"E": (1.77, 1.87), "alpha": (0.317, 0.373), "beta": (0.331, 0.415)}.items():
        assert constants[name]["low"] < high and constants[name]["high"] > low
        assert constants[name]["standard_error"] == pytest.approx(PUBLISHED_STANDARD_ERRORS[name], rel=0.35)


def test_a_law_without_noise_is_found_exactly() -> None:
    found = fit_scaling_law(made(), bootstrap_samples=5)
    assert tuple(found.law) == pytest.approx(tuple(TRUTH), rel=1e-3)
    assert not len(found.dropped) and found.residual_std < 1e-5


@pytest.mark.parametrize("law", [ScalingLaw(0.5, 20.0, 60.0, 0.2, 0.25), ScalingLaw(2.5, 3000.0, 400.0, 0.45, 0.28)])
def test_other_laws_are_found_too(law: ScalingLaw) -> None:
    found = fit_scaling_law(made(law=law), bootstrap_samples=5)
    assert tuple(found.law) == pytest.approx(tuple(law), rel=1e-2)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """A small version of `benchmarks/laws_coverage.py`."""
    from laws_coverage import covers

    held = np.array([covers(("scattered", 6, 7, 0.01), 20, trial) for trial in range(3)])
    assert held.mean() >= 0.75


@pytest.fixture(scope="module")
def with_outlier() -> Runs:
    runs = made(noise=0.004)
    runs.loss[3] *= 1.3
    return runs


@pytest.fixture(scope="module")
def without_outlier(with_outlier: Runs) -> ScalingLawFit:
    """The fit to runs of which one is an outlier."""
    return fit_scaling_law(with_outlier, bootstrap_samples=20)


def test_outliers_are_left_out_and_named(with_outlier: Runs, without_outlier: ScalingLawFit) -> None:
    assert without_outlier.dropped.names == ("run 3",)
    found = fit_scaling_law(with_outlier, drop_highest=0, bootstrap_samples=5)
    assert found.dropped.names == ()
    saved = fit_as_dict(found)
    assert [row["run"] for row in saved["residuals"] if row["outlier"]] == ["run 3"]


@threadpool_limits.wrap(limits=1)  # as in `fit_scaling_law`: threads take longer over five rows than one does
def test_the_same_seed_gives_the_same_intervals() -> None:
    runs = made(noise=0.01)
    point = best_fit(runs)[2]
    one, two, other = (bootstrap(runs, point, 2, seed).E.tolist() for seed in (0, 0, 1))
    assert one == two != other


def test_a_saved_fit_is_read_back(without_outlier: ScalingLawFit, tmp_path: Path) -> None:
    found = without_outlier
    path = write_csv(tmp_path / "fit.json", json.dumps(fit_as_dict(found)))
    again = read_fitted_law(path)
    assert again.law == found.law and again.parameter_scope == "all"
    assert np.array(again.bootstrap_samples) == pytest.approx(np.array(found.bootstrap_samples), rel=1e-8)
    at_once = recommend(parse_fitted_law(fit_as_dict(found), ""), 1e22)
    assert recommend(again, 1e22)["loss_interval"] == pytest.approx(at_once["loss_interval"])


def test_the_drawing_is_svg_and_fetches_nothing(with_outlier: Runs, without_outlier: ScalingLawFit) -> None:
    text = draw_fit(without_outlier, "a <title>")
    assert text.startswith("<svg") and "a &lt;title&gt;" in text
    assert text.count("http") == 1  # the name of the format
    assert text.count("<circle") == 2 * (len(with_outlier) - 1) + 1


# Bad data


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("params,tokens,loss\n1e6,1e8,3\n1e7,1e9,-2\n", "line 3, column loss: -2 must be positive"),
        ("params,tokens,loss\n1e6,1e8,3\n1e7,oops,2\n", "line 3, column tokens: 'oops' is not a number"),
        ("params,tokens,loss\n1e6,1e8\n", "line 2, column loss: the value is missing"),
        ("params,tokens,loss\n1e6,1e8,nan\n", "line 2, column loss: nan must be positive"),
        ("params,tokens\n1e6,1e8\n", "no column for loss"),
        ("params,loss\n1e6,3\n", "no column for two of parameters, tokens and flops"),
        ("params,N,tokens,loss\n1,1,1,1\n", "both contain parameters"),
        ("params,tokens,loss\n1e6,1e8,3\n1e7,1e9,2\n", "2 runs: a law has five constants"),
        ("params,tokens,loss\n" + "1e6,1e8,3\n" * 8, "1 different value of parameters"),
        ("", "contains no runs"),
        ("params,tokens,loss\n\n", "contains no runs"),
    ],
)
def test_bad_data_gets_a_sentence(
    rows: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "runs.csv", rows)
    assert call(monkeypatch, "laws", "fit", str(path)) == 2
    err = capsys.readouterr().err
    assert told in err and "Traceback" not in err


def test_other_things_that_cannot_be_fitted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        read_runs([tmp_path / "none.csv"])
    with pytest.raises(DataError, match="no run folder"):
        read_runs([tmp_path])
    with pytest.raises(DataError, match="--drop-highest 99"):
        fit_scaling_law(made(), drop_highest=99)
    with pytest.raises(DataError, match="not a saved fit"):
        read_fitted_law(write_csv(tmp_path / "fit.json", '{"E": 1}'))
    flat = made()
    flat.loss[:] = 2.0 + 400 / flat.parameters**0.35
    flat.tokens[:] = np.geomspace(1e9, 1e11, len(flat))
    with pytest.raises(DataError, match="does not fall with their tokens"):
        fit_scaling_law(flat, bootstrap_samples=20)


def test_columns_by_other_names(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "runs.csv", "note,C,N,Loss\nfirst,6e17,1e8,3.5\n")
    runs = read_runs([path])
    assert (runs.parameters[0], runs.tokens[0], runs.loss[0]) == (1e8, pytest.approx(1e9), 3.5)


# Runs of our own


def run_folder(path: Path, steps: int = 40, done: int = 40) -> Path:
    path.mkdir(parents=True)
    model = {"layers": 2, "width": 32, "heads": 2, "sequence": 64}
    job = make_job({"steps": steps, "model": model, "batch": {"samples": 4}})
    (path / "job.toml").write_text(job.to_toml())
    lines = [json.dumps({"step": n, "samples": 4 * n, "loss": 5.0 - n / 40}) for n in range(1, done + 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    return path


def test_run_folders_are_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "one")
    runs = read_runs([tmp_path / "runs"])
    model = load_job(folder / "job.toml").require_decoder()
    assert runs.names == ("one",) and runs.tokens[0] == 40 * 4 * 64
    assert runs.loss[0] == pytest.approx(4.0125)  # the mean of the last two steps
    assert runs.flops[0] == shape_of(model).flops(160)
    blocks = read_runs([folder], "blocks")
    assert runs.parameters[0] - blocks.parameters[0] == 256 * 32
    assert blocks.parameters[0] == 2 * (4 * 32 * 32 + 3 * 32 * model.ffn)
    (folder / "events.jsonl").write_text('{"event": "validation", "step": 40, "loss": 4.2}\n')
    assert read_runs([folder]).loss[0] == 4.2


def test_a_run_that_is_not_finished_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not finished: 12 of 40 steps"):
        read_runs([run_folder(tmp_path / "one", done=12)])


# The design


def test_every_designed_job_loads_and_costs_its_budget(tmp_path: Path) -> None:
    jobs = design_grid(1e18, 1e20, 3, 5, 4.0, ["precision=bf16"], "all", tmp_path)
    assert len(jobs) == 15 and len({one.path for one in jobs}) == 15
    for one, row in zip(jobs, write_grid(jobs), strict=True):
        job = load_job(Path(row["file"]))
        model = job.require_decoder()
        assert job == one.job and job.precision == "bf16"
        flops = shape_of(model).flops(job.samples) * job.total_steps
        assert flops == pytest.approx(one.flops, rel=0.01)
        assert 20 < model.width / model.layers < 140
    middle = jobs[7]
    assert middle.parameters == pytest.approx(math.sqrt(1e19 / 120), rel=0.1)
    assert middle.job.optimizer.lr == pytest.approx(0.3118 * 1e19**-0.125, rel=0.01)


def test_sizes_are_met_from_thousands_to_trillions() -> None:
    for target in (1e4, 1e5, 1e6, 1e8, 1e10, 1e12):
        template = make_template(["model.vocab=256"], 1e12)
        assert count_parameters(model_of_size(template, target, "all"), "all") == pytest.approx(target, rel=0.35)
        if target > 1e5:
            assert count_parameters(model_of_size(template, target, "blocks"), "blocks") == pytest.approx(
                target, rel=0.1
            )


def test_designs_that_cannot_be(tmp_path: Path) -> None:
    for text in ("1e20:1e18", "many", "0:1", "-1:2", "nan"):
        with pytest.raises(JobError, match="--budget"):
            parse_budget(text)
    assert parse_budget("1e18") == (1e18, 1e18)
    for settings in (["model.width=64"], ["steps=3"], ["batch.samples=2"]):
        with pytest.raises(JobError, match="the grid chooses"):
            design_grid(1e18, 1e19, 2, 2, 2.0, settings, "all", tmp_path)
    with pytest.raises(JobError, match="no decoder with a vocabulary of 256"):
        design_grid(1e6, 1e6, 1, 1, 1.0, [], "all", tmp_path)


def test_batches_suit_the_devices() -> None:
    assert batch_size_for_budget(1e24, 1e12, 4096, 1024) % 1024 == 0
    assert batch_size_for_budget(1e24, 1e12, 4096, 96) % 96 == 0
    assert batch_size_for_budget(1e12, 1e8, 128) == 16  # 2457 tokens by the rule
    assert batch_size_for_budget(1e12, 1e6, 128) == 4  # 7 would leave a thousand steps


# The recommendation


def test_a_recommendation_in_numbers() -> None:
    law = published_law().law
    found = recommend(published_law(), 5.9e23)
    N, loss, (low, high) = found["parameters"], found["loss"], found["loss_interval"]
    assert pytest.approx(73.1e9, rel=0.01) == N and found["tokens"] == pytest.approx(1.344e12, rel=0.01)
    assert loss == pytest.approx(1.974, abs=1e-3)
    assert low < loss < high < low + 0.1
    for edge in found["near_optimal_parameters"]:
        assert law.loss(edge, 5.9e23 / 6 / edge) == pytest.approx(1.005 * loss, rel=1e-6)
    half = found["overtrained"][0]
    assert half["parameters"] == N / 2
    assert law.loss(half["parameters"], half["tokens"]) == pytest.approx(loss)
    assert half["break_even"] == pytest.approx((half["flops"] - found["flops"]) / N)


def test_far_extrapolation_is_flagged() -> None:
    assert not recommend(published_law(), 1e24)["warnings"]
    (told,) = recommend(published_law(), 2e24)["warnings"]
    assert told.startswith("extrapolation: 2e+24 FLOPs is 154 times outside")
    assert len(recommend(published_law(), 1e28)["warnings"]) == 3


def test_days_become_a_budget_through_the_planner() -> None:
    found = recommend_with_plan(published_law(), None, 1.0, 8, "h100", [])
    facts = found["plan"]
    assert facts["devices"] == 8 and facts["fits"]
    assert facts["days"] == pytest.approx(1.0, rel=1e-3)
    assert facts["device_hours"] == pytest.approx(24 * 8, rel=1e-3)
    assert facts["parameters"] == pytest.approx(found["parameters"], rel=0.1)
    # The law's 6ND and the planner's count differ by attention and by the embedding, which multiplies nothing.
    assert facts["planner_flops"] == pytest.approx(found["flops"], rel=0.25)
    size, tokens = found["parameters"], found["tokens"]
    assert found["flops"] == pytest.approx(6 * size * tokens)
    assert found["tokens_per_parameter"] == pytest.approx(tokens / size)
    assert found["loss"] == published_law().law.loss(size, tokens)


# The commands


def test_money_becomes_a_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "recommend", "--cost", "2000", "--price", "2.5", "--devices", "8", "--cluster", "h100"
    assert not call(monkeypatch, "laws", *words)
    told = capsys.readouterr().out
    cost = float(re.search(r"cost: +([\d,.]+) at 2.5 for an hour", told)[1].replace(",", ""))  # type: ignore[index]
    assert cost == pytest.approx(2000, rel=2e-3) and " in bf16 on 8 x H100" in told


def test_design_fit_and_recommend_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid"
    assert not call(monkeypatch, "laws", "design", "--budget", "1e18:1e20", "-o", str(grid))
    assert "15 jobs" in capsys.readouterr().out and len(list(grid.glob("*.toml"))) == 15
    runs = made(noise=0.005)
    rows = "\n".join(f"{N},{D},{loss}" for N, D, loss in zip(runs.parameters, runs.tokens, runs.loss))
    path, saved = write_csv(tmp_path / "runs.csv", f"N,D,loss\n{rows}\n"), tmp_path / "f.json"
    assert not call(monkeypatch, "laws", "fit", str(path), "--draws", "20", "-o", str(saved), "--json")
    told = json.loads(capsys.readouterr().out)
    assert all(told[name]["low"] < told[name]["value"] < told[name]["high"] for name in CONSTANTS)
    assert not call(monkeypatch, "laws", "recommend", "--law", str(saved), "--flops", "1e25", "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] * said["tokens"] * 6 == pytest.approx(1e25) and said["warnings"]
    assert not call(monkeypatch, "laws", "recommend", "--flops", "1e24")
    assert "Besiroglu" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("recommend",),
        ("recommend", "--flops", "1e24", "--days", "3"),
        ("recommend", "--days", "3"),
        ("recommend", "--flops", "-1"),
        ("recommend", "--flops", "nan"),
        ("recommend", "--cost", "100"),
        ("recommend", "--cost", "100", "--price", "2", "--devices", "8"),
        ("recommend", "--cost", "100", "--price", "2", "--devices", "8", "--cluster", "h100", "--days", "1"),
        ("recommend", "--flops", "1e24", "--devices", "8"),
        ("recommend", "--flops", "1e24", "--devices", "8", "--cluster", "h1000"),
        ("recommend", "--flops", "1e24", "--law", "nowhere.json"),
        ("design", "--budget", "x"),
        ("design", "--budget", "1e18", "--set", "model.name=resnet"),
        ("design", "--budget", "1e18", "--count", "some"),
        ("fit", "nowhere.csv"),
    ],
)
def test_mistakes_end_with_2(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "laws", *words) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told and ("--count" not in words or "--count 'some': use all or blocks." in told)


# Gradient noise


def test_noise_from_two_batch_sizes() -> None:
    """Of made gradients with mean G and variance 1 in each of 1000 numbers: S / |G|^2 is known."""
    chance = torch.Generator().manual_seed(0)
    G = torch.full((1000,), 0.1)
    small = [(G + torch.randn(1000, generator=chance) / 8**0.5) for _ in range(400)]
    few = float(torch.stack([g.square().sum() for g in small]).mean())
    many = torch.stack(small).view(25, 16, 1000).mean(1).square().sum(1).mean()
    gradient, variance = solve_noise_scale(few, float(many), 8, 128)
    assert variance == pytest.approx(1000, rel=0.05) and gradient == pytest.approx(10, rel=0.1)
