"""Prompts in, groups of completions out: checks, turns between threads, the loop, and what it counts."""

from rollout.engine.prompts import Prompt, decode_completion, encode_prompt

__all__ = [
    "Prompt",
    "decode_completion",
    "encode_prompt",
]
