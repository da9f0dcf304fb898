"""The order of rows, and reading them: nothing dropped, nothing seen twice, no value changed."""

import json
from collections import Counter
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from trainer.config import ConfigError
from trainer.data.rows import DATA_PURPOSE, SHUFFLE_PURPOSE, Row, RowStream, permutation, read_jsonl, uniforms

# -- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 5, 1000])
def test_permutation_holds_every_place_once(n: int) -> None:
    assert sorted(permutation(n, 3, DATA_PURPOSE, 2).tolist()) == list(range(n))


def test_permutation_is_a_function_of_seed_purpose_and_epoch() -> None:
    def draw(seed: int, purpose: int, epoch: int) -> tuple[int, ...]:
        return tuple(permutation(100, seed, purpose, epoch).tolist())

    variants = list(product((0, 1, 2**32 - 1), (DATA_PURPOSE, SHUFFLE_PURPOSE), (0, 1, 2**32 - 1)))
    first = [draw(*variant) for variant in variants]
    # 100! orders: two equal ones by chance have odds below 1e-150
    assert len(set(first)) == len(variants)
    assert [draw(*variant) for variant in reversed(variants)] == first[::-1]


@pytest.mark.parametrize("vary", ["epoch", "seed"])
def test_permutation_is_uniform(vary: str) -> None:
    draws = 2400
    orders = (permutation(4, 0, DATA_PURPOSE, i) if vary == "epoch" else permutation(4, i, 17) for i in range(draws))
    counts = Counter(tuple(order.tolist()) for order in orders)
    observed = [counts[order] for order in permutations(range(4))]
    # false alarm: 1 in a million
    assert tiny_models.chi_square_p(observed, [draws / 24] * 24) > 1e-6


def test_successive_orders_are_independent() -> None:
    firsts = [int(permutation(3, 0, DATA_PURPOSE, epoch)[0]) for epoch in range(2701)]
    counts = Counter(pairwise(firsts))
    observed = [counts[a, b] for a in range(3) for b in range(3)]
    # false alarm: 1 in a million
    assert tiny_models.chi_square_p(observed, [2700 / 9] * 9) > 1e-6


def test_uniforms_are_in_range_and_do_not_depend_on_how_many_are_drawn() -> None:
    many = uniforms(1000, 5, 18, 1)
    assert many.min() >= 0.0
    assert many.max() < 1.0
    assert np.array_equal(uniforms(7, 5, 18, 1), many[:7])


# -- the stream ---------------------------------------------------------------------------------------------------


def _rows(count: int) -> list[Row]:
    return [Row(str(i), i) for i in range(count)]


def _answers(rows: list[Row]) -> list[int]:
    return [row.answer for row in rows]


@pytest.mark.parametrize(("count", "batch"), [(5, 8), (10, 4), (7, 7), (1, 3), (6, 1)])
def test_every_epoch_sees_each_row_once_whatever_the_batch(count: int, batch: int) -> None:
    stream = RowStream(_rows(count), seed=0)
    batches = [_answers(stream.take(i * batch, batch)) for i in range(count * 3)]
    assert [len(taken) for taken in batches] == [batch] * (count * 3)
    seen = [answer for taken in batches for answer in taken]
    epochs = [seen[i : i + count] for i in range(0, len(seen), count)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * (3 * batch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    rows = _rows(50)
    orders = [tuple(_answers(RowStream(rows, seed).take(50 * e, 50))) for seed in (0, 1) for e in (0, 1)]
    assert len({*orders, tuple(range(50))}) == 5


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 13, 20])
def test_two_takes_are_one_and_their_order_does_not_matter(cut: int) -> None:
    whole = _answers(RowStream(_rows(5), 3).take(2, 20))
    forwards, backwards = RowStream(_rows(5), 3), RowStream(_rows(5), 3)
    head, tail = forwards.take(2, cut), forwards.take(2 + cut, 20 - cut)
    late, early = backwards.take(2 + cut, 20 - cut), backwards.take(2, cut)
    assert _answers(head + tail) == _answers(early + late) == whole


