"""Foreign and damaged tables of measured runs: `benchmarks/planner_accuracy.py` and `tools/fit_planner.py`."""

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]
import fit_planner  # noqa: E402
import planner_accuracy  # noqa: E402

RUNS = ROOT / "benchmarks" / "runs.csv"
WRITTEN = ("ACCURACY_FILE", "CONSTANTS_FILE", "FRAMEWORKS_FILE")


def table(path: Path, count: int = 3, sources: tuple[str, ...] = ("megatron-sc21",), **cells: str) -> Path:
    """Writes the first runs of each source; `cells` replace those of the second row."""
    with RUNS.open(encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    rows = [row for source in sources for row in [row for row in runs if row["source"] == source][:count]]
    rows[1] |= cells
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def refusal(module: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Returns the one sentence that a script ends with."""
    monkeypatch.setattr("sys.argv", ["script", *words])
    with pytest.raises(SystemExit) as ended:
        module.main()  # type: ignore[attr-defined]
    found = capsys.readouterr()
    assert ended.value.code == 2 and not found.out and found.err.count("\n") == 1
    return found.err


@pytest.mark.parametrize(
    ("column", "cell", "rule"),
    [
        *(("iter_time_s", cell, "not a number from 1e-06") for cell in ("soon", "nan", "inf", "0", "-3")),
        ("tflops_per_gpu", "0", "not a number from 1e-06"),
        ("layers", "2.5", "not a whole number from 1"),
        ("heads", "0", "not a whole number from 1"),
        ("tp", "1e300", "not a whole number from 1"),
        ("recompute", "some", "the layout is impossible"),
    ],
)
def test_a_bad_cell_is_told_with_line_and_column(
    column: str, cell: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = str(table(tmp_path / "runs.csv", **{column: cell}))
    for module in (planner_accuracy, fit_planner):
        said = refusal(module, capsys, monkeypatch, path)
        assert said.startswith(f"{path}, line 3: ") and column in said and cell in said and rule in said


def test_a_file_that_is_no_table_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = table(good := tmp_path / "good.csv").read_text()
    header, first, *_ = text.splitlines()
    files = {
        "missing": (None, "cannot be read: No such file"), "empty": (b"", "no column source"),
        "binary": (bytes(range(256)), "is not a CSV file in UTF-8"), "header": (header.encode(), "has no rows"),
        "column": (text.replace("iter_time_s", "seconds").encode(), "line 1: no column iter_time_s;"),
        "cut": (text[: text.index(first) + 90].encode(), "line 2: it has more or fewer cells"),
        "quote": (text.encode() + b'"', "is not a CSV file"),
    }  # fmt: skip
    for name, (content, rule) in files.items():
        path = tmp_path / f"{name}.csv"
        if content is not None:
            path.write_bytes(content)
        for module in (planner_accuracy, fit_planner):
            said = refusal(module, capsys, monkeypatch, str(path))
            assert str(path) in said and rule in said
    assert "two sources" in refusal(fit_planner, capsys, monkeypatch, "--check", str(good))
    untimed = str(table(tmp_path / "untimed.csv", 2, tflops_per_gpu="", gpu="Z80"))
    assert "two sources" in refusal(fit_planner, capsys, monkeypatch, "--check", untimed)
    assert "cannot be written" in refusal(planner_accuracy, capsys, monkeypatch, str(good), "--rows", str(tmp_path))


def test_an_empty_set_has_no_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "runs.csv", 2, gpu="Z80")
    path.write_text(path.read_text().replace("A100-80GB", "Z80"))
    monkeypatch.setattr("sys.argv", ["script", str(path)])
    planner_accuracy.main()
    said = capsys.readouterr().out
    assert "skipped 2: no data sheet for Z80" in said and "fits: no rows" in said and "nan" not in said.lower()


def test_runs_of_others_are_judged_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contents = table(tmp_path / "runs.csv", 2, ("megatron-sc21", "llm-foundry"), iter_time_s="1000"), {}
    for name in WRITTEN:
        (tmp_path / name).write_bytes(before := getattr(fit_planner, name).read_bytes())
        monkeypatch.setattr(fit_planner, name, tmp_path / name)
        contents[name] = before
    for flags in (["--check"], ["--rounds", "1"]):
        monkeypatch.setattr("sys.argv", ["script", str(path), *flags])
        fit_planner.main()
        said = capsys.readouterr().out
        assert "llm-foundry" in said and "nan" not in said.lower()
    assert contents == {name: (tmp_path / name).read_bytes() for name in WRITTEN}
