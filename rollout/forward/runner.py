"""Runs what the scheduler planned: block copies, one forward, one draw."""

from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollout.errors import RolloutError
from rollout.forward.sampler import SampledTokens, sample
from rollout.model.kv_cache import KVCache
from rollout.model.views import AttentionContext, raw_logits
from rollout.schedule.batch import Chunk, ScheduledBatch
from rollout.schedule.sequence import Request, Sequence
from rollout.torch_state import own_torch_state
from rollout_kernels.attention_plan import AttentionPlan, QuerySpan
from rollout_kernels.shapes import ROW_MULTIPLE, SEGMENT_SIZE, pad_rows, round_up


class ModelRunner:
    """Holds the rollout view, its KV tensors and the last token of every slot."""

    def __init__(self, view: PreTrainedModel, cache: KVCache, max_num_seqs: int, *, exact: bool) -> None:
        self.view = view
        self.cache = cache
        self.device = cache.keys.device
        self.row_multiple = ROW_MULTIPLE if exact else 1
        self.group_siblings = True
        # sampled ids stay on the device: the next forward reads them here, not from the host
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def run(self, batch: ScheduledBatch) -> tuple[list[Sequence], SampledTokens | None, list[tuple[Sequence, Tensor]]]:
        """Run one planned iteration.

        Returns the sequences that drew a token, in the order of SampledTokens' rows (None: nobody drew), and the
        prompts whose prefill ended, each with its row of logits [V].
        """
        with own_torch_state(self.view.num_threads):
            return self._run(batch)

    def _run(self, batch: ScheduledBatch) -> tuple[list[Sequence], SampledTokens | None, list[tuple[Sequence, Tensor]]]:
        if batch.copies:
            self.cache.copy_blocks(batch.copies)
        completing = [c.sequence for c in batch.chunks if c.completes]
        drawing = [sequence for sequence in completing if not sequence.is_prompt] + batch.forks
        logits = self.forward(batch.chunks) if batch.chunks else None
        prefilled: list[tuple[Sequence, Tensor]] = []
        if drawing != completing:
            rows: dict[Sequence, Tensor] = {} if logits is None else dict(zip(completing, logits, strict=False))
            prefilled = [(sequence, rows[sequence].clone()) for sequence in completing if sequence.is_prompt]
            rows |= {fork: self._first_logits(fork) for fork in batch.forks}
            drawn = [rows[sequence] for sequence in drawing]
            logits = pad_rows(torch.stack(drawn), self.row_multiple) if drawn else None
        if not drawing or logits is None:
            return [], None, prefilled
        sampled = sample(logits, drawing, self.view.ops)
        if not bool(sampled.raw_logprobs.isfinite().all()):
            self.cache.clear()
            raise RolloutError("the model's logits are not finite: its weights are broken, or its dtype is too narrow")
        self._last_tokens[torch.tensor([s.slot for s in drawing], device=self.device)] = sampled.ids
        return drawing, sampled, prefilled

    def copy_last_token(self, source: int, destination: int) -> None:
        """A sequence was forked: its last token is the fork's too."""
        self._last_tokens[destination] = self._last_tokens[source]

    @staticmethod
    def _first_logits(fork: Sequence) -> Tensor:
        assert isinstance(fork.first_logits, Tensor)
        return fork.first_logits

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        """Compute the chunks' KV; logits [>= C, V] of the C chunks that complete, in order, then padding."""
        counts = [chunk.count for chunk in chunks]
        total = sum(counts)
        starts = np.cumsum([0, *counts])
        positions, blocks = self._places(chunks, starts, round_up(total, self.row_multiple))
        completed = [int(starts[i + 1]) - 1 for i, chunk in enumerate(chunks) if chunk.completes]
        # somebody must be asked for logits even if no prompt is through yet
        logit_rows = completed + [0] * (round_up(max(len(completed), 1), self.row_multiple) - len(completed))
        context = AttentionContext(
            plan=self._plan(chunks, starts),
            ops=self.view.ops,
            cache=self.cache,
            write_rows=self._on_device(self.cache.rows(blocks, positions).reshape(-1)),
            layers_seen=[],
        )
        ids = self._token_ids(chunks, starts, len(positions))
        logits = raw_logits(
            self.view, context, ids, self._on_device(positions), self._on_device(np.array(logit_rows, np.int64))
        )
        layers = self.cache.group.num_layers
        assert context.layers_seen == list(range(layers)), f"attention ran for layers {context.layers_seen} of {layers}"
        return logits

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _places(
        self, chunks: Seq[Chunk], starts: NDArray[np.int64], size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions and blocks [size] of the chunks' tokens; what is behind them is padding, at 0."""
        positions, blocks = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for chunk, row in zip(chunks, starts, strict=False):
            if chunk.count == 1:  # without arrays of one, since most are
                positions[row] = chunk.start
                blocks[row] = chunk.sequence.table.blocks[chunk.start // self.cache.block_size]
            else:
                places = np.arange(chunk.start, chunk.start + chunk.count)
                positions[row : row + chunk.count] = places
                table = np.asarray(chunk.sequence.table.blocks, np.int64)
                blocks[row : row + chunk.count] = table[places // self.cache.block_size]
        return positions, blocks

    def _token_ids(self, chunks: Seq[Chunk], starts: NDArray[np.int64], total: int) -> Tensor:
        """Ids [total]: prompts and recomputed tokens from the host, the last sampled ones from the device."""
        ids = np.zeros(total, np.int64)
        sampled_rows, slots = [], []
        for chunk, row in zip(chunks, starts, strict=False):
            sequence = chunk.sequence
            if sequence.is_prompt or sequence.recomputing:
                ids[row : row + chunk.count] = sequence.token_ids[chunk.start : chunk.start + chunk.count]
            else:
                sampled_rows.append(int(row))
                slots.append(sequence.slot)
        device_ids = self._on_device(ids)
        if slots:
            device_ids[torch.tensor(sampled_rows, device=self.device)] = self._last_tokens[
                torch.tensor(slots, device=self.device)
            ]
        return device_ids

    def _plan(self, chunks: Seq[Chunk], starts: NDArray[np.int64]) -> AttentionPlan:
        """What attends what: siblings that decode share one product over their common prompt's whole segments."""
        siblings: dict[Request, list[tuple[int, Chunk]]] = defaultdict(list)
        spans: list[QuerySpan] = []
        for row, chunk in zip(starts, chunks, strict=False):
            shared = self._shared_segments(chunk)
            if shared:
                siblings[chunk.sequence.request.family].append((int(row), chunk))
            else:
                spans.append(self._span(int(row), chunk, 0))
        for members in siblings.values():
            shared = self._shared_segments(members[0][1]) if len(members) > 1 else 0
            spans.extend(self._span(row, chunk, shared) for row, chunk in members)
            if shared:
                members.sort(key=lambda member: member[1].start)
                rows = np.array([row for row, _ in members], np.int64)
                lengths = np.array([chunk.start + 1 for _, chunk in members], np.int64)
                prefix = members[0][1].sequence.table.blocks[: shared * SEGMENT_SIZE // self.cache.block_size]
                spans.append(QuerySpan(rows, lengths, self.cache.units(prefix), 0, shared))
        return AttentionPlan(spans, self.cache.layout, self.device)

    def _shared_segments(self, chunk: Chunk) -> int:
        """Leading segments that a decoding completion may attend together with its siblings; 0 for a prefill."""
        sequence, size = chunk.sequence, self.cache.block_size
        num_prompt = sequence.request.num_prompt_tokens
        if not self.group_siblings or chunk.count > 1 or chunk.start < num_prompt or SEGMENT_SIZE % size:
            return 0
        return num_prompt // size * size // SEGMENT_SIZE

    def _span(self, row: int, chunk: Chunk, first_segment: int) -> QuerySpan:
        # sequences that share a prefix have blocks that segments do not cut
        units = self.cache.units(chunk.sequence.table.blocks[first_segment * SEGMENT_SIZE // self.cache.block_size :])
        lengths = np.arange(chunk.start + 1, chunk.start + chunk.count + 1)
        return QuerySpan(np.arange(row, row + chunk.count), lengths, units, first_segment)
