"""What a user sets: the engine's configuration and a request's sampling parameters."""

import math
from dataclasses import dataclass

from rollout.errors import RolloutError


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise RolloutError(f"{name}={value!r}: {remedy}")


def is_kind(kinds: type | tuple[type, ...], value: object) -> bool:
    """isinstance, but True and False are no numbers."""
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclass(frozen=True)
class RolloutConfig:
    """Sizes and modes of a RolloutEngine."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks in the pool. None: as many as memory_fraction allows and max_num_seqs full sequences need.
    The trainer counts with the sequences and lengths of its own steps."""
    memory_fraction: float = 0.35
    """Share of the device's total memory that the KV pool may take, in (0, 1]; unused if num_blocks is set."""
    max_model_len: int | None = None
    """Longest sequence, prompt and completion, in tokens. None: the model's max_position_embeddings."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens per forward; longer prompts are prefilled in chunks."""
    prefill_chunk_size: int | None = None
    """Prompt tokens per forward beside the running completions, so that a long prompt does not hold them up. None: as
    many as max_num_batched_tokens leaves."""
    prefix_cache: bool = True
    """Keep full KV blocks and find them again by their tokens, until the weights change or the pool needs the room."""
    skip_special_tokens: bool = True
    """Leave special tokens, the end token included, out of a completion's text. False keeps them, for rewards that
    look for what the chat template marks with them; the ids are the same."""
    dtype: str = "auto"
    """"float32", "bfloat16" or "auto": what the model is stored in."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:N" or "auto": CUDA where there is one."""
    exact: str = "auto"
    """Trainer and generator agree in every bit: "auto" checks and says if not, "require" refuses if not, "off"."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("prefix_cache", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be True or False")
        for name in ("num_blocks", "max_model_len", "prefill_chunk_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be at least 1, or null")
        _require(0.0 < self.memory_fraction <= 1.0, "memory_fraction", self.memory_fraction, "must lie in (0, 1]")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"must be at least max_num_seqs ({self.max_num_seqs}), so that every running sequence can take its token",
        )
        _require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", self.dtype, "use auto, float32 or bfloat16")
        _require(self.exact in ("auto", "require", "off"), "exact", self.exact, "use auto, require or off")
        device_ok = self.device in ("auto", "cpu", "cuda") or self.device.removeprefix("cuda:").isdigit()
        _require(device_ok, "device", self.device, "use auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Nothing is taken from a model's generation_config but its end tokens."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token, with the log-prob it has at temperature 1."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all. Then top_p, then min_p."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the likeliest."""
    max_new_tokens: int = 64
    """Longest completion, in tokens, the end token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion beside the model's end tokens; the completion contains the one it met."""
    ignore_eos: bool = False
    """Do not stop at the model's end tokens."""
    seed: int | None = None
    """Seed of the draw, 0 to 2**32 - 1. None: the engine draws one and reports it in the group."""

    def __post_init__(self) -> None:
        for name in ("top_k", "max_new_tokens"):
            _require(is_kind(int, getattr(self, name)), name, getattr(self, name), "must be a whole number")
        for name in ("temperature", "top_p", "min_p"):
            _require(is_kind((int, float), getattr(self, name)), name, getattr(self, name), "must be a number")
        _require(self.seed is None or is_kind(int, self.seed), "seed", self.seed, "must be a whole number or None")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "must be True or False")
        t = self.temperature
        _require(
            t == 0.0 or (math.isfinite(t) and t >= 1e-10), "temperature", t, "must be 0 (greedy) or at least 1e-10"
        )
        _require(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "must lie in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "must lie in [0, 1]")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")
        _require(
            self.seed is None or 0 <= self.seed < 2**32, "seed", self.seed, "must lie in 0 .. 4294967295, or be None"
        )
        # YAML and JSON give lists
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(
            all(isinstance(i, int) and i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "must be token ids, 0 or more",
        )

    @property
    def cuts(self) -> bool:
        """Whether sampling is restricted to a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def logit_temperature(self) -> float:
        """What logits are divided by for log-probs: greedy completions are scored at temperature 1."""
        return self.temperature or 1.0
