"""Print the README's table of figures from finished runs: readme_figures.py RUN_DIR [RUN_DIR ...]"""

import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

ROWS = {
    "mean reward, first 10 steps": ("reward_first10", "{:.2f}"),
    "mean reward, last 10 steps": ("reward_last10", "{:.2f}"),
    "held-out pass@1 (greedy) before": ("eval_pass@1_before", "{:.2f}"),
    "held-out pass@1 (greedy) after": ("eval_pass@1_after", "{:.2f}"),
    "largest gap between generator's and trainer's log-probs": ("logprob_gap_max", "{:g}"),
    "sampled tokens per second": ("tokens_per_second", "{:.0f}"),
    "seconds in all": ("seconds.total", "{:.0f}"),
    "of which warm start": ("seconds.warm_start", "{:.0f}"),
}


def _value(summary: dict[str, Any], path: str) -> float:
    value: Any = summary
    for part in path.split("."):
        value = value[part]
    return float(value)


def main() -> None:
    summaries = [json.loads((Path(folder) / "summary.json").read_text()) for folder in sys.argv[1:]]
    if not summaries:
        raise SystemExit(__doc__)
    print(f"| default run, {len(summaries)} seeds, {torch.get_num_threads()} threads | median | lowest to highest |")
    print("|---|--:|--:|")
    for label, (path, shown) in ROWS.items():
        values = sorted(_value(summary, path) for summary in summaries)
        middle = shown.format(statistics.median(values))
        print(f"| {label} | {middle} | {shown.format(values[0])} to {shown.format(values[-1])} |")
    print(f"\nMeasured on {platform.processor() or platform.machine()}, torch {torch.__version__}.")


if __name__ == "__main__":
    main()
