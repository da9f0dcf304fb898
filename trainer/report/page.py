"""The page: runs in, one string of HTML out, with its styles and its script inside and nothing fetched."""

import base64
import hashlib
import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from trainer.config import ConfigError
from trainer.report.charts import Chart
from trainer.report.markup import duration, escape, number
from trainer.report.panels import charts, colour
from trainer.report.runs import RunRecord, read_runs
from trainer.report.samples import render_samples

_WINDOW = 10
"""Steps at a run's begin and end over which its reward is averaged."""


def write_report(paths: Sequence[str], out: str | None) -> Path:
    """Write the page of the runs in these folders and return where it is. Raises ConfigError."""
    runs = read_runs(paths)
    if out is None and len(runs) > 1:
        raise ConfigError(f"out: {len(runs)} runs have no folder in common: give out=FILE.html")
    path = runs[0].path / "report.html" if out is None else Path(out).expanduser().absolute()
    text = render_page(runs)
    partial = path.with_name(f".{path.name}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # it may never have been made
            partial.unlink()
        raise ConfigError(f"out: {path} cannot be written: {error.strerror}; give another out=FILE.html") from error
    return path


def render_page(runs: Sequence[RunRecord]) -> str:
    """The page. Without its script curves and texts are there, and the legend works."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    sections = charts(runs)
    ordered = [chart for made in sections.values() for chart in made]
    css, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    css += "".join(f"body:has(#run-{k}:not(:checked)) .of-{k}{{display:none}}\n" for k in range(len(runs)))
    data = json.dumps([chart.data() for chart in ordered]).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(script)}; img-src data:"
    body = [_sections(sections), render_samples(runs), _config(runs)]
    if not any(run.lines for run in runs):
        body.insert(0, '<p class="muted">No step has ended yet.</p>')
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} \N{MIDDLE DOT} cowroll</title><link rel="icon" href="data:,">
<style>{css}</style></head>
<body><header class="top"><h1>{escape(title)}</h1>{_figures(runs)}</header>
<main>{"".join(body)}</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script></body></html>
"""


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- what it came to ----------------------------------------------------------------------------------------------


def _facts(run: RunRecord) -> dict[str, str]:
    """The figures that one looks for first; those that are not known are left out."""
    facts, steps = {}, run.config.get("steps", "")
    if run.ended:
        facts["Steps"] = f"{run.last_step}, ended"
    else:
        facts["Steps"] = f"{run.last_step} of {steps} so far" if steps else f"{run.last_step} so far"
    rewards, scores = run.values("reward"), run.values("eval/pass@1")
    if rewards:
        first, last = statistics.fmean(rewards[:_WINDOW]), statistics.fmean(rewards[-_WINDOW:])
        facts[f"Reward, first and last {_WINDOW}"] = _change(first, last)
    if scores:
        facts["Held-out pass@1"] = _change(scores[0], scores[-1])
    if gaps := run.values("logprob_gap_max"):
        facts["Largest log-prob gap"] = number(max(gaps))
    if speeds := run.values("rollout/tokens_per_second"):
        facts["Tokens per second, median"] = number(statistics.median(speeds))
    if seconds := run.values("timing_s/step"):
        facts["Time in steps"] = duration(sum(seconds))
    if peaks := run.values("memory/peak_bytes"):
        facts["Peak memory"] = f"{max(peaks) / 2**30:.2f} GiB"
    return facts


def _change(first: float, last: float) -> str:
    return f"{first:.3f} \N{RIGHTWARDS ARROW} {last:.3f}"


def _figures(runs: Sequence[RunRecord]) -> str:
    """One run's as tiles; those of several as a table, whose first column shows and hides a run."""
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        tiles = (f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts[0].items())
        return f'<p class="muted">{escape(_about(runs[0]))}</p><dl class="tiles">{"".join(tiles)}</dl>'
    names = list(dict.fromkeys(name for some in facts for name in some))
    rows = []
    for k, (run, some) in enumerate(zip(runs, facts, strict=True)):
        cells = "".join(f"<td>{escape(some.get(name, ''))}</td>" for name in names)
        box = f'<input type="checkbox" id="run-{k}" checked><b></b><span>{escape(run.label)}</span>'
        rows.append(f'<tr><th scope="row"><label class="key {colour(k)}">{box}</label></th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("Run", *names))
    return _table("Runs", f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>")


def _about(run: RunRecord) -> str:
    """What trained on what, by which algorithm."""
    config = run.config
    model = config.get("model.path") or config.get("model.kind", "")
    parts = (model, config.get("task.name") or config.get("task.kind", ""), config.get("algorithm.kind", ""))
    return " \N{MIDDLE DOT} ".join(part for part in (*parts, str(run.path)) if part)


# -- sections -----------------------------------------------------------------------------------------------------


def _sections(sections: dict[str, list[Chart]]) -> str:
    parts, place = [], 0
    for name, made in sections.items():
        figures = []
        for chart in made:
            figures.append(chart.render(place))
            place += 1
        parts.append(f'<section><h2>{name}</h2><div class="charts">{"".join(figures)}</div></section>')
    return "".join(parts)


def _config(runs: Sequence[RunRecord]) -> str:
    """Every key with its value; of several runs first those that differ."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    tables = ""
    if len(runs) > 1:
        text = "Where the runs differ" if differing else "The runs do not differ"
        tables = f"<h3>{text}</h3>{_values(runs, differing) if differing else ''}"
    tables += f"<details><summary>All {len(keys)} keys</summary>{_values(runs, keys)}</details>"
    return f"<section><h2>Configuration</h2>{tables}</section>"


def _values(runs: Sequence[RunRecord], keys: Sequence[str]) -> str:
    names = (f'<th scope="col">{escape(run.label)}</th>' for run in runs)
    rows = []
    for key in keys:
        cells = (f"<td><code>{escape(run.config.get(key, ''))}</code></td>" for run in runs)
        rows.append(f'<tr><th scope="row"><code>{escape(key)}</code></th>{"".join(cells)}</tr>')
    head = f'<thead><tr><th scope="col">Key</th>{"".join(names)}</tr></thead>'
    return _table("Configuration", f"{head}<tbody>{''.join(rows)}</tbody>")


def _table(name: str, inside: str) -> str:
    """In a frame of its own that scrolls sideways, by keyboard too, so that the page does not."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>{inside}</table></div>'
