"""The engine: prompts in, groups of completions out, over the caller's own weights."""

import dataclasses
import logging
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollout.block_pool import BlockPool
from rollout.config import RolloutConfig, SamplingParams
from rollout.errors import ExactnessError, RolloutError
from rollout.exactness import check_parity, probe
from rollout.kv_cache import KVCache, LayerGroup
from rollout.loading import check_module, load_model, load_tokenizer, resolve_device
from rollout.memory import pool_size
from rollout.model_runner import ModelRunner
from rollout.prompts import Prompt, decode_completion, end_token_ids
from rollout.requests import BadPrompt, Limits, OnError, make_requests
from rollout.sampler import TRAIN
from rollout.scheduler import Scheduler
from rollout.sequence import Request, Sequence
from rollout.stats import EngineStats
from rollout.types import FinishReason, Rollout, RolloutGroup
from rollout.views import check_shared, identify, make_view, training_view

logger = logging.getLogger(__name__)


class RolloutEngine:
    """Generates groups of rollouts from a model directory or from the caller's module.

    A module is read through a view and never changed; after its weights changed in place, call weights_updated().
    Use it as a context manager, or close() it.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: RolloutConfig | None = None,
    ) -> None:
        self.config = config = config or RolloutConfig()
        if isinstance(model, str | Path):
            tokenizer = tokenizer or load_tokenizer(model)
            self.module = load_model(model, config.dtype, resolve_device(config.device))
        else:
            self.module = check_module(model)
        self.tokenizer = tokenizer
        parameter = next(self.module.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._check_module_matches()
        self.max_model_len = self._resolve_max_model_len()
        self.end_token_ids = end_token_ids(self.module, tokenizer)
        self.layer_group = LayerGroup.of(self.module.config, self.dtype)
        num_blocks = pool_size(config, self.layer_group, self.max_model_len, self.device)
        self.exact, self.exact_reason = self._resolve_exact()

        self.pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_num_batched_tokens)
        self._cache: KVCache | None = KVCache(self.layer_group, num_blocks, config.block_size, self.device)
        self._identity = identify(self.module)
        view = make_view(self.module, exact=self.exact)
        self._runner: ModelRunner | None = ModelRunner(view, self._cache, config.max_num_seqs, exact=self.exact)
        self.policy_version = 0
        self._prompt_tokens = self._completion_tokens = self._forward_steps = 0
        self._seconds = 0.0
        self._peak_used = self._peak_shared = self._peak_running = 0

    def _check_module_matches(self) -> None:
        config = self.config
        if config.dtype != "auto" and getattr(torch, config.dtype) != self.dtype:
            raise RolloutError(f"dtype={config.dtype!r}, but the module is in {self.dtype}: convert it, or use auto")
        if config.device != "auto" and resolve_device(config.device).type != self.device.type:
            raise RolloutError(f"device={config.device!r}, but the module is on {self.device}: move it, or use auto")

    def _resolve_max_model_len(self) -> int:
        limit = int(self.module.config.max_position_embeddings)
        wanted = self.config.max_model_len
        if wanted is not None and wanted > limit:
            raise RolloutError(f"max_model_len={wanted} is more than the model's max_position_embeddings of {limit}")
        return wanted or limit

    def _resolve_exact(self) -> tuple[bool, str]:
        mode = self.config.exact
        report = probe(self.module, self.layer_group, self.config.block_size, self.max_model_len, exact=mode != "off")
        check_parity(report, self.dtype)
        if mode == "off":
            return False, "exact=off"
        if not report.exact:
            if mode == "require":
                raise ExactnessError(f"exact='require', but {report.reason}: use exact=auto to recompute log-probs")
            logger.warning("exact=auto: %s; the trainer will recompute log-probs", report.reason)
        return report.exact, report.reason

    # -- generating ---------------------------------------------------------------------------------------------

    def generate_rollouts(
        self,
        prompts: Seq[Prompt],
        n: int = 16,
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        step: int = 0,
        keys: Seq[int] | None = None,
        purpose: int = TRAIN,
        on_error: OnError = "raise",
    ) -> list[RolloutGroup]:
        """n completions of each prompt: groups in prompt order, rollouts in index order.

        A completion depends on the weights, its prompt's ids, its sampling parameters (seed included), `step`, its
        key, its index and `purpose`, and on nothing else. keys: one per prompt, 0 .. 2**32 - 1; None: the prompt's
        place in this call. Raises RolloutError before any work if an input is bad; with on_error="return" a bad prompt
        gets a group with `error` set and one rollout of finish_reason "error", and the others run.
        """
        runner = self._ready()
        limits = Limits(self.module.config.vocab_size, self.max_model_len, self.pool.num_blocks, self.config.block_size)
        requests = make_requests(
            prompts, n, sampling, self.tokenizer, limits, step=step, keys=keys, purpose=purpose, on_error=on_error
        )
        started = time.perf_counter()
        self._peak_used = self._peak_shared = self._peak_running = 0
        try:
            for request in requests:
                if isinstance(request, Request):
                    self.scheduler.add(request)
                    self._prompt_tokens += request.num_prompt_tokens
            while self.scheduler.has_work:
                self._step(runner)
        except BaseException:
            # an error or an interrupt: nothing of this call stays behind
            self.scheduler.abort_all()
            raise
        finally:
            self._seconds += time.perf_counter() - started
        return [self._result(request) for request in requests]

    def _ready(self) -> ModelRunner:
        if self._runner is None:
            raise RolloutError("this engine is closed: make a new one")
        if self.scheduler.has_work:
            raise RolloutError("this engine is already generating: call it from one place at a time")
        return self._runner

    def _step(self, runner: ModelRunner) -> None:
        """One iteration: plan, run, append; a sequence that ends here frees its blocks before the next plan."""
        batch = self.scheduler.schedule()
        assert batch, "sequences wait or run, but none was scheduled"
        self._observe()
        drawing, sampled, prefilled = runner.run(batch)
        for chunk in batch.chunks:
            chunk.sequence.num_computed += chunk.count
        for prompt, logits in prefilled:
            self.scheduler.prefilled(prompt, logits)
        if sampled is not None:
            values = (sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.raw_logprobs.tolist())
            for sequence, token, logprob, raw_logprob in zip(drawing, *values, strict=True):
                self._append(sequence, token, logprob, raw_logprob)
        self._forward_steps += bool(batch.chunks)

    def _observe(self) -> None:
        self._peak_used = max(self._peak_used, self.pool.num_blocks - self.pool.num_free_blocks)
        self._peak_shared = max(self._peak_shared, self.pool.num_shared_blocks)
        self._peak_running = max(self._peak_running, len(self.scheduler.running))

    def _append(self, sequence: Sequence, token: int, logprob: float, raw_logprob: float) -> None:
        request = sequence.request
        sequence.token_ids.append(token)
        sequence.logprobs.append(logprob)
        sequence.raw_logprobs.append(raw_logprob)
        sequence.recomputing = False
        self._completion_tokens += 1
        sequence.first_logits = None
        ends = request.sampling.stop_token_ids
        if token in ends or (token in self.end_token_ids and not request.sampling.ignore_eos):
            sequence.finish_reason = "stop"
        elif sequence.num_tokens >= request.max_len:
            sequence.finish_reason = "length"
        if sequence.finish_reason:
            self.scheduler.finish(sequence)

    # -- requests and results -----------------------------------------------------------------------------------

    def _result(self, request: Request | BadPrompt) -> RolloutGroup:
        if isinstance(request, BadPrompt):
            failed = Rollout(0, [], [], [], None, "error", self.policy_version)
            return RolloutGroup([], [failed], request.key, request.seed, request.error)
        ordered = sorted(request.sequences, key=lambda sequence: sequence.index)
        return RolloutGroup(
            prompt_ids=request.prompt_ids,
            rollouts=[self._rollout(sequence) for sequence in ordered],
            key=request.key,
            seed=request.seed,
        )

    def _rollout(self, sequence: Sequence) -> Rollout:
        reason: FinishReason | None = sequence.finish_reason
        assert reason is not None
        ids = sequence.completion_ids
        text = decode_completion(sequence.request.prompt_ids, ids, self.tokenizer) if self.tokenizer else None
        return Rollout(sequence.index, ids, sequence.logprobs, sequence.raw_logprobs, text, reason, self.policy_version)

    # -- weights and state --------------------------------------------------------------------------------------

    def weights_updated(self) -> None:
        """The shared weights changed in place: from now on rollouts carry the next policy_version. Moves no bytes."""
        self._ready()
        check_shared(self.module, self._identity)
        self.policy_version += 1

    def training_view(self, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
        """The module that a loss runs through to see this engine's log-probs bit for bit; same parameters."""
        return training_view(self.module, exact=self.exact, gradient_checkpointing=gradient_checkpointing)

    def stats(self) -> EngineStats:
        counters = self.scheduler.stats
        return EngineStats(
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            block_size=self.config.block_size,
            pool_bytes=self._cache.num_bytes if self._cache is not None else 0,
            peak_blocks_used=self._peak_used,
            peak_blocks_shared=self._peak_shared,
            peak_running=self._peak_running,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            forward_steps=self._forward_steps,
            seconds=self._seconds,
            policy_version=self.policy_version,
            exact=self.exact,
            exact_reason=self.exact_reason,
            **dataclasses.asdict(counters),
        )

    def close(self) -> None:
        """Free the KV pool and the view. Closing twice is fine; generating afterwards is an error."""
        self._runner = self._cache = None

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
