"""Train the default task with each algorithm, one after the other, and print the README's table.

    python scripts/compare_algorithms.py [--only grpo,dapo] [KEY=VALUE ...]

Further arguments are the trainer's own, for all runs.
Runs lie in outputs/compare-NAME; a finished one is not done again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from trainer.config.algorithm_options import ALGORITHMS


def run(name: str, overrides: list[str]) -> dict[str, float]:
    """The summary of a run with the algorithm."""
    folder = Path("outputs") / f"compare-{name}"
    if not (folder / "summary.json").exists():
        own = [f"algorithm={name}", f"name=compare-{name}", f"run_dir={folder}", "tracking=none", "checkpoint.every=0"]
        subprocess.run([sys.executable, "-m", "trainer", *own, *overrides], check=True)
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="algorithms, separated by commas; default: all")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    rows = {name: run(name, args.overrides) for name in args.only.split(",")}
    print("| algorithm | reward, first 10 steps | last 10 | held-out pass@1 after | largest gap |")
    print("|---|--:|--:|--:|--:|")
    for name, summary in rows.items():
        first, last, after = (summary[key] for key in ("reward_first10", "reward_last10", "eval_pass@1_after"))
        print(f"| {name} | {first:.2f} | {last:.2f} | {after:.2f} | {summary['logprob_gap_max']:g} |")


if __name__ == "__main__":
    main()
