"""Requests and their sequences, as the scheduler sees them: counts and blocks, no tensors."""

from collections import deque
from dataclasses import dataclass, field, replace

from rollout.config import SamplingParams
from rollout.schedule.block_pool import BlockPool, BlockTable
from rollout.schedule.prefix_cache import CachedBlock, CacheKey
from rollout.types import FinishReason


@dataclass
class Span:
    """Tokens start .. end - 1 of a sequence: all given to it (forced), or all drawn by it (sampled)."""

    start: int
    end: int
    forced: bool


@dataclass(eq=False)
class Sequence:
    """A prompt (index -1) or one of its completions (index 0 .. n - 1): a list of spans.

    A prompt is a forced span, what is drawn extends a sampled one, and forced tokens may come in between. Forced tokens
    whose KV is missing are computed like a prompt's: in chunks, and the next token is drawn behind the last of them.
    """

    request: "Request"
    index: int
    token_ids: list[int]
    """Prompt and completion so far."""
    table: BlockTable
    num_computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    slot: int = -1
    """Row of the device's token table while it runs; -1 for a prompt."""
    first_logits: object | None = None
    """Row of its prompt's logits, until it has drawn its first token from them."""
    num_host_tokens: int = 0
    """Leading tokens that were there when it last lost its slot: of these, the host has the sampled ids, too."""
    num_preemptions: int = 0
    first_token_at: float = 0.0
    """Clock when it drew its first token."""
    cached: list[CachedBlock] = field(default_factory=list)
    """Nodes of its leading blocks in the prefix cache."""
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    """Of each completion token, whether it counts in a loss."""
    spans: list[Span] = field(default_factory=list)
    """In order, without gaps. Left out: token_ids are forced."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.spans:
            self.spans.append(Span(0, len(self.token_ids), forced=True))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def is_prompt(self) -> bool:
        return self.index < 0

    @property
    def recomputing(self) -> bool:
        """Preempted: its tokens are prefilled again before it goes on."""
        return self.num_computed < self.num_host_tokens

    def append(self, token: int, logprob: float, raw_logprob: float) -> None:
        """Add a drawn token."""
        self._extend([token], forced=False)
        self.loss_mask.append(True)
        self.logprobs.append(logprob)
        self.raw_logprobs.append(raw_logprob)

    def force(self, ids: list[int]) -> None:
        """Add tokens that were not drawn: their log-probs are 0.0, and they count in no loss."""
        self._extend(ids, forced=True)
        self.loss_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.raw_logprobs += [0.0] * len(ids)

    def _extend(self, ids: list[int], *, forced: bool) -> None:
        self.token_ids += ids
        if self.spans[-1].forced != forced:
            self.spans.append(Span(self.spans[-1].end, self.spans[-1].end, forced))
        self.spans[-1].end += len(ids)

    def positions_on_device(self, start: int, end: int) -> list[int]:
        """Those of start .. end - 1 whose ids are in the device's token table: drawn, and since it has its slot."""
        start = max(start, self.num_host_tokens)
        positions: list[int] = []
        for span in reversed(self.spans):
            if span.end <= start:
                break
            if not span.forced:
                positions[:0] = range(max(start, span.start), min(end, span.end))
        return positions

    def fork(self, request: "Request", index: int, table: BlockTable) -> "Sequence":
        """A sequence of another request with the same tokens so far."""
        return Sequence(
            request,
            index,
            list(self.token_ids),
            table,
            logprobs=list(self.logprobs),
            raw_logprobs=list(self.raw_logprobs),
            loss_mask=list(self.loss_mask),
            spans=[replace(span) for span in self.spans],
        )

    def preempted(self) -> None:
        """Its blocks are gone, and all its tokens are to be computed again."""
        self.num_preemptions += 1
        self.num_computed, self.num_host_tokens = 0, self.num_tokens

    def share_blocks(self, parent: "Sequence") -> None:
        """Stand where the parent of this fork stands, on its blocks."""
        self.table, self.num_computed = parent.table.fork(), parent.num_computed
        self.num_host_tokens, self.cached = parent.num_host_tokens, list(parent.cached)


