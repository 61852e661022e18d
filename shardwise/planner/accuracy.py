"""How far predictions were off on the measured runs of `benchmarks/runs.csv`. Written by `tools/plots.py`."""

NUM_RUNS = 1334
TIME_MEDIAN, TIME_P90 = 0.056, 0.171
NUM_MEMORY_RUNS = 103
MEMORY_MEDIAN, MEMORY_P90 = 0.056, 0.282

ACCURACY_SENTENCE = (
    f"On {NUM_RUNS:,} measured runs of other people's systems half of the predicted step times are within "
    f"{100 * TIME_MEDIAN:.0f}% of the measured ones, nine of ten within {100 * TIME_P90:.0f}%; peak memory, known of "
    f"{NUM_MEMORY_RUNS} runs, within {100 * MEMORY_MEDIAN:.0f}% and {100 * MEMORY_P90:.0f}%."
)
