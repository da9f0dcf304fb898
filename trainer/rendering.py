"""A row's prompt as the engine takes it, with what the row has for its chat template."""

from collections.abc import Mapping
from typing import Any

from rollout import ChatPrompt
from rollout.prompts import Prompt
from trainer.config import ConfigError
from trainer.rows import Row

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
"""Fields of a row that go to its chat template, beside being columns for rewards."""


def prompt_of(row: Row, template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
    """The row's prompt; messages get the row's tools, and the arguments of all rows overridden by its own.

    template_kwargs: task.chat_template_kwargs. Raises ConfigError for fields of the wrong kind, and for arguments of a
    prompt that is text.
    """
    tools, own = row.columns.get(TOOLS), row.columns.get(TEMPLATE_KWARGS)
    if not isinstance(tools, list | None):
        raise ConfigError(f"{TOOLS}={tools!r}: give a list of JSON schemas")
    if not isinstance(own, dict | None):
        raise ConfigError(f"{TEMPLATE_KWARGS}={own!r}: give an object of names and values")
    arguments = {**(template_kwargs or {}), **(own or {})}
    if isinstance(row.prompt, str):
        for name, given in ((TOOLS, tools), (TEMPLATE_KWARGS, arguments)):
            if given:
                raise ConfigError(f"{name} are for a chat template, and this prompt is text: give messages")
        return row.prompt
    return ChatPrompt(row.prompt, tools, arguments)
