"""What goes with every prompt: rendered as it says, or refused by its key, never left out."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from rollout.engine.prompts import encode_prompt
from tiny_models import TEXT_VOCAB, TOOL_CHAT_TEMPLATE, byte_tokenizer
from trainer.config import ConfigError, DatasetConfig, PromptedTaskConfig, ReasoningGymConfig
from trainer.data.prompts import Example, PromptSettings, prompt_settings
from trainer.data.rendering import prompt_of, render_rows, without_long_prompts
from trainer.data.rows import Row
from trainer.data.tasks import Task, exact_match

TOKENIZER = byte_tokenizer(chat_template=TOOL_CHAT_TEMPLATE)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SHOTS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
ASKED = {"role": "user", "content": "3+3="}
OWN_SYSTEM = {"role": "system", "content": "Own."}


def _rendered(prompt: Any, columns: dict[str, Any] | None = None, **options: Any) -> str:
    """The text of a row's ids, under a configuration's settings."""
    settings = prompt_settings(DatasetConfig(path="", **options))
    ids = encode_prompt(prompt_of(Row(prompt, "6", columns or {}), settings), TOKENIZER, TEXT_VOCAB)
    text = TOKENIZER.decode(ids)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "3+3="),
        ({"system_prompt": "Add."}, "Add.\n\n3+3="),
        ({"system_prompt": ""}, "3+3="),
        ({"prefill": "It is "}, "3+3=It is "),
        ({"few_shot": SHOTS}, "1+1=2\n\n2+2=4\n\n3+3="),
        ({"few_shot": SHOTS, "system_prompt": "Add.", "prefill": " "}, "Add.\n\n1+1=2\n\n2+2=4\n\n3+3= "),
    ],
)
def test_a_text(options: dict[str, Any], text: str) -> None:
    assert _rendered("3+3=", **options) == text


SHOWN = "<user>1+1=\nA:2<eos>\n<user>2+2=\nA:4<eos>\n"


@pytest.mark.parametrize("prompt", ["3+3=", [ASKED]])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<user>3+3=\nA:"),
        ({"system_prompt": "Add."}, "<user>Add.\n<user>3+3=\nA:"),
        ({"system_prompt": ""}, "<user>\n<user>3+3=\nA:"),
        ({"prefill": "<think>"}, "<user>3+3=\nA:<think>"),
        ({"few_shot": SHOTS}, f"{SHOWN}<user>3+3=\nA:"),
        ({"few_shot": SHOTS, "system_prompt": "Add.", "prefill": "x"}, f"<user>Add.\n{SHOWN}<user>3+3=\nA:x"),
        ({"tools": TOOLS}, f"tools: {json.dumps(TOOLS)}\n<user>3+3=\nA:"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "prefill": "x"}, "<user>3+3=\nA:<think></think>x"),
    ],
)
def test_a_chat(prompt: Any, options: dict[str, Any], text: str) -> None:
    """A text with task.chat, or messages with or without."""
    assert _rendered(prompt, chat=True, **options) == text
    if isinstance(prompt, list):
        assert _rendered(prompt, **options) == text


def test_a_chat_is_what_transformers_makes_of_all_its_messages() -> None:
    user, assistant = ({"role": role} for role in ("user", "assistant"))
    turns = [m for s in SHOTS for m in (user | {"content": s["prompt"]}, assistant | {"content": s["answer"]})]
    messages = [{"role": "system", "content": "Add."}, *turns, ASKED]
    settings = prompt_settings(DatasetConfig(path="", system_prompt="Add.", few_shot=SHOTS, tools=TOOLS))
    ids = encode_prompt(prompt_of(Row([ASKED], "6"), settings), TOKENIZER, TEXT_VOCAB)
    arguments: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": True, "return_dict": False}
    assert ids == TOKENIZER.apply_chat_template(messages, tokenize=True, **arguments)


def test_examples_stand_behind_a_system_message_of_the_row() -> None:
    assert _rendered([OWN_SYSTEM, ASKED], few_shot=SHOTS) == f"<user>Own.\n{SHOWN}<user>3+3=\nA:"


def test_a_text_keeps_its_one_bos() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    settings = PromptSettings(system_prompt="s", few_shot=[Example("a", "b")], prefill="c")
    ids = encode_prompt(prompt_of(Row("p", ""), settings), tokenizer, TEXT_VOCAB)
    assert ids == tokenizer("s\n\nab\n\npc")["input_ids"]
    assert ids.count(tiny_models.BOS) == 1


@pytest.mark.parametrize(
    ("prompt", "columns", "options", "message"),
    [
        ("a", {}, {"tools": TOOLS}, "tools are for a chat template, .* use task.chat=true"),
        ("a", {}, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs are for a chat template"),
        ("a", {}, {"few_shot": [{"prompt": [ASKED], "answer": "1"}]}, r"task\.few_shot: entry 1 is a chat, and this"),
        ([OWN_SYSTEM, ASKED], {}, {"system_prompt": "b"}, r"task\.system_prompt: the row has a system message of its"),
        ([ASKED], {"tools": TOOLS}, {"tools": TOOLS}, r"task\.tools: the row has tools of its own"),
        ([ASKED, {"role": "assistant", "content": "x"}], {}, {"prefill": "b"}, "has a prefill, and its last message"),
        ([ASKED], {}, {"chat_template_kwargs": {"nosuch": 1}}, "template argument 'nosuch'"),
    ],
)  # fmt: skip
def test_what_would_be_left_out_is_refused(prompt: Any, columns: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _rendered(prompt, columns, **options)


def test_a_setting_that_no_row_can_have_is_named_with_the_row() -> None:
    with pytest.raises(ConfigError, match=r"^task: train row a\.jsonl:1 \('a'\): tools are for a chat template"):
        render_rows([Row("a", 1, source="a.jsonl:1")], TOKENIZER, TEXT_VOCAB, "train", PromptSettings(tools=TOOLS))


@pytest.mark.parametrize(
    ("row", "chat", "told"),
    [
        (Row("hi<eos>\n<user>act", ""), True, True),
        (Row([{"role": "user", "content": "hi<eos>"}], ""), False, True),
        (Row([{"role": "user", "content": [{"type": "text", "text": "hi<eos>"}]}], ""), False, True),
        (Row([ASKED], ""), False, False),
        (Row("<user>rendered before", ""), False, False),
    ],
)
def test_text_that_reads_like_a_special_token(
    row: Row, chat: bool, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It becomes that token, as in every tokenizer, which is said where it may end a turn."""
    (made,) = render_rows([row], TOKENIZER, TEXT_VOCAB, "train", PromptSettings(chat=chat))
    text = TOKENIZER.decode(made.prompt_ids)
    assert list(made.prompt_ids or ()) == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    said = "task: 1 train rows have messages with text that reads like a special token and becomes one, such as"
    assert caplog.messages == ([f"{said} {row.name()}"] if told else [])


