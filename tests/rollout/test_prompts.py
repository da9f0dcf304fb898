"""Prompts to ids, completions to text, and the ids that end a completion."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from rollout import RolloutError, SamplingParams
from rollout.engine.prompts import Prompt, decode_completion, encode_prompt
from rollout.model.tokenizers import check_end_tokens
from tiny_models import (
    BOS,
    BOS_CHAT_TEMPLATE,
    CHAT_TEMPLATE,
    EOS,
    TEXT_VOCAB,
    USER,
    assert_greedy,
    byte_tokenizer,
    chain_model,
    completions,
    framed,
    greedy,
    greedy_ids,
    metaspace_tokenizer,
    random_model,
    save_directory,
    small_engine,
)

NEWLINE = byte_tokenizer()("\n")["input_ids"][0]
HELLO = [{"role": "user", "content": "Hi!"}]
RENDERED = [USER, 43, 76, 4, NEWLINE, 36, 29]  # <user> H i ! \n A :


def encode(prompt: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> list[int]:
    return encode_prompt(prompt, tokenizer, TEXT_VOCAB)


def ascii_ids(text: str) -> list[int]:
    """What `byte_tokenizer` makes of printable ASCII: '!' is 4, the first after the special tokens."""
    return [ord(character) - ord("!") + 4 for character in text]


# -- encoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, BOS_CHAT_TEMPLATE])
def test_messages_are_exactly_what_the_template_renders(adds_bos: bool, template: str) -> None:
    """One <bos> if the template prints one; the tokenizer's post-processor never adds another."""
    tokenizer = byte_tokenizer(adds_bos=adds_bos, chat_template=template)
    expected = [BOS] * (template == BOS_CHAT_TEMPLATE) + RENDERED
    assert encode(HELLO, tokenizer) == expected
    direct = tokenizer.apply_chat_template(HELLO, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert direct == expected


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_string_has_what_the_tokenizer_puts_before_it(adds_bos: bool) -> None:
    assert encode("Hi!", byte_tokenizer(adds_bos=adds_bos)) == [BOS] * adds_bos + ascii_ids("Hi!")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_rendered_string_keeps_its_one_bos(adds_bos: bool) -> None:
    assert encode("<bos><user>Hi!\nA:", byte_tokenizer(adds_bos=adds_bos)) == [BOS, *RENDERED]


def test_several_messages() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    expected = [USER, *ascii_ids("a"), NEWLINE, USER, *ascii_ids("b"), NEWLINE, *ascii_ids("A:")]
    assert encode(messages, byte_tokenizer()) == expected


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_ids_are_taken_as_they_are(kind: Any) -> None:
    """No <bos> is added to ids, and they come back as Python ints."""
    ids = encode(kind([BOS, 5, 263]), byte_tokenizer(adds_bos=True))
    assert ids == [BOS, 5, 263]
    assert {type(token) for token in ids} == {int}


def test_the_engine_returns_the_ids_it_used() -> None:
    tokenizer = byte_tokenizer(adds_bos=True, chat_template=BOS_CHAT_TEMPLATE)
    prompts: list[Prompt] = [HELLO, "Hi!", "<bos><user>Hi!\nA:", [5, 6]]
    with small_engine(random_model("qwen3", vocab_size=TEXT_VOCAB), tokenizer) as engine:
        groups = engine.generate_rollouts(prompts, 1, greedy(2))
    assert [group.prompt_ids for group in groups] == [
        [BOS, *RENDERED],
        [BOS, *ascii_ids("Hi!")],
        [BOS, *RENDERED],
        [5, 6],
    ]


@pytest.mark.parametrize("limit", [None, 16, 64])
def test_a_tokenizers_model_max_length_cuts_nothing(limit: int | None) -> None:
    """Without one transformers says 1e30; the engine's limit comes from the model's config."""
    options: dict[str, Any] = {"model_max_length": limit} if limit else {}
    tokenizer = byte_tokenizer(**options)
    model = random_model("qwen3", vocab_size=TEXT_VOCAB, max_position_embeddings=64)
    with small_engine(model, tokenizer) as engine:
        (group,) = engine.generate_rollouts(["x" * 40], 1, greedy(50))
        assert engine.max_model_len == 64
    assert group.prompt_ids == ascii_ids("x" * 40)
    assert len(group.rollouts[0].completion_ids) == 24


@pytest.mark.parametrize("text", ["12+34=", "", " ", "<eos>", "12+34=<eos>", "<user>", "a<bos>"])
@pytest.mark.parametrize(
    ("frame", "before"),
    [
        ("<bos> $A <eos>", [BOS]),
        ("$A <eos>", []),
        ("<bos> $A <eos> <user>", [BOS]),
        ("<bos> <user> $A <pad> <pad>", [BOS, USER]),
        ("$A", []),
    ],
)
def test_what_the_tokenizer_puts_behind_a_text_is_left_out(frame: str, before: list[int], text: str) -> None:
    """What it puts before it stays, and so does an end token that the text itself has."""
    own = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    tokenizer = framed(byte_tokenizer(), frame)
    if before or own:
        assert encode(text, tokenizer) == before + own
    else:
        with pytest.raises(RolloutError, match="is empty: it has no tokens"):
            encode(text, tokenizer)


def test_a_tokenizer_that_closes_texts_goes_with_chats_and_rendered_strings() -> None:
    tokenizer = framed(byte_tokenizer(chat_template=BOS_CHAT_TEMPLATE), "<bos> $A <eos>")
    assert encode(HELLO, tokenizer) == encode("<bos><user>Hi!\nA:", tokenizer) == [BOS, *RENDERED]


@pytest.mark.filterwarnings("ignore:This sequence already has")
@pytest.mark.parametrize("text", ["12+34=", "", "</s>", "a</s>"])
def test_a_tokenizer_written_in_python_that_closes_texts(text: str) -> None:
    """It adds no end token to a text that has one, which stays."""
    own = ByT5Tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert ByT5Tokenizer()(text)["input_ids"][-1] == 1
    if own:
        assert encode_prompt(text, ByT5Tokenizer(), 384) == own


def test_a_saved_tokenizer_that_closes_texts(tmp_path: Path) -> None:
    """As add_eos_token makes them: the model goes on behind the text."""
    tokenizer = framed(byte_tokenizer(), "<bos> $A <eos>")
    model = chain_model({ascii_ids("=")[0]: 7, 7: EOS}, hidden=TEXT_VOCAB)
    with small_engine(save_directory(tmp_path, model, tokenizer)) as engine:
        (group,) = engine.generate_rollouts(["12+34="], 1, greedy(4))
    assert group.prompt_ids == [BOS, *ascii_ids("12+34=")]
    assert group.rollouts[0].completion_ids == [7, EOS]


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_and_padding_of_a_tokenizer_are_not_applied(tmp_path: Path, length: int, side: str) -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    tokenizer.backend_tokenizer.enable_truncation(8, direction=side)
    tokenizer.backend_tokenizer.enable_padding(length=12, direction=side, pad_id=0, pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).padding is not None
    loaded, text = AutoTokenizer.from_pretrained(tmp_path), "x" * length
    assert encode(text, loaded) == [BOS, *ascii_ids(text)]
    rendered = [USER, *ascii_ids(text), NEWLINE, *ascii_ids("A:")]
    assert encode([{"role": "user", "content": text}], loaded) == rendered


# -- vocabularies that do not fit ---------------------------------------------------------------------------------


def tokenizer_with(entries: dict[str, int]) -> PreTrainedTokenizerFast:
    """`byte_tokenizer` with further entries at ids of their own, so that there may be gaps."""
    spec = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    spec["model"]["vocab"] |= entries
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    spec["added_tokens"] += [{"id": i, "content": token, **added} for token, i in entries.items()]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)), eos_token="<eos>")


