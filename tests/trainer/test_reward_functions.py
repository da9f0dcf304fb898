"""Several functions with weights: what is written, what each is given, and what their values come to."""

import asyncio
import functools
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from rollout import RolloutError
from scoring import PROGRESS, group, score, scores
from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import ConfigError, FunctionsRewardConfig, RewardConfig, TrainerConfig, parse_config
from trainer.config import function_entries as entries
from trainer.config.names import as_typed
from trainer.data.rows import Row
from trainer.data.tasks import Task, exact_match
from trainer.rewards.builtin import SoftOverlong
from trainer.rewards.functions import WeightedFunction, check_functions, make_functions, weighted
from trainer.rewards.loading import load_reward
from trainer.rewards.scorer import Scorer
from trainer.rewards.scores import Scores

ROWS = [Row("1+1=", "2", {"level": 3}, "rows.jsonl:1"), Row("2+2=", "4", {"level": 4}, "rows.jsonl:2")]
GROUPS = [group(["2", "3"], 0), group(["x", "4"], 1)]
TASK = Task("test", ROWS, [], exact_match)


def _collect(*functions: WeightedFunction, **options: Any) -> Scores:
    return Scorer(functions, RewardConfig(**options)).collect(ROWS, GROUPS, PROGRESS)


def _config(*overrides: str) -> TrainerConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIRECTORY)):
        return parse_config(compose("config", as_typed(overrides)))


# -- what is written ----------------------------------------------------------------------------------------------


def test_names_paths_and_mappings() -> None:
    written = [
        "numeric",
        "judge.py:score",
        "package.judge.score",
        {"path": "a b/judge.py:f", "name": "kind", "weight": 2},
    ]
    names = [(entry.name, entry.path, entry.weight) for entry in entries(written)]
    assert names == [
        ("numeric", None, 1.0),
        (None, "judge.py:score", 1.0),
        (None, "package.judge.score", 1.0),
        ("kind", "a b/judge.py:f", 2.0),
    ]
    (entry,) = entries([{"name": "soft_overlong", "weight": -0.5, "max_length": 8, "buffer": 2}])
    assert (entry.weight, entry.options) == (-0.5, {"max_length": 8, "buffer": 2})


