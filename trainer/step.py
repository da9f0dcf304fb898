"""One training step: sample, score, compare, update, swap."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout import ExactnessError, RolloutEngine, RolloutGroup
from rollout.forward import TokenScores, score_tokens
from trainer.algorithm.advantages import AdvantageFunction
from trainer.algorithm.batch import StepTokens, StepTotals, TrainingBatch, micro_batches
from trainer.algorithm.compose import make_advantages, make_loss
from trainer.algorithm.credit import token_advantages
from trainer.algorithm.divergences import DIVERGENCES
from trainer.algorithm.losses import LossFunction, PolicyLoss
from trainer.collecting import Collected, Collector, RowSource
from trainer.config import TrainerConfig, sampling_params
from trainer.data.rows import MINIBATCH_PURPOSE, Row, permutation
from trainer.rewards.scorer import Scorer
from trainer.rewards.scores import Scores
from trainer.signals import interrupts
from trainer.tracking.metrics import UpdateMetrics
from trainer.tracking.timing import PhaseTimer
from trainer.tracking.tracking import Metrics
from trainer.weights.optimizer import MasterAdamW, learning_rate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one step did, of G groups of n rollouts: rows that the engine could not take are not among them."""

    rows: list[Row]
    groups: list[RolloutGroup]
    scores: Scores
    advantages: Tensor
    """fp32 [T], of the step's completion tokens in order of group, rollout, place."""
    metrics: Metrics


