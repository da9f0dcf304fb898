"""What an update is computed from: the step's rollouts as flat tensors, cut into packs of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rollout import RolloutGroup
from rollout.forward import Pack, build_pack
from rollout.model import LayerGroup


@dataclass(frozen=True)
class StepTokens:
    """The T completion tokens of a step's groups of n rollouts, in order of group, rollout, place; on the CPU."""

    groups: Sequence[RolloutGroup]
    starts: list[int]
    """Where each rollout's tokens begin, and where the last one's end."""
    rollout_logprobs: Tensor
    """fp32 [T]: what the generator drew the tokens with; 0.0 for forced ones."""
    loss_mask: Tensor
    """bool [T]: which tokens the policy chose, and learns from; others are attended and count in no loss."""
    advantages: Tensor
    """fp32 [T]"""
    old_logprobs: Tensor | None
    """fp32 [T]: the trainer's, before the step. None: not known, and those of the first forward are taken."""
    ref_logprobs: Tensor | None = None
    """fp32 [T]: under the reference's weights, if there is one."""
    entropy: Tensor | None = None
    """fp32 [T]: in nats, before the step, if somebody asked for it."""
    teaches: Tensor | None = None
    """bool [T]: tokens that the objective is taken of; None: all that count."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], *, exact: bool) -> Self:
        """exact: the generator's log-probs are the trainer's in every bit. Advantages are 0 to begin with."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        starts = [0]
        for rollout in rollouts:
            starts.append(starts[-1] + len(rollout.completion_ids))
        logprobs = torch.tensor([v for rollout in rollouts for v in rollout.logprobs], dtype=torch.float32)
        mask = torch.tensor([v for rollout in rollouts for v in rollout.loss_mask], dtype=torch.bool)
        old = logprobs if exact else None
        return cls(groups, starts, logprobs, mask, torch.zeros_like(logprobs), old)

    @property
    def lengths(self) -> Tensor:
        """int64 [rollouts]"""
        return torch.tensor(self.starts).diff()

    def spread(self, values: Tensor) -> Tensor:
        """[groups, n] -> [T]: each rollout's value at all of its tokens."""
        return values.flatten().repeat_interleave(self.lengths)

    def masked(self, keep: Tensor) -> Self:
        """With the loss of some rollouts switched off; keep: bool [groups, n]."""
        return replace(self, loss_mask=self.loss_mask & self.spread(keep))


@dataclass(frozen=True)
class TrainingBatch:
    """One pack of groups, each prompt once, with C completion tokens in order of group, rollout, place.

    A rollout's tokens are all in one pack, a group's rollouts not always.
    """

    pack: Pack
    rollout_ids: Tensor
    """int64 [C]: which of the step's rollouts a token belongs to, group * n + index."""
    rollout_logprobs: Tensor
    """fp32 [C], as StepTokens has it."""
    old_logprobs: Tensor
    """fp32 [C]: the trainer's, before the step; rollout_logprobs where those are the same in every bit."""
    advantages: Tensor
    """fp32 [C]"""
    loss_mask: Tensor
    """bool [C]"""
    ref_logprobs: Tensor | None = None
    """fp32 [C]"""
    teaches: Tensor | None = None
    """bool [C]"""
    values: Tensor | None = None
    """fp32 [C]: a critic's; nothing here has one yet."""
    tokens: Tensor | None = None
    """int64 [C], on the CPU: the tokens' places in StepTokens."""

    @property
    def rollout_places(self) -> Tensor:
        """int64 [C]: which of this pack's rollouts a token belongs to, 0 .. K - 1."""
        places: Tensor = torch.unique_consecutive(self.rollout_ids, return_inverse=True)[1]
        return places

    def rollout_sums(self, values: Tensor) -> Tensor:
        """Sums over each rollout's tokens: [C] -> [K]."""
        places = self.rollout_places
        return values.new_zeros(int(places[-1]) + 1).index_add(0, places, values)


@dataclass(frozen=True)
class StepTotals:
    """Counts over all micro-batches of an update, to divide sums by; only what counts in the loss is counted."""

    num_tokens: int
    num_rollouts: int
    """Rollouts with at least one token that counts."""
    max_length: int = 1
    """Longest completion that there can be."""

    @classmethod
    def of(cls, step: StepTokens, groups: Sequence[int] | None = None, max_length: int = 1) -> Self:
        """groups: those of the update; None: all."""
        n = len(step.groups[0].rollouts) if step.groups else 0
        chosen = range(len(step.groups)) if groups is None else groups
        bounds = [(step.starts[i], step.starts[i + 1]) for g in chosen for i in range(g * n, (g + 1) * n)]
        counts = [int(step.loss_mask[start:end].sum()) for start, end in bounds]
        return cls(sum(counts), sum(count > 0 for count in counts), max_length)


def micro_batches(
    step: StepTokens,
    layer: LayerGroup,
    device: torch.device,
    *,
    max_tokens: int,
    row_multiple: int,
    groups: Sequence[int] | None = None,
) -> Iterator[TrainingBatch]:
    """Cut groups (None: all, else their places) into packs of at most max_tokens packed tokens.

    A group that does not fit beside the others goes on in the next pack, with its prompt again; a single rollout that
    is longer than max_tokens gets a pack of its own. Each is made when it is asked for.
    """
    packs: list[list[tuple[int, list[int]]]] = [[]]
    used = 0
    for g in range(len(step.groups)) if groups is None else groups:
        group, members = step.groups[g], list[int]()
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
            yield _batch(step, pack, layer, device, row_multiple)


def _batch(
    step: StepTokens, pack: list[tuple[int, list[int]]], layer: LayerGroup, device: torch.device, row_multiple: int
) -> TrainingBatch:
    n = len(step.groups[0].rollouts)
    ids = [g * n + i for g, members in pack for i in members]
    tokens = torch.cat([torch.arange(step.starts[i], step.starts[i + 1]) for i in ids])
    token_lists = [
        (step.groups[g].prompt_ids, [step.groups[g].rollouts[i].completion_ids for i in members]) for g, members in pack
    ]

    def taken(values: Tensor) -> Tensor:
        return values[tokens].to(device)

    def maybe(values: Tensor | None) -> Tensor | None:
        return None if values is None else taken(values)

    masks = [step.loss_mask[step.starts[i] : step.starts[i + 1]].tolist() for i in ids]
    packed = build_pack(token_lists, layer, device, row_multiple=row_multiple, loss_masks=masks)
    old = step.rollout_logprobs if step.old_logprobs is None else step.old_logprobs
    return TrainingBatch(
        pack=packed,
        rollout_ids=torch.tensor(ids).repeat_interleave(step.lengths[ids]).to(device),
        rollout_logprobs=taken(step.rollout_logprobs),
        old_logprobs=taken(old),
        advantages=taken(step.advantages),
        loss_mask=packed.loss_mask,
        ref_logprobs=maybe(step.ref_logprobs),
        teaches=maybe(step.teaches),
        tokens=tokens,
    )
