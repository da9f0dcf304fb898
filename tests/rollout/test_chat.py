"""Chat prompts: everything that messages, tools and arguments say is rendered as transformers does it, or refused."""

from typing import Any

import pytest

from rollout import ChatPrompt, RolloutError
from rollout.engine.prompts import Prompt, encode_prompt
from tiny_models import (
    BOS_CHAT_TEMPLATE,
    CHAT_TEMPLATE,
    TEXT_VOCAB,
    TOOL_CHAT_TEMPLATE,
    byte_tokenizer,
    framed,
    greedy,
    random_model,
    small_engine,
)

HELLO: dict[str, Any] = {"role": "user", "content": "Hi!"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def rendered(prompt: Prompt, template: str | dict[str, str] = TOOL_CHAT_TEMPLATE) -> str:
    """Text of the ids that a prompt becomes."""
    tokenizer = byte_tokenizer(chat_template=template)
    text = tokenizer.decode(encode_prompt(prompt, tokenizer, TEXT_VOCAB))
    assert isinstance(text, str)
    return text


def by_transformers(messages: Any, **arguments: Any) -> list[int]:
    tokenizer = byte_tokenizer(chat_template=TOOL_CHAT_TEMPLATE)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert isinstance(ids, list)
    return ids


def encode(prompt: Prompt) -> list[int]:
    return encode_prompt(prompt, byte_tokenizer(chat_template=TOOL_CHAT_TEMPLATE), TEXT_VOCAB)


# -- tools and arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [None, [], TOOLS, TOOLS * 2])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_tools_and_arguments_are_rendered_as_transformers_does(tools: Any, arguments: dict[str, Any]) -> None:
    expected = by_transformers([HELLO], tools=tools, add_generation_prompt=True, **arguments)
    assert encode(ChatPrompt([HELLO], tools, arguments)) == expected


def test_what_arguments_change_can_be_seen() -> None:
    assert rendered([HELLO]) == "<user>Hi!\nA:"
    assert rendered(ChatPrompt([HELLO], template_kwargs={"enable_thinking": False})) == "<user>Hi!\nA:<think></think>"
    assert rendered(ChatPrompt([HELLO], TOOLS)).startswith('tools: [{"type": "function", "function": {"name": "add"')


def add(a: int) -> int:
    """Adds one.

    Args:
        a: A number.
    """
    return a + 1


def test_a_function_is_a_tool() -> None:
    assert encode(ChatPrompt([HELLO], [add])) == by_transformers([HELLO], tools=[add], add_generation_prompt=True)


def test_the_engine_takes_chat_prompts() -> None:
    prompt = ChatPrompt([HELLO], TOOLS, {"enable_thinking": False})
    tokenizer = byte_tokenizer(chat_template=TOOL_CHAT_TEMPLATE)
    with small_engine(random_model("qwen3", vocab_size=TEXT_VOCAB), tokenizer) as engine:
        one, other = engine.generate_rollouts([prompt, [HELLO]], 1, greedy(2))
    assert (one.prompt_ids, other.prompt_ids) == (encode(prompt), encode([HELLO]))


def test_tools_choose_among_named_templates() -> None:
    named = {"default": CHAT_TEMPLATE, "tool_use": TOOL_CHAT_TEMPLATE}
    assert rendered([HELLO], named) == "<user>Hi!\nA:"
    assert rendered(ChatPrompt([HELLO], TOOLS), named).startswith("tools: ")


@pytest.mark.parametrize(
    ("head", "reads"),
    [
        ("{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}", True),
        ("{{ date | default('today') }}", True),
        ("{% generation %}{{ date }}{% endgeneration %}", True),
        ("{% set date = 'today' %}{{ date }}", False),
        ("{% for date in [1, 2] %}{{ date }}{% break %}{% endfor %}", False),
        ("date", False),
        ("", False),
    ],
)
def test_arguments_are_those_that_the_template_reads(head: str, reads: bool) -> None:
    prompt = ChatPrompt([HELLO], template_kwargs={"date": "yesterday"})
    if reads:
        assert rendered(prompt, head + CHAT_TEMPLATE) == "yesterday<user>Hi!\nA:"
    else:
        with pytest.raises(
            RolloutError, match=r"template argument 'date': .* takes none of that name \(it reads: none"
        ):
            rendered(prompt, head + CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ChatPrompt([HELLO], template_kwargs={"thinking": False}), r"'thinking': .*\(it reads: enable_thinking\)"),
        (ChatPrompt([HELLO], template_kwargs={"messages": []}), "template argument 'messages'"),
        (ChatPrompt([HELLO], template_kwargs={"add_generation_prompt": False}), "argument 'add_generation_prompt'"),
        (ChatPrompt([HELLO], template_kwargs={"tokenize": False}), "template argument 'tokenize'"),
        (ChatPrompt([HELLO], template_kwargs="thinking"), "template_kwargs='thinking': give a mapping"),  # type: ignore[arg-type]
        (ChatPrompt([HELLO], tools="add"), "tools='add': give a list of JSON schemas"),  # type: ignore[arg-type]
        (ChatPrompt([HELLO], tools=[5]), r"tools=\[5\]: give a list of JSON schemas"),  # type: ignore[list-item]
        (ChatPrompt([]), r"messages=\[\]: give a list of messages"),
        (ChatPrompt("Hi!"), "messages='Hi!': give a list of messages"),  # type: ignore[arg-type]
        (ChatPrompt([HELLO, 3]), "give a list of messages"),  # type: ignore[list-item]
    ],
    ids=str,
)
def test_arguments_that_would_be_dropped_are_named(prompt: ChatPrompt, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        rendered(prompt)


def test_tools_that_a_template_does_not_render_are_refused() -> None:
    with pytest.raises(RolloutError, match="the prompt has tools, and the chat template does not render any"):
        rendered(ChatPrompt([HELLO], TOOLS), CHAT_TEMPLATE)
    calls = [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}, HELLO]
    with pytest.raises(
        RolloutError, match=r"message 1 \(assistant\) calls tools, and the chat template renders no calls"
    ):
        rendered(calls, CHAT_TEMPLATE)


