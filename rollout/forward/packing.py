"""Packs for the training view: each group's prompt once, its completions behind it, many groups in one row of tokens.

    [prompt A | a1 | a2 | a3 | prompt B | b1 | ... ]

A completion's rows attend the prompt's rows and their own, at the positions they were generated at, so the pack's
logits are those of token-by-token decoding, in every bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.model.kv_cache import LayerGroup
from rollout.torch_state import own_torch_state
from rollout_kernels.attention_plan import AttentionPlan, KVLayout, QuerySpan
from rollout_kernels.shapes import round_up


@dataclass(frozen=True)
class Pack:
    """T packed tokens (padded), and which of their logits score the C completion tokens.

    ids, positions: [T] int64. targets: [C] int64, completion tokens in order of group, completion, place.
    logit_rows: [C padded] int64, the token row whose logits predict each target; padding repeats row 0.
    loss_mask: [C] bool, which targets count in a loss. Those that do not (forced tokens) are attended all the same.
    """

    ids: Tensor
    positions: Tensor
    plan: AttentionPlan
    targets: Tensor
    logit_rows: Tensor
    loss_mask: Tensor


@own_torch_state()
def build_pack(
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    layer: LayerGroup,
    device: torch.device,
    *,
    row_multiple: int,
    loss_masks: Sequence[Sequence[bool]] | None = None,
) -> Pack:
    """Pack groups of (prompt ids, completions); every prompt and completion has at least one token.

    row_multiple: token and logit rows are padded to a multiple of it. loss_masks: one per completion, in order of group
    and completion, one value per token. None: all count.
    """
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    logit_rows: list[int] = []
    spans: list[QuerySpan] = []
    for prompt, completions in groups:
        start, length = len(ids), len(prompt)
        prompt_rows = np.arange(start, start + length)
        spans.append(QuerySpan(prompt_rows, np.arange(1, length + 1), prompt_rows))
        ids.extend(prompt)
        positions.extend(range(length))
        for completion in completions:
            # the last token predicts nothing, so it needs no row
            rows = np.arange(len(ids), len(ids) + len(completion) - 1)
            if len(rows):
                lengths = np.arange(length + 1, length + len(completion))
                spans.append(QuerySpan(rows, lengths, np.concatenate([prompt_rows, rows])))
            ids.extend(completion[:-1])
            positions.extend(range(length, length + len(rows)))
            targets.extend(completion)
            logit_rows.extend([start + length - 1, *rows.tolist()])
    total = round_up(len(ids), row_multiple)
    layout = KVLayout(layer.num_kv_heads, layer.num_groups, unit=1, head_stride=total)

    def padded(values: list[int], size: int) -> Tensor:
        return torch.tensor(values + [0] * (size - len(values)), device=device)

    return Pack(
        ids=padded(ids, total),
        positions=padded(positions, total),
        plan=AttentionPlan(spans, layout, device),
        targets=padded(targets, len(targets)),
        logit_rows=padded(logit_rows, round_up(len(logit_rows), row_multiple)),
        loss_mask=_joined_mask(loss_masks, len(targets)).to(device),
    )


def _joined_mask(loss_masks: Sequence[Sequence[bool]] | None, count: int) -> Tensor:
    if loss_masks is None:
        return torch.ones(count, dtype=torch.bool)
    joined = [value for mask in loss_masks for value in mask]
    assert len(joined) == count, f"loss masks of {len(joined)} tokens for completions of {count}"
    return torch.tensor(joined, dtype=torch.bool)
