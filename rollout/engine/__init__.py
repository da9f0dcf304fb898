"""Prompts in, groups of completions out: checks, turns between threads, the loop, and what it counts."""

from rollout.engine.prompts import Prompt, encode_prompt

__all__ = [
    "Prompt",
    "encode_prompt",
]
