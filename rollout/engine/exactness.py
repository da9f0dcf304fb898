"""Does this machine keep the promise? A probe at start-up, with the threads, dtype and model that will be used.

It decodes a few completions token by token through the rollout view, runs the same tokens packed through the training
view, and once through transformers' own attention. The first two have to agree in every bit (exactness), the third
within rounding (parity: the engine runs this model right).
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rollout.config import RolloutConfig, SamplingParams
from rollout.errors import ExactnessError, RolloutError
from rollout.forward.packing import build_pack
from rollout.forward.runner import ModelRunner
from rollout.model.adapters import stir_adapters
from rollout.model.families import family_named
from rollout.model.kv_cache import KVCache, LayerGroup
from rollout.model.numerics import Numerics
from rollout.model.views import AttentionContext, bare_view, make_view, raw_logits
from rollout.schedule.batch import Chunk
from rollout.schedule.block_pool import BlockPool
from rollout.schedule.sequence import Request, Sequence
from rollout_kernels.reference.activations import SiLU
from rollout_kernels.shapes import SEGMENT_SIZE

logger = logging.getLogger(__name__)

_PROBES = ((1, (3,)), (SEGMENT_SIZE + 11, (9, 2, 6)), (5, (7, 1)))
"""(prompt length, completion lengths): one row, past a segment's edge (and any window) with siblings, and few."""

_SIZE_INDEPENDENT = (SiLU, nn.ReLU)


@dataclass(frozen=True)
class ProbeReport:
    """What the probe saw."""

    num_differing: int
    """Tokens whose logits differ in some bit between decoding and the pack."""
    num_tokens: int
    parity_gap: float
    """Largest mean log-prob difference from transformers' eager attention at a token, in nats, by probability."""
    num_threads: int
    varying_activations: list[str]
    """Activations whose bits may depend on the size of their tensor."""

    @property
    def exact(self) -> bool:
        return self.num_differing == 0 and not self.varying_activations

    @property
    def reason(self) -> str:
        verdict = "agree in every bit"
        if self.num_differing:
            verdict = f"differ at {self.num_differing} of {self.num_tokens} tokens"
        elif self.varying_activations:
            verdict = f"may differ, since {', '.join(self.varying_activations)} may round by the size of its tensor"
        return f"generator and trainer {verdict} ({self.num_threads} threads)"


def _probe_tokens(config: PretrainedConfig, max_len: int) -> list[tuple[list[int], list[list[int]]]]:
    generator = torch.Generator().manual_seed(0)
    groups = []
    for prompt_length, lengths in _PROBES:
        if prompt_length > SEGMENT_SIZE:
            windows = [layer.window or 0 for layer in family_named(config.model_type).attention(config)]
            prompt_length = max(prompt_length, *(window + 1 for window in windows))
        sizes = [max(1, min(prompt_length, max_len - max(lengths))), *lengths]
        drawn = [torch.randint(config.vocab_size, (size,), generator=generator).tolist() for size in sizes]
        groups.append((drawn[0], drawn[1:]))
    return groups


def _varying_activations(view: PreTrainedModel) -> list[str]:
    """Activations that are not known to give an element the same bits whatever the tensor's size.

    torch splits large tensors among threads and computes the ends of the shares in other code. A trial cannot show
    that an activation is free of this: only some values at some places round otherwise.
    """
    used = {type(module.act_fn) for module in view.modules() if hasattr(module, "act_fn")}
    return sorted(kind.__name__ for kind in used if not issubclass(kind, _SIZE_INDEPENDENT))


