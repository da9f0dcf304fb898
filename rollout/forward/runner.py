"""Runs what the scheduler planned: block copies, one forward, sampling."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollout.errors import RolloutError
from rollout.forward.inputs import ForwardInputs, drawing, prepare
from rollout.forward.sampler import SampledTokens, sample
from rollout.model.kv_cache import KVCache
from rollout.model.views import AttentionContext, raw_logits
from rollout.schedule.batch import Chunk, ScheduledBatch
from rollout.schedule.sequence import Sequence
from rollout.torch_state import own_torch_state
from rollout_kernels.attention_plan import AttentionPlan
from rollout_kernels.shapes import pad_rows


class ModelRunner:
    """Holds the rollout view, its KV tensors and the token table: the ids that every slot's sequence has drawn."""

    def __init__(self, view: PreTrainedModel, cache: KVCache, max_num_seqs: int, max_len: int) -> None:
        self.view = view
        self.cache = cache
        self.device = cache.keys.device
        self.group_siblings = True
        # sampled ids stay on the device: the next forward reads them here, not from the host
        self._tokens = torch.zeros(max_num_seqs, max_len, dtype=torch.int32, device=self.device)

    def prepare(self, chunks: Seq[Chunk], forks: Seq[Sequence] = ()) -> ForwardInputs:
        """What execute() and a draw need of planned chunks, and of forks that draw from stored logits."""
        return prepare(chunks, self.cache, self.view.numerics.row_multiple, forks, group_siblings=self.group_siblings)

    @torch.no_grad()
    def run(self, batch: ScheduledBatch) -> tuple[list[Sequence], SampledTokens | None, list[tuple[Sequence, Tensor]]]:
        """Run one planned iteration.

        Returns the sequences that drew a token, in the order of SampledTokens' rows (None: nobody drew), and the
        prompts whose prefill ended, each with its row of logits [V].
        """
        with own_torch_state(self.view.numerics.num_threads):
            return self._run(batch)

    def _run(self, batch: ScheduledBatch) -> tuple[list[Sequence], SampledTokens | None, list[tuple[Sequence, Tensor]]]:
        if batch.copies:
            self.cache.copy_blocks(batch.copies)
        completing = [c.sequence for c in batch.chunks if c.completes]
        draws = drawing(batch.chunks, batch.forks)
        inputs = self.prepare(batch.chunks, batch.forks)
        logits = self.execute(inputs) if batch.chunks else None
        prefilled: list[tuple[Sequence, Tensor]] = []
        if draws != completing:
            rows: dict[Sequence, Tensor] = {} if logits is None else dict(zip(completing, logits, strict=False))
            prefilled = [(sequence, rows[sequence].clone()) for sequence in completing if sequence.is_prompt]
            rows |= {fork: self._first_logits(fork) for fork in batch.forks}
            drawn = [rows[sequence] for sequence in draws]
            logits = pad_rows(torch.stack(drawn), self.view.numerics.row_multiple) if drawn else None
        if not draws or logits is None:
            return [], None, prefilled
        sampled = sample(logits, inputs.draws, self.view.numerics.ops)
        if not bool(sampled.raw_logprobs.isfinite().all()):
            self.cache.clear()
            raise RolloutError("the model's logits are not finite: its weights are broken, or its dtype is too narrow")
        slots, positions = self._on_device(inputs.draws.slots), self._on_device(inputs.draws.positions)
        self._tokens[slots, positions] = sampled.ids.int()
        return draws, sampled, prefilled

    def copy_tokens(self, source: int, destination: int, start: int, end: int) -> None:
        """A sequence was forked: what slot `source` has drawn at positions start .. end - 1 is the fork's too."""
        self._tokens[destination, start:end] = self._tokens[source, start:end]

    @staticmethod
    def _first_logits(fork: Sequence) -> Tensor:
        assert isinstance(fork.first_logits, Tensor)
        return fork.first_logits

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """Compute the rows' KV; logits [L, V] of inputs.logit_rows, in the model's dtype."""
        context = AttentionContext(
            plan=AttentionPlan(inputs.spans, self.cache.layout, self.device),
            ops=self.view.numerics.ops,
            cache=self.cache,
            write_rows=self._on_device(inputs.write_rows),
            layers_seen=[],
        )
        ids = self._on_device(inputs.ids)
        if len(inputs.table_rows):
            slots, positions = self._on_device(inputs.table_slots), self._on_device(inputs.table_positions)
            ids[self._on_device(inputs.table_rows)] = self._tokens[slots, positions].long()
        logits = raw_logits(
            self.view, context, ids, self._on_device(inputs.positions), self._on_device(inputs.logit_rows)
        )
        layers = self.cache.group.num_layers
        assert context.layers_seen == list(range(layers)), f"attention ran for layers {context.layers_seen} of {layers}"
        return logits

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