def test_a_chat_prompt_needs_a_template_and_a_tokenizer() -> None:
    with pytest.raises(RolloutError, match="no chat template"):
        encode_prompt(ChatPrompt([HELLO]), byte_tokenizer(chat_template=None), TEXT_VOCAB)
    with pytest.raises(RolloutError, match="needs a tokenizer"):
        encode_prompt(ChatPrompt([HELLO]), None, TEXT_VOCAB)


@pytest.mark.parametrize("prefill", ["<think>", " 4", "é\n", "<eos>"])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_a_prefill_goes_on_with_what_the_template_begins(prefill: str, arguments: dict[str, Any]) -> None:
    """One text, so that tokens may lie across the border, and a special token's text is that token."""
    tokenizer = byte_tokenizer(chat_template=TOOL_CHAT_TEMPLATE)
    ids = encode_prompt(ChatPrompt([HELLO], TOOLS, arguments, prefill), tokenizer, TEXT_VOCAB)
    text = tokenizer.apply_chat_template([HELLO], tools=TOOLS, tokenize=False, add_generation_prompt=True, **arguments)
    assert ids == tokenizer(text + prefill, add_special_tokens=False)["input_ids"]
    assert ids[: len(encode(ChatPrompt([HELLO], TOOLS, arguments)))] == encode(ChatPrompt([HELLO], TOOLS, arguments))


def test_a_prefill_is_neither_cut_nor_framed() -> None:
    """By settings that a tokenizer's file may have, or by its post-processor."""
    plain = byte_tokenizer(chat_template=BOS_CHAT_TEMPLATE)
    expected = encode_prompt(ChatPrompt([HELLO], prefill="Yes"), plain, TEXT_VOCAB)
    other = framed(byte_tokenizer(chat_template=BOS_CHAT_TEMPLATE), "<bos> $A <eos>")
    other.backend_tokenizer.enable_truncation(4)
    other.backend_tokenizer.enable_padding(length=99)
    assert encode_prompt(ChatPrompt([HELLO], prefill="Yes"), other, TEXT_VOCAB) == expected
    assert plain.decode(expected) == "<bos><user>Hi!\nA:Yes"


