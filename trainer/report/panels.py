"""Which charts a page has, and from which metrics; those of which no run has a value are left out."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.report.charts import Chart, Line, binned
from trainer.report.markup import duration, escape
from trainer.report.runs import RunRecord

_PHASES = ("rollout", "reward", "forward", "backward", "optimizer", "swap")
"""Of a step, one after another; what is left of it is shown as the rest."""
_BESIDE = ("eval", "checkpoint")
"""Not part of a step's seconds."""
_BINS = 90
"""Steps, or means of neighbouring ones, that are stacked."""


@dataclass(frozen=True)
class Panel:
    title: str
    metric: str
    unit: str = ""
    smooth: bool = True
    size: float = 1.0
    """What the metric is divided by."""
    if_any: bool = False
    """Only worth a chart where it is not 0 throughout."""


PANELS = {
    "Learning": (
        Panel("Reward", "reward"),
        Panel("Held-out pass@1", "eval/pass@1", smooth=False),
        Panel("Held-out reward", "eval/reward", smooth=False),
        Panel("Completion length", "completions/mean_length", " tokens"),
        Panel("Cut off by the length limit", "completions/clipped_ratio"),
        Panel("Entropy", "entropy", " nats"),
        Panel("Groups of equal rewards", "frac_reward_zero_std"),
    ),
    "Updates": (
        Panel("KL to the initial weights", "kl"),
        Panel("Clipped tokens", "clip_ratio/region_mean"),
        Panel("Gradient norm", "grad_norm"),
        Panel("Learning rate", "learning_rate", smooth=False),
        Panel("Loss", "loss"),
        Panel("Largest log-prob gap, generator to trainer", "logprob_gap_max", smooth=False),
        Panel("Skipped updates", "skipped_updates", smooth=False, if_any=True),
        Panel("Completions without a score", "rewards/unscored", smooth=False, if_any=True),
    ),
    "Engine": (
        Panel("KV pool in use", "rollout/kv_cache_usage"),
        Panel("Preemptions", "rollout/preemptions", smooth=False),
        Panel("Sampled tokens per second", "rollout/tokens_per_second"),
        Panel("Prefix cache hits", "rollout/cache_hit_rate", if_any=True),
        Panel("Peak memory", "memory/peak_bytes", " GiB", smooth=False, size=2**30),
    ),
}


def colour(run: int) -> str:
    """Classes that give a run its colour and, past the last colour, dashes."""
    return f"run-{run % 8}" + (" dashed" if run >= 8 else "")


def style(run: int) -> str:
    """Classes of a run's marks: its colour, and by what the legend hides them."""
    return f"{colour(run)} of-{run}"


def charts(runs: Sequence[RunRecord]) -> dict[str, list[Chart]]:
    """By section."""
    sections = {}
    for section, panels in PANELS.items():
        more = _function_panels(runs) if section == "Learning" else ()
        made = [_chart(panel, runs) for panel in (*panels, *more)]
        sections[section] = [chart for chart in made if chart is not None]
    sections["Seconds per step"] = [chart for k in range(len(runs)) if (chart := _time(runs, k)) is not None]
    return {section: made for section, made in sections.items() if made}


def _function_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """Of each reward function, where there are several."""
    names = dict.fromkeys(name for run in runs for line in run.lines for name in line)
    means = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    shown = {name: name.removeprefix("rewards/").removesuffix("/mean") for name in means}
    return [Panel(f"Reward: {shown[name]}", name) for name in means] if len(means) > 1 else []


def _chart(panel: Panel, runs: Sequence[RunRecord]) -> Chart | None:
    lines = []
    for k, run in enumerate(runs):
        if points := [(step, value / panel.size) for step, value in run.points(panel.metric)]:
            lines.append(Line(run.label, style(k), points))
    if not lines or (panel.if_any and not any(value for line in lines for _, value in line.points)):
        return None
    last = max(run.last_step for run in runs)
    return Chart(panel.title, lines, panel.unit, smooth=panel.smooth, bounds=(0, last))


def _time(runs: Sequence[RunRecord], k: int) -> Chart | None:
    """Where the seconds of a run's steps went, stacked."""
    lines = [line for line in runs[k].lines if isinstance(line.get("timing_s/step"), float)]
    if not lines:
        return None
    seconds = {name: [line.get(f"timing_s/{name}", 0.0) for line in lines] for name in (*_PHASES, *_BESIDE)}
    inside = [sum(seconds[name][i] for name in _PHASES) for i in range(len(lines))]
    seconds["rest"] = [max(0.0, line["timing_s/step"] - spent) for line, spent in zip(lines, inside, strict=True)]
    seconds = {name: values for name, values in seconds.items() if any(values)}
    total = sum(map(sum, seconds.values()))
    steps = [line["step"] for line in lines]
    layers, legend = [], []
    for place, (name, values) in enumerate(seconds.items()):
        layers.append(Line(name, f"phase-{place}", binned(list(zip(steps, values, strict=True)), _BINS)))
        mean = duration(statistics.fmean(values))
        legend.append(f'<li class="phase-{place}"><b></b>{name} {mean}, {sum(values) / total:.0%}</li>')
    title = "Phases" if len(runs) == 1 else runs[k].label
    note = f'<ul class="phases" aria-label="{escape(title)}: mean seconds of a step">{"".join(legend)}</ul>'
    last = max(run.last_step for run in runs)
    return Chart(title, layers, " s", stacked=True, note=note, style=f"of-{k}", bounds=(0, last))
