"""The one log-prob function. The sampler and the trainer both call it, so they cannot disagree.

R rows, V vocabulary.
"""

import torch
from torch import Tensor

from rollout_kernels.ops import Ops


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [R, V] in any float dtype / temperature [R] (fp32, > 0) -> fp32 [R, V]."""
    return logits.float() / temperature[:, None]


def kept_tokens(z: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens sampling may choose: bool [R, V] for scaled logits z [R, V].

    top_k [R] int (0: off) keeps the k largest; top_p [R] then keeps the smallest head of what is left whose mass
    reaches p; min_p [R] then drops tokens less probable than min_p times the likeliest. Equal logits rank by token id.
    The likeliest token is always kept.
    """
    vocab = z.shape[-1]
    ranked, order = z.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=z.device)
    keep = rank < torch.where(top_k > 0, top_k, vocab)[:, None]
    mass = torch.where(keep, (ranked.double() - ranked[:, :1].double()).exp(), 0.0)
    mass = mass / mass.sum(-1, keepdim=True)
    before = mass.cumsum(-1) - mass
    # all of it where top_p is 1: the mass before the last tokens of a tail may round to 1
    keep &= (before < top_p[:, None]) | (rank == 0) | (top_p[:, None] >= 1.0)
    keep &= ranked >= ranked[:, :1] + min_p.log()[:, None]
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def token_logprobs(z: Tensor, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
    """Log-probability of tokens [R] (int64) under scaled logits z [R, V]: fp32 [R], differentiable in z.

    `z[token] - logsumexp(z)`, over the tokens in `kept` [R, V] where it is given; the token itself always counts as
    kept. More accurate than a log-softmax at large vocabularies, and no [R, V] result is formed.
    """
    if kept is not None:
        kept = kept.scatter(-1, tokens[:, None], True)
        z = z.masked_fill(~kept, -torch.inf)
    picked: Tensor = z.gather(-1, tokens[:, None])[:, 0]
    return picked - z.logsumexp(-1)


def entropy(z: Tensor, kept: Tensor | None = None) -> Tensor:
    """Entropy in nats of softmax(z) for each row of z [R, V], over the tokens in `kept` where it is given: fp32 [R].

    Differentiable in z.
    """
    if kept is not None:
        z = z.masked_fill(~kept, -torch.inf)
    # 0 times -inf would be nan, in the sum or in its gradient
    values = z.masked_fill(z == -torch.inf, 0.0)
    return z.logsumexp(-1) - (z.softmax(-1) * values).sum(-1)


def sample_inverse_cdf(ops: Ops, z: Tensor, uniform: Tensor, kept: Tensor | None = None) -> Tensor:
    """Draw one token per row of z [R, V] (fp32) by inverse CDF from uniform [R] (fp64 in [0, 1)): int64 [R].

    Over the tokens in `kept` where it is given; a token of probability 0 is never drawn.
    """
    if kept is not None:
        z = z.masked_fill(~kept, -torch.inf)
    return ops.draw_tokens(z, uniform)
