"""Rewards of one's own that cannot be used: each is refused by name, and none of them ends the process its own way."""

import asyncio
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import Rollout, RolloutError, RolloutGroup
from scoring import score
from trainer.config import ConfigError
from trainer.data.rows import Row
from trainer.data.tasks import Task, numeric
from trainer.rewards.functions import check_functions, weighted
from trainer.rewards.loading import check_arguments, load_reward


@pytest.fixture(autouse=True)
def _imports_stay_here() -> Iterator[None]:
    path, modules = sys.path[:], set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def _reward(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# -- importing it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\ndef f(completions:\n    pass\n", "judge.py:2: "),
        ("def f(completions):\nreturn 1\n", "judge.py:2: expected an indented block"),
        ("import sys\nsys.exit()\n", "judge.py:2: exit(None) while '{}' is imported; keep it behind"),
        ("exit(0)\n", "judge.py:1: exit(0) while"),
        ("raise BaseException('gone')\n", "judge.py:1: BaseException: gone"),
        ("raise GeneratorExit\n", "judge.py:1: GeneratorExit"),
        ("\n\n1 / 0\n", "judge.py:3: ZeroDivisionError: division by zero"),
        ("import nosuch_package\n", "judge.py:1: No module named 'nosuch_package'; install it, or put its file beside"),
        ("from json import nosuch\n", "judge.py:1: ImportError: cannot import name 'nosuch' from 'json'"),
        ("import json\ndef g(): json.loads('{')\ng()\n", "judge.py:2: JSONDecodeError: Expecting"),
        ("def f(): return f()\nf()\n", "judge.py:1: RecursionError"),
        ("f = 1\n", "has no function 'f'"),
        ("class f:\n    pass\n", "'f' is a class; name a function or an instance, as in scorer = f()"),
        ("def f(completions):\n    yield 1.0\n", "it yields; a reward returns a list"),
        ("async def f(completions):\n    yield 1.0\n", "it yields; a reward returns a list"),
    ],
)
def test_file_that_cannot_be_imported_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = f"{_reward(tmp_path / 'judge.py', text)}:f"
    before = sys.path[:]
    with pytest.raises(ConfigError) as caught:
        load_reward(path)
    message = str(caught.value)
    assert message.startswith(f"reward.path={path!r}: ")
    assert problem.format(path[:-2]) in message
    assert "\n" not in message
    # a file that was imported may still import what is beside it
    assert (sys.path == before) is (caught.value.__cause__ is not None)


def test_mistake_in_a_neighbour_is_named_there(tmp_path: Path) -> None:
    _reward(tmp_path / "neighbour_with_mistake.py", "a = 1\nb = = 2\n")
    with pytest.raises(ConfigError, match=r"neighbour_with_mistake\.py:2: invalid syntax"):
        load_reward(f"{_reward(tmp_path / 'judge.py', 'import neighbour_with_mistake')}:f")


def test_module_of_a_package_that_leaves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _reward(tmp_path / "leaving_package" / "judge.py", "import sys\nsys.exit('bye')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"judge\.py:2: exit\('bye'\) while 'leaving_package\.judge' is imported"):
        load_reward("leaving_package.judge:f")


def test_an_interrupt_while_it_is_imported_passes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_reward(f"{_reward(tmp_path / 'judge.py', 'raise KeyboardInterrupt')}:f")


def test_neighbours_are_found_at_once_and_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _reward(tmp_path / "mine" / "early_neighbour.py", "VALUE = 2.0\n")
    _reward(tmp_path / "mine" / "late_package" / "inner.py", "VALUE = 3.0\n")
    text = "import early_neighbour\ndef f(completions):\n    from late_package.inner import VALUE\n"
    file = _reward(
        tmp_path / "mine" / "judge.py", text + "    return [VALUE + early_neighbour.VALUE for _ in completions]\n"
    )
    assert load_reward(f"{file.relative_to(tmp_path)}:f")(["a"]) == [5.0]


def test_files_of_one_name_do_not_clash(tmp_path: Path) -> None:
    functions = []
    for value in (1.0, 2.0):
        folder = tmp_path / str(value)
        _reward(folder / "shared_name.py", f"VALUE = {value}\n")
        _reward(folder / "shared_package" / "__init__.py", "")
        _reward(folder / "shared_package" / "inner.py", f"VALUE = {value}\n")
        text = "from shared_name import VALUE\nfrom shared_package.inner import VALUE as INNER\n"
        file = _reward(folder / "judge.py", text + "def f(completions): return [VALUE + INNER]\n")
        functions.append(load_reward(f"{file}:f"))
    assert [function(["a"]) for function in functions] == [[2.0], [4.0]]
    modules = {function.__module__ for function in functions}
    assert len(modules) == 2
    assert modules <= set(sys.modules)


# -- what it wants ------------------------------------------------------------------------------------------------


def _task(train: list[Row], held_out: list[Row]) -> Task:
    return Task("test", train, held_out, numeric)


def _leveled(completions: list[str], level: list[int]) -> list[float]:
    return [float(value) for value in level]


def test_field_that_only_training_rows_have_is_refused_with_the_file() -> None:
    task = _task([Row("a", 1, {"level": 1}, "train.jsonl:1")], [Row("b", 1, {}, "some folder/eval.jsonl:1")])
    message = r"^reward: _leveled wants 'level', which is no field of the held-out rows in some folder/eval\.jsonl; add"
    with pytest.raises(ConfigError, match=message):
        check_functions([weighted(_leveled)], task)


def test_field_that_only_held_out_rows_have_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="wants 'level', which is no field of the training rows; "):
        check_functions([weighted(_leveled)], _task([Row("a", 1)], [Row("b", 1, {"level": 1})]))


