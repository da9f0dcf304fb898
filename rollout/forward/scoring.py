"""Log-probs of packed completions through a training view: what the trainer sees, in every bit what was drawn.

Logits of all rows never exist at once. They are made, and in the backward made again, of a chunk of rows at a time; a
row's bits do not depend on the chunk it is in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.config import SamplingParams
from rollout.forward.packing import Pack
from rollout.forward.sampler import processed_logits
from rollout.model.views import AttentionContext, head_of, hidden_states
from rollout.torch_state import own_torch_state
from rollout_kernels.logprobs import entropy, token_logprobs
from rollout_kernels.shapes import ROW_MULTIPLE

_CHUNK_BYTES = 32 * 2**20
"""Of one chunk's logits in fp32."""
_MOST_ROWS = 1024


@dataclass(frozen=True)
class TokenScores:
    """fp32 [C] each: log-probs of the packed completion tokens (differentiable), and the entropy before each."""

    logprobs: Tensor
    entropy: Tensor


def chunk_rows(vocab_size: int) -> int:
    """Rows of logits that are made at once: a multiple of 16."""
    rows = _CHUNK_BYTES // (4 * vocab_size) // ROW_MULTIPLE * ROW_MULTIPLE
    return max(ROW_MULTIPLE, min(rows, _MOST_ROWS))


def score_tokens(
    view: PreTrainedModel, pack: Pack, sampling: SamplingParams, *, entropy_gradient: bool = False
) -> TokenScores:
    """Log-probs under the view's current weights, by the function and options that the tokens were drawn with.

    entropy_gradient: whether gradients flow through the entropies, too. The head's gradients are accumulated chunk by
    chunk, with its parameters' hooks called for each, and only by backward(): torch.autograd.grad does not see them.
    """
    context = AttentionContext(pack.plan, view.numerics.ops)
    hidden = hidden_states(view, context, pack.ids, pack.positions, pack.logit_rows)
    head, count = head_of(view), len(pack.targets)
    targets = torch.cat([pack.targets, pack.targets.new_zeros(len(hidden) - count)])

    def score(rows: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        with own_torch_state(view.numerics.num_threads):
            z, kept = processed_logits(head.logits(rows), [sampling] * len(rows))
            logprobs = token_logprobs(z, targets[place], kept)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                return logprobs, entropy(z if entropy_gradient else z.detach(), kept)

    # so that there is a backward where only the head has gradients; its weight itself would have its hooks called
    anchor = torch.zeros((), device=hidden.device, requires_grad=head.trained)
    rows = chunk_rows(head.weight.shape[0])
    logprobs, entropies = _InChunks.apply(hidden, anchor, score, rows)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs[:count], entropies[:count] if entropy_gradient else entropies[:count].detach())


Score = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


class _InChunks(torch.autograd.Function):
    """score() of chunks of hidden rows [R, D], which keeps nothing for the backward but the rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, score: Score, size: int) -> tuple[Tensor, Tensor]:
        del anchor
        ctx.save_for_backward(hidden)
        ctx.score, ctx.places = score, [slice(i, i + size) for i in range(0, len(hidden), size)]
        parts = [score(hidden[place], place) for place in ctx.places]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, None, None]:
        (hidden,) = ctx.saved_tensors
        gradient = torch.zeros_like(hidden)
        for place in ctx.places:
            rows = hidden[place].detach().requires_grad_()
            with torch.enable_grad():
                outs = ctx.score(rows, place)
            wanted = [(out, up[place]) for out, up in zip(outs, upstream, strict=True) if out.requires_grad]
            # into the head's own parameters, hooks and all
            torch.autograd.backward([out for out, _ in wanted], [up for _, up in wanted])
            gradient[place] = rows.grad
        return gradient if ctx.needs_input_grad[0] else None, None, None, None
