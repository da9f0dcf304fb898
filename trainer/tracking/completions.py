"""Completions that a step shows of itself: a few, with what they were worth and how probable each token was."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rollout import Rollout, RolloutGroup
from rollout.engine import decode_completion
from trainer.data.rows import COMPLETIONS_PURPOSE, permutation
from trainer.rewards.scores import Scores

_FIRST, _LAST = 768, 256
"""Tokens that are shown of a longer text."""
_CONTEXT = 8
"""Tokens that a token's text is decoded behind."""


@dataclass(frozen=True)
class SampledCompletion:
    """One completion of a step."""

    step: int
    prompt: str
    """As the model was given it, special tokens included."""
    completion: str
    finish_reason: str
    reward: float | None
    """None: no function has scored it."""
    rewards: dict[str, float | None]
    """By function, before weights."""
    extras: dict[str, Any]
    """What functions gave to log_extra."""
    num_tokens: int
    tokens: list[str]
    """What each token adds to the text, special tokens included."""
    logprobs: list[float | None]
    """Per token, its log-prob at temperature 1 over the whole vocabulary; None for one that was not drawn."""
    left_out: int
    """Tokens between the first 768 and the last 256, of which nothing is shown."""

    def line(self) -> dict[str, Any]:
        """The line in completions.jsonl; what there is nothing of is left out."""
        return {name: value for name, value in vars(self).items() if name not in ("extras", "left_out") or value}


def table_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """The row in a dashboard's table of what stands in a line of completions.jsonl, by TRL's names."""
    row: dict[str, Any] = {name: line[name] for name in ("step", "prompt", "completion")}
    row |= line.get("extras", {})
    row |= {f"rewards/{name}": value for name, value in line["rewards"].items()}
    return row | {"reward": line["reward"]}


def sample_completions(
    groups: Sequence[RolloutGroup],
    scores: Scores,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    *,
    seed: int,
    count: int,
) -> list[SampledCompletion]:
    """At most `count` of a step's completions, in the step's order; which, is a function of seed and step alone."""
    places = [(g, i) for g, group in enumerate(groups) for i in range(len(group.rollouts))]
    chosen = sorted(permutation(len(places), seed, COMPLETIONS_PURPOSE, step)[:count].tolist())
    return [_sampled(groups[g], i, scores, g, tokenizer, step) for g, i in (places[place] for place in chosen)]


def _sampled(
    group: RolloutGroup, i: int, scores: Scores, g: int, tokenizer: PreTrainedTokenizerBase, step: int
) -> SampledCompletion:
    rollout = group.rollouts[i]
    tokens, logprobs, left_out = _shown(group.prompt_ids, rollout, tokenizer)
    return SampledCompletion(
        step=step,
        prompt=_prompt_text(group.prompt_ids, tokenizer),
        completion=_joined(tokens, left_out) if left_out or rollout.text is None else rollout.text,
        finish_reason=rollout.finish_reason,
        reward=float(scores.totals[g, i]) if scores.scored[g, i] else None,
        rewards={name: _finite(float(values[g, i])) for name, values in scores.parts.items()},
        extras={name: columns[g][i] for name, columns in scores.extras.items()},
        num_tokens=len(rollout.completion_ids),
        tokens=tokens,
        logprobs=logprobs,
        left_out=left_out,
    )


def _shown(
    prompt_ids: Sequence[int], rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[float | None], int]:
    """Texts and log-probs of a completion's tokens, and how many in its middle are left out."""
    ids = rollout.completion_ids
    drawn = zip(rollout.raw_logprobs, rollout.loss_mask, strict=True)
    logprobs = [_finite(round(value, 4)) if mask else None for value, mask in drawn]
    left_out = max(0, len(ids) - _FIRST - _LAST)
    if not left_out:
        return token_texts(prompt_ids, ids, tokenizer), logprobs, 0
    first = token_texts(prompt_ids, ids[:_FIRST], tokenizer)
    last = token_texts(ids[:-_LAST], ids[-_LAST:], tokenizer)
    return first + last, logprobs[:_FIRST] + logprobs[-_LAST:], left_out


def _prompt_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    def text(some: Sequence[int]) -> str:
        return decode_completion([], some, tokenizer, skip_special_tokens=False)

    left_out = len(ids) - _FIRST - _LAST
    return text(ids) if left_out <= 0 else _joined([text(ids[:_FIRST]), text(ids[-_LAST:])], left_out, first=1)


def _joined(texts: Sequence[str], left_out: int, first: int = _FIRST) -> str:
    if not left_out:
        return "".join(texts)
    return f"{''.join(texts[:first])}\n... {left_out} tokens ...\n{''.join(texts[first:])}"


def token_texts(before: Sequence[int], ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each of `ids`, behind those before, adds to the text, special tokens included.

    A character of several tokens stands at the last of them, and the others add nothing.
    """
    texts: list[str] = []
    context, pending = list(before[-_CONTEXT:]), []
    for place, token in enumerate(ids):
        pending.append(token)
        text = decode_completion(context, pending, tokenizer, skip_special_tokens=False)
        if text.endswith("\ufffd") and place < len(ids) - 1:
            texts.append("")
            continue
        texts.append(text)
        context, pending = [*context, *pending][-_CONTEXT:], []
    return texts


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
