"""Log-probs of packed completions through a training view: what the trainer sees, in every bit what was drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.config import SamplingParams
from rollout.forward.packing import Pack
from rollout.forward.sampler import processed_logits
from rollout.model.views import AttentionContext, raw_logits
from rollout_kernels.logprobs import entropy, token_logprobs


@dataclass(frozen=True)
class TokenScores:
    """fp32 [C] each: log-probs of the packed completion tokens (differentiable), and the entropy before each."""

    logprobs: Tensor
    entropy: Tensor


def score_tokens(view: PreTrainedModel, pack: Pack, sampling: SamplingParams) -> TokenScores:
    """Log-probs under the view's current weights, by the function and options that the tokens were drawn with."""
    logits = raw_logits(view, AttentionContext(pack.plan, view.numerics.ops), pack.ids, pack.positions, pack.logit_rows)
    z, kept = processed_logits(logits, [sampling] * logits.shape[0])
    count = len(pack.targets)
    targets = torch.cat([pack.targets, pack.targets.new_zeros(logits.shape[0] - count)])
    with torch.no_grad():
        entropies = entropy(z.detach(), kept)[:count]
    return TokenScores(token_logprobs(z, targets, kept)[:count], entropies)
