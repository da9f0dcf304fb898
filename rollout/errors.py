"""Errors a user can mend. Everything else that goes wrong is a bug of ours and raises as such."""

from rollout_kernels.errors import RolloutError

__all__ = ["ExactnessError", "RolloutError"]


class ExactnessError(RolloutError):
    """`exact="require"` on a machine, dtype or model where generator and trainer would not agree in every bit."""