@pytest.mark.parametrize(
    "written",
    [
        "[numeric,package/judge.py:score]",
        '[{name: numeric, weight: 1.0}, {path: "package/judge.py:score", weight: 1}]',
        "[{name: numeric}, {path: package/judge.py:score}]",
    ],
)
def test_from_the_command_line(written: str) -> None:
    reward = _config("reward=functions", f"reward.functions={written}").reward
    assert isinstance(reward, FunctionsRewardConfig)
    found = [(entry.name, entry.path, entry.weight) for entry in entries(reward.functions)]
    assert found == [("numeric", None, 1.0), (None, "package/judge.py:score", 1.0)]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ([], ": is empty; give at least one function"),
        ([3], "[0]=3: give a name, a path, or a mapping"),
        (["numeric", {}], "[1]: has neither name nor path"),
        ([{"name": "numeric", "weight": math.nan}], "[0].weight=nan: must be a finite number"),
        ([{"name": "numeric", "weight": math.inf}], "[0].weight=inf: must be a finite number"),
        ([{"name": "numeric", "weight": "1"}], "[0].weight='1': must be a finite number"),
        ([{"name": "numeric", "weight": True}], "[0].weight=True: must be a finite number"),
        ([{"name": "numeric", "weight": None}], "[0].weight=None: must be a finite number"),
        ([{"path": "judge.py:f", "pattern": "a"}], "[0].pattern: a function by path has name, path and weight"),
        ([{"name": 3}], "[0].name=3: give text"),
        (["nosuch"], "[0].name='nosuch': use one of task, exact_match, numeric, regex, math, soft_overlong, or a path"),
        ([{"name": "numeric", "wieght": 1}], "[0].wieght=1: is no option of numeric, which has name, weight"),
        ([{"name": "regex"}], "[0].pattern='': give a regular expression"),
        ([{"name": "soft_overlong", "max_length": 4, "buffer": 5}], "[0].buffer=5: must be at most max_length (4)"),
        (["nosuch.py:f"], "[0].path='nosuch.py:f': file 'nosuch.py' does not exist"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(written: list[Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_functions(FunctionsRewardConfig(functions=written), TASK)
    assert str(caught.value).startswith(f"reward.functions{problem}")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["reward.timeout=5"], r"reward\.timeout=5\.0: a function in the trainer's own process cannot be ended; give"),
        (["reward.timeout=0", "reward.workers=1"], r"reward\.timeout=0\.0: must be more than 0"),
        (["reward.workers=-1"], r"reward\.workers=-1: must be at least 0"),
        (["reward.on_error=ignore"], r"reward\.on_error='ignore': use error, skip or a finite number to score"),
        (["reward.on_nan=nan"], r"reward\.on_nan='nan': use"),
        (["reward.on_none=inf"], r"reward\.on_none='inf': use"),
        (["reward.on_timeout="], r"reward\.on_timeout='': use"),
        (["reward=functions"], r"reward\.functions: reward=functions needs a list, as in reward\.functions=\[numeric"),
        (["reward=functions", "reward.functions=[]"], r"reward\.functions: reward=functions needs a list"),
        (["reward=functions", "reward.functions=numeric"], r"reward\.functions: "),
    ],
)
def test_options_that_cannot_be_met(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        _config(*overrides)


@pytest.mark.parametrize(("written", "kept"), [("0", "0"), ("-1.5", "-1.5"), ("1e-3", "1e-3"), ("skip", "skip")])
def test_policies_arrive_as_typed(written: str, kept: str) -> None:
    assert _config(f"reward.on_error={written}").reward.on_error == kept


def test_every_function_is_checked_against_the_rows() -> None:
    def leveled(completions: list[str], level: list[int]) -> list[float]:
        return []

    def topical(completions: list[str], topic: list[str]) -> list[float]:
        return []

    held_out = [Row("3+3=", "6", {"topic": "sums"}, "eval.jsonl:1")]
    functions = [weighted(exact_match), weighted(leveled, "judge"), weighted(topical)]
    check_functions(functions[:2], Task("test", ROWS, [], exact_match))
    with pytest.raises(
        ConfigError, match=r"^reward: judge wants 'level', which is no field of the held-out rows in eval"
    ):
        check_functions(functions[:2], Task("test", ROWS, held_out, exact_match))
    with pytest.raises(ConfigError, match=r"^reward: topical wants 'topic', which is no field of the training rows"):
        check_functions(functions, Task("test", ROWS, held_out, exact_match))


@pytest.mark.parametrize("field", ["trainer_state", "log_extra", "log_metric"])
def test_a_field_with_the_name_of_an_argument_is_refused(field: str) -> None:
    rows = [Row("p", 1, {field: 2})]
    with pytest.raises(
        ConfigError, match=f"^task: field '{field}' of the training rows is what rewards are called with"
    ):
        check_functions([weighted(exact_match)], Task("test", rows, [], exact_match))


# -- sums ---------------------------------------------------------------------------------------------------------


def _constant(value: Any, name: str = "constant", weight: float = 1.0) -> WeightedFunction:
    return weighted(lambda completions: [value for _ in completions], name, weight)


def test_the_total_is_weighted_and_the_parts_are_not() -> None:
    found = _collect(_constant(1.0, "a", 0.7), _constant(0.0, "b", 0.3), _constant(5.0, "c", 0.0))
    assert found.totals.tolist() == [[0.7, 0.7], [0.7, 0.7]]
    assert found.metrics() == {
        "rewards/a/mean": 1.0, "rewards/a/std": 0.0, "rewards/a/failed": 0.0,
        "rewards/b/mean": 0.0, "rewards/b/std": 0.0, "rewards/b/failed": 0.0,
        "rewards/c/mean": 5.0, "rewards/c/std": 0.0, "rewards/c/failed": 0.0,
        "rewards/unscored": 0.0,
    }  # fmt: skip


def test_one_function_of_weight_one_keeps_every_bit() -> None:
    for value in (0.1, 1e15 + 0.125, -1e-300, 5e-324, 1e30):
        assert _collect(_constant(value)).totals.tolist() == [[value, value], [value, value]]


@pytest.mark.parametrize("weights", [(2.0, 2.0), (1e300, -1e300), (-1e300, 0.0)])
def test_a_sum_that_is_too_large_is_refused(weights: tuple[float, float]) -> None:
    with pytest.raises(
        RolloutError, match=r"^reward: the weighted sum of .*; give smaller weights \(row rows\.jsonl:1"
    ):
        _collect(_constant(1e30, "a", weights[0]), _constant(1e30, "b", weights[1]))


def test_none_is_no_score_and_others_count() -> None:
    """As in TRL: the sum is over the functions that scored, and a completion that none scored has no score."""
    sometimes = weighted(lambda completions: [None, 3.0, None, 5.0], "sometimes", 2.0)
    never = weighted(lambda completions: [None, None, None, 1.0], "never")
    found = _collect(sometimes, never)
    assert found.scored.tolist() == [[False, True], [False, True]]
    assert found.totals.tolist() == [[0.0, 6.0], [0.0, 11.0]]
    metrics = found.metrics()
    assert (metrics["rewards/sometimes/mean"], metrics["rewards/sometimes/std"]) == (4.0, statistics.stdev([3, 5]))
    assert metrics["rewards/never/mean"] == 1.0
    assert "rewards/never/std" not in metrics
    assert (metrics["rewards/unscored"], metrics["rewards/sometimes/failed"]) == (2.0, 0.0)


def test_a_function_that_scores_nobody_has_no_mean() -> None:
    assert _collect(_constant(None)).metrics() == {"rewards/constant/failed": 0.0, "rewards/unscored": 4.0}


def test_scores_of_rounds_are_joined_and_chosen_from() -> None:
    def judge(completions: list[str], log_metric: Any, log_extra: Any) -> list[Any]:
        log_metric("texts", len(completions))
        if "x" not in completions:
            log_extra("said", completions)
        return [math.nan if text == "x" else float(text) for text in completions]

    with Scorer([weighted(judge)], RewardConfig(on_nan="skip")) as scorer:
        first, second = (scorer.collect(ROWS[g:][:1], GROUPS[g:][:1], PROGRESS) for g in (0, 1))
        nothing = scorer.collect([], [], PROGRESS)
    both = first.joined(second)
    assert both.totals.tolist() == [[2.0, 3.0], [0.0, 4.0]]
    assert both.scored.tolist() == [[True, True], [False, True]]
    assert (both.extras, both.logged) == ({"said": [["2", "3"], [None, None]]}, {"texts": [2, 2]})
    assert [failure[:2] for failure in both.failures["judge"]] == [(1, 0)]
    last = both.chosen([1])
    assert (last.totals.tolist(), last.extras) == ([[0.0, 4.0]], {"said": [[None, None]]})
    assert [failure[:2] for failure in last.failures["judge"]] == [(0, 0)]
    assert both.chosen([0]).failures == {"judge": []}
    assert first.joined(nothing) is first
    assert nothing.joined(first) is first


# -- policies -----------------------------------------------------------------------------------------------------


def _picky(completions: list[str]) -> list[Any]:
    """A number for digits; else what an x asks for."""
    if "x" in completions:
        raise ValueError("an x")
    return [float(text) for text in completions]


def _gives(value: Any) -> WeightedFunction:
    return weighted(lambda completions: [value if text == "x" else float(text) for text in completions], "judge")


@pytest.mark.parametrize(("policy", "total", "scored"), [("skip", 0.0, False), ("0", 0.0, True), ("-2.5", -2.5, True)])
def test_what_takes_the_place_of_a_score(policy: str, total: float, scored: bool) -> None:
    for function, key in (
        (weighted(_picky, "judge"), "on_error"),
        (_gives(math.nan), "on_nan"),
        (_gives(None), "on_none"),
    ):
        found = _collect(function, **{key: policy})
        assert found.totals.tolist() == [[2.0, 3.0], [total, 4.0]], key
        assert found.scored.tolist() == [[True, True], [scored, True]]
        assert found.metrics()["rewards/judge/failed"] == float(key != "on_none")


@pytest.mark.parametrize("value", [math.inf, "1", 10**400, 1e300], ids=["inf", "text", "huge", "large"])
def test_no_finite_number_is_as_good_as_nan(value: Any) -> None:
    assert _collect(_gives(value), on_nan="0").totals.tolist() == [[2.0, 3.0], [0.0, 4.0]]


def test_none_can_be_an_error() -> None:
    with pytest.raises(RolloutError, match=r"^reward judge returned None for completion 2 \(row rows\.jsonl:2 "):
        _collect(_gives(None), on_none="error")


def test_a_wrong_count_that_is_skipped_is_found_completion_by_completion() -> None:
    counts = weighted(lambda completions: [1.0 for text in completions if text != "x"], "counts")
    found = _collect(counts, on_error="skip")
    assert found.scored.tolist() == [[True, True], [False, True]]
    assert found.failures == {"counts": [(1, 0, "reward counts returned 0 values for 1 completions")]}


# -- as TRL calls them --------------------------------------------------------------------------------------------

CHAT = [
    Row([{"role": "user", "content": "say A"}], "A", {"ground_truth": "A"}),
    Row("say B", "B", {"ground_truth": "B"}),
]


def test_a_conversational_reward_in_trl_s_form_runs_unchanged() -> None:
    def format_and_answer(
        prompts: Any, completions: Any, ground_truth: Any, trainer_state: Any = None, **kwargs: Any
    ) -> Any:
        contents = [completion[0]["content"] for completion in completions]
        asked = [prompt[-1]["content"] for prompt in prompts]
        matches = [re.search(r"\\boxed\{(.*?)\}", content) for content in contents]
        late = trainer_state.global_step / trainer_state.max_steps
        kwargs["log_metric"]("boxed", sum(match is not None for match in matches) / len(matches))
        kwargs["log_extra"]("asked", asked)
        return [(match[1] == want) * late if match else None for match, want in zip(matches, ground_truth, strict=True)]

    found = scores(format_and_answer, CHAT[:1], [group([r"\boxed{A}", r"\boxed{B}", "A"])])
    assert found.totals.tolist() == [[0.3, 0.0, 0.0]]
    assert found.scored.tolist() == [[True, True, False]]
    assert found.logged == {"boxed": [2 / 3]}
    assert found.extras == {"asked": [["say A"] * 3]}
    assert found.metrics()["boxed"] == 2 / 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_field_that_a_row_lacks_is_none(tmp_path: Path, workers: int) -> None:
    path = f"{tmp_path}/judge.py:judge"
    (tmp_path / "judge.py").write_text("def judge(level): return [float(value is None) for value in level]\n")
    with Scorer([weighted(load_reward(path), path=path)], RewardConfig(workers=workers)) as scorer:
        found = scorer.collect([ROWS[0], Row("p", 1)], GROUPS, PROGRESS)
    assert found.totals.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_text_stays_text_beside_conversations() -> None:
    seen: list[Any] = []

    def look(prompts: list[Any], completions: list[Any]) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0 for _ in prompts]

    score(look, CHAT, [group(["A"], 0), group(["B"], 1)])
    said = [{"role": "assistant", "content": "A"}]
    assert seen == [([{"role": "user", "content": "say A"}], said), ("say B", "B")]


