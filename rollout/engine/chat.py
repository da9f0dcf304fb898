"""Chat messages to ids, through the tokenizer's own template: what they hold is rendered, or refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from transformers import PreTrainedTokenizerBase

from rollout.errors import RolloutError, short

Message = Mapping[str, Any]

_TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What a template raises on messages that it cannot render, in Jinja's words or in Python's."""
_OURS = {"messages", "tools", "add_generation_prompt"}
"""Variables of a template that are no argument of ChatPrompt.template_kwargs."""


@dataclass(frozen=True)
class ChatPrompt:
    """Chat messages, and what their template takes beside them.

    The ids are those of tokenizer.apply_chat_template(messages, tools=tools, **template_kwargs). A last message of the
    assistant is continued; behind any other the assistant's turn is begun, and goes on with `prefill`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None
    """JSON schemas of functions, or functions that transformers can make them of."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the template, such as enable_thinking. One that it does not read is refused."""
    prefill: str = ""
    """Text behind what the template begins the assistant's turn with, encoded together with it."""


def encode_chat(prompt: ChatPrompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of a chat. Raises RolloutError for what the template would leave out or cannot render."""
    if not tokenizer.chat_template:
        raise RolloutError("the prompt is a list of chat messages, but the tokenizer has no chat template: use strings")
    if not _is_list_of(Mapping, prompt.messages) or not prompt.messages:
        raise RolloutError(f"messages={short(prompt.messages)}: give a list of messages with role and content")
    messages = [_checked(message, f"message {place}") for place, message in enumerate(prompt.messages)]
    continues = messages[-1]["role"] == "assistant"
    if continues and prompt.prefill:
        raise RolloutError("the prompt has a prefill, and its last message is the assistant's: join the two")
    check_characters(prompt.prefill)
    if continues and messages[-1].get("tool_calls"):
        raise RolloutError(
            f"message {len(messages) - 1} calls tools, so there is nothing to go on with: add the tools' answers"
        )
    try:
        _check_template(prompt, messages, tokenizer.get_chat_template(tools=prompt.tools))
        given = {"tools": prompt.tools, "return_dict": False, **prompt.template_kwargs}
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=not continues, continue_final_message=continues, **given
        )
        if prompt.prefill:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
            ids = tokenizer(text + prompt.prefill, add_special_tokens=False)["input_ids"]
    except RolloutError:
        raise
    except _TEMPLATE_ERRORS as error:
        raise RolloutError(f"the chat template refuses {short(prompt.messages)}: {short(error)}") from error
    _check_rendered(messages, tokenizer, given)
    return ids


def _is_list_of(kind: type, value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(part, kind) for part in value)
    )


def _checked(message: Message, where: str) -> dict[str, Any]:
    """The message as templates expect it: content is text, and keys without a value are left out."""
    made = {key: value for key, value in message.items() if value is not None}
    role = made.get("role")
    if not isinstance(role, str) or not role:
        raise RolloutError(f"{where} has role {role!r}: say whose it is, as in 'user'")
    where = f"{where} ({role})"
    if "tool_calls" in made and not _is_list_of(Mapping, made["tool_calls"]):
        raise RolloutError(f"{where}: tool_calls={short(made['tool_calls'])}: give a list of calls")
    content = made.get("content")
    if content is None and not made.get("tool_calls"):
        raise RolloutError(f"{where} has no content")
    if isinstance(content, list | tuple):
        made["content"] = "".join(_text_of(part, f"{where}, part {i}") for i, part in enumerate(content))
    elif not isinstance(content, str | None):
        raise RolloutError(f"{where} has content {short(content)}: give text, or a list of text parts")
    check_characters(made.get("content", ""))
    return made


def check_characters(text: str) -> None:
    """Refuse text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RolloutError(f"{short(text)} has half a surrogate pair, which is no character") from error


def _text_of(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RolloutError(f"{where} is {short(part)}: only parts of type 'text' can be rendered")


def _check_template(prompt: ChatPrompt, messages: Sequence[Message], template: str) -> None:
    """Refuse tools and arguments that the template has no use for."""
    if prompt.tools is not None and not all(isinstance(tool, Mapping) or callable(tool) for tool in prompt.tools):
        raise RolloutError(f"tools={short(prompt.tools)}: give a list of JSON schemas")
    if not isinstance(prompt.template_kwargs, Mapping):
        raise RolloutError(f"template_kwargs={short(prompt.template_kwargs)}: give a mapping of names to values")
    reads = _variables(template)
    if prompt.tools and "tools" not in reads:
        raise RolloutError("the prompt has tools, and the chat template does not render any")
    for name in prompt.template_kwargs:
        if name not in reads or name in _OURS:
            known = ", ".join(sorted(reads - _OURS)) or "none"
            raise RolloutError(
                f"template argument {name!r}: the chat template takes none of that name (it reads: {known})"
            )
    for place, message in enumerate(messages):
        if message.get("tool_calls") and "tool_calls" not in template:
            raise RolloutError(
                f"message {place} ({message['role']}) calls tools, and the chat template renders no calls"
            )


def _check_rendered(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> None:
    """Refuse a message that the template leaves out, as many do with roles that they do not know."""
    # templates may render a call and leave out what was said beside it
    said = {i: f"\ue0f0{i}\ue0f1" for i, m in enumerate(messages) if m.get("content") and not m.get("tool_calls")}
    marked = [
        {**message, "content": message["content"] + said[i]} if i in said else dict(message)
        for i, message in enumerate(messages)
    ]
    try:
        text = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True, **given)
    except _TEMPLATE_ERRORS:  # it looks at more of the content than it prints
        return
    for place, mark in said.items():
        if mark not in text:
            raise RolloutError(f"message {place} ({messages[place]['role']}): the chat template leaves it out")


class _Generation(jinja2.ext.Extension):
    """transformers' own tag, {% generation %}; here only its contents matter."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """Names that the template reads without having set them, functions of its environment apart."""
    environment = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols])
    known = {"raise_exception", "strftime_now", "namespace", *environment.globals}
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)) - known)
