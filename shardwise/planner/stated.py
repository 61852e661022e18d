"""How far predictions were off on the measured runs of `benchmarks/runs.csv`. Written by `tools/plots.py`."""

RUNS = 1334
TIME_MEDIAN, TIME_P90 = 0.056, 0.171
MEMORY_RUNS = 103
MEMORY_MEDIAN, MEMORY_P90 = 0.056, 0.282

SENTENCE = (
    f"On {RUNS:,} measured runs of other people's systems half of the predicted step times are within "
    f"{100 * TIME_MEDIAN:.0f}% of the measured ones, nine of ten within {100 * TIME_P90:.0f}%; peak memory, known of "
    f"{MEMORY_RUNS} runs, within {100 * MEMORY_MEDIAN:.0f}% and {100 * MEMORY_P90:.0f}%."
)
