"""KV that outlives its sequence: full blocks, found again by the tokens before and in them. Plain Python.

A tree of blocks per cache key, which says what made the KV (policy version, adapter, salt). A block's children are
looked up by their token ids themselves, so two contents never collide. Blocks that nobody holds stay until the pool
needs room; the least recently used one without children goes first.
"""

import heapq
from collections.abc import Hashable, Sequence

CacheKey = Hashable


class CachedBlock:
    """A node: one full block of KV, after the blocks of its ancestors."""

    __slots__ = ("block", "children", "last_used", "parent", "tokens")

    def __init__(self, block: int, tokens: tuple[int, ...], parent: "CachedBlock | None") -> None:
        self.block = block
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], CachedBlock] = {}
        self.last_used = 0


class PrefixCache:
    """Which blocks hold which tokens. The pool asks it for a block to evict when no other is free."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._roots: dict[CacheKey, CachedBlock] = {}
        self._nodes: dict[int, CachedBlock] = {}
        self._idle: set[int] = set()
        self._heap: list[tuple[int, int]] = []
        """(last used, block) of idle leaves; entries that no longer hold are skipped when they come up."""
        self._clock = 0

    @property
    def num_idle(self) -> int:
        """Cached blocks that no sequence holds."""
        return len(self._idle)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def count(self, num_queried: int, num_hit: int) -> None:
        """A prompt has been looked for, and so much of it found."""
        self.num_queried_tokens += num_queried
        self.num_hit_tokens += num_hit

    def match(self, key: CacheKey, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Blocks that hold the longest cached prefix of token_ids, at most max_tokens of it, in order of position."""
        node = self._roots.get(key)
        found: list[int] = []
        size = self.block_size
        while node is not None and (len(found) + 1) * size <= max_tokens:
            start = len(found) * size
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is not None:
                found.append(node.block)
        return found

    def extend(
        self, key: CacheKey, after: CachedBlock | None, tokens: tuple[int, ...], block: int
    ) -> CachedBlock | None:
        """Register `block`, which holds `tokens`, behind the node `after` (None: at the front); returns its node.

        Where the same tokens are cached already, that block stays and its node is returned. None if `after` is no
        longer cached, so that nothing could find the block.
        """
        if after is None:
            after = self._roots.setdefault(key, CachedBlock(0, (), None))
        elif self._nodes.get(after.block) is not after:
            return None
        node = after.children.get(tokens)
        if node is None:
            node = after.children[tokens] = self._nodes[block] = CachedBlock(block, tokens, after)
        return node

    def node(self, block: int) -> CachedBlock:
        """The node of a cached block."""
        return self._nodes[block]

    def acquire(self, block: int) -> None:
        """A sequence holds an idle block again."""
        self._idle.discard(block)

    def retire(self, block: int) -> None:
        """The last sequence let go of a cached block: it is idle from now on."""
        self._clock += 1
        node = self._nodes[block]
        node.last_used = self._clock
        self._idle.add(block)
        self._offer(node)

    def _offer(self, node: CachedBlock) -> None:
        if not node.children and node.block in self._idle:
            heapq.heappush(self._heap, (node.last_used, node.block))
        # blocks that are hit again and again leave old entries behind, which nothing would ever pop
        if len(self._heap) > 2 * len(self._nodes) + 64:
            idle = (self._nodes[block] for block in self._idle)
            self._heap = [(leaf.last_used, leaf.block) for leaf in idle if not leaf.children]
            heapq.heapify(self._heap)

    def evict(self) -> list[int]:
        """Forget the least recently used idle leaf and return its block, free to be written.

        If every idle block has descendants in use, one of those subtrees is forgotten: its idle blocks are returned.
        """
        while self._heap:
            last_used, block = heapq.heappop(self._heap)
            node = self._nodes.get(block)
            if node is not None and block in self._idle and not node.children and node.last_used == last_used:
                return self._forget(node)
        return self._forget(self._nodes[min(self._idle, key=lambda block: self._nodes[block].last_used)])

    def _forget(self, top: CachedBlock) -> list[int]:
        """Unregister a node and its descendants; returns those of their blocks that are idle."""
        assert top.parent is not None
        del top.parent.children[top.tokens]
        self._offer(top.parent)
        freed, pending = [], [top]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            del self._nodes[node.block]
            if node.block in self._idle:
                self._idle.remove(node.block)
                freed.append(node.block)
        return freed

    def clear(self) -> list[int]:
        """Forget everything: no entry can be hit again. Returns the idle blocks, which are free from now on."""
        freed = list(self._idle)
        for table in (self._roots, self._nodes, self._idle, self._heap):
            table.clear()
        return freed
