"""Prompts in, groups of completions out: checks, turns between threads, the loop, and what it counts."""

from typing import TYPE_CHECKING

from rollout.lazy import importer

if TYPE_CHECKING:
    from rollout.engine.prompts import Prompt, encode_prompt

__all__ = [
    "Prompt",
    "encode_prompt",
]

__getattr__ = importer(
    __name__,
    {
        "rollout.engine.prompts": ("Prompt", "encode_prompt"),
    },
)
