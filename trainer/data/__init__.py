"""Rows to train and evaluate on: read, made, and rendered as prompts."""
