"""The rewards that come with the trainer, against values worked out by hand or by others."""

import asyncio
import importlib.util
import pickle
import re
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from rollout import RolloutError
from scoring import PROGRESS, group
from trainer.config import (
    ArithmeticConfig,
    ConfigError,
    FunctionsRewardConfig,
    MathRewardConfig,
    RegexRewardConfig,
    RewardConfig,
)
from trainer.data.rows import Row
from trainer.data.tasks import final_answer, make_task
from trainer.rewards.builtin import BUILTIN, Regex, SoftOverlong
from trainer.rewards.builtin import math as math_reward
from trainer.rewards.functions import make_functions, weighted
from trainer.rewards.scorer import Scorer

TASK = make_task(ArithmeticConfig(eval_rows=1), 0)
needs_math = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="no math-verify here")


# -- regular expressions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "whole", "search"),
    [("42", 1.0, 1.0), ("is 42.", 0.0, 1.0), ("42\n", 0.0, 1.0), ("forty", 0.0, 0.0), ("", 0.0, 0.0)],
)
def test_whole_or_search(text: str, whole: float, search: float) -> None:
    assert Regex("[0-9]+")([text]) == [whole]
    assert Regex("[0-9]+", match="search")([text]) == [search]


THINKS = r"(?s)<think>(?!.*<think>).*?</think>.+"


@pytest.mark.parametrize(
    ("prefix", "text", "value"),
    [
        ("<think>\n", "2+2 is 4</think>4", 1.0),
        ("<think>\n", "2+2 is 4, so 4", 0.0),
        ("<think>\n", "<think>2+2 is 4</think>4", 0.0),
        ("<think>\n", "2+2 is 4</think>", 0.0),
        ("", "2+2 is 4</think>4", 0.0),
        ("", "<think>2+2\nis 4</think>4", 1.0),
    ],
)
def test_an_opening_tag_that_the_template_has_put_counts(prefix: str, text: str, value: float) -> None:
    assert Regex(THINKS, prefix=prefix)([text]) == [value]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pattern": "("}, r"pattern='\(': no regular expression \(missing \), unterminated"),
        ({"pattern": ""}, "pattern='': give a regular expression"),
        ({}, "pattern='': give"),
        ({"pattern": 3}, "pattern=3: give"),
        ({"pattern": "a", "match": "start"}, "match='start': use whole or search"),
        ({"pattern": "a", "prefix": None}, "prefix=None: give text"),
    ],
)
def test_options_of_a_regex(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        Regex(**options)


# -- length -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "value"),
    # the paper's own sizes: 16384 expected tokens, 4096 of buffer
    [
        *[(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5)],
        *[(20479, -4095 / 4096), (20480, -1.0), (20481, -1.0), (10**6, -1.0)],
    ],
)
def test_soft_overlong_punishment(length: int, value: float) -> None:
    assert SoftOverlong(max_length=20480, buffer=4096)([[0] * length]) == [value]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "max_length=0: give"),
        ({"max_length": 8}, "buffer=0: give"),
        ({"max_length": 8, "buffer": 9}, r"buffer=9: must be at most max_length \(8\)"),
        ({"max_length": 8.0, "buffer": 1}, r"max_length=8\.0: give"),
        ({"max_length": 8, "buffer": True}, "buffer=True: give"),
    ],
)
def test_options_of_soft_overlong(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        SoftOverlong(**options)


# -- mathematics --------------------------------------------------------------------------------------------------


@needs_math
@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        (r"\boxed{\frac13}", r"$\frac13$", 1.0),
        (r"so \boxed{\frac{2}{6}}.", r"\frac{1}{3}", 1.0),
        (r"$\frac12$", r"\frac13", 0.0),
        ("the answer is 72", 72, 1.0),
        ("the answer is 73", 72, 0.0),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        (r"$x^2 + 2x$", "(x+1)^2", 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2,1\}", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        ("0.5", "1/2", 1.0),
        ("no idea", 3, 0.0),
        ("", 3, 0.0),
    ],
)
def test_math(text: str, answer: object, value: float) -> None:
    assert math_reward([text], [answer]) == [value]