@dataclass(eq=False)
class Request:
    """One prompt, to be completed n times."""

    prompt_ids: list[int]
    n: int
    sampling: SamplingParams
    seed: int
    step: int
    key: int
    purpose: int
    max_len: int
    """Longest sequence: by max_new_tokens, the model and the pool."""
    prompt: Sequence | None = None
    """Holds the prompt's blocks from its prefill until the last completion has been forked."""
    salt: str | None = None
    """Requests share cached KV only with those of the same salt."""
    submitted_at: float = 0.0
    """Clock when it was submitted."""
    lost_tokens: int = 0
    """Prompt tokens whose KV was given up and has to be found or computed again."""
    policy_version: int = 0
    """Weights that it runs under, from its admission on."""
    logits_row: object | None = None
    """Logits after the prompt, on the device; every completion draws its first token from them."""
    unforked: deque[int] = field(default_factory=deque)
    """Completions that have not begun."""
    sequences: list[Sequence] = field(default_factory=list)
    """Completions that have begun, finished ones included."""
    forked_from: "Request | None" = None
    num_forked: int = 0
    """Forks of its running completions so far."""

    def __post_init__(self) -> None:
        self.unforked.extend(range(self.n))

    @property
    def family(self) -> "Request":
        """The request whose prompt blocks this one shares: its own, or that of the sequence it was forked from."""
        return self.forked_from.family if self.forked_from is not None else self

    @property
    def cache_key(self) -> CacheKey:
        return (self.policy_version, self.salt)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def prefilled(self) -> bool:
        return self.logits_row is not None

    @property
    def finished(self) -> bool:
        return not self.unforked and all(s.finish_reason for s in self.sequences)

    def fork(self, sampling: SamplingParams, key: int, max_len: int) -> "Request":
        """A request of one completion of the same prompt, for a fork of a running one."""
        seed = self.seed if sampling.seed is None else sampling.seed
        return Request(self.prompt_ids, 1, sampling, seed, self.step, key, self.purpose, max_len, salt=self.salt)

    def begin_next(self, table: BlockTable, slot: int, cached: list[CachedBlock], first_logits: object) -> Sequence:
        """The next completion, at the prompt's end; `table` holds the prompt's KV."""
        index, length = self.unforked.popleft(), self.num_prompt_tokens
        sequence = Sequence(self, index, list(self.prompt_ids), table, length, slot, first_logits, cached=list(cached))
        self.sequences.append(sequence)
        return sequence

    def begin_as_fork(self, parent: "Request", sequence: Sequence) -> None:
        """`sequence`, a fork of one of the parent's, is this request's only completion."""
        self.policy_version, self.forked_from = parent.policy_version, parent
        self.unforked.clear()
        self.sequences.append(sequence)

    def start_prompt(self, pool: BlockPool) -> Sequence:
        self.prompt = Sequence(self, -1, list(self.prompt_ids), BlockTable(pool))
        return self.prompt

    def drop_prompt(self, lost_tokens: int = 0) -> None:
        """Give the prompt's blocks and logits back; it is prefilled again if completions are still to come."""
        self.lost_tokens += lost_tokens
        if self.prompt is not None:
            self.prompt.table.free()
        self.prompt = self.logits_row = None

    def shared_prefix(self, block_size: int) -> BlockTable | None:
        """A new table over the prompt's full blocks, if some live sequence of this request still holds their KV."""
        full = self.num_prompt_tokens // block_size
        holders = [self.prompt] if self.prompt is not None and self.prefilled else []
        holders += [s for s in self.sequences if s.table.blocks and s.num_computed >= full * block_size]
        return holders[0].table.fork(full) if holders and full else None