class Trainer:
    """The steps of a run, one at a time; it keeps no record of them.

    The optimizer holds engine.module's parameters. rows, scorer: what is sampled and what it is worth. reference: a
    training view of frozen weights, whose log-probs batches then carry. advantages, loss: how rewards become a loss;
    None: as config.algorithm says. max_new_tokens: one for each of a step's rows; None: config.sampling's for all.
    """

    def __init__(
        self,
        config: TrainerConfig,
        engine: RolloutEngine,
        optimizer: MasterAdamW,
        rows: RowSource,
        scorer: Scorer,
        *,
        reference: PreTrainedModel | None = None,
        advantages: AdvantageFunction | None = None,
        loss: LossFunction | None = None,
        max_new_tokens: Sequence[int] | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        self.config, self.engine, self.optimizer = config, engine, optimizer
        self.reference = reference
        self.policy = engine.training_view(gradient_checkpointing=config.model.gradient_checkpointing)
        self.sampling = sampling_params(config)
        self.timer = timer or PhaseTimer()
        self.collector = Collector(config, engine, rows, scorer, self.sampling, max_new_tokens, self.timer)
        self.advantages = advantages or make_advantages(config.algorithm)
        self.loss = loss or make_loss(config.algorithm)

    def step(self, i: int) -> StepResult:
        """Step i, counted from 0: its rollouts, its updates of the weights in place, and the engine told of them.

        Signals are held from the first optimizer step on: whoever has written the step down lets them go, by
        trainer.signals.interrupts.release(). Raises RolloutError if no row could be run, or for what a reward does
        wrong, and ExactnessError if config.rollout.exact requires exactness and the step shows a difference.
        """
        with self.timer.phase("step"):
            collected = self.collector.collect(i)
            with self.timer.phase("update"):
                tokens = self.prepare(collected)
                metrics = collected.metrics | self.update(tokens, i)
                with self.timer.phase("swap"):
                    self.engine.weights_updated()
        return StepResult(collected.rows, collected.groups, collected.scores, tokens.advantages, metrics)

    # -- what is known before the update ------------------------------------------------------------------------

    def prepare(self, collected: Collected) -> StepTokens:
        """The step's tokens, with their advantages and all that is to be measured under the weights of now."""
        algorithm = self.config.algorithm
        tokens = StepTokens.of(collected.groups, exact=self.engine.numerics.exact)
        scores, keep = collected.scores, collected.scores.scored
        if algorithm.truncated == "mask":
            ended = [r.finish_reason != "length" for group in collected.groups for r in group.rollouts]
            keep = keep & torch.tensor(ended, dtype=torch.bool).view(keep.shape)
        tokens = self._measured(tokens.masked(keep))
        penalised = algorithm.kl_in != "loss" and bool(algorithm.kl_coef)
        advantages = token_advantages(
            tokens,
            scores.totals,
            scores.scored,
            self.advantages,
            penalty=self._penalty if penalised else None,
            penalise=algorithm.kl_in,
            whitened=algorithm.whiten,
        )
        return replace(tokens, advantages=advantages)

    def _penalty(self, log_ratios: Tensor) -> Tensor:
        algorithm = self.config.algorithm
        return algorithm.kl_coef * DIVERGENCES[algorithm.kl_estimator](log_ratios)

    def _measured(self, tokens: StepTokens) -> StepTokens:
        """With log-probs of the reference, and of the policy where they are not known and will be asked for."""
        algorithm = self.config.algorithm
        several = algorithm.epochs * algorithm.minibatches > 1
        corrected, penalised = algorithm.correction != "none", algorithm.kl_in != "loss" and algorithm.kl_coef > 0
        unknown = tokens.old_logprobs is None and (several or corrected or penalised)
        if unknown or algorithm.top_entropy < 1.0:
            old, entropy = self._scored(self.policy, tokens)
            tokens = replace(tokens, old_logprobs=old if tokens.old_logprobs is None else tokens.old_logprobs)
            if algorithm.top_entropy < 1.0:
                tokens = replace(tokens, teaches=_highest(entropy, tokens.loss_mask, algorithm.top_entropy))
        if self.reference is not None:
            tokens = replace(tokens, ref_logprobs=self._scored(self.reference, tokens)[0])
        return tokens

    @torch.no_grad()
    def _scored(self, view: PreTrainedModel, tokens: StepTokens) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies under a view's weights, fp32 [T] each."""
        logprobs, entropy = torch.zeros_like(tokens.rollout_logprobs), torch.zeros_like(tokens.rollout_logprobs)
        for batch in self._micro_batches(tokens):
            with self.timer.phase("forward"):
                scores = score_tokens(view, batch.pack, self.sampling)
                logprobs[batch.tokens], entropy[batch.tokens] = scores.logprobs.cpu(), scores.entropy.cpu()
        return logprobs, entropy

    # -- the update ---------------------------------------------------------------------------------------------

    def update(self, tokens: StepTokens, i: int) -> Metrics:
        """Epochs of minibatches: each accumulates the loss of its micro-batches and steps the weights in place.

        Without groups (dynamic sampling found none that teaches) nothing moves. A gradient that is not finite moves
        nothing either, and is counted.
        """
        metrics = UpdateMetrics()
        lr = learning_rate(self.config.optim, i, self.config.steps)
        norms: list[float] = []
        for groups in self._minibatches(len(tokens.groups), i):
            totals = StepTotals.of(tokens, groups, self.sampling.max_new_tokens)
            for batch in self._micro_batches(tokens, groups):
                with self.timer.phase("forward"):
                    scores, loss = self._forward(batch, totals, known=tokens.old_logprobs is not None)
                with self.timer.phase("backward"):
                    loss.loss.backward()
                metrics.add(batch, scores, loss, drawn_by_these_weights=not norms)
            self._hold_exactness(metrics.gap_max)
            # from here on the step is finished, or the weights would be ahead of what is written down
            interrupts.hold()
            with self.timer.phase("optimizer"):
                norms.append(self.optimizer.step(lr))
        return metrics.result(norms) | {"learning_rate": lr}

    def _minibatches(self, num_groups: int, i: int) -> Iterator[list[int] | None]:
        """Places of the groups of each optimizer step; None: all. Dealt out anew every epoch."""
        algorithm = self.config.algorithm
        for epoch in range(algorithm.epochs):
            if algorithm.minibatches == 1:
                yield None
                continue
            order = permutation(num_groups, self.config.seed, MINIBATCH_PURPOSE, i * algorithm.epochs + epoch).tolist()
            count = min(algorithm.minibatches, num_groups)
            yield from (sorted(order[k::count]) for k in range(count))

    def _micro_batches(self, tokens: StepTokens, groups: Sequence[int] | None = None) -> Iterator[TrainingBatch]:
        engine = self.engine
        batches = micro_batches(
            tokens,
            engine.layer_group,
            engine.device,
            max_tokens=self.config.algorithm.micro_batch_tokens,
            row_multiple=engine.numerics.row_multiple,
            groups=groups,
        )
        while True:
            with self.timer.phase("forward"):  # packing counts for the forward
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _forward(self, batch: TrainingBatch, totals: StepTotals, *, known: bool) -> tuple[TokenScores, PolicyLoss]:
        """known: whether the batch's old log-probs are the trainer's; else those of this very forward are."""
        needs_entropy = self.config.algorithm.entropy_coef > 0
        scores = score_tokens(self.policy, batch.pack, self.sampling, entropy_gradient=needs_entropy)
        if not known:
            batch = replace(batch, old_logprobs=scores.logprobs.detach())
        return scores, self.loss(scores, batch, totals)

    def _hold_exactness(self, gap_max: float) -> None:
        """The probe is a sample: if a step shows a difference after all, refuse or fall back, and say so."""
        if gap_max == 0.0 or not self.engine.numerics.exact:
            return
        reason = f"generator's and trainer's log-probs differ by up to {gap_max:.2g}"
        if self.config.rollout.exact == "require":
            raise ExactnessError(f"exact='require', but {reason}: use exact=auto to recompute log-probs")
        logger.warning("%s; from now on the trainer's own are used", reason)
        self.engine.fall_back(reason)
        self.policy.numerics = self.engine.numerics


def _highest(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """bool [T]: the tokens of the mask whose entropy is among its highest `share` (arXiv 2506.01939); ties are in."""
    chosen = entropy[mask]
    if not len(chosen):
        return mask
    kept = max(1, round(share * len(chosen)))
    return mask & (entropy >= chosen.sort(descending=True).values[kept - 1])