def test_functions_share_nothing() -> None:
    def vandal(prompts: Any, completions: Any, level: Any) -> list[float]:
        prompts.clear()
        completions[:] = ["changed"] * 4
        level[0] = 99
        return [0.0] * 4

    def witness(prompts: Any, completions: Any, level: Any) -> list[float]:
        assert (prompts[0], completions, level) == ("1+1=", ["2", "3", "x", "4"], [3, 3, 4, 4])
        return [1.0] * 4

    assert _collect(weighted(vandal), weighted(witness)).totals.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_async_functions_share_one_event_loop() -> None:
    loops: list[Any] = []

    async def later(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    class Later:
        async def __call__(self, completions: list[str]) -> list[float]:
            return await later(completions)

    for function in (later, Later(), functools.partial(later)):
        assert score(function, ROWS, GROUPS) == [[1.0, 1.0], [1.0, 1.0]]
    assert len(loops) == 3
    assert len(set(loops)) == 1


def test_an_async_function_that_raises_is_named_with_its_row() -> None:
    async def later(answer: list[str]) -> list[float]:
        return [1 / (int(value) - 4) for value in answer]

    with pytest.raises(RolloutError, match=r"^reward later raised ZeroDivisionError: .* for row rows\.jsonl:2 "):
        score(later, ROWS, GROUPS)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("log_metric('m', float('nan'))", r"log_metric\('m', nan\): give a finite number"),
        ("log_extra('c', [1, 2])", r"log_extra\('c', \.\.\.\): 2 values for 1 completions"),
    ],
)
def test_what_cannot_be_logged(tmp_path: Path, line: str, problem: str) -> None:
    namespace: dict[str, Any] = {}
    exec(
        f"def judge(completions, log_metric, log_extra):\n    {line}\n    return [1.0 for _ in completions]", namespace
    )
    with pytest.raises(RolloutError, match=f"^reward judge raised ValueError: {problem}"):
        score(namespace["judge"], ROWS[:1], [group(["a"])])