def _decode(runner: ModelRunner, pool: BlockPool, groups: Seq[tuple[list[int], list[list[int]]]]) -> Tensor:
    """Logits [C, V] of all completion tokens, teacher-forced one token per forward, all groups in one batch."""
    rows: dict[tuple[int, int, int], Tensor] = {}
    live: list[tuple[tuple[int, int], list[int], Sequence]] = []
    for g, (prompt, completions) in enumerate(groups):
        request = Request(prompt, len(completions), SamplingParams(), 0, 0, g, 0, 1 << 30)
        parent = request.start_prompt(pool)
        parent.table.make_writable(0, len(prompt))
        logits = runner.execute(runner.prepare([Chunk(parent, 0, len(prompt))]))[0]
        for i, completion in enumerate(completions):
            rows[g, i, 0] = logits
            child = Sequence(request, i, list(prompt), parent.table.fork(), len(prompt))
            live.append(((g, i), completion, child))
    for place in range(1, max(len(completion) for _, completion, _ in live)):
        active = [(key, completion, s) for key, completion, s in live if place < len(completion)]
        chunks = []
        for _, completion, s in active:
            s.force([completion[place - 1]])
            copies = s.table.make_writable(s.num_tokens - 1, s.num_tokens)
            if copies:
                runner.cache.copy_blocks(copies)
            chunks.append(Chunk(s, s.num_tokens - 1, 1))
        logits = runner.execute(runner.prepare(chunks))
        rows.update({(*key, place): logits[j] for j, (key, _, _) in enumerate(active)})
    return torch.stack([rows[key] for key in sorted(rows)])


@torch.no_grad()
def probe(module: PreTrainedModel, group: LayerGroup, block_size: int, max_len: int, numerics: Numerics) -> ProbeReport:
    """Compare decoding, packing and transformers' own forward on a few random tokens."""
    device = next(module.parameters()).device
    groups = _probe_tokens(module.config, max_len)
    module = bare_view(module)
    stir_adapters(module)
    view = make_view(module, numerics)
    num_blocks = sum(2 + (len(p) + max(map(len, cs))) // block_size * (len(cs) + 1) + 2 * len(cs) for p, cs in groups)
    cache = KVCache(group, num_blocks, block_size, device)
    runner = ModelRunner(view, cache, max_num_seqs=1, max_len=1)
    decoded = _decode(runner, BlockPool(num_blocks, block_size), groups)

    pack = build_pack(groups, group, device, row_multiple=numerics.row_multiple)
    context = AttentionContext(pack.plan, numerics.ops)
    trained = raw_logits(view, context, pack.ids, pack.positions, pack.logit_rows)[: len(decoded)]
    differing = int((decoded != trained).any(-1).sum())

    eager = bare_view(module)
    eager.set_attn_implementation("eager")
    expected = []
    for prompt, completions in groups:
        for completion in completions:
            ids = torch.tensor([prompt + completion[:-1]], device=device)
            expected.append(eager(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :])
    ours, theirs = (logits.float().log_softmax(-1) for logits in (decoded, torch.cat(expected)))
    gap = (theirs.exp() * (ours - theirs).abs()).sum(-1).max()
    varying = _varying_activations(view)
    return ProbeReport(differing, len(decoded), float(gap), numerics.num_threads, varying)


def check_parity(report: ProbeReport, dtype: torch.dtype) -> None:
    """Refuse a model whose log-probs are not transformers' within the dtype's rounding."""
    limit = 1e-3 if dtype == torch.float32 else 0.2
    if not report.parity_gap <= limit:
        raise RolloutError(
            f"the engine does not run this model right: log-probs differ from transformers' eager attention by"
            f" {report.parity_gap:.2g} nats (at most {limit} expected in {dtype}); please report the model's config"
        )


def decide_numerics(module: PreTrainedModel, group: LayerGroup, config: RolloutConfig, max_len: int) -> Numerics:
    """How an engine computes, with the probe's verdict; refuses what config.exact or parity forbid."""
    device, aimed = next(module.parameters()).device, config.exact != "off"
    numerics = Numerics.of(device, group.dtype, exact=aimed)
    report = probe(module, group, config.block_size, max_len, numerics)
    check_parity(report, group.dtype)
    if not aimed:
        return numerics.judged(False, "exact=off")
    if report.exact:
        return numerics.judged(True, report.reason)
    if config.exact == "require":
        raise ExactnessError(f"exact='require', but {report.reason}: use exact=auto to recompute log-probs")
    logger.warning("exact=auto: %s; the trainer will recompute log-probs", report.reason)
    return Numerics.of(device, group.dtype, exact=False).judged(False, report.reason)
