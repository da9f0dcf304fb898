"""Prompts in, groups of completions out: checks, turns between threads, the loop, and what it counts."""