# -- examples and tools from files --------------------------------------------------------------------------------


def _write(folder: Path, name: str, values: list[Any]) -> str:
    (folder / name).write_text(json.dumps(values))
    return str(folder / name)


def test_examples_of_a_file_have_the_task_s_columns_and_whole_answers(tmp_path: Path) -> None:
    shots = _write(tmp_path, "shots.json", [{"question": "a", "answer": "Think.\n#### 4", "id": 1}])
    config = DatasetConfig(path="", few_shot=shots, prompt_column="question", answer_after="####")
    assert prompt_settings(config).few_shot == [Example("a", "Think.\n#### 4")]


@pytest.mark.parametrize("config", [DatasetConfig(path=""), ReasoningGymConfig(name="gcd")])
def test_a_file_says_the_same_as_a_list(tmp_path: Path, config: PromptedTaskConfig) -> None:
    config.few_shot, config.tools = SHOTS, TOOLS
    listed = prompt_settings(config)
    config.few_shot, config.tools = _write(tmp_path, "shots.json", SHOTS), _write(tmp_path, "tools.json", TOOLS)
    assert prompt_settings(config) == listed
    assert listed.few_shot == [Example("1+1=", "2"), Example("2+2=", "4")]


def test_a_whole_number_is_an_answer() -> None:
    number = 12345678901234567890123
    assert _rendered("b", few_shot=[{"prompt": "a", "answer": number}]) == f"a{number}\n\nb"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"few_shot": 5}, r"^task\.few_shot=5: give a list of \{prompt, answer\}, or a file of them"),
        ({"few_shot": {"prompt": "a"}}, r"^task\.few_shot=.*: give a list"),
        ({"few_shot": ["a"]}, r"^task\.few_shot: entry 1: an example is an object with prompt and answer, not 'a'"),
        ({"few_shot": [{"prompt": "a"}]}, r"^task\.few_shot: entry 1: an example is an object"),
        ({"few_shot": [*SHOTS, {"prompt": 5, "answer": "a"}]}, r"^task\.few_shot: entry 3: prompt=5: give text"),
        ({"few_shot": [{"prompt": "a", "answer": 1.5}]}, r"^task\.few_shot: entry 1: answer=1\.5: give text; put numb"),
        ({"few_shot": [{"prompt": "a", "answer": True}]}, r"^task\.few_shot: entry 1: answer=True: give text"),
        ({"few_shot": "nosuch.jsonl"}, r"^task\.few_shot: file 'nosuch\.jsonl' does not exist"),
        ({"tools": "nosuch.json"}, r"^task\.tools: file 'nosuch\.json' does not exist"),
        ({"tools": ["add"]}, r"^task\.tools: 'add': a tool is an object, its JSON schema"),
        ({"tools": {"name": "add"}}, r"^task\.tools=.*: give a list of JSON schemas, or a file of them"),
    ],
)  # fmt: skip
def test_bad_examples_and_tools_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prompt_settings(DatasetConfig(path="", **options))


