"""Completions on the page: each token shaded by how probable it was."""

import math
from collections.abc import Sequence
from typing import Any

from trainer.report.markup import escape, number
from trainer.report.panels import style
from trainer.report.runs import RunRecord

_STEPS, _TOKENS = 60, 80_000
"""At most so many steps, and about so many tokens, of all runs together."""
_LONG = 300
"""Characters of a prompt that are shown unopened."""
BOUNDS = (0.95, 0.8, 0.6, 0.4, 0.2, 0.05)
"""Probabilities below which a token has the next shade; the first has none."""


def shade(logprob: float | None) -> int:
    """0 .. 6, the least probable last; 0 for a token that was not drawn."""
    return 0 if logprob is None else sum(math.exp(logprob) < bound for bound in BOUNDS)


def chosen_steps(runs: Sequence[RunRecord]) -> list[int]:
    """Steps with completions of which the page shows some: evenly spread, with the first and the last."""
    tokens: dict[int, int] = {}
    for run in runs:
        for one in run.completions:
            step = int(one["step"])
            tokens[step] = tokens.get(step, 0) + len(one.get("tokens", ())) + 50
    steps = sorted(tokens)
    if not steps:
        return []
    most = min(_STEPS, max(2, _TOKENS * len(steps) // sum(tokens.values())))
    if len(steps) <= most:
        return steps
    return [steps[round(k * (len(steps) - 1) / (most - 1))] for k in range(most)]


def render_samples(runs: Sequence[RunRecord]) -> str:
    """The section; empty without completions."""
    steps = chosen_steps(runs)
    if not steps:
        return ""
    shown = set(steps)
    cards = [
        _card(one, run.label if len(runs) > 1 else "", k)
        for step in steps
        for k, run in enumerate(runs)
        for one in run.completions
        if int(one["step"]) == step and step in shown
    ]
    total = sum(len(run.completions) for run in runs)
    note = "" if len(cards) == total else f" {len(cards)} of {total} are on this page, of steps evenly spread."
    options = "".join(f"<option>{step}</option>" for step in steps)
    return f"""<section id="completions"><h2>Completions</h2>
<p class="muted">Drawn at random from each step's. The less probable a token was, the stronger its shade.{note}</p>
<div class="tools"><div class="filter" hidden><label for="step">Step</label>
<button type="button" id="before" aria-label="Step before">\N{LEFTWARDS ARROW}</button>
<select id="step"><option value="">all</option>{options}</select>
<button type="button" id="behind" aria-label="Step after">\N{RIGHTWARDS ARROW}</button></div>{_legend()}</div>
<div class="cards">{"".join(cards)}</div></section>"""


def _legend() -> str:
    edges = ("1", *(f"{bound:g}" for bound in BOUNDS), "0")
    shades = (f'<i class="p{k}">{edges[k]}\N{EN DASH}{edges[k + 1]}</i>' for k in range(len(BOUNDS) + 1))
    return f'<p class="shades">Probability {"".join(shades)}</p>'


def _card(one: dict[str, Any], label: str, run: int) -> str:
    reward = one.get("reward")
    facts = [f'<span class="step">step {int(one["step"])}</span>']
    if label:
        facts.insert(0, f'<span class="chip {style(run)}">{escape(label)}</span>')
    facts.append(f"<strong>{'no reward' if reward is None else f'reward {number(reward)}'}</strong>")
    parts = one.get("rewards", {})
    if len(parts) > 1:
        facts += [f"<span>{escape(name)} {'none' if v is None else number(v)}</span>" for name, v in parts.items()]
    facts += [f"<span>{escape(name)}: {escape(value)}</span>" for name, value in one.get("extras", {}).items()]
    ended = {"stop": "ended by itself", "length": "cut off"}.get(one.get("finish_reason", ""), one.get("finish_reason"))
    facts.append(f'<span class="muted">{int(one.get("num_tokens", 0))} tokens, {escape(ended)}</span>')
    return (
        f'<article class="card of-{run}" data-step="{int(one["step"])}"><header>{"".join(facts)}</header>'
        f"{_prompt(str(one.get('prompt', '')))}"
        f'<pre class="tokens" aria-label="Completion">{_tokens(one)}</pre></article>'
    )


def _prompt(text: str) -> str:
    if len(text) <= _LONG:
        return f'<pre class="prompt" aria-label="Prompt">{escape(text)}</pre>'
    return (
        f'<details><summary><span class="prompt">{escape(text[: _LONG // 2])} \N{HORIZONTAL ELLIPSIS}</span></summary>'
        f'<pre class="prompt" aria-label="Prompt">{escape(text)}</pre></details>'
    )


def _tokens(one: dict[str, Any]) -> str:
    tokens, logprobs = one.get("tokens", ()), one.get("logprobs", ())
    left_out, first = one.get("left_out", 0), len(tokens) * 3 // 4
    shown = []
    for place, (text, logprob) in enumerate(zip(tokens, logprobs, strict=False)):
        if left_out and place == first:
            shown.append(
                f'<em class="muted">\n\N{HORIZONTAL ELLIPSIS} {left_out} tokens \N{HORIZONTAL ELLIPSIS}\n</em>'
            )
        if text:
            title = "not drawn" if logprob is None else f"p {math.exp(logprob):.3g}, log-prob {logprob:g}"
            line = " nl" if text.startswith("\n") else ""
            shown.append(f'<i class="p{shade(logprob)}{line}" title="{title}">{escape(text)}</i>')
    return "".join(shown) or '<em class="muted">nothing</em>'
