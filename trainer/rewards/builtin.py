"""The rewards that come with the trainer, by name, and those of them that have options.

They take completions as text. A worker process gets a copy of them, so they are plain functions or frozen dataclasses,
whose fields are their options.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config import ConfigError
from trainer.data.tasks import RewardFunction, exact_match, numeric


@dataclass(frozen=True)
class Regex:
    """1 if the pattern matches the completion, else 0.

    match "whole": all of it; "search": any part of it. prefix: text that the chat template puts before every
    completion (`<think>`, say), which is matched as the completion's beginning. Raises ConfigError.
    """

    pattern: str = ""
    match: str = "whole"
    prefix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ConfigError(f"pattern={self.pattern!r}: give a regular expression, as Python's re reads it")
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"pattern={self.pattern!r}: no regular expression ({error})") from error
        if self.match not in ("whole", "search"):
            raise ConfigError(f"match={self.match!r}: use whole or search")
        if not isinstance(self.prefix, str):
            raise ConfigError(f"prefix={self.prefix!r}: give text")

    def __call__(self, completions: list[str]) -> list[float]:
        pattern = re.compile(self.pattern)
        found = pattern.fullmatch if self.match == "whole" else pattern.search
        return [float(found(self.prefix + text) is not None) for text in completions]


@dataclass(frozen=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), of a completion's length in tokens.

    0 up to max_length - buffer, from there linear to -1 at max_length, and -1 beyond. Raises ConfigError.
    """

    max_length: int = 0
    buffer: int = 0

    def __post_init__(self) -> None:
        for name, value in (("max_length", self.max_length), ("buffer", self.buffer)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: give a number of tokens, at least 1")
        if self.buffer > self.max_length:
            raise ConfigError(f"buffer={self.buffer}: must be at most max_length ({self.max_length})")

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        free = self.max_length - self.buffer
        return [-min(max(len(ids) - free, 0) / self.buffer, 1.0) for ids in completion_ids]


def math(completions: list[str], answer: list[Any]) -> list[float | None]:
    """1 if math-verify finds the completion's last formula or number equal to the answer, else 0.

    answer: a number or LaTeX, with or without $; None for one that cannot be read. math-verify's own time limits are
    signals, which only a main thread has, and are off: a worker's limit takes their place. What goes wrong inside of
    it is raised, and is no wrong answer.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for module in ("parser", "grader"):  # they warn that their limits are off
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, normalization_config=NormalizationConfig(units=True)),
        ExprExtractionConfig(),
    ]

    def read(text: str) -> list[Any]:
        found: list[Any] = parse(text, targets, parsing_timeout=None, raise_on_error=True)
        return found

    def score(text: str, want: Any) -> float | None:
        written = str(want).strip()
        gold = read(written if "$" in written or "\\boxed" in written else f"${written}$")
        if not gold:
            return None
        return float(verify(gold, read(text), timeout_seconds=None, raise_on_error=True))

    return [score(text, want) for text, want in zip(completions, answer, strict=True)]


def _math() -> RewardFunction:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError("math: needs math-verify; pip install 'cowroll[tasks]'") from error
    return math  # type: ignore[return-value]


BUILTIN: dict[str, Callable[..., RewardFunction]] = {
    "exact_match": lambda: exact_match,
    "numeric": lambda: numeric,
    "regex": Regex,
    "math": _math,
    "soft_overlong": SoftOverlong,
}
"""By name, what makes the function, of its options."""
