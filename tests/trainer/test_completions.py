"""Completions that a step shows: which they are, the text of their tokens, and lines that stay small."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from rollout import Rollout, RolloutGroup
from tiny_models import byte_tokenizer, metaspace_tokenizer
from trainer.__main__ import CONFIG_DIRECTORY
from trainer.config import parse_config
from trainer.loop import train
from trainer.rewards.scores import Scores
from trainer.run import prepare
from trainer.tracking.completions import SampledCompletion, sample_completions, token_texts


def _byte_ids(text: str) -> list[int]:
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


def _rollout(index: int, text: str, logprob: float = -0.5, **fields: object) -> Rollout:
    ids = _byte_ids(text)
    return Rollout(index, ids, [-9.0] * len(ids), [logprob] * len(ids), text, "stop", 0, **fields)  # type: ignore[arg-type]


def _step(num_groups: int, n: int, text: str = "t") -> tuple[list[RolloutGroup], Scores]:
    """Groups whose completions name their places, and whose rewards are 10 g + i."""
    groups = [
        RolloutGroup(_byte_ids(f"p{g}="), [_rollout(i, f"{text}{g}.{i}") for i in range(n)], g, 0)
        for g in range(num_groups)
    ]
    totals = torch.tensor([[10.0 * g + i for i in range(n)] for g in range(num_groups)], dtype=torch.float64)
    return groups, Scores(totals, torch.ones(num_groups, n, dtype=torch.bool), {"exact": totals * 2})


def _sampled(groups: list[RolloutGroup], scores: Scores, **options: int) -> list[SampledCompletion]:
    chosen = {"step": 1, "seed": 0, "count": 4} | options
    return sample_completions(groups, scores, byte_tokenizer(), chosen.pop("step"), **chosen)


# -- which --------------------------------------------------------------------------------------------------------


def test_each_has_its_own_prompt_reward_and_parts() -> None:
    shown = _sampled(*_step(6, 5), count=30)
    assert len(shown) == 30
    for place, one in enumerate(shown):
        g, i = divmod(place, 5)
        assert (one.prompt, one.completion, one.reward) == (f"p{g}=", f"t{g}.{i}", 10.0 * g + i)
        assert (one.rewards, one.finish_reason, one.num_tokens) == ({"exact": 2 * (10.0 * g + i)}, "stop", 4)


def test_choice_is_a_function_of_seed_and_step() -> None:
    groups, scores = _step(6, 5)
    other, other_scores = _step(6, 5, text="u")
    chosen = {
        (seed, step): [one.reward for one in _sampled(groups, scores, seed=seed, step=step)]
        for seed in range(3)
        for step in range(1, 9)
    }
    again = [one.reward for one in _sampled(other, other_scores, seed=1, step=3)]
    assert again == chosen[1, 3]
    assert len({tuple(rewards) for rewards in chosen.values()}) == len(chosen)
    assert all(len(set(rewards)) == len(rewards) == 4 for rewards in chosen.values())
    assert all(rewards == sorted(rewards, key=lambda reward: reward or 0.0) for rewards in chosen.values())


def test_every_place_is_as_likely() -> None:
    """Over 3000 steps each of 12 places is chosen some 1000 times; 6 standard deviations are 155."""
    groups, scores = _step(3, 4)
    counts = dict.fromkeys(scores.totals.flatten().tolist(), 0)
    for step in range(3000):
        for one in _sampled(groups, scores, step=step):
            assert one.reward is not None
            counts[one.reward] += 1
    assert all(abs(count - 1000) < 155 for count in counts.values())


@pytest.mark.parametrize(("num_groups", "count", "expected"), [(2, 0, 0), (0, 4, 0), (1, 4, 2), (3, 100, 6)])
def test_no_more_than_there_are(num_groups: int, count: int, expected: int) -> None:
    assert len(_sampled(*_step(num_groups, 2), count=count)) == expected


def test_what_was_not_scored_has_no_reward() -> None:
    groups, scores = _step(1, 2)
    scores.scored[0, 1] = False
    scores.parts["exact"][0, 1] = math.nan
    first, second = _sampled(groups, scores)
    assert (first.reward, second.reward, second.rewards) == (0.0, None, {"exact": None})
    assert json.loads(json.dumps(second.line(), allow_nan=False))["reward"] is None


# -- tokens -------------------------------------------------------------------------------------------------------


def test_character_of_several_tokens_stands_at_the_last_one() -> None:
    ids = _byte_ids("a\u20acb")
    assert token_texts([], ids, byte_tokenizer()) == ["a", "", "", "\u20ac", "b"]
    assert token_texts([], ids[:3], byte_tokenizer()) == ["a", "", "\ufffd"]


def test_special_tokens_are_shown() -> None:
    tokenizer = byte_tokenizer()
    (special,) = [tokenizer.eos_token_id]
    assert token_texts(_byte_ids("12+34="), [*_byte_ids("46"), special], tokenizer) == ["4", "6", tokenizer.eos_token]


def test_space_before_a_word_is_kept() -> None:
    tokenizer = metaspace_tokenizer()
    ids = tokenizer("a b ab", add_special_tokens=False)["input_ids"]
    before, behind = ids[:1], ids[1:]
    assert tokenizer.decode(before) + "".join(token_texts(before, behind, tokenizer)) == tokenizer.decode(ids)


def test_texts_of_random_bytes_add_up() -> None:
    soup = np.random.default_rng(0).integers(256, size=400, dtype=np.uint8).tobytes()
    ids = [byte_tokenizer().convert_tokens_to_ids(token) for token in _tokens_of(soup)]
    texts = token_texts([], ids, byte_tokenizer())
    assert len(texts) == len(ids)
    assert "".join(texts) == soup.decode(errors="replace")


def _tokens_of(data: bytes) -> list[str]:
    """The names that byte-level vocabularies have for bytes (openai/gpt-2, encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [names[byte] for byte in data]


def test_logprobs_are_raw_and_none_for_forced_tokens() -> None:
    rollout = _rollout(0, "abc", logprob=-0.123456, loss_mask=[True, False, True])
    groups, scores = [RolloutGroup(_byte_ids("p"), [rollout], 0, 0)], _step(1, 1)[1]
    (shown,) = _sampled(groups, scores)
    assert shown.logprobs == [-0.1235, None, -0.1235]
    assert shown.tokens == ["a", "b", "c"]


def test_long_texts_are_cut_in_their_middle() -> None:
    digits = "".join(str(k % 10) for k in range(1500))
    groups = [RolloutGroup(_byte_ids("q" * 2000), [_rollout(0, digits)], 0, 0)]
    (shown,) = _sampled(groups, _step(1, 1)[1])
    assert (shown.num_tokens, shown.left_out, len(shown.logprobs)) == (1500, 476, 1024)
    assert "".join(shown.tokens) == digits[:768] + digits[-256:]
    assert shown.completion == f"{digits[:768]}\n... 476 tokens ...\n{digits[-256:]}"
    assert shown.prompt == f"{'q' * 768}\n... 976 tokens ...\n{'q' * 256}"
    assert len(json.dumps(shown.line())) < 25_000


# -- in a run -----------------------------------------------------------------------------------------------------


def _run(run_dir: Path, *overrides: str) -> list[dict[str, object]]:
    chosen = [
        "experiment=smoke", f"run_dir={run_dir}", "name=n", "steps=4", "model.warm_start_steps=0", "eval.every=0",
        "algorithm.prompts_per_step=3", "algorithm.group_size=2", "sampling.max_new_tokens=4", "checkpoint.every=2",
        "rollout.num_blocks=64", *overrides,
    ]  # fmt: skip
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        run = prepare(parse_config(compose("config", chosen)))
    try:
        train(run)
    finally:
        run.close()
    return [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]


def test_run_writes_completions_and_a_resumed_one_the_same(tmp_path: Path) -> None:
    lines = _run(tmp_path / "run")
    assert [line["step"] for line in lines] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    for line in lines:
        tokens, logprobs = line["tokens"], line["logprobs"]
        assert isinstance(tokens, list)
        assert isinstance(logprobs, list)
        assert tokens
        assert len(tokens) == len(logprobs) == line["num_tokens"]
        assert all(logprob <= 0.0 for logprob in logprobs)
        assert "".join(tokens).startswith(str(line["completion"]))
        assert str(line["prompt"]).endswith("=")
    resumed = _run(tmp_path / "run", f"resume={tmp_path / 'run/checkpoints/step-000002'}")
    assert resumed == lines
    assert not (tmp_path / "run/completions.before-resume.jsonl").exists()


def test_none_are_an_empty_file(tmp_path: Path) -> None:
    assert _run(tmp_path / "run", "tracking.completions=0", "steps=1") == []