# -- files --------------------------------------------------------------------------------------------------------

LINES = ['{"prompt": "café?", "answer": "1"}', '{"prompt": "b", "answer": "2"}', '{"prompt": "c", "answer": "3"}']
PLAIN = "\n".join(LINES).encode() + b"\n"
EXPECTED = [Row("café?", "1"), Row("b", "2"), Row("c", "3")]


def _file(path: Path, content: bytes) -> Path:
    file = path / "rows.jsonl"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    "content",
    [
        PLAIN,
        PLAIN.rstrip(),
        b"\xef\xbb\xbf" + PLAIN,
        b"\xef\xbb\xbf\r\n" + PLAIN,
        PLAIN.replace(b"\n", b"\r\n\r\n \t\r\n"),
        b"\n\n" + PLAIN + b"\n",
    ],
    ids=["plain", "no last newline", "bom", "bom and blank line", "crlf and blank lines", "blank lines around"],
)
def test_same_rows_however_the_file_was_written(tmp_path: Path, content: bytes) -> None:
    assert read_jsonl(_file(tmp_path, content), "task.path") == EXPECTED


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        (PLAIN[:-9], ":3", "not JSON"),
        (LINES[0].encode("latin-1") + b"\n", ":1", "not UTF-8"),
        (b"\n" + LINES[0].encode("latin-1"), ":2", "not UTF-8"),
        (PLAIN.decode().encode("utf-16"), ":1", "not UTF-8"),
        (PLAIN + PLAIN[:5] + b"\n" + PLAIN, ":4", "not JSON"),
        (LINES[0].encode() + b" " + LINES[1].encode(), ":1", "not JSON"),
        (PLAIN + b"\xef\xbb\xbf" + PLAIN, ":4", "not JSON"),
        (b"[1, 2]\n", ":1", "not list"),
        (b'\n"text"\n', ":2", "not str"),
        (b'{"prompt": "a"}\n', ":1", "'answer'"),
        (PLAIN + b'{"answer": 1}\n', ":4", "'prompt'"),
        (b'{"prompt": null, "answer": 1}', ":1", "'prompt'"),
        (b'{"prompt": "a", "answer": null}', ":1", "'answer'"),
        (b'{"prompt": 5, "answer": 1}', ":1", "neither text nor a list of messages"),
        (b'{"prompt": [], "answer": 1}', ":1", "neither text nor a list of messages"),
        (b'{"prompt": ["a"], "answer": 1}', ":1", "neither text nor a list of messages"),
        (b'{"prompt": {"role": "user", "content": "a"}, "answer": 1}', ":1", "neither text nor"),
        (b'{"prompt": [{"role": "user"}], "answer": 1}', ":1", "role and content"),
        # exposes: a message without a role passes, though the check says that messages have role and content
        (b'{"prompt": [{"content": "a"}], "answer": 1}', ":1", "role and content"),
        # exposes: half of a surrogate pair is text that no tokenizer takes; it is found later, without file and line
        (b'\n{"prompt": "\\ud83d", "answer": 1}', ":2", "prompt"),
        # exposes: Python's own limit on digits is a ValueError, not a JSONDecodeError, and ends in a traceback
        (b'{"prompt": "a", "answer": ' + b"7" * 5000 + b"}", ":1", "digits"),
        (b'{"prompt": "a", "answer": 1, "prompts": 2}', ":1", "'prompts'"),
        (b'{"prompt": "a", "answer": 1, "completions": 2}', ":1", "'completions'"),
        (b'{"prompt": "a", "answer": 1, "completion_ids": 2}', ":1", "'completion_ids'"),
        (b'{"prompt": "a", "answer": 1, "answer": 2}', ":1", "'answer' is given twice"),
        (b'\n{"prompt": "a", "answer": 1, "meta": {"k": 1, "k": 1}}', ":2", "'k' is given twice"),
        (b'{"prompt": [{"role": "user", "role": "tool", "content": ""}], "answer": 1}', ":1", "'role' is given twice"),
        (b'{"prompt": "a", "answer": NaN}', ":1", "NaN is not JSON"),
        (b'{"prompt": "a", "answer": 1, "weight": -Infinity}', ":1", "-Infinity is not JSON"),
        (b'{"prompt": "a", "answer": 1e400}', ":1", "1e400 is larger than any double"),
        (b'{"prompt": "a", "answer": 1, "deep": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", ":1", "within each other"),
        (b'{"prompt": "a", "answer": 1, "deep": ' + b'{"k":[' * 40 + b"]}" * 40 + b"}", ":1", "within each other"),
        (b'{"prompt": "a", "answer": 1, "deep": ' + b"[" * 500, ":1", "JSON"),
        (b"", "", "no rows"),
        (b"\n \r\n", "", "no rows"),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path: Path, content: bytes, where: str, what: str) -> None:
    file = _file(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_jsonl(file, "task.path")
    message = str(caught.value)
    assert message.startswith(f"task.path: {file}{where}")
    assert what in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["nosuch.jsonl", "."])