RIGHT = ([r"\boxed{\frac13}"], [r"$\frac13$"])


@needs_math
def test_math_is_the_same_in_every_thread_and_process() -> None:
    found: list[list[float | None]] = [math_reward(*RIGHT)]
    thread = threading.Thread(target=lambda: found.append(math_reward(*RIGHT)))
    thread.start()
    thread.join()

    async def awaited() -> list[float | None]:
        return await asyncio.to_thread(math_reward, *RIGHT) + math_reward(*RIGHT)

    found.append(asyncio.run(awaited()))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found.append(pool.submit(math_reward, *RIGHT).result())
    (math,) = make_functions(MathRewardConfig(), TASK)
    for workers in (0, 1):
        with Scorer([math], MathRewardConfig(workers=workers, timeout=None)) as scorer:
            scores = scorer.collect([Row("p", RIGHT[1][0])], [group(RIGHT[0])], PROGRESS)
            found.append(scores.totals[0].tolist())
    assert found == [[1.0], [1.0], [1.0, 1.0], [1.0], [1.0], [1.0]]


@needs_math
def test_an_expression_without_end_is_a_counted_failure_and_no_wrong_answer(caplog: pytest.LogCaptureFixture) -> None:
    (math,) = make_functions(MathRewardConfig(), TASK)
    rows = [Row("p", "5", source=f"rows.jsonl:{i}") for i in (1, 2, 3)]
    texts = ["5", r"\boxed{9^{9^{9^{9}}}}", "6"]
    began = time.monotonic()
    with Scorer([math], MathRewardConfig(workers=1, timeout=3.0, on_timeout="-2")) as scorer:
        scores = scorer.collect(rows, [group([text], key) for key, text in enumerate(texts)], PROGRESS)
    assert time.monotonic() - began < 3 + 12  # two processes that import sympy, and the limit
    assert scores.totals.flatten().tolist() == [1.0, -2.0, 0.0]
    assert scores.metrics()["rewards/math/failed"] == 1.0
    assert "reward math took more than reward.timeout=3 s and was ended, for row rows.jsonl:2" in caplog.text


@needs_math
def test_an_answer_that_cannot_be_read_scores_nobody() -> None:
    assert math_reward(["3", "4"], ["", "4"]) == [None, 1.0]


# -- by name ------------------------------------------------------------------------------------------------------


def test_the_task_s_own_function_by_name() -> None:
    (alone,) = make_functions(RewardConfig(), TASK)
    (listed,) = make_functions(FunctionsRewardConfig(functions=["task"]), TASK)
    assert alone == listed
    assert (alone.function, alone.name) == (final_answer, "final_answer")


def test_a_regex_of_the_configuration() -> None:
    (made,) = make_functions(RegexRewardConfig(pattern="a+", match="search", prefix="b"), TASK)
    assert (made.function, made.name) == (Regex("a+", "search", "b"), "regex")
    with pytest.raises(ConfigError, match=r"^reward\.pattern='\[': no regular expression"):
        make_functions(RegexRewardConfig(pattern="["), TASK)


@pytest.mark.parametrize("name", BUILTIN)
def test_a_worker_can_be_given_a_copy(name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    every: dict[str, dict[str, Any]] = {"regex": {"pattern": "a"}, "soft_overlong": {"max_length": 4, "buffer": 2}}
    made = BUILTIN[name](**every.get(name, {}))
    assert pickle.loads(pickle.dumps(made)) == made


def test_they_take_text_where_prompts_are_messages() -> None:
    row = Row([{"role": "user", "content": "1+1?"}], "2")
    made = make_functions(FunctionsRewardConfig(functions=["exact_match", "numeric", "task"]), TASK)
    scores = Scorer(made).collect([row], [group(["2", "3"])], PROGRESS)
    right = [[1.0, 0.0]]
    found = {name: part.tolist() for name, part in scores.parts.items()}
    assert found == {"exact_match": right, "numeric": right, "final_answer": right}
    with pytest.raises(RolloutError, match=re.escape("reward exact_match raised AttributeError: 'list' object has no")):
        Scorer([weighted(BUILTIN["exact_match"]())]).collect([row], [group(["2"])], PROGRESS)