def test_ids_with_gaps() -> None:
    """260 entries and one at 300: fewer entries than the highest id, and a model with room for it."""
    tokenizer = tokenizer_with({"<far>": 300})
    assert (len(tokenizer), tokenizer.get_vocab()["<far>"]) == (261, 300)
    assert encode_prompt("a<far>", tokenizer, 301) == [*ascii_ids("a"), 300]
    assert decode_completion(ascii_ids("a"), [300, 280, *ascii_ids("b")], tokenizer) == "<far>b"
    with small_engine(chain_model({300: 5, 5: EOS}, hidden=304), tokenizer) as engine:
        (group,) = engine.generate_rollouts(["<far>"], 1, greedy(4))
    assert (group.prompt_ids, group.rollouts[0].completion_ids) == ([300], [5, EOS])


@pytest.mark.parametrize(
    ("entries", "vocab", "highest"),
    [({}, 259, 259), ({"<far>": 300}, 264, 300), ({"<far>": 264}, 264, 264)],
)
def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused_at_start(
    tmp_path: Path, entries: dict[str, int], vocab: int, highest: int
) -> None:
    tokenizer, model = tokenizer_with(entries), random_model("llama", vocab_size=vocab)
    message = rf"ids go up to {highest} .*, but the model has a vocabulary of {vocab}"
    with pytest.raises(RolloutError, match=message):
        small_engine(model, tokenizer)
    with pytest.raises(RolloutError, match=rf"model directory '.*': the tokenizer's {message}"):
        small_engine(save_directory(tmp_path, model, tokenizer))


