"""Errors a user can mend. Everything else that goes wrong is a bug of ours and raises as such."""

from rollout_kernels.errors import RolloutError

__all__ = ["ExactnessError", "RolloutError"]


class ExactnessError(RolloutError):
    """`exact="require"` on a machine, dtype or model where generator and trainer would not agree in every bit."""


def short(value: object) -> str:
    """A value, or what an error says, on one line of a message."""
    text, limit = (str(value), 240) if isinstance(value, BaseException) else (repr(value), 80)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
