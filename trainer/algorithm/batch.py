"""What an update is computed from: the step's rollouts as tensors, split into packs of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout import RolloutGroup
from rollout.forward.packing import Pack, build_pack
from rollout.model.kv_cache import LayerGroup


@dataclass(frozen=True)
class TrainingBatch:
    """One pack of groups, each prompt once, with C completion tokens in order of group, rollout, place.

    rollout_logprobs: fp32 [C], what the generator drew the tokens with; 0.0 for forced ones. advantages: fp32 [C].
    loss_mask: bool [C], False for forced tokens, which are attended and count in no loss.
    """

    pack: Pack
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor


def micro_batches(
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    layer: LayerGroup,
    device: torch.device,
    *,
    max_tokens: int,
    exact: bool,
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
            yield _batch(groups, advantages, pack, layer, device, exact)


def _batch(
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    pack: list[tuple[int, list[int]]],
    layer: LayerGroup,
    device: torch.device,
    exact: bool,
) -> TrainingBatch:
    chosen = [(groups[g], groups[g].rollouts[i], float(advantages[g, i])) for g, members in pack for i in members]
    token_lists = [
        (groups[g].prompt_ids, [groups[g].rollouts[i].completion_ids for i in members]) for g, members in pack
    ]
    logprobs = [value for _, rollout, _ in chosen for value in rollout.logprobs]
    repeated = [advantage for _, rollout, advantage in chosen for _ in rollout.completion_ids]
    masks = [rollout.loss_mask for _, rollout, _ in chosen]
    packed = build_pack(token_lists, layer, device, exact=exact, loss_masks=masks)
    return TrainingBatch(
        pack=packed,
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32, device=device),
        advantages=torch.tensor(repeated, dtype=torch.float32, device=device),
        loss_mask=packed.loss_mask,
    )
