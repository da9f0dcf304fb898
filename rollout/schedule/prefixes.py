"""What a sequence need not compute, because its KV lies in blocks already. Plain Python, no tensors."""

from collections.abc import Iterable

from rollout.schedule.block_pool import BlockPool, BlockTable
from rollout.schedule.sequence import Sequence


def adopt(sequence: Sequence, pool: BlockPool, *, cached: bool) -> int:
    """Give a sequence without blocks those that hold its first tokens; returns how many tokens they hold.

    cached: look in the prefix cache; otherwise only at the prompt's blocks that live siblings hold. The last token is
    always computed: its logits are needed.
    """
    request = sequence.request
    sequence.cached = []
    if cached:
        blocks = pool.cache.match(request.cache_key, sequence.token_ids, sequence.num_tokens - 1)
        for block in blocks:
            pool.share(block)
        sequence.table = BlockTable(pool, blocks)
        sequence.cached = [pool.cache.node(block) for block in blocks]
    elif not sequence.is_prompt:
        sequence.table = request.shared_prefix(pool.block_size) or sequence.table
    return len(sequence.table.blocks) * pool.block_size


def being_computed(prompt: Sequence, computed: int, running: Iterable[Sequence], block_size: int) -> bool:
    """Whether a running prompt is about to fill the block that `prompt` would compute first."""
    end = computed + block_size
    if end >= prompt.num_tokens:
        return False
    wanted, key = prompt.token_ids[:end], prompt.request.cache_key
    return any(
        s.is_prompt and s.num_tokens >= end and s.token_ids[:end] == wanted and s.request.cache_key == key
        for s in running
    )


def register(sequence: Sequence, pool: BlockPool) -> None:
    """Enter the sequence's full blocks into the prefix cache, as far as they are computed."""
    size = pool.block_size
    while (len(sequence.cached) + 1) * size <= sequence.num_computed:
        i = len(sequence.cached)
        tokens = tuple(sequence.token_ids[i * size : (i + 1) * size])
        after = sequence.cached[-1] if sequence.cached else None
        node = pool.cache.extend(sequence.request.cache_key, after, tokens, sequence.table.blocks[i])
        if node is None:
            return
        sequence.cached.append(node)
