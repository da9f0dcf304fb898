"""Problems of reasoning-gym: its rows, its scores, and held-out questions that are not trained on."""

import pickle
import sys
from typing import Any

import pytest

from trainer.config import ConfigError, ReasoningGymConfig
from trainer.data.rows import Row, uniforms
from trainer.data.tasks import Task, make_task
from trainer.storage.digests import rows_digest

reasoning_gym = pytest.importorskip("reasoning_gym")
SMALL = {"max_terms": 2, "max_digits": 2}


def _task(name: Any = "chain_sum", **options: Any) -> Task:
    values: dict[str, Any] = {"size": 40, "eval_rows": 10, "options": SMALL if name == "chain_sum" else {}}
    return make_task(ReasoningGymConfig(name=name, **values | options), 0)


def test_rows_are_the_library_s() -> None:
    made = reasoning_gym.create_dataset("chain_sum", seed=7, size=40, **SMALL)
    rows = _task(seed=7).train_rows
    assert [(row.prompt, row.answer) for row in rows] == [(e["question"], e["answer"]) for e in made]
    assert rows[3].columns == {"entry": ["train", 3], "dataset": "chain_sum"}
    assert rows_digest(rows) == rows_digest(_task(seed=7).train_rows) != rows_digest(_task(seed=8).train_rows)


@pytest.mark.parametrize("name", ["chain_sum", ["chain_sum", "leg_counting"]])
def test_held_out_questions_are_new(name: Any) -> None:
    options = SMALL if name == "chain_sum" else {"chain_sum": SMALL | {"max_digits": 1}}
    task = _task(name, size=300, eval_rows=20, options=options)
    held_out = [row.prompt for row in task.eval_rows]
    assert len(set(map(str, held_out))) == len(held_out) == 20
    assert not {str(row.prompt) for row in task.train_rows} & set(map(str, held_out))
    assert _task(name, size=300, eval_rows=20, options=options).eval_rows == task.eval_rows


def test_nothing_held_out() -> None:
    assert _task(eval_rows=0).eval_rows == []


def test_too_few_questions_are_refused() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 9 or 10 digits, two signs: some 200
    with pytest.raises(
        ConfigError, match=r"^task\.eval_rows=100: only \d+ of 800 further problems of chain_sum ask what"
    ):
        _task(size=1000, eval_rows=100, options=options)


def test_several_datasets_are_mixed_with_their_own_options() -> None:
    task = _task(
        ["chain_sum", "leg_counting"], size=200, options={"chain_sum": SMALL, "leg_counting": {"max_animals": 3}}
    )
    names = [row.columns["dataset"] for row in task.train_rows]
    # 200 throws of a coin: between 60 and 140 but for 1 in 50 million
    assert 60 < names.count("chain_sum") < 140
    assert set(names) == {"chain_sum", "leg_counting"}
    sums = [str(row.prompt) for row in task.train_rows if row.columns["dataset"] == "chain_sum"]
    assert max(prompt.count(" + ") + prompt.count(" - ") for prompt in sums) == 1
    assert _scored(task, task.train_rows[0], [task.train_rows[0].answer]) == [1.0]


# -- scores -------------------------------------------------------------------------------------------------------


def _scored(task: Task, row: Row, completions: list[str]) -> list[float]:
    return task.reward(completions=completions, entry=[row.columns["entry"]] * len(completions), prompts=None)


def test_scores_are_the_library_s() -> None:
    made = reasoning_gym.create_dataset("chain_sum", seed=0, size=40, **SMALL)
    task = _task()
    said = ["5", "", "no number", f"The answer is {made[2]['answer']}", f" {made[2]['answer']}\n"]
    expected = [made.score_answer(text.strip(), made[2]) for text in said]
    assert _scored(task, task.train_rows[2], said) == expected
    assert expected[-1] == 1.0