# -- names --------------------------------------------------------------------------------------------------------

JUDGE = """
import functools
class Scorer:
    def __call__(self, completions): return [1.0 for _ in completions]
    def method(self, completions): return [2.0 for _ in completions]
scorer, bound, anonymous = Scorer(), Scorer().method, lambda completions: [3.0 for _ in completions]
part = functools.partial(Scorer().method)
def score(completions): return [4.0 for _ in completions]
"""


def test_every_function_has_a_name_of_its_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "judge.py").write_text(JUDGE)
    names = ["a/judge.py:score", "b/judge.py:score", "a/judge.py:anonymous", "a/judge.py:bound", "a/judge.py:part"]
    written: list[Any] = [f"{tmp_path}/{name}" for name in [*names, "a/judge.py:scorer"]]
    written.append({"path": written[0], "name": "score_2"})
    functions = make_functions(FunctionsRewardConfig(functions=written), TASK)
    named = ["score", "score_2", "<lambda>", "method", "method_2", "Scorer", "score_2_2"]
    assert [one.name for one in functions] == named
    assert list(_collect(*functions).parts) == named


def test_a_length_penalty_beside_a_task_s_reward() -> None:
    written = ["exact_match", {"name": "soft_overlong", "max_length": 4, "buffer": 4, "weight": 0.5}]
    functions = make_functions(FunctionsRewardConfig(functions=written), TASK)
    assert functions[1].function == SoftOverlong(4, 4)
    # two tokens of four: half of the punishment, by half
    assert _collect(*functions).totals.tolist() == [[0.75, -0.25], [-0.25, 0.75]]
