"""Blocks and their tables: a state machine that follows what every block holds, and the errors of misuse."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from rollout.schedule.block_pool import NULL_BLOCK, BlockPool, BlockTable, OutOfBlocksError

# -- state machine ------------------------------------------------------------------------------------------------


class BlockTables(RuleBasedStateMachine):
    """Writes a new token at every position, applies the copies, and reads every table back after each rule.

    A copy on write that was missed, made from the wrong block or made too late shows as a token that is not the
    table's own; a block used twice, as another table's token; a freed block, as None.
    """

    tables: Bundle[BlockTable] = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.storage: dict[int, list[int | None]] = {}
        self.contents: dict[BlockTable, list[int]] = {}
        self.num_tokens = 0

    def write(self, table: BlockTable, start: int, end: int) -> bool:
        """Write new tokens at start .. end - 1 if the pool has room; whether it had."""
        needed, free = table.num_blocks_to_write(start, end), self.pool.num_free_blocks
        if needed > free:
            return False
        copies = table.make_writable(start, end)
        assert self.pool.num_free_blocks == free - needed
        gathered = {destination: list(self.storage[source]) for source, destination in copies}
        self.storage.update(gathered)
        for position in range(start, end):
            block = table.blocks[position // self.pool.block_size]
            self.num_tokens += 1
            self.storage.setdefault(block, [None] * self.pool.block_size)
            self.storage[block][position % self.pool.block_size] = self.num_tokens
            self.contents[table][position:] = [self.num_tokens, *self.contents[table][position + 1 :]]
        return True

    def forget_free_blocks(self) -> None:
        self.storage = {block: held for block, held in self.storage.items() if self.pool.ref_count(block)}

    @rule(target=tables, length=st.integers(0, 20))
    def allocate(self, length: int) -> BlockTable:
        table = BlockTable(self.pool)
        self.contents[table] = []
        self.write(table, 0, length)
        return table

    @rule(table=tables, count=st.integers(1, 7))
    def append(self, table: BlockTable, count: int) -> None:
        length = len(self.contents[table])
        self.write(table, length, length + count)

    @rule(table=tables, data=st.data())
    def overwrite(self, table: BlockTable, data: Any) -> None:
        length = len(self.contents[table])
        start = data.draw(st.integers(0, length))
        self.write(table, start, data.draw(st.integers(start, length)))

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> BlockTable:
        child = table.fork()
        self.contents[child] = list(self.contents[table])
        return child

    @rule(target=tables, table=tables, num_blocks=st.integers(0, 5))
    def fork_full_blocks(self, table: BlockTable, num_blocks: int) -> BlockTable:
        full = min(num_blocks, len(self.contents[table]) // self.pool.block_size)
        child = table.fork(full)
        self.contents[child] = self.contents[table][: full * self.pool.block_size]
        return child

    @rule(table=consumes(tables))
    def free(self, table: BlockTable) -> None:
        table.free()
        del self.contents[table]
        self.forget_free_blocks()

    @rule()
    def abort(self) -> None:
        """Every sequence goes; its table, still known, begins again at nothing."""
        for table in self.contents:
            table.free()
            self.contents[table] = []
        self.forget_free_blocks()
        assert self.pool.num_free_blocks == self.pool.num_blocks

    @invariant()
    def every_table_reads_what_was_written_to_it(self) -> None:
        size = self.pool.block_size
        for table, content in self.contents.items():
            held = [self.storage.get(table.blocks[i // size], [None] * size)[i % size] for i in range(len(content))]
            assert held == content

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check_integrity(self.contents)
        holders = [block for table in self.contents for block in set(table.blocks)]
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(set(holders))
        assert self.pool.num_shared_blocks == sum(holders.count(block) > 1 for block in set(holders))
        assert NULL_BLOCK not in holders


TestBlockTables = BlockTables.TestCase
TestBlockTables.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)

# -- by hand ------------------------------------------------------------------------------------------------------


def table_of(pool: BlockPool, length: int) -> BlockTable:
    table = BlockTable(pool)
    assert table.make_writable(0, length) == []
    return table


def test_a_fork_moves_nothing_and_takes_nothing() -> None:
    pool = BlockPool(8, 4)
    table = table_of(pool, 10)
    child = table.fork()
    assert child.blocks == table.blocks
    assert child.blocks is not table.blocks
    assert pool.num_free_blocks == 5
    assert pool.num_shared_blocks == 3


def test_the_first_write_to_a_shared_tail_copies_it_and_nothing_else() -> None:
    pool = BlockPool(8, 4)
    table = table_of(pool, 6)
    first, tail = table.blocks
    child = table.fork()
    ((source, destination),) = child.make_writable(6, 7)
    assert (source, child.blocks) == (tail, [first, destination])
    assert table.blocks == [first, tail]
    assert table.make_writable(6, 7) == []  # alone again
    assert [pool.ref_count(block) for block in (first, tail, destination)] == [2, 1, 1]


def test_a_write_behind_full_shared_blocks_copies_nothing() -> None:
    pool = BlockPool(8, 4)
    table = table_of(pool, 8)
    child = table.fork()
    assert child.num_blocks_to_write(8, 9) == 1
    assert child.make_writable(8, 9) == []
    assert child.blocks[:2] == table.blocks


@pytest.mark.parametrize("num_forks", [1, 2, 15])
def test_each_writing_fork_copies_the_tail_once(num_forks: int) -> None:
    pool = BlockPool(40, 4)
    table = table_of(pool, 6)
    forks = [table.fork() for _ in range(num_forks)]
    copies = [copy for fork in forks for copy in fork.make_writable(6, 7)]
    assert len({destination for _, destination in copies}) == num_forks
    assert pool.num_free_blocks == 40 - 2 - num_forks
    for fork in [table, *forks]:
        fork.free()
    assert pool.num_free_blocks == 40
    pool.check_integrity([])


def test_freeing_a_block_twice_raises() -> None:
    pool = BlockPool(4, 4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(RuntimeError, match=f"block {block} freed twice"):
        pool.release(block)
    assert pool.num_free_blocks == 4


def test_freeing_a_table_again_frees_nothing() -> None:
    pool = BlockPool(4, 4)
    table, other = table_of(pool, 5), table_of(pool, 5)
    table.free()
    table.free()
    pool.check_integrity([other])
    assert pool.num_free_blocks == 2


def test_sharing_a_free_block_raises() -> None:
    pool = BlockPool(4, 4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(RuntimeError, match="free and cannot be shared"):
        pool.share(block)


def test_the_null_block_is_nobodys() -> None:
    pool = BlockPool(5, 4)
    assert NULL_BLOCK not in [pool.allocate() for _ in range(5)]
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release(NULL_BLOCK)


def test_an_exhausted_pool_says_so() -> None:
    pool = BlockPool(2, 4)
    pool.allocate()
    pool.allocate()
    with pytest.raises(OutOfBlocksError, match="all 2 KV blocks are in use"):
        pool.allocate()
    pool.check_integrity()


# -- what check_integrity finds -----------------------------------------------------------------------------------


def test_integrity_finds_a_lost_block() -> None:
    pool = BlockPool(4, 4)
    table = table_of(pool, 8)
    table.blocks.pop()
    with pytest.raises(RuntimeError, match="differ from the tables"):
        pool.check_integrity([table])


def test_integrity_finds_a_block_that_two_tables_hold_and_one_paid_for() -> None:
    pool = BlockPool(4, 4)
    table = table_of(pool, 8)
    with pytest.raises(RuntimeError, match="differ from the tables"):
        pool.check_integrity([table, BlockTable(pool, table.blocks[:1])])


def test_integrity_finds_a_block_twice_in_the_free_list() -> None:
    pool = BlockPool(4, 4)
    pool._free.append(pool._free[0])
    with pytest.raises(RuntimeError, match="twice in the free list"):
        pool.check_integrity()


def test_integrity_finds_a_used_block_in_the_free_list() -> None:
    pool = BlockPool(4, 4)
    pool._free.append(pool.allocate())
    with pytest.raises(RuntimeError, match="disagree"):
        pool.check_integrity()


def test_integrity_finds_a_wrong_count_of_shared_blocks() -> None:
    pool = BlockPool(4, 4)
    pool.num_shared_blocks = 1
    with pytest.raises(RuntimeError, match="counted as shared"):
        pool.check_integrity()