def test_an_answer_in_tags_is_taken_out() -> None:
    task = _task()
    answer = task.eval_rows[4].answer
    said = [f"<answer>9999999</answer> or <answer> {answer} </answer>.", f"<answer>{answer}</answer><answer>x</answer>"]
    assert _scored(task, task.eval_rows[4], said)[0] == 1.0
    assert _scored(task, task.eval_rows[4], said)[1] < 1.0


def test_problems_of_many_solutions() -> None:
    """countdown's scorer takes every expression of the right value; graph_color has no answer of its own."""
    task = _task("countdown", options={"min_numbers": 2, "max_numbers": 2})
    answer = task.train_rows[0].answer
    assert _scored(task, task.train_rows[0], [answer, f"({answer})", "1"])[:2] == [1.0, 1.0]
    assert _scored(task, task.train_rows[0], ["1"])[0] < 1.0
    colours = _task("graph_color", size=3, eval_rows=1)
    assert colours.train_rows[0].answer is None
    assert colours.worked_example is None


def test_what_a_scorer_cannot_parse_scores_0() -> None:
    task = _task("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.create_dataset("prime_factorization", seed=0, size=1).score_answer(
            "none", {"answer": "2", "metadata": {"number": 2, "factors": [2]}}
        )
    assert _scored(task, task.train_rows[0], ["none", task.train_rows[0].answer]) == [0.0, 1.0]


@pytest.mark.parametrize("name", ["chain_sum", "list_functions", ["gcd", "leg_counting"]])
def test_a_copy_scores_as_the_first_does(name: Any) -> None:
    """In another process, say; list_functions makes other problems in another order."""
    task = _task(name, size=12, eval_rows=2)
    copy = pickle.loads(pickle.dumps(task.reward))
    for row in (task.train_rows[7], task.eval_rows[-1]):
        said = {"completions": [row.answer, "nonsense"], "entry": [row.columns["entry"]] * 2}
        assert copy(**said) == task.reward(**said)
        assert copy(**said)[0] == 1.0


@pytest.mark.parametrize(("fraction", "low", "high"), [(0.0, 0.0, 0.2), (0.35, 0.25, 0.55), (1.0, 1.0, 1.0)])
def test_worked_examples_leave_room(fraction: float, low: float, high: float) -> None:
    """All look like answers; about the fraction of them are right (a wrong one may be right by chance)."""
    task = _task(size=400, finished_fraction=fraction)
    assert task.worked_example is not None
    answers = {row.answer for row in task.train_rows}
    examples = [
        task.worked_example(row, float(u)) for row, u in zip(task.train_rows, uniforms(400, 0, 99), strict=True)
    ]
    assert set(examples) <= answers
    scores = [_scored(task, row, [text])[0] for row, text in zip(task.train_rows, examples, strict=True)]
    assert low <= sum(score == 1.0 for score in scores) / 400 <= high


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chainsum", {}, r"^task\.name='chainsum': .* no dataset of that name \(it has 1\d\d, among them chain_sum, "),
        ("composite", {}, r"^task\.name='composite': "),
        (5, {}, r"^task\.name=5: "),
        (["gcd", "nosuch"], {}, r"^task\.name='nosuch': "),
        ("chain_sum", {"max_term": 2}, r"^task\.options=\{'max_term': 2\}: TypeError: .* argument 'max_term'"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, r"^task\.options=.*: AssertionError: max_terms must be >="),
        ("chain_sum", {"seed": 2}, r"^task\.options=.*: give a mapping; task\.seed and task\.size are keys"),
        (["gcd", "chain_sum"], {"max_terms": 2}, r"^task\.options\.max_terms: .* options by name, of gcd, chain_sum"),
        (["gcd", "chain_sum"], {"gcd": 2}, r"^task\.options=2: give a mapping"),
    ],
)
def test_what_the_library_has_not_is_named(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _task(name, options=options)


def test_without_the_library_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasoning_gym", "reasoning_gym.composite", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"^task=reasoning_gym: .*; install it with: pip install .* '\.\[tasks\]'"):
        _task()
