"""`generate_rollouts`: the library in one call."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.config import RolloutConfig, SamplingParams
from rollout.engine.engine import RolloutEngine
from rollout.engine.prompts import Prompt
from rollout.engine.requests import OnError
from rollout.errors import RolloutError
from rollout.model.builtin import build_tiny, warm_started_directory
from rollout.types import RolloutGroup

_current: RolloutEngine | None = None


@contextlib.contextmanager
def use_engine(engine: RolloutEngine) -> Iterator[None]:
    """Make `engine` the one that generate_rollouts uses while it is not told a model; a trainer does."""
    global _current
    previous, _current = _current, engine
    try:
        yield
    finally:
        _current = previous


def _builtin_engine(config: RolloutConfig | None) -> RolloutEngine:
    warm_started = warm_started_directory()
    if warm_started is not None:
        what, engine = (
            f"warm-started by an earlier training run ({warm_started})",
            RolloutEngine(warm_started, None, config),
        )
    else:
        what, engine = "with random weights (not warm-started)", RolloutEngine(*build_tiny(seed=0), config)
    warnings.warn(f"no model given and no trainer is running: using the built-in tiny model, {what}", stacklevel=3)
    return engine


def generate_rollouts(
    prompts: Sequence[Prompt],
    n: int = 16,
    *,
    model: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: RolloutConfig | None = None,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    on_error: OnError = "raise",
) -> list[RolloutGroup]:
    """n completions of each prompt (strings, id lists, chat message lists or ChatPrompts), in order.

    model: a directory or a module; None: the running trainer's engine, else the built-in tiny model (with a warning).
    sampling: all options; max_new_tokens, temperature and seed override it. For many calls on one model make a
    RolloutEngine once: this function makes one per call, and closes it. Raises RolloutError on bad input.
    """
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    params = replace(sampling or SamplingParams(), **{name: v for name, v in given.items() if v is not None})  # type: ignore[arg-type]
    if model is None and (tokenizer is not None or (config is not None and _current is not None)):
        raise RolloutError("tokenizer= and config= go with model=; a running trainer's engine has its own")
    if model is None and _current is not None:
        return _current.generate_rollouts(prompts, n, params, on_error=on_error)
    with RolloutEngine(model, tokenizer, config) if model is not None else _builtin_engine(config) as engine:
        return engine.generate_rollouts(prompts, n, params, on_error=on_error)
