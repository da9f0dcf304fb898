"""From logits to tokens and their log-probs, by counter-based randomness.

The uniform number of a token is a function of (seed, purpose, step, prompt key, rollout index, position) and of nothing
else: not of the batch, of preemption, or of how often the engine was called.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.config import SamplingParams
from rollout.forward.inputs import Draws
from rollout_kernels.logprobs import kept_tokens, sample_inverse_cdf, scaled_logits, token_logprobs
from rollout_kernels.ops import Ops
from rollout_kernels.philox import uniform53

TRAIN, EVAL = 0, 1
"""Purposes: evaluation draws from numbers that training never uses."""


@dataclass(frozen=True)
class SampledTokens:
    """[R] each, on the device: sampled ids (int64), their log-probs and raw log-probs (fp32)."""

    ids: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor


def processed_logits(logits: Tensor, sampling: Seq[SamplingParams]) -> tuple[Tensor, Tensor | None]:
    """What log-probs are taken of: fp32 scaled logits [R, V], and the kept set [R, V] if any row is cut.

    sampling: one per row of logits [R, V]. The sampler and the trainer both come through here.
    """
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    z = scaled_logits(logits, column([s.logit_temperature for s in sampling]))
    if not any(s.cuts for s in sampling):
        return z, None
    top_k = torch.tensor([s.top_k for s in sampling], device=device)
    with torch.no_grad():
        kept = kept_tokens(z, top_k, column([s.top_p for s in sampling]), column([s.min_p for s in sampling]))
    return z, kept


def sample(logits: Tensor, draws: Draws, ops: Ops) -> SampledTokens:
    """Draw R tokens from their rows of logits [>= R, V]; further rows are padding."""
    rows = len(draws.sampling)
    sampling = draws.sampling + [SamplingParams()] * (logits.shape[0] - rows)
    z, kept = processed_logits(logits, sampling)
    uniform = np.zeros(logits.shape[0])
    uniform[:rows] = uniform53(tuple(draws.counters), tuple(draws.seeds))
    ids = sample_inverse_cdf(ops, z, torch.from_numpy(uniform).to(z.device), kept)
    greedy = [i for i in range(rows) if sampling[i].temperature == 0.0]
    if greedy:
        ids[greedy] = z[greedy].argmax(-1)
    logprobs = token_logprobs(z, ids, kept)
    plain = kept is None and all(s.logit_temperature == 1.0 for s in sampling)
    raw = logprobs if plain else token_logprobs(logits.float(), ids)
    return SampledTokens(ids[:rows], logprobs[:rows], raw[:rows])
