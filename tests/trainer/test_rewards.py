"""Rewards: any callable is found and gets its own copies in order; whatever is not a finite number stops here."""

import functools
import math
import re
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import RolloutError, RolloutGroup
from scoring import PROGRESS, group, score
from trainer.config import ArithmeticConfig, ConfigError, CustomRewardConfig, RewardConfig
from trainer.data.rows import Row
from trainer.data.tasks import exact_match, final_answer, make_task, numeric
from trainer.rewards.functions import make_functions
from trainer.rewards.loading import check_arguments, load_reward, reward_name
from trainer.rewards.scores import Scores


def _groups(*texts: list[str]) -> list[RolloutGroup]:
    return [group(some, key) for key, some in enumerate(texts)]


ROWS = [Row("1+1=", "2", {"level": 3, "tags": ["a"]}), Row("hi", 7, {"level": 4})]
GROUPS = _groups(["2", "3", "4"], ["5", "6", "7"])
COMPLETIONS = ["2", "3", "4", "5", "6", "7"]


# -- finding the function -----------------------------------------------------------------------------------------

MODULE = """
import functools
def plain(completions): return [float(len(text)) for text in completions]
async def later(completions): return [1.0] * len(completions)
class Scorer:
    factor = 2.0
    def __call__(self, completions): return [self.factor] * len(completions)
    def method(self, completions): return [self.factor + 1] * len(completions)
    async def later(self, completions): return [1.0] * len(completions)
class Later:
    async def __call__(self, completions): return [1.0] * len(completions)
instance, later_instance = Scorer(), Later()
bound, later_bound = instance.method, instance.later
anonymous = lambda completions: [5.0] * len(completions)
def scaled(completions, factor): return [factor] * len(completions)
part = functools.partial(scaled, factor=6.0)
later_part = functools.partial(later)
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "judge.py").write_text(MODULE)
    (tmp_path / "judge.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "package.judge"


@pytest.mark.parametrize("path", ["package.judge:plain", "package.judge.plain", "judge.py:plain", "./judge.py:plain"])
def test_dotted_path_and_file(module: str, path: str) -> None:
    assert load_reward(path)(["a", "bcd"]) == [1.0, 3.0]


def test_file_in_another_folder_whose_name_has_dots_and_spaces(tmp_path: Path) -> None:
    file = tmp_path / "my rewards v1.2" / "judge-1.py"
    file.parent.mkdir()
    file.write_text("def f(completions): return [9.0]\n")
    assert load_reward(f"{file}:f")(["a"]) == [9.0]


@pytest.mark.parametrize(
    ("name", "reward"), [("instance", 2.0), ("bound", 3.0), ("anonymous", 5.0), ("part", 6.0), ("plain", 1.0)]
)
def test_any_callable_scores(module: str, name: str, reward: float) -> None:
    function = load_reward(f"judge.py:{name}")
    assert score(function, ROWS, GROUPS) == [[reward] * 3, [reward] * 3]
    assert reward_name(function)


@pytest.mark.parametrize("name", ["later", "later_bound", "later_part", "later_instance"])
def test_async_is_awaited_in_whatever_form(module: str, name: str) -> None:
    assert score(load_reward(f"judge.py:{name}"), ROWS, GROUPS) == [[1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nosuch.py:f", "file 'nosuch.py' does not exist"),
        ("judge.py:nosuch", "'judge.py' has no function 'nosuch'"),
        ("judge.py:number", "'judge.py' has no function 'number'"),
        ("package.nosuch:f", "No module named 'package.nosuch'"),
        ("nosuch_package.judge.f", "No module named 'nosuch_package'"),
        ("package.judge:nosuch", "has no function 'nosuch'"),
        ("plain", "use package.module:function or FILE.py:function"),
        (":plain", "use package.module:function or FILE.py:function"),
        ("judge.py:", "use package.module:function or FILE.py:function"),
    ],
)
def test_missing_function_is_named(module: str, path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward(path)
    assert str(caught.value).startswith(f"reward.path={path!r}: ")
    assert problem in str(caught.value)


# exposes: the file's module is not in sys.modules while it runs, which dataclasses need for annotations that are text
def test_file_may_define_dataclasses(tmp_path: Path) -> None:
    file = tmp_path / "with_dataclass.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Weights:\n    right: float = 2.0\n"
        "def f(completions): return [Weights().right] * len(completions)\n"
    )
    assert load_reward(f"{file}:f")(["a"]) == [2.0]


@pytest.mark.parametrize(
    ("kind", "function"), [("task", final_answer), ("exact_match", exact_match), ("numeric", numeric)]
)
def test_configured_kind(kind: str, function: Callable[..., Any]) -> None:
    (made,) = make_functions(RewardConfig(kind=kind), make_task(ArithmeticConfig(), 0))
    assert (made.function, made.name, made.weight) == (function, function.__name__, 1.0)


def test_configured_custom_function(module: str) -> None:
    config = CustomRewardConfig(path="judge.py:anonymous")
    (made,) = make_functions(config, make_task(ArithmeticConfig(), 0))
    assert made.function(["a"]) == [5.0]
    assert (made.name, made.path) == ("<lambda>", "judge.py:anonymous")


# -- what the function is given -----------------------------------------------------------------------------------


def test_columns_are_aligned_and_repeated_for_every_completion() -> None:
    seen: dict[str, Any] = {}

    def take_all(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0] * 6

    score(take_all, ROWS, GROUPS)
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    assert seen == {
        "trainer_state": PROGRESS,
        "prompts": [ROWS[0].prompt] * 3 + [ROWS[1].prompt] * 3,
        "completions": COMPLETIONS,
        "completion_ids": [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]],
        "answer": ["2"] * 3 + [7] * 3,
        "level": [3] * 3 + [4] * 3,
        "tags": [["a"]] * 3 + [None] * 3,
    }


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [float(text) for text in completions],
        lambda level, completions: [float(text) + 0 * a for text, a in zip(completions, level, strict=True)],
        lambda completions, unknown=1: [float(text) * unknown for text in completions],
        lambda *, completion_ids, **rest: [float(text) for text in rest["completions"]],
        functools.partial(lambda completions, shift: [float(text) + shift for text in completions], shift=0),
    ],
)
def test_function_gets_the_arguments_it_names(function: Callable[..., Any]) -> None:
    assert score(function, ROWS, GROUPS) == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]


def test_no_groups_at_all() -> None:
    assert score(lambda completions, level: [float(text) for text in completions], [], []) == []


def test_what_a_function_does_to_its_arguments_stays_with_it() -> None:
    rows = [Row([{"role": "user", "content": "hi"}], ["7"], {"meta": {"k": [1]}})]
    groups = _groups(["a", "b"])

    def vandal(prompts: Any, completions: Any, completion_ids: Any, answer: Any, meta: Any) -> list[float]:
        assert (prompts[1], answer[1], meta[1]) == ([{"role": "user", "content": "hi"}], ["7"], {"k": [1]})
        said = [[{"role": "assistant", "content": text}] for text in "ab"]
        assert (completions, completion_ids) == (said, [[0, 0], [0, 1]])
        prompts[0][-1]["content"] = answer[0][0] = meta[0]["k"][0] = completions[0][0]["content"] = "changed"
        completion_ids[0].append(9)
        return [0.0, 1.0]

    # the second call asserts that the first one left no trace
    assert [score(vandal, rows, groups) for _ in range(2)] == [[[0.0, 1.0]]] * 2
    assert rows == [Row([{"role": "user", "content": "hi"}], ["7"], {"meta": {"k": [1]}})]
    assert groups == _groups(["a", "b"])


# exposes: rewards are counted against `completions` after the function may have changed that list
@pytest.mark.parametrize("change", [list.pop, list.clear, lambda texts: texts.append("more")])
def test_function_may_use_up_its_list_of_completions(change: Callable[[list[str]], Any]) -> None:
    def hungry(completions: list[str]) -> list[float]:
        rewards = [float(text) for text in completions]
        change(completions)
        return rewards

    assert score(hungry, ROWS, GROUPS) == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]


# -- what it may return -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0, 1.5, -2, True, 0.0],
        (1, 0, 1.5, -2, 1, 0),
        np.array([1, 0, 1.5, -2, 1, 0], np.float32),
        [np.float32(1), np.int64(0), np.float64(1.5), np.float16(-2), 1, 0],
        torch.tensor([1, 0, 1.5, -2, 1, 0], dtype=torch.bfloat16),
        torch.tensor([1, 0, 1.5, -2, 1, 0], requires_grad=True),
        [torch.tensor(1), torch.tensor(0.0), torch.tensor(1.5), np.array(-2), np.bool_(True), torch.tensor(False)],
        deque([1, 0, 1.5, -2, 1, 0]),
    ],
)
def test_numbers_of_any_kind_become_floats(returned: Any) -> None:
    rewards = score(lambda **_: returned, ROWS, GROUPS)
    assert rewards == [[1.0, 0.0, 1.5], [-2.0, 1.0, 0.0]]
    assert {type(value) for group in rewards for value in group} == {float}


@pytest.mark.parametrize(
    "bad",
    [
        math.nan,
        math.inf,
        -math.inf,
        "1",
        [1.0],
        1j,
        Fraction(1, 2),
        np.float32("nan"),
        # exposes: math.isfinite raises OverflowError for it
        10**400,
        # exposes: finite in fp64, but infinite as an advantage in fp32
        1e300,
        np.complex64(1),
        torch.tensor([1.0]),
        torch.tensor(math.inf),
    ],
    ids=lambda bad: repr(bad)[:12],
)
def test_value_that_is_no_finite_number_is_named_with_its_place(bad: Any) -> None:
    shown = "inf" if isinstance(bad, torch.Tensor) and bad.ndim == 0 else repr(bad)

    def my_judge(completions: list[str]) -> list[Any]:
        return [*([1.0] * 4), bad, math.nan]

    with pytest.raises(RolloutError, match=rf"^reward my_judge returned {re.escape(shown)} for completion 4;"):
        score(my_judge, ROWS, GROUPS)


def test_integer_of_more_digits_than_python_writes_is_named_by_its_type() -> None:
    with pytest.raises(RolloutError, match="returned a value of type int for completion 0;"):
        score(lambda **_: [10**5000] * 6, ROWS, GROUPS)


def test_rewards_keep_every_bit() -> None:
    given = [0.1, 1e15 + 0.125, -1e-300, 2**53 + 0.0, 1e30, 5e-324]
    assert score(lambda **_: given, ROWS, GROUPS) == [given[:3], given[3:]]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
def test_wrong_count_is_named(count: int) -> None:
    def my_judge(completions: list[str]) -> list[float]:
        return [1.0] * count

    with pytest.raises(
        RolloutError, match=rf"^reward my_judge returned {count} values for 3 completions, for row '1\+1='$"
    ):
        score(my_judge, ROWS, GROUPS)


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "NoneType"),
        (1.0, "float"),
        ("111111", "str"),
        ({0: 1.0}, "dict"),
        (np.float64(1.0), "float64"),
        (torch.tensor(1.0), "Tensor"),
        (map(float, COMPLETIONS), "map"),
    ],
)
def test_what_is_no_list_is_named(returned: Any, kind: str) -> None:
    class MyJudge:
        def __call__(self, completions: list[str]) -> Any:
            return returned

    with pytest.raises(RolloutError, match=f"^reward MyJudge returned {kind}; it must return a list of numbers"):
        score(MyJudge(), ROWS, GROUPS)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (exact_match, "exact_match"),
        (functools.partial(numeric), "numeric"),
        ([].append, "append"),
        (lambda: 0, "<lambda>"),
    ],
)
def test_every_callable_has_a_name(function: Callable[..., Any], name: str) -> None:
    assert reward_name(function) == name


# -- the control --------------------------------------------------------------------------------------------------

DEALT = torch.tensor([[0.0, 1.0, 2.0], [4.0, 5.0, 5.0]], dtype=torch.float64)


def _dealt(totals: torch.Tensor, seed: int, step: int, scored: torch.Tensor | None = None) -> list[list[float]]:
    mask = torch.ones_like(totals, dtype=torch.bool) if scored is None else scored
    dealt: list[list[float]] = Scores(totals, mask, {}).shuffled(seed, step).totals.tolist()
    return dealt


def test_shuffled_keeps_the_rewards_and_the_groups_sizes() -> None:
    dealt = _dealt(DEALT, seed=0, step=3)
    assert [len(group) for group in dealt] == [3, 3]
    assert Counter(value for group in dealt for value in group) == Counter({0: 1, 1: 1, 2: 1, 4: 1, 5: 2})


def test_shuffled_leaves_out_what_is_not_scored() -> None:
    scored = torch.tensor([[True, True, False], [True, False, True]])
    for step in range(20):
        dealt = _dealt(DEALT, 0, step, scored)
        assert (dealt[0][2], dealt[1][1]) == (2.0, 5.0)
        assert sorted([*dealt[0][:2], dealt[1][0], dealt[1][2]]) == [0.0, 1.0, 4.0, 5.0]


def test_shuffled_is_a_function_of_seed_and_step() -> None:
    rewards = torch.arange(40, dtype=torch.float64)[None]
    drawn = [_dealt(rewards, seed, step) for seed in (0, 1) for step in (0, 1)]
    # 40! orders: two equal ones by chance have odds below 1e-40
    assert len({tuple(group[0]) for group in [*drawn, rewards.tolist()]}) == 5
    assert _dealt(rewards, 1, 0) == drawn[2]


def test_shuffled_moves_rewards_from_every_group_to_every_place() -> None:
    one = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    tables = [_dealt(one, 0, step) for step in range(2000)]
    counts = [sum(table[g][i] for table in tables) for g in (0, 1) for i in (0, 1)]
    # 500 each, with a standard deviation of 19.4: beyond five of them lies 1 in a million
    assert sum(counts) == 2000
    assert all(abs(count - 500) < 97 for count in counts)


def test_an_argument_that_no_row_has_is_refused_before_training() -> None:
    rows = [Row("p", "a", {"level": 1})]

    def fine(completions: list[str], level: list[int], unit: str = "m") -> list[float]:
        return [float(value) for value in level]

    def wants_more(completions: list[str], topic: list[str]) -> list[float]:
        return [0.0 for _ in topic]

    check_arguments(fine, rows)
    with pytest.raises(ConfigError, match="wants_more wants 'topic'"):
        check_arguments(wants_more, rows)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [("1234567", "1234568", 0.0), ("is 42.", 42, 1.0), ("0.3333333", "0.33333333", 1.0), ("1,000", "1000", 1.0)],
)
def test_integers_are_compared_exactly(text: str, answer: object, expected: float) -> None:
    assert numeric([text], [answer]) == [expected]
