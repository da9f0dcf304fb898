"""What a key of the configuration may be: a default, a range, what one without a default needs."""

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message begins with the key."""


def setting(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
    trajectory: bool = True,
    needs: str | None = None,
) -> T:
    limits = {
        "at_least": at_least, "above": above, "at_most": at_most, "choices": choices, "trajectory": trajectory,
        "needs": needs,
    }  # fmt: skip
    # OmegaConf wants a default for every field; a factory keeps lists apart
    made: T = field(default_factory=lambda: default, metadata=limits)
    return made