def test_a_prefill_that_would_be_lost_is_refused() -> None:
    with pytest.raises(RolloutError, match="has a prefill, and its last message is the assistant's"):
        encode(ChatPrompt([HELLO, {"role": "assistant", "content": "a"}], prefill="b"))
    with pytest.raises(RolloutError, match="half a surrogate pair"):
        encode(ChatPrompt([HELLO], prefill="\ud800"))


# -- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["The sum", "The sum ", "  x", "", [{"type": "text", "text": "The sum"}]])
def test_a_last_message_of_the_assistant_is_continued(content: Any) -> None:
    """Its turn is left open: no end token, and no second turn behind it."""
    text = content if isinstance(content, str) else content[0]["text"]
    assert rendered([HELLO, {"role": "assistant", "content": content}]) == f"<user>Hi!\nA:{text}"
    message = {"role": "assistant", "content": text}
    expected = by_transformers([HELLO, message], continue_final_message=True)
    assert encode([HELLO, {"role": "assistant", "content": content}]) == expected


def test_an_earlier_message_of_the_assistant_is_closed() -> None:
    messages = [HELLO, {"role": "assistant", "content": "Yes."}, HELLO]
    assert rendered(messages) == "<user>Hi!\nA:Yes.<eos>\n<user>Hi!\nA:"


@pytest.mark.parametrize("content", [None, "", "Wait.", "left out"])
def test_calls_and_their_results_are_rendered(content: str | None) -> None:
    """A call stands for the text that its message lacks; keys of value None are as good as left out."""
    call: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [CALL], "refusal": None}
    if content == "left out":
        del call["content"]
        content = ""
    text = rendered([HELLO, call, {"role": "tool", "content": "2"}])
    assert text.startswith(f'<user>Hi!\nA:{content or ""}call: {{"type": "function"')
    assert text.endswith("<eos>\nresult: 2\nA:")


@pytest.mark.parametrize("parts", [["Hi!"], ["H", "i!"], ["", "Hi!", ""]])
def test_parts_of_text_are_joined(parts: list[str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    assert rendered([{"role": "user", "content": content}]) == "<user>Hi!\nA:"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user"}, r"message 1 \(user\) has no content"),
        ({"role": "user", "content": None}, r"message 1 \(user\) has no content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, r"message 1 \(assistant\) has no content"),
        ({"role": "user", "content": 5}, r"message 1 \(user\) has content 5: give text"),
        ({"role": "user", "content": {"text": "a"}}, r"message 1 \(user\) has content \{'text': 'a'\}"),
        ({"role": "user", "content": ["a"]}, r"message 1 \(user\), part 0 is 'a': only parts of type 'text'"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]},
            r"message 1 \(user\), part 1 is \{'type': 'image'",
        ),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "part 0 is"),
        ({"role": "user", "content": "a\ud800"}, "half a surrogate pair"),
        ({"content": "a"}, "message 1 has role None"),
        ({"role": "", "content": "a"}, "message 1 has role ''"),
        ({"role": 3, "content": "a"}, "message 1 has role 3"),
        ({"role": "critic", "content": "a"}, r"message 1 \(critic\): the chat template leaves it out"),
        ({"role": "developer", "content": "a"}, r"message 1 \(developer\): the chat template leaves it out"),
        ({"role": "assistant", "content": "a", "tool_calls": "add"}, "tool_calls='add': give a list of calls"),
        (
            {"role": "assistant", "content": "a", "tool_calls": [CALL]},
            "message 1 calls tools, .* add the tools' answers",
        ),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_rendered_is_named_by_its_place(message: dict[str, Any], error: str) -> None:
    with pytest.raises(RolloutError, match=error):
        rendered([HELLO, message])


def test_a_message_without_text_may_render_to_nothing() -> None:
    assert rendered([{"role": "critic", "content": ""}, HELLO]) == "<user>Hi!\nA:"


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{% for x in 5 %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_prompt(template: str) -> None:
    with pytest.raises(RolloutError, match="the chat template refuses"):
        rendered([HELLO], template)
    with pytest.raises(RolloutError, match="no default"):
        rendered([HELLO], {"rag": CHAT_TEMPLATE})


def test_a_template_that_looks_at_content_is_not_disturbed() -> None:
    """The check of what is left out renders other content, which such a template may refuse."""
    picky = "{% if messages[0].content != 'Hi!' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
    assert rendered([HELLO], picky) == "<user>Hi!\nA:"