# -- empty and wrong ----------------------------------------------------------------------------------------------


def test_an_empty_string_begins_at_bos() -> None:
    assert encode("", byte_tokenizer(adds_bos=True)) == [BOS]


@pytest.mark.parametrize("prompt", ["", []])
@pytest.mark.parametrize("bos", [True, False])
def test_a_prompt_without_tokens_is_refused_and_the_engine_goes_on(prompt: Any, bos: bool) -> None:
    model = random_model("qwen3", vocab_size=TEXT_VOCAB)
    with small_engine(model, byte_tokenizer(bos=bos)) as engine:
        with pytest.raises(RolloutError, match=r"prompt 1: .* is empty: it has no tokens"):
            engine.generate_rollouts(["a", prompt], 2, greedy())
        good = engine.generate_rollouts(["a", prompt, " "], 1, greedy(), on_error="return")
    assert [group.error is None for group in good] == [True, False, True]
    for group in (good[0], good[2]):
        expected = greedy_ids(model, group.prompt_ids, 8, [EOS])
        assert_greedy(model, group.prompt_ids, group.rollouts[0].completion_ids, expected)


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "message"),
    [
        ("text", None, "a text prompt needs a tokenizer"),
        (HELLO, None, "a text prompt needs a tokenizer"),
        (HELLO, byte_tokenizer(chat_template=None), "no chat template"),
        ([*HELLO, 3], byte_tokenizer(), "neither a string, a list of token ids nor a list of chat messages"),
        ([264], byte_tokenizer(), "token id 264 is outside the model's vocabulary of 264"),
        (7, byte_tokenizer(), "7 is neither"),
        (["a", "b"], byte_tokenizer(), "is neither"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_named(prompt: Any, tokenizer: PreTrainedTokenizerFast | None, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        encode(prompt, tokenizer)


def test_messages_that_the_template_refuses_are_an_error_of_that_prompt() -> None:
    """As templates do that want user and assistant to alternate."""
    refusing = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}" + CHAT_TEMPLATE
    with small_engine(random_model("qwen3", vocab_size=TEXT_VOCAB), byte_tokenizer(chat_template=refusing)) as engine:
        with pytest.raises(RolloutError, match=r"prompt 1: .*roles must alternate"):
            engine.generate_rollouts([HELLO, HELLO * 2], 1, greedy(2))
        good, bad = engine.generate_rollouts([HELLO, HELLO * 2], 1, greedy(2), on_error="return")
    assert good.prompt_ids == RENDERED
    assert bad.error is not None


# -- decoding -----------------------------------------------------------------------------------------------------


def byte_ids(data: bytes) -> list[int]:
    """Ids of any bytes, one each: by way of latin-1, which byte-level tokenizers write non-ASCII bytes in."""
    tokenizer = byte_tokenizer()
    table = {value: tokenizer.convert_tokens_to_ids(character) for value, character in bytes_to_unicode().items()}
    return [table[value] for value in data]


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {value: chr(256 + i) for i, value in enumerate(others)}


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_character_of_four_tokens_is_one_character(cut: int) -> None:
    """The engine emits an emoji byte by byte; an unfinished one is one replacement character, ids untouched."""
    data = "\U0001f600ok".encode()
    ids = byte_ids(data)
    model = chain_model(dict(zip([5, *ids], ids, strict=False)), hidden=TEXT_VOCAB)
    with small_engine(model, byte_tokenizer()) as engine:
        (made,) = engine.generate_rollouts([[5]], 1, greedy(cut))[0].rollouts
    assert made.completion_ids == ids[:cut]
    assert made.text == data[:cut].decode(errors="replace")
    assert made.text == ("\ufffd" if cut < 4 else "\U0001f600ok"[: cut - 3])


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    euro = "\u20ac".encode()
    prompt, completion = byte_ids(b"secret " + euro[:2]), byte_ids(euro[2:] + b"!")
    assert decode_completion(prompt, completion, byte_tokenizer()) == "\ufffd!"


def test_ten_thousand_random_bytes_decode_as_python_decodes_them() -> None:
    soup = np.random.default_rng(0).integers(256, size=10_000, dtype=np.uint8).tobytes()
    assert decode_completion(ascii_ids("prompt"), byte_ids(soup), byte_tokenizer()) == soup.decode(errors="replace")


@pytest.mark.parametrize("clean_up", [True, False])
@pytest.mark.parametrize("text", ["    return 1", " x != y , z .", "n't 's", "!", "  "])
def test_spaces_are_kept(text: str, clean_up: bool) -> None:
    """Behind a prompt, whatever the tokenizer would drop at a text's beginning or clean up inside it."""
    forced = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    tokenizer = metaspace_tokenizer(clean_up_tokenization_spaces=clean_up, **forced)
    prompt = tokenizer("def f():")["input_ids"]
    completion = [tokenizer.convert_tokens_to_ids("\u2581" if c == " " else c) for c in text]
    assert decode_completion(prompt, completion, tokenizer) == text


def test_special_tokens_are_left_out_of_the_text() -> None:
    prompt, completion = [BOS, *ascii_ids("a")], [*ascii_ids("b"), USER, *ascii_ids("c"), EOS]
    assert decode_completion(prompt, completion, byte_tokenizer()) == "bc"


@pytest.mark.parametrize(("skip", "text"), [(True, "bc"), (False, "b<user>c<eos>")])
def test_special_tokens_are_kept_if_asked_for(skip: bool, text: str) -> None:
    ids = [*ascii_ids("b"), USER, *ascii_ids("c"), EOS]
    model = chain_model(dict(zip([BOS, *ids], ids, strict=False)), hidden=TEXT_VOCAB)
    with small_engine(model, byte_tokenizer(), skip_special_tokens=skip) as engine:
        (made,) = engine.generate_rollouts([[BOS]], 1, greedy(8))[0].rollouts
    assert (made.completion_ids, made.text) == (ids, text)


def test_ids_that_the_tokenizer_does_not_know_have_no_text() -> None:
    """The model's vocabulary is larger by four ids."""
    assert decode_completion(ascii_ids("a"), [*ascii_ids("b"), 260, 263, *ascii_ids("c")], byte_tokenizer()) == "bc"


@pytest.mark.parametrize("unknown", [384, 400, 9999])
def test_ids_that_a_tokenizer_written_in_python_does_not_know_have_no_text(unknown: int) -> None:
    tokenizer = ByT5Tokenizer()
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert decode_completion([a], [b, unknown, a], tokenizer) == "ba"


def test_without_a_tokenizer_there_is_no_text() -> None:
    with small_engine(chain_model({1: 2, 2: 3})) as engine:
        (made,) = engine.generate_rollouts([[1]], 1, greedy(2))[0].rollouts
    assert (made.completion_ids, made.text) == ([2, 3], None)


# -- ends ---------------------------------------------------------------------------------------------------------


def set_end(directory: Path, file: str, end: int | list[int] | None) -> None:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": end}))


@pytest.mark.parametrize("last", [7, 9, 5, EOS])
def test_every_declared_end_token_ends_a_completion(tmp_path: Path, last: int) -> None:
    """7 and 9 by generation_config, 5 by config, 1 by the tokenizer; 8 is none, so the chain goes through it."""
    model = chain_model({20: 21, 21: 8, 8: last, last: 30}, hidden=TEXT_VOCAB)
    directory = save_directory(tmp_path, model, byte_tokenizer())
    set_end(directory, "generation_config.json", [7, 9])
    set_end(directory, "config.json", 5)
    with small_engine(directory) as engine:
        assert engine.end_token_ids == {7, 9, 5, EOS}
        (made,) = engine.generate_rollouts([[20]], 1, greedy())[0].rollouts
    assert (made.completion_ids, made.finish_reason) == ([21, 8, last], "stop")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 7, {7}), (None, [7, 9], {7, 9}), ("missing", 7, {7}), ("missing", [7, 9], {7, 9}), (None, None, set())],
    ids=str,
)
def test_end_tokens_as_a_number_a_list_or_none(
    tmp_path: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    """The tokenizer's is added to them; with no end at all a completion runs to its length."""
    directory = save_directory(tmp_path, chain_model({20: 21, 21: 9, 9: 22, 22: 30}, hidden=TEXT_VOCAB))
    byte_tokenizer(eos_token=None).save_pretrained(directory)
    set_end(directory, "config.json", config)
    if generation == "missing":
        (directory / "generation_config.json").unlink()
    else:
        set_end(directory, "generation_config.json", generation)
    with small_engine(directory) as engine:
        assert engine.end_token_ids == expected
        made = completions(engine.generate_rollouts([[20]], 1, greedy(4)))
    assert made == [[[21, 9] if 9 in expected else [21, 9, 22, 30]]]


@pytest.mark.parametrize("declared", ["7", [7, "9"], 7.0, True, {"id": 7}, [[7]]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_no_ids_are_named(tmp_path: Path, file: str, declared: Any) -> None:
    directory = save_directory(tmp_path, random_model("llama", vocab_size=TEXT_VOCAB), byte_tokenizer())
    set_end(directory, file, declared)
    with pytest.raises(RolloutError, match=rf"'{tmp_path}': {file}: eos_token_id=.*: give a token id, a list"):
        small_engine(directory)


@pytest.mark.parametrize(("declared", "expected"), [(None, []), (7, [7]), ([7, 9], [7, 9]), ((), []), ({7}, [7])])
def test_end_tokens_come_in_several_forms(declared: Any, expected: list[int]) -> None:
    assert check_end_tokens(declared) == expected


@pytest.mark.parametrize(("declared", "kept"), [(9999, {EOS}), ([7, 9999], {7, EOS}), (-1, {EOS}), (264, {EOS})])
def test_an_end_token_that_the_model_cannot_emit_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, declared: Any, kept: set[int]
) -> None:
    directory = save_directory(tmp_path, random_model("llama", vocab_size=TEXT_VOCAB), byte_tokenizer())
    set_end(directory, "generation_config.json", declared)
    with caplog.at_level(logging.WARNING, "rollout"), small_engine(directory) as engine:
        assert engine.end_token_ids == kept
    assert "of the generation_config is outside the model's vocabulary of 264 and ends no completion" in caplog.text


def test_sampling_defaults_of_a_directory_are_not_applied(tmp_path: Path) -> None:
    """A generation_config that asks for greedy decoding, top_k 1 and 3 tokens changes nothing."""
    directory = save_directory(tmp_path, random_model("llama", vocab_size=TEXT_VOCAB), byte_tokenizer())
    plain = small_engine(directory)
    path = directory / "generation_config.json"
    defaults = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1, "max_new_tokens": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | defaults))
    sampling = SamplingParams(max_new_tokens=8, seed=0)
    calls = [engine.generate_rollouts([[5, 6]], 3, sampling) for engine in (plain, small_engine(directory))]
    assert completions(calls[0]) == completions(calls[1])
    assert max(len(ids) for ids in completions(calls[0])[0]) > 3
