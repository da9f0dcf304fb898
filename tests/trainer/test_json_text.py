"""Files of JSON lines: the same rows however they were written, no value changed, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError, DatasetConfig
from trainer.data.columns import rows_of
from trainer.data.files import Source, read_records
from trainer.data.rows import Row


def _read(file: Path) -> list[Row]:
    return rows_of(read_records(Source("task.path", str(file), lines=True)), DatasetConfig(), "task.path")


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
    assert _read(_file(tmp_path, content)) == EXPECTED


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
        _read(file)
    message = str(caught.value)
    assert message.startswith(f"task.path: {file}{where}")
    assert what in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["nosuch.jsonl", "."])
def test_missing_file_is_named_with_its_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^task\.eval_path: file .* does not exist"):
        read_records(Source("task.eval_path", str(tmp_path / name), lines=True))


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
    rows = _read(_file(tmp_path, "\n".join(lines).encode()))
    expected = [json.loads(line) for line in lines]
    assert [repr(row.answer) for row in rows] == [repr(value["answer"]) for value in expected]
    assert [repr(row.columns) for row in rows] == [repr({"extra": value["extra"]}) for value in expected]


def test_messages_and_late_columns_are_kept(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    values = [{"prompt": "a", "answer": 1}, {"prompt": messages, "answer": "x", "n": 3, "input_ids": [1], "meta": {}}]
    rows = _read(_file(tmp_path, "\n".join(map(json.dumps, values)).encode()))
    late = {"n": 3, "input_ids": [1], "meta": {}}
    assert rows == [Row("a", 1, dict.fromkeys(late)), Row(messages, "x", late)]


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\t"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [*SEPARATORS, SEPARATORS, "\r"])
def test_only_a_newline_ends_a_row(tmp_path: Path, separator: str, newline: str) -> None:
    text = f"a{separator}b"
    lines = [f'{{"prompt": "{text}{i}", "answer": "{text}"}}' for i in range(3)]
    rows = _read(_file(tmp_path, newline.join(lines).encode()))
    assert rows == [Row(f"{text}{i}", text) for i in range(3)]


def test_rows_say_where_they_were_read(tmp_path: Path) -> None:
    file = _file(tmp_path, b"\n" + PLAIN.replace(b"\n", b"\n\n"))
    assert [row.source for row in _read(file)] == [f"{file}:{line}" for line in (2, 4, 6)]


def test_lists_in_a_row_are_taken_however_many_there_are_side_by_side(tmp_path: Path) -> None:
    value = {"prompt": "a", "answer": [[i] for i in range(500)]}
    assert _read(_file(tmp_path, json.dumps(value).encode())) == [Row("a", value["answer"])]
