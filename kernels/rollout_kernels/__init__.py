"""Tensor-level building blocks of the rollout engine: torch references that are also the CPU path."""
