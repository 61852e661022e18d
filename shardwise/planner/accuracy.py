"""The planner's error on the measured runs of `benchmarks/runs.csv`, read from `accuracy.toml`."""

import tomllib
from pathlib import Path

_FIGURES = tomllib.loads((Path(__file__).parent / "accuracy.toml").read_text(encoding="utf-8"))

ACCURACY_SENTENCE = (
    "On {time_runs:,} measured runs of other training systems, half of the predicted step times are within "
    "{time_median:.0%} of the measured ones and 90% within {time_p90:.0%}; for peak memory ({memory_runs} runs) the "
    "figures are {memory_median:.0%} and {memory_p90:.0%}."
).format(**_FIGURES)
