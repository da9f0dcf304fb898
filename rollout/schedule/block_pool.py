"""KV blocks: who holds which, how often. Plain Python: no tensors, so it runs and is tested in microseconds."""

from collections import Counter
from collections.abc import Iterable

from rollout.schedule.prefix_cache import PrefixCache

NULL_BLOCK = 0
"""Block that padding writes to; never handed out."""

BlockCopy = tuple[int, int]
"""(source block, destination block)"""


class OutOfBlocksError(RuntimeError):
    """The pool has no free block; the scheduler checks before it asks, so this is a bug."""


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks of `block_size` tokens each; every operation is O(1)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size)
        self.reset()

    def reset(self) -> None:
        """Every block is free and nothing is cached, whatever was held."""
        self.cache.clear()
        num_blocks = self.num_blocks
        self._free = list(range(num_blocks, NULL_BLOCK, -1))
        self._ref_counts = [0] * (num_blocks + 1)
        self.num_shared_blocks = 0
        """Blocks with two or more holders."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return len(self._free) + self.cache.num_idle

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take a free block, a cached one only if there is no other; its reference count becomes 1."""
        if not self._free:
            if not self.cache.num_idle:
                raise OutOfBlocksError(f"all {self.num_blocks} KV blocks are in use")
            self._free += self.cache.evict()
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block in use, or to a cached one."""
        if self.cache.is_idle(block):
            self.cache.acquire(block)
        elif not self._ref_counts[block]:
            raise RuntimeError(f"block {block} is free and cannot be shared")
        self._ref_counts[block] += 1
        self.num_shared_blocks += self._ref_counts[block] == 2

    def release(self, block: int) -> None:
        """Drop a reference; the last one frees the block, or leaves it to the cache."""
        if not self._ref_counts[block]:
            raise RuntimeError(f"block {block} freed twice")
        self._ref_counts[block] -= 1
        self.num_shared_blocks -= self._ref_counts[block] == 1
        if not self._ref_counts[block]:
            if block in self.cache:
                self.cache.retire(block)
            else:
                self._free.append(block)

    def forget_cached(self) -> None:
        """Drop every cache entry; blocks in use stay with their holders."""
        self._free += self.cache.clear()

    def check_integrity(self, tables: Iterable["BlockTable"] | None = None) -> None:
        """Raise if the free list and the counts disagree, or the counts differ from what `tables` hold."""
        free = Counter(self._free)
        if any(count > 1 for count in free.values()):
            raise RuntimeError(f"blocks twice in the free list: {[b for b, c in free.items() if c > 1]}")
        idle = {block for block in range(1, self.num_blocks + 1) if not self._ref_counts[block]}
        known = set(free) | {block for block in idle if self.cache.is_idle(block)}
        if idle != known or len(free) + self.cache.num_idle != len(idle):
            raise RuntimeError(f"free list, cache and reference counts disagree on blocks {sorted(idle ^ known)}")
        if self.num_shared_blocks != sum(count > 1 for count in self._ref_counts):
            raise RuntimeError(
                f"{self.num_shared_blocks} blocks counted as shared, which the reference counts do not show"
            )
        if tables is not None:
            held = Counter(block for table in tables for block in table.blocks)
            wrong = [b for b in range(self.num_blocks + 1) if held[b] != self._ref_counts[b]]
            if wrong:
                raise RuntimeError(f"reference counts of blocks {wrong} differ from the tables that hold them")


class BlockTable:
    """One sequence's blocks, in order of position."""

    def __init__(self, pool: BlockPool, blocks: list[int] | None = None) -> None:
        self.pool = pool
        self.blocks: list[int] = blocks or []

    def fork(self, num_blocks: int | None = None) -> "BlockTable":
        """A table that shares the first `num_blocks` blocks (None: all) with this one; no data moves."""
        blocks = self.blocks[:num_blocks]
        for block in blocks:
            self.pool.share(block)
        return BlockTable(self.pool, list(blocks))

    def num_blocks_to_write(self, start: int, end: int) -> int:
        """Free blocks that `make_writable(start, end)` would take."""
        size = self.pool.block_size
        last_needed = -(-end // size)
        new = max(0, last_needed - len(self.blocks))
        held = self.blocks[start // size : last_needed]
        return new + sum(self.pool.ref_count(block) > 1 for block in held)

    def make_writable(self, start: int, end: int) -> list[BlockCopy]:
        """Make positions start .. end - 1 exist and belong to this table alone.

        Returns the copies on write that have to happen before anything is written.
        """
        size = self.pool.block_size
        copies = []
        for i in range(start // size, min(-(-end // size), len(self.blocks))):
            shared = self.blocks[i]
            if self.pool.ref_count(shared) > 1:
                self.blocks[i] = self.pool.allocate()
                copies.append((shared, self.blocks[i]))
                self.pool.release(shared)
        while len(self.blocks) * size < end:
            self.blocks.append(self.pool.allocate())
        return copies

    def free(self) -> None:
        """Give every block back, the last first."""
        while self.blocks:
            self.pool.release(self.blocks.pop())
