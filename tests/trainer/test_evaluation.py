"""Held-out evaluation: greedy, counted by hand on a model whose tokens are known, and invisible to training."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

import tiny_models
from rollout import RolloutConfig, RolloutEngine, RolloutGroup, SamplingParams
from trainer.config import ConfigError, EvalConfig
from trainer.data.rows import Row
from trainer.data.tasks import exact_match
from trainer.evaluation import check_by, eval_sampling, pass_at
from trainer.evaluation import evaluate as evaluate_by
from trainer.rewards.calling import TrainingProgress
from trainer.rewards.functions import weighted
from trainer.rewards.scorer import Scorer

CONFIG = RolloutConfig(block_size=4, num_blocks=64, max_model_len=24, max_num_seqs=8, max_num_batched_tokens=64)
TOKENIZER = tiny_models.byte_tokenizer()
EQUALS, FOUR, THREE, TWO, X = TOKENIZER("=432x", add_special_tokens=False)["input_ids"]
# after "=" a 4 is likelier than a 3; both go on to a 2, which ends; an x repeats for ever
CHAIN = {EQUALS: {FOUR: 0.6, THREE: 0.4}, FOUR: TWO, THREE: TWO, TWO: tiny_models.EOS, X: X}
GREEDY_IN_NAME_ONLY = SamplingParams(temperature=3.0, top_k=2, top_p=0.9, min_p=0.1, max_new_tokens=2, seed=0)


def evaluate(
    engine: RolloutEngine,
    rows: list[Row],
    function: Callable[..., Any],
    sampling: SamplingParams,
    max_new_tokens: int,
    step: int,
) -> dict[str, float]:
    config = EvalConfig(max_new_tokens=max_new_tokens)
    scorer, progress = Scorer([weighted(function)]), TrainingProgress(step, 9)
    return evaluate_by(engine, rows, scorer, config, eval_sampling(config, sampling), progress)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    size = tiny_models.TEXT_VOCAB
    return RolloutEngine(tiny_models.chain_model(CHAIN, hidden=size, eos_token_id=tiny_models.EOS), TOKENIZER, CONFIG)


def _length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_pass_at_1_is_the_share_of_right_rows_and_an_over_long_one_is_wrong(engine: RolloutEngine) -> None:
    # completions are 42, 42, 42 and xxxxx; the last prompt has more tokens than the model takes
    prompts = {"1=": "42", "2=": 42, "3=": "32", "x": "xxxxx", "9" * 30 + "=": "42"}
    rows = [Row(prompt, answer) for prompt, answer in prompts.items()]
    metrics = evaluate(engine, rows, exact_match, GREEDY_IN_NAME_ONLY, max_new_tokens=5, step=0)
    # three of 3 tokens and one of 5, cut
    lengths = {"eval/mean_length": 14 / 4, "eval/clipped_ratio": 1 / 4}
    assert metrics == {"eval/reward": 3 / 5, "eval/pass@1": pytest.approx(3 / 5), "eval/num_errors": 1.0} | lengths
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("step", [0, 7])
def test_every_completion_is_the_greedy_one(engine: RolloutEngine, step: int) -> None:
    # drawn at temperature 3, all forty would be 42 once in 10 million times or less
    rows = [Row(f"{i}=", "42") for i in range(40)]
    metrics = evaluate(engine, rows, exact_match, GREEDY_IN_NAME_ONLY, max_new_tokens=8, step=step)
    assert metrics["eval/pass@1"] == 1.0


@pytest.mark.parametrize(("limit", "length"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_length_limit_is_the_evaluation_s_own(engine: RolloutEngine, limit: int, length: int) -> None:
    # "42" and the end token
    metrics = evaluate(engine, [Row("1=", "")], _length, GREEDY_IN_NAME_ONLY, limit, step=0)
    assert metrics["eval/reward"] == float(length)


@pytest.mark.parametrize(
    ("rewards", "mean", "passed"), [([0.5, 0.5], 0.5, 0.0), ([1.0, 0.999], 0.9995, 0.5), ([3.0, -1.0], 1.0, 0.5)]
)
def test_reward_of_one_or_more_passes(engine: RolloutEngine, rewards: list[float], mean: float, passed: float) -> None:
    rows = [Row("1=", "42"), Row("2=", "42")]
    metrics = evaluate(engine, rows, lambda **_: rewards, GREEDY_IN_NAME_ONLY, 4, step=0)
    assert metrics["eval/reward"] == pytest.approx(mean)
    assert metrics["eval/pass@1"] == passed


def test_no_row_that_can_be_taken(engine: RolloutEngine) -> None:
    def needs_a_column(completions: list[str], level: list[int]) -> list[float]:
        return [1.0] * len(completions)

    rows = [Row("9" * 30, "1", {"level": 1})] * 2
    metrics = evaluate(engine, rows, needs_a_column, GREEDY_IN_NAME_ONLY, 4, step=0)
    assert metrics == {"eval/reward": 0.0, "eval/pass@1": 0.0, "eval/num_errors": 2.0}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_pass_at_k_is_without_bias(engine: RolloutEngine, seed: int) -> None:
    """After "=" a 4 comes with 0.6: pass@k of "42" is 1 - 0.4 ** k. 400 rows of 5: sd of pass@4 below 0.01."""
    rows = [Row(f"{i}=", "42") for i in range(400)]
    config = EvalConfig(samples=5, temperature=1.0, max_new_tokens=4)
    sampling = eval_sampling(config, SamplingParams(seed=seed, temperature=0.3))
    metrics = evaluate_by(engine, rows, Scorer([weighted(exact_match)]), config, sampling, TrainingProgress(0, 9))
    ks = [int(name.removeprefix("eval/pass@")) for name in metrics if "pass@" in name]
    assert ks == [1, 2, 4, 5]
    for k in ks:  # five standard deviations: one false alarm in some 100,000 runs
        assert metrics[f"eval/pass@{k}"] == pytest.approx(1 - 0.4**k, abs=0.06 if k == 1 else 0.05)


@pytest.mark.parametrize(("n", "passed", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 4), (5, 5, 2), (8, 3, 8), (6, 1, 2)])
def test_pass_at_k_counts_the_choices_of_k(n: int, passed: int, k: int) -> None:
    choices = list(combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at(k, n, passed) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_figures_of_a_column_s_values_are_those_of_their_rows(engine: RolloutEngine) -> None:
    rows = [Row(f"{i}=", "42" if i < 3 else "32", {"level": i % 2}) for i in range(4)]
    config = EvalConfig(by="level", max_new_tokens=4)
    sampling = eval_sampling(config, SamplingParams(seed=0))
    metrics = evaluate_by(engine, rows, Scorer([weighted(exact_match)]), config, sampling, TrainingProgress(0, 9))
    assert [metrics[f"eval/{part}pass@1"] for part in ("", "0/", "1/")] == [3 / 4, 1.0, 1 / 2]


def test_a_column_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^eval\.by='lvl': .* no such column; they have level, x$"):
        check_by(EvalConfig(by="lvl"), [Row("a", "b", {"level": 1, "x": 2})])


def _training_step(engine: RolloutEngine, step: int) -> list[RolloutGroup]:
    prompts = tiny_models.random_prompts([3, 9, 5], seed=step)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=6, seed=4)
    return engine.generate_rollouts(prompts, 3, sampling, step=step, keys=[3 * step + i for i in range(3)])


def test_evaluation_leaves_the_next_rollouts_as_they_would_have_been() -> None:
    rows = [Row(prompt, None) for prompt in tiny_models.random_prompts([2, 11, 30, 7])]  # type: ignore[arg-type]
    model = tiny_models.shared_model("qwen3")
    with RolloutEngine(model, None, CONFIG) as alone, RolloutEngine(model, None, CONFIG) as between:
        expected = [_training_step(alone, step) for step in range(3)]
        seen = []
        for step in range(3):
            evaluate(between, rows, _length, SamplingParams(seed=4), 5, step)
            seen.append(_training_step(between, step))
    # groups are compared whole: ids, log-probs in every bit, keys, policy version
    assert seen == expected
    assert len({tuple(r.completion_ids) for groups in seen for group in groups for r in group.rollouts}) > 20
