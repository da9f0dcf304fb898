"""Numbers per step, by the names that TRL's dashboards use where it has one."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout import EngineStats, RolloutEngine, RolloutGroup
from rollout.forward import TokenScores
from rollout.memory import peak_bytes
from trainer.algorithm.batch import TrainingBatch
from trainer.algorithm.losses import PolicyLoss
from trainer.tracking.tracking import Metrics


@dataclass
class UpdateMetrics:
    """Sums over a step's micro-batches, so that a mean is one of all tokens however they were split.

    The gap to the generator is that of the weights that drew the tokens: of the micro-batches before the first
    optimizer step.
    """

    num_tokens: int = 0
    num_drawn: int = 0
    loss: float = 0.0
    sums: Metrics = field(default_factory=dict)
    gaps: float = 0.0
    lowest_ratio: float = float("inf")
    highest_ratio: float = float("-inf")
    gap_max: float = 0.0

    def add(self, batch: TrainingBatch, scores: TokenScores, loss: PolicyLoss, *, drawn_by_these_weights: bool) -> None:
        mask = batch.loss_mask
        ratio = loss.ratio[mask]
        self.num_tokens += len(ratio)
        self.loss += float(loss.loss.detach())
        self._sum("entropy", scores.entropy.detach()[mask])
        self._sum("sampling/importance_sampling_ratio/mean", ratio)
        self._sum("clip_ratio/low_mean", loss.clipped_low[mask])
        self._sum("clip_ratio/high_mean", loss.clipped_high[mask])
        self._sum("clip_ratio/region_mean", (loss.clipped_low | loss.clipped_high)[mask])
        if loss.kl is not None:
            self._sum("kl", loss.kl[mask])
        if len(ratio):
            self.lowest_ratio = min(self.lowest_ratio, float(ratio.min()))
            self.highest_ratio = max(self.highest_ratio, float(ratio.max()))
        if drawn_by_these_weights and len(ratio):
            gap = (scores.logprobs.detach() - batch.rollout_logprobs).abs()[mask]
            self.num_drawn += len(gap)
            self.gaps += float(gap.double().sum())
            self.gap_max = max(self.gap_max, float(gap.max()))

    def _sum(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.double().sum())

    def result(self, norms: Sequence[float]) -> Metrics:
        """norms: the gradient's before clipping, of each optimizer step; what was skipped is not finite."""
        metrics = {name: total / max(self.num_tokens, 1) for name, total in self.sums.items()}
        metrics["loss"] = self.loss / max(len(norms), 1)
        metrics["sampling/sampling_logp_difference/mean"] = self.gaps / max(self.num_drawn, 1)
        metrics["logprob_gap_max"] = metrics["sampling/sampling_logp_difference/max"] = self.gap_max
        if self.num_tokens:
            metrics["sampling/importance_sampling_ratio/min"] = self.lowest_ratio
            metrics["sampling/importance_sampling_ratio/max"] = self.highest_ratio
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics["grad_norm"] = statistics.fmean(finite) if finite else 0.0
        metrics["skipped_updates"] = float(len(norms) - len(finite))
        return metrics


def completion_metrics(groups: list[RolloutGroup], rewards: Tensor, scored: Tensor) -> Metrics:
    """Rewards (fp64 [groups, n]) of those that are scored (bool [groups, n]), and lengths of a step's completions."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts], dtype=torch.float64)
    ended = torch.tensor([rollout.finish_reason == "stop" for rollout in rollouts])
    metrics = {
        "num_prompts": float(len(groups)),
        "num_tokens": float(lengths.sum()) + sum(len(group.prompt_ids) for group in groups),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float((~ended).double().mean()),
    }
    given = [group[mask].tolist() for group, mask in zip(rewards, scored, strict=True)]
    if scored.any():
        # exact, so that an offset common to all costs no digits
        metrics["reward"] = statistics.mean(value for group in given for value in group)
        metrics["reward_std"] = statistics.fmean(statistics.stdev(g) if len(g) > 1 else 0.0 for g in given if g)
        metrics["frac_reward_zero_std"] = statistics.fmean(len(set(group)) == 1 for group in given if group)
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
    return metrics


_COUNTERS = ("preemptions", "recomputed_tokens", "forks", "cow_copies", "prefix_tokens_saved")


def engine_metrics(before: EngineStats, after: EngineStats) -> Metrics:
    """The engine's gauges and counts over one step's rollouts, from its stats before and after them."""
    counts = {f"rollout/{name}": float(getattr(after, name) - getattr(before, name)) for name in _COUNTERS}
    tokens, seconds = after.completion_tokens - before.completion_tokens, after.seconds - before.seconds
    hits = after.cache_hit_tokens - before.cache_hit_tokens
    queried = after.cache_queried_tokens - before.cache_queried_tokens
    latencies = {
        f"timing_s/{name}_{percentile}": seconds
        for name, values in (("first_token", after.time_to_first_token), ("per_token", after.time_per_token))
        for percentile, seconds in zip(("p50", "p99"), values, strict=True)
    }
    return (
        counts
        | latencies
        | {
            "rollout/kv_cache_usage": after.kv_cache_usage,
            "rollout/blocks_shared": float(after.peak_blocks_shared),
            "rollout/kv_waste": after.kv_waste,
            "rollout/cache_hit_tokens": float(hits),
            "rollout/cache_hit_rate": hits / queried if queried else 0.0,
            "rollout/queue_depth": float(after.peak_waiting),
            "rollout/tokens_per_second": tokens / seconds if tokens else 0.0,
            "rollout/policy_version": float(after.policy_version),
        }
    )


def memory_metrics(engine: RolloutEngine) -> Metrics:
    """Peak bytes of the process (on CUDA: of the device's allocator), from the first step on where the system counts
    anew, and the KV pool's."""
    return {
        "memory/peak_bytes": float(peak_bytes(engine.device)),
        "memory/kv_pool_bytes": float(engine.stats().pool_bytes),
    }
