"""Tensor-level building blocks of the rollout engine: compiled CPU kernels, and the same in torch operations."""
