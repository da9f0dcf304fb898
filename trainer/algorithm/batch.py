"""What an update is computed from: the step's rollouts as tensors, split into packs of bounded size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout import RolloutGroup
from rollout.forward import Pack, build_pack
from rollout.model import LayerGroup


@dataclass(frozen=True)
class TrainingBatch:
    """One pack of groups, each prompt once, with C completion tokens in order of group, rollout, place.

    A rollout's tokens are all in one pack, a group's rollouts not always.
    """

    pack: Pack
    rollout_ids: Tensor
    """int64 [C]: which of the step's rollouts a token belongs to, group * n + index."""
    rollout_logprobs: Tensor
    """fp32 [C]: what the generator drew the tokens with; 0.0 for forced ones."""
    old_logprobs: Tensor
    """fp32 [C]: the trainer's, before the step; rollout_logprobs where those are the same in every bit."""
    advantages: Tensor
    """fp32 [C]"""
    loss_mask: Tensor
    """bool [C]: which tokens the policy chose, and learns from; forced ones are attended and count in no loss."""
    ref_logprobs: Tensor | None = None
    """fp32 [C]: under the reference's weights, if there is one."""
    values: Tensor | None = None
    """fp32 [C]: a critic's; nothing here has one yet."""


@dataclass(frozen=True)
class StepTotals:
    """Counts over all micro-batches of a step, to divide sums by."""

    num_tokens: int
    """Tokens that count in the loss."""
    num_rollouts: int

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> "StepTotals":
        counts = [sum(rollout.loss_mask) for group in groups for rollout in group.rollouts]
        return cls(sum(counts), len(counts))


def micro_batches(
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    layer: LayerGroup,
    device: torch.device,
    *,
    max_tokens: int,
    row_multiple: int,
) -> Iterator[TrainingBatch]:
    """Split groups (advantages [groups, n]) into packs of at most max_tokens packed tokens.

    A group that does not fit beside the others goes on in the next pack, with its prompt again; a single rollout that
    is longer than max_tokens gets a pack of its own. Each is made when it is asked for.
    """
    packs: list[list[tuple[int, list[int]]]] = [[]]
    used = 0
    for g, group in enumerate(groups):
        members: list[int] = []
        for i, rollout in enumerate(group.rollouts):
            cost = len(rollout.completion_ids) + (0 if members else len(group.prompt_ids))
            if used and used + cost > max_tokens:
                if members:
                    packs[-1].append((g, members))
                packs.append([])
                members, used = [], 0
                cost = len(rollout.completion_ids) + len(group.prompt_ids)
            members.append(i)
            used += cost
        packs[-1].append((g, members))
    for pack in packs:
        if pack:
            yield _batch(groups, advantages, pack, layer, device, row_multiple)


def _batch(
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    pack: list[tuple[int, list[int]]],
    layer: LayerGroup,
    device: torch.device,
    row_multiple: int,
) -> TrainingBatch:
    n = advantages.shape[1]
    chosen = [(g * n + i, groups[g].rollouts[i], float(advantages[g, i])) for g, members in pack for i in members]
    token_lists = [
        (groups[g].prompt_ids, [groups[g].rollouts[i].completion_ids for i in members]) for g, members in pack
    ]

    def per_token(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    masks = [rollout.loss_mask for _, rollout, _ in chosen]
    packed = build_pack(token_lists, layer, device, row_multiple=row_multiple, loss_masks=masks)
    logprobs = per_token((value for _, rollout, _ in chosen for value in rollout.logprobs), torch.float32)
    return TrainingBatch(
        pack=packed,
        rollout_ids=per_token((place for place, rollout, _ in chosen for _ in rollout.completion_ids), torch.int64),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=per_token((a for _, rollout, a in chosen for _ in rollout.completion_ids), torch.float32),
        loss_mask=packed.loss_mask,
    )
