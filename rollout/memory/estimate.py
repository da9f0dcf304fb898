"""Peak memory of a forward or a step, known before it runs: every operation on the meta device, and no data."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rollout.config import RolloutConfig, SamplingParams
from rollout.forward.inputs import Draws
from rollout.forward.packing import Pack, build_pack
from rollout.forward.runner import ModelRunner
from rollout.forward.sampler import sample
from rollout.forward.scoring import score_tokens
from rollout.model.kv_cache import KVCache, LayerGroup
from rollout.model.numerics import Numerics
from rollout.model.views import make_view, training_view
from rollout.schedule.batch import Chunk
from rollout.schedule.block_pool import BlockPool
from rollout.schedule.sequence import Request, Span
from rollout.schedule.sequence import Sequence as Seq

META = torch.device("meta")
_DEPTHS = (2, 4)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors allocated and not yet freed while it is active, and their peak.

    What a library takes inside one operation is not seen, but for logsumexp's copy of its input.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self.kept = self.kept_at_peak = 0
        """What the caller counts as kept, of the live bytes."""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # views of what was there before, and results in its place, are not new
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if func is torch.ops.aten.logsumexp.default:
            self._reach(self.live + args[0].nbytes)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known and key not in given:
                    self._known.add(key)
                    weakref.finalize(storage, self._freed, key, size)
                    self.live += size
                    self._reach(self.live)
        return out

    def _reach(self, size: int) -> None:
        if size > self.peak:
            self.peak, self.kept_at_peak = size, self.kept

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


Adapt = Callable[[PreTrainedModel], object]
"""What is done to a model before it runs: an adapter injected."""


def _as_it_is(model: PreTrainedModel) -> None:
    """Without an adapter."""


def skeleton(config: PretrainedConfig, dtype: torch.dtype, adapt: Adapt = _as_it_is) -> PreTrainedModel:
    """The model that a config describes, without weights."""
    with META:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    adapt(model)
    return model


def _shallow(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """The same model with its first layers only."""
    shallow = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        shallow.layer_types = config.layer_types[:num_layers]
    shallow.num_hidden_layers = num_layers
    return shallow


@dataclass(frozen=True)
class TrainingPeak:
    """Bytes at the highest point of forward and backward."""

    activations: int = 0
    """Activations, logits and whatever else the passes hold."""
    gradients: int = 0
    """fp32 gradients that have accumulated by then."""


def training_peak(
    config: PretrainedConfig,
    dtype: torch.dtype,
    pack: Pack,
    backward: Callable[[PreTrainedModel, Pack], None],
    numerics: Numerics,
    *,
    gradient_checkpointing: bool,
    accumulated: bool,
    adapt: Adapt = _as_it_is,
) -> TrainingPeak:
    """Peak of `backward(view, pack)`: one micro-batch's forward and backward through a training view.

    accumulated: whether an earlier micro-batch has left its gradients, so that all of them are there throughout.
    Layers are alike, so a deep model is run at two depths and extrapolated to its own.
    """
    depth = int(config.num_hidden_layers)

    def at(num_layers: int) -> TrainingPeak:
        model = skeleton(_shallow(config, num_layers), dtype, adapt)
        # what attention works out once per pack and keeps
        fresh = replace(pack, plan=replace(pack.plan))
        view = training_view(model, numerics, gradient_checkpointing=gradient_checkpointing)
        if "segment_attention" not in numerics.ops.own:
            _ = fresh.plan.tiles  # come from the host, and are not counted
        return _backward_peak(view, lambda: backward(view, fresh), accumulated)

    if depth <= _DEPTHS[1]:
        return at(depth)
    everything = sum(4 * p.numel() for p in skeleton(config, dtype, adapt).parameters() if p.requires_grad)
    low, high = (at(num_layers) for num_layers in _DEPTHS)

    def extrapolated(a: int, b: int) -> int:
        return b + (b - a) * (depth - _DEPTHS[1]) // (_DEPTHS[1] - _DEPTHS[0])

    peak = TrainingPeak(extrapolated(low.activations, high.activations), extrapolated(low.gradients, high.gradients))
    # the end of the backward, with every gradient, may be higher than where shallow models have their peak
    return peak if peak.activations + peak.gradients >= everything else TrainingPeak(0, everything)


def _backward_peak(view: PreTrainedModel, backward: Callable[[], None], accumulated: bool) -> TrainingPeak:
    parameters = [p for p in view.parameters() if p.requires_grad]
    gradients: dict[int, Tensor] = {}

    def keep(parameter: torch.nn.Parameter) -> None:
        # as an optimizer's hook does: the fp32 copy is there beside the sum for a moment
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        parameter.grad = None
        if id(parameter) in gradients:
            gradients[id(parameter)].add_(gradient)
        else:
            gradients[id(parameter)] = gradient
            live.kept += gradient.nbytes

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(keep)
    with LiveBytes() as live:
        for parameter in parameters if accumulated else ():
            gradients[id(parameter)] = torch.zeros_like(parameter, dtype=torch.float32)
            live.kept += gradients[id(parameter)].nbytes
        backward()
    return TrainingPeak(live.peak - live.kept_at_peak, live.kept_at_peak)


def score_and_backward(
    view: PreTrainedModel, pack: Pack, sampling: SamplingParams | None = None, *, reference: bool = False
) -> None:
    """What a policy-gradient loss does with a pack, as far as memory goes; reference: with frozen weights beside it."""
    sampling = sampling or SamplingParams()
    scores = score_tokens(view, pack, sampling)
    if reference:
        with torch.no_grad():
            score_tokens(view, pack, sampling)
    scores.logprobs.sum().backward()


def widest_pack(
    layer: LayerGroup, prompt: int, new: int, n: int, num_groups: int, max_tokens: int, *, row_multiple: int
) -> Pack:
    """Groups of a prompt and n completions of `new` tokens, up to max_tokens in all, on the meta device.

    At least one whole completion; the last is cut to fit, as shorter ones would fill the room.
    """
    groups: list[tuple[list[int], list[list[int]]]] = []
    left = max(max_tokens, prompt + new)
    while left > prompt and len(groups) < num_groups:
        lengths = [min(new, left - prompt - i * new) for i in range(n) if left - prompt - i * new > 0]
        groups.append(([0] * prompt, [[0] * length for length in lengths]))
        left -= prompt + sum(lengths)
    return build_pack(groups, layer, META, row_multiple=row_multiple)


def rollout_peak(
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    config: RolloutConfig,
    num_blocks: int,
    prompt: int,
    new: int,
    n: int,
    sampling: SamplingParams,
    numerics: Numerics,
    adapt: Adapt = _as_it_is,
) -> int:
    """Bytes that the largest prefill or decode iteration takes beside weights and KV.

    Decoding is taken at full length, with as many sequences as num_blocks holds and config.max_num_seqs allows, n of
    them to a prompt of `prompt` tokens. Without gradients layers leave nothing behind, so two of them suffice.
    """
    shallow = _shallow(model_config, min(2, model_config.num_hidden_layers))
    cache = KVCache(LayerGroup.of(shallow, dtype), num_blocks, config.block_size, META)
    view = make_view(skeleton(shallow, dtype, adapt), numerics)
    runner = ModelRunner(view, cache, config.max_num_seqs, prompt + new)
    pool = BlockPool(num_blocks, config.block_size)
    families = _full_families(pool, config.max_num_seqs, prompt, new, n, sampling)
    decoding = [Chunk(s, s.num_tokens - 1, 1) for s in families]
    peaks = [_forward_peak(runner, decoding)]
    pool.reset()
    prefills = _prefills(pool, prompt, config, sampling)
    peaks.append(_forward_peak(runner, prefills))
    # a prefilled prompt's row of logits stays until its completions have forked
    return max(peaks) + len(prefills) * int(model_config.vocab_size) * dtype.itemsize


def _prompt(pool: BlockPool, prompt: int, n: int, sampling: SamplingParams) -> Seq:
    return Request([0] * prompt, n, sampling, 0, 0, 0, 0, 1 << 30).start_prompt(pool)


def _prefills(pool: BlockPool, prompt: int, config: RolloutConfig, sampling: SamplingParams) -> list[Chunk]:
    """Last chunks of as many prompts as one iteration may take."""
    chunks: list[Chunk] = []
    budget = min(config.prefill_chunk_size or config.max_num_batched_tokens, config.max_num_batched_tokens)
    while budget > 0:
        sequence = _prompt(pool, prompt, 1, sampling)
        if sequence.table.num_blocks_to_write(0, prompt) > pool.num_free_blocks:
            break
        sequence.table.make_writable(0, prompt)
        chunks.append(Chunk(sequence, max(0, prompt - budget), min(prompt, budget)))
        budget -= prompt
    return chunks


def _full_families(
    pool: BlockPool, max_num_seqs: int, prompt: int, new: int, n: int, sampling: SamplingParams
) -> list[Seq]:
    """Completions about to draw their last token, n to a prompt."""
    sequences: list[Seq] = []
    length = prompt + new - 1
    ids = [0] * length
    while len(sequences) < max_num_seqs:
        parent = _prompt(pool, prompt, n, sampling)
        if parent.table.num_blocks_to_write(0, length) > pool.num_free_blocks:
            break
        parent.table.make_writable(0, prompt)
        for index in range(min(n, max_num_seqs - len(sequences))):
            table = parent.table.fork()
            if table.num_blocks_to_write(prompt, length) > pool.num_free_blocks:
                return sequences
            table.make_writable(prompt, length)
            spans = [Span(0, prompt, forced=True), Span(prompt, length, forced=False)]
            sequences.append(Seq(parent.request, index, ids, table, prompt, len(sequences), spans=spans))
    return sequences


@torch.no_grad()
def _forward_peak(runner: ModelRunner, chunks: list[Chunk]) -> int:
    if not chunks:
        return 0
    # a draw reads of a sequence what its random numbers are made of
    drawing = [Seq(c.sequence.request, i, c.sequence.token_ids, c.sequence.table) for i, c in enumerate(chunks)]
    inputs, draws = runner.prepare(chunks), Draws.of(drawing)
    with LiveBytes() as live:
        logits = runner.execute(inputs)
        sample(logits, draws, runner.view.numerics.ops)
    peak: int = live.peak
    return peak
