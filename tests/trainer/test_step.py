"""Trainer.step as a library call: what it returns, and a loss and advantages of one's own."""

import torch

import tiny_models
from rollout import RolloutConfig, RolloutEngine
from rollout.forward import TokenScores
from trainer.algorithm.advantages import AdvantageFunction
from trainer.algorithm.batch import StepTotals, TrainingBatch
from trainer.algorithm.losses import LossFunction, PolicyLoss
from trainer.config import ClippedConfig, OptimConfig, SamplingConfig, TrainerConfig
from trainer.data.rows import Row, RowStream
from trainer.rewards.functions import weighted
from trainer.rewards.scorer import Scorer
from trainer.step import Trainer
from trainer.weights.optimizer import MasterAdamW


def _trainer(*, advantages: AdvantageFunction | None = None, loss: LossFunction | None = None) -> Trainer:
    """Two prompts, three completions of five tokens each; the reward is the first token's id."""
    model = tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB)
    engine = RolloutEngine(model, tiny_models.byte_tokenizer(), RolloutConfig(num_blocks=32))
    config = TrainerConfig(
        algorithm=ClippedConfig(prompts_per_step=2, group_size=3, micro_batch_tokens=12),
        sampling=SamplingConfig(max_new_tokens=5, ignore_eos=True),
        optim=OptimConfig(lr=1e-2),
    )
    optimizer = MasterAdamW(model.named_parameters(), config.optim)
    rows = RowStream([Row("ab", 1), Row("c", 2)], seed=0)
    scorer = Scorer([weighted(lambda completion_ids: [float(ids[0]) for ids in completion_ids])])
    return Trainer(
        config, engine, optimizer, rows, scorer,
        advantages=advantages, loss=loss,
    )  # fmt: skip


def test_a_step_returns_what_it_was_made_of() -> None:
    trainer = _trainer()
    before = trainer.engine.module.get_output_embeddings().weight.detach().clone()
    result = trainer.step(0)
    assert sorted(row.prompt for row in result.rows) == ["ab", "c"]
    first = [[float(rollout.completion_ids[0]) for rollout in group.rollouts] for group in result.groups]
    assert result.scores.totals.tolist() == first
    assert torch.allclose(result.advantages.view(2, -1).sum(-1), torch.zeros(2), atol=1e-4)
    assert result.metrics["completions/mean_length"] == 5.0
    assert result.metrics["learning_rate"] == 1e-2
    assert trainer.engine.policy_version == 1
    assert not torch.equal(before, trainer.engine.module.get_output_embeddings().weight)
    trainer.optimizer.close()


def test_advantages_and_loss_of_ones_own_are_the_step_s() -> None:
    seen: list[TrainingBatch] = []

    def plain(scores: TokenScores, batch: TrainingBatch, totals: StepTotals) -> PolicyLoss:
        seen.append(batch)
        assert totals == StepTotals(num_tokens=30, num_rollouts=6, max_length=5)
        none = torch.zeros_like(batch.loss_mask)
        logprobs = scores.logprobs
        return PolicyLoss(-(batch.advantages * logprobs).sum() / 30, torch.ones_like(logprobs), none, none, None)

    trainer = _trainer(advantages=lambda rewards, scored: (rewards - 7.0).float(), loss=plain)
    result = trainer.step(0)
    values = (result.scores.totals - 7.0).float().flatten()
    assert torch.equal(result.advantages, values.repeat_interleave(5))
    assert len(seen) > 1
    drawn = [rollout for group in result.groups for rollout in group.rollouts]
    ids, advantages = (torch.cat([getattr(b, name) for b in seen]) for name in ("rollout_ids", "advantages"))
    assert ids.tolist() == [i for i in range(6) for _ in range(5)]
    assert torch.equal(advantages, (result.scores.totals - 7.0).float().flatten()[ids])
    logprobs = torch.tensor([value for rollout in drawn for value in rollout.logprobs], dtype=torch.float64)
    assert abs(result.metrics["loss"] + float((advantages.double() * logprobs).sum()) / 30) < 1e-3
    trainer.optimizer.close()