def test_missing_file_is_named_with_its_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^task\.eval_path: file .* does not exist"):
        read_jsonl(tmp_path / name, "task.eval_path")


@pytest.mark.parametrize(
    "answers",
    [
        ["4", 4.5],
        [4, "four"],
        [12345678901234567890123, 1],
        [9007199254740993, 1.5],
        [True, 0, 1.0, -0.0],
        [["a", 1], {"b": [None, 2.0]}],
        ["\u2028line\u2029", "a\x85b", "\\boxed{4}\n"],
    ],
)
def test_values_keep_type_and_digits(tmp_path: Path, answers: list[Any]) -> None:
    lines = [json.dumps({"prompt": "p", "answer": answer, "extra": [answer]}, ensure_ascii=False) for answer in answers]
    rows = read_jsonl(_file(tmp_path, "\n".join(lines).encode()), "task.path")
    expected = [json.loads(line) for line in lines]
    assert [repr(row.answer) for row in rows] == [repr(value["answer"]) for value in expected]
    assert [repr(row.columns) for row in rows] == [repr({"extra": value["extra"]}) for value in expected]


def test_messages_and_late_columns_are_kept(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    values = [{"prompt": "a", "answer": 1}, {"prompt": messages, "answer": "x", "n": 3, "input_ids": [1], "meta": {}}]
    rows = read_jsonl(_file(tmp_path, "\n".join(map(json.dumps, values)).encode()), "task.path")
    assert rows == [Row("a", 1, {}), Row(messages, "x", {"n": 3, "input_ids": [1], "meta": {}})]


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\t"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [*SEPARATORS, SEPARATORS, "\r"])
def test_only_a_newline_ends_a_row(tmp_path: Path, separator: str, newline: str) -> None:
    text = f"a{separator}b"
    lines = [f'{{"prompt": "{text}{i}", "answer": "{text}"}}' for i in range(3)]
    rows = read_jsonl(_file(tmp_path, newline.join(lines).encode()), "task.path")
    assert rows == [Row(f"{text}{i}", text) for i in range(3)]


def test_rows_say_where_they_were_read(tmp_path: Path) -> None:
    file = _file(tmp_path, b"\n" + PLAIN.replace(b"\n", b"\n\n"))
    assert [row.source for row in read_jsonl(file, "task.path")] == [f"{file}:{line}" for line in (2, 4, 6)]


def test_lists_in_a_row_are_taken_however_many_there_are_side_by_side(tmp_path: Path) -> None:
    value = {"prompt": "a", "answer": [[i] for i in range(500)]}
    assert read_jsonl(_file(tmp_path, json.dumps(value).encode()), "task.path") == [Row("a", value["answer"])]
