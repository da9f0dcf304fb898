"""What can be done to a running completion between steps: fork it, or put tokens behind it."""

from collections.abc import Sequence as Seq

from rollout.config import SamplingParams, is_kind
from rollout.engine.handles import RolloutHandle
from rollout.engine.loop import EngineCore
from rollout.errors import RolloutError, short


def fork(
    core: EngineCore, handle: RolloutHandle, index: int, sampling: SamplingParams | None, key: int | None, max_len: int
) -> RolloutHandle:
    """Fork completion `index` of a running request into a request of its own; max_len bounds its length."""
    with core.turn():
        handle.check_owner(core.turns)
        request, runner, parent = handle.request, core.ready(), handle.running(index, "forked")
        params = sampling or request.sampling
        max_len = min(request.num_prompt_tokens + params.max_new_tokens, max_len)
        if max_len <= parent.num_tokens:
            raise RolloutError(f"completion {index} has {len(parent.logprobs)} tokens: raise max_new_tokens to fork it")
        family, branch = request.family, request.fork(params, request.key if key is None else key, max_len)
        forked = core.adopt(branch)
        child = core.scheduler.fork(parent, branch, family.n + family.num_forked)
        family.num_forked += 1
        if child.slot >= 0:
            runner.copy_tokens(parent.slot, child.slot, request.num_prompt_tokens, parent.num_tokens)
        return forked


def force(core: EngineCore, handle: RolloutHandle, index: int, ids: Seq[int]) -> None:
    """Append tokens that were not sampled to a running completion, which continues after them.

    They count for max_new_tokens, and an end token among them ends nothing. Raises RolloutError if the completion has
    not drawn a token yet or has ended, if an id is not one of the model's, or if there is no room for them and for a
    token behind them.
    """
    with core.turn():
        handle.check_owner(core.turns)
        vocab_size = core.ready().view.config.vocab_size
        sequence = handle.running(index, "continued")
        if not ids or not all(is_kind(int, token) and 0 <= token < vocab_size for token in ids):
            raise RolloutError(f"{short(ids)}: force one or more ids of the model's vocabulary of {vocab_size}")
        room = sequence.request.max_len - sequence.num_tokens - 1
        if len(ids) > room:
            raise RolloutError(
                f"{len(ids)} tokens are too many for completion {index}, which has room for {room} and one to draw"
                " behind them: raise max_new_tokens, max_model_len or num_blocks"
            )
        sequence.force(list(ids))