# -- length -------------------------------------------------------------------------------------------------------


def _task(lengths: list[int], limit: int | None, held_out: list[int] | None = None) -> Task:
    rows = [
        render_rows([Row("x" * n, n, source=f"a.jsonl:{n}") for n in given], TOKENIZER, TEXT_VOCAB, "train")
        for given in (lengths, held_out or [])
    ]
    return Task("t", rows[0], rows[1], exact_match, prompts=PromptSettings(max_tokens=limit))


@pytest.mark.parametrize(("limit", "kept"), [(None, [5, 9, 3, 7]), (9, [5, 9, 3, 7]), (7, [5, 3, 7]), (3, [3])])
def test_long_prompts_are_left_out_with_a_word(
    limit: int | None, kept: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    task = without_long_prompts(_task([5, 9, 3, 7], limit))
    assert [row.answer for row in task.train_rows] == kept
    said = [message for message in caplog.messages if "train" in message]
    number = 4 - len(kept)
    longest = "the longest has 9 tokens: a.jsonl:9 ('xxxxxxxxx')"
    told = f"task.max_prompt_tokens={limit}: {number} of 4 train rows are longer and left out; {longest}"
    assert said == ([told] if number else [])


def test_held_out_rows_are_left_out_too(caplog: pytest.LogCaptureFixture) -> None:
    assert [row.answer for row in without_long_prompts(_task([1], 5, [4, 6])).eval_rows] == [4]
    assert "1 of 2 eval rows are longer" in caplog.text


def test_a_limit_that_no_row_meets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^task\.max_prompt_tokens=2: no train row has as few; the shortest has 3"):
        without_long_prompts(_task([5, 3], 2))
    with pytest.raises(ConfigError, match=r"^task\.max_prompt_tokens=2: no eval row has as few"):
        without_long_prompts(_task([1], 2, [3]))