@pytest.mark.parametrize(
    "function",
    [lambda completions, level=2: [], lambda **_: [], lambda completions: [], functools.partial(_leveled, level=[1])],
)
def test_field_that_need_not_be_there_is_not_asked_for(function: Callable[..., Any]) -> None:
    check_functions([weighted(function)], _task([Row("a", 1, {"level": 1})], [Row("b", 1)]))
    check_functions([weighted(function)], _task([Row("a", 1)], []))


def test_argument_by_place_only_is_refused() -> None:
    def placed(completions: list[str], /) -> list[float]:
        return []

    with pytest.raises(ConfigError, match="placed takes 'completions' by place only"):
        check_arguments(placed, [Row("a", 1)])


@pytest.mark.parametrize("held_out", [False, True])
def test_numeric_refuses_an_answer_that_is_no_number_with_its_line(held_out: bool) -> None:
    good, bad = [Row("a", "1/2", {}, "t.jsonl:1")], [Row("a", 3), Row("what?", "seven", {}, "rows.jsonl:9")]
    task = _task(good, bad) if held_out else _task(bad, good)
    message = r"^reward=numeric: rows\.jsonl:9 \('what\?'\): answer 'seven' is not a single number; correct the row, or"
    with pytest.raises(ConfigError, match=message):
        check_functions([weighted(numeric)], task)
    check_functions([weighted(task.reward)], _task(good, good))


# -- calling it ---------------------------------------------------------------------------------------------------


ROWS = [Row(f"prompt {i}", i, {}, f"rows.jsonl:{i + 1}") for i in range(3)]


def _groups(count: int = 3) -> list[RolloutGroup]:
    return [RolloutGroup([g], [Rollout(0, [g], [-1.0], [-1.0], "text", "stop", 0)] * 2, g, 0) for g in range(count)]


@pytest.mark.parametrize(
    ("error", "described"),
    [
        (ValueError("two\nlines"), "ValueError: two lines"),
        (SystemExit(0), "SystemExit: 0"),
        (SystemExit(), "SystemExit"),
        (BaseException("gone"), "BaseException: gone"),
        (StopIteration(), "StopIteration"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (RolloutError("mine"), "RolloutError: mine"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_whatever_it_raises_is_named_with_function_file_and_row(error: BaseException, described: str) -> None:
    def my_judge(answer: list[int]) -> list[float]:
        if 1 in answer:
            raise error
        return [0.0] * len(answer)

    line = my_judge.__code__.co_firstlineno + 2
    place = f"{re.escape(__file__)}:{line}"
    row = r"row rows\.jsonl:2 \('prompt 1'\)"
    with pytest.raises(RolloutError, match=f"^reward my_judge raised {described} at {place}, for {row}$") as caught:
        score(my_judge, ROWS, _groups())
    assert caught.value.__cause__ is error


def test_error_inside_a_library_is_placed_where_the_reward_called_it() -> None:
    def my_judge(answer: list[float]) -> list[float]:
        return [float(functools.reduce(lambda a, b: a / b, [value, 0])) for value in answer]

    place = f"{re.escape(__file__)}:{my_judge.__code__.co_firstlineno + 1}"
    with pytest.raises(
        RolloutError, match=f"raised ZeroDivisionError: division by zero at {place}, for row rows.jsonl:1"
    ):
        score(my_judge, ROWS, _groups())


def test_endless_recursion_is_an_error_of_the_reward() -> None:
    def endless(completions: list[str]) -> list[float]:
        return endless(completions)

    with pytest.raises(RolloutError, match=r"^reward endless raised RecursionError: .* for row rows\.jsonl:1 "):
        score(endless, ROWS, _groups())


def test_error_of_all_rows_together_names_their_range() -> None:
    def together(completions: list[str]) -> list[float]:
        assert len(completions) < 6
        return [0.0] * len(completions)

    rows = r"from rows\.jsonl:1 \('prompt 0'\) to rows\.jsonl:3 \('prompt 2'\)"
    with pytest.raises(RolloutError, match=f"for 3 rows together, {rows}; for none of them alone$"):
        score(together, ROWS, _groups())


def test_list_that_fails_when_it_is_read_is_an_error_of_the_reward() -> None:
    class Lazy(list[float]):
        def __iter__(self) -> Any:
            raise OSError("server is gone")

    with pytest.raises(RolloutError, match=r"^reward <lambda> raised OSError: server is gone at "):
        score(lambda completions: Lazy([0.0] * 6), ROWS, _groups())


def test_an_interrupt_in_a_reward_passes() -> None:
    def interrupted(completions: list[str]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted, ROWS, _groups())


def test_value_that_is_not_finite_is_named_with_its_row() -> None:
    with pytest.raises(RolloutError, match=r"returned nan for completion 5; .*\(row rows\.jsonl:3 \('prompt 2'\)\)$"):
        score(lambda completions: [0.0] * 5 + [float("nan")], ROWS, _groups())


def test_long_or_made_rows_are_named_by_the_beginning_of_their_prompt() -> None:
    assert Row("x" * 100, 1).name() == repr("x" * 60 + "...")
    assert (
        Row([{"role": "user", "content": "é"}], 1, {}, "f:2").name() == """f:2 ('[{"role": "user", "content": "é"}]')"""
    )
