"""What one forward and its draw are told: planned chunks as arrays of fixed meaning, in numpy and on the host.

`prepare` makes them, `ModelRunner.execute` moves them to the device and runs them. Nothing here depends on weights.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.config import SamplingParams
from rollout.model.kv_cache import KVCache
from rollout.schedule.batch import Chunk
from rollout.schedule.sequence import Request, Sequence
from rollout_kernels.attention_plan import QuerySpan
from rollout_kernels.shapes import SEGMENT_SIZE, round_up

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Draws:
    """R tokens that are drawn, each for a sequence.

    counters: uint64 [4, R], of the token's random number: its position, its rollout's index, the prompt's key, the
    step. seeds: uint64 [2, R], that number's key: seed and purpose. slots, positions: int64 [R], where the drawn id
    goes in the token table. sampling: R options.
    """

    counters: NDArray[np.uint64]
    seeds: NDArray[np.uint64]
    slots: Ints
    positions: Ints
    sampling: list[SamplingParams]

    @staticmethod
    def of(sequences: Seq[Sequence]) -> "Draws":
        """The next token of each sequence."""
        requests = [s.request for s in sequences]
        positions = [s.num_tokens for s in sequences]
        counters = [positions, [s.index for s in sequences], [r.key for r in requests], [r.step for r in requests]]
        return Draws(
            counters=np.array(counters, np.uint64),
            seeds=np.array([[r.seed for r in requests], [r.purpose for r in requests]], np.uint64),
            slots=np.array([s.slot for s in sequences], np.int64),
            positions=np.array(positions, np.int64),
            sampling=[r.sampling for r in requests],
        )


@dataclass(frozen=True)
class ForwardInputs:
    """One forward over T token rows, those behind the chunks' tokens padding, and the draw behind it. int64 throughout.

    ids: [T], 0 where the token is in the device's table, and in padding.
    table_rows, table_slots, table_positions: [S], the rows whose ids are in the token table, and where.
    positions: [T], 0 in padding. write_rows: [T * kv_heads], where each row's keys and values go; padding's in block 0.
    spans: which rows attend which KV.
    logit_rows: [L], the rows whose logits are taken: the last of each chunk that completes, in order; padding repeats
        row 0.
    draws: in the order of `drawing`; the logits of forks are stored already.
    """

    ids: Ints
    table_rows: Ints
    table_slots: Ints
    table_positions: Ints
    positions: Ints
    write_rows: Ints
    spans: list[QuerySpan]
    logit_rows: Ints
    draws: Draws


def drawing(chunks: Seq[Chunk], forks: Seq[Sequence]) -> list[Sequence]:
    """Who draws a token: completions whose chunks complete, in order, then forks."""
    return [chunk.sequence for chunk in chunks if chunk.completes and not chunk.sequence.is_prompt] + list(forks)


def prepare(
    chunks: Seq[Chunk], cache: KVCache, row_multiple: int, forks: Seq[Sequence] = (), *, group_siblings: bool = True
) -> ForwardInputs:
    """The inputs of a forward over chunks, whose blocks are allocated, and of a draw for them and for forks.

    row_multiple: of which T and L are multiples. group_siblings: completions that decode attend the whole segments of
    their common prompt together, which changes no bit.
    """
    starts = np.cumsum([0, *(chunk.count for chunk in chunks)])
    positions, blocks = _places(chunks, starts, round_up(int(starts[-1]), row_multiple), cache.block_size)
    ids, table = _token_ids(chunks, starts, len(positions))
    completed = [int(end) - 1 for chunk, end in zip(chunks, starts[1:], strict=True) if chunk.completes]
    # somebody must be asked for logits even if no prompt is through yet
    logit_rows = completed + [0] * (round_up(max(len(completed), 1), row_multiple) - len(completed))
    return ForwardInputs(
        ids=ids,
        table_rows=table[0],
        table_slots=table[1],
        table_positions=table[2],
        positions=positions,
        write_rows=cache.rows(blocks, positions).reshape(-1),
        spans=_attention_spans(chunks, starts, cache, group_siblings),
        logit_rows=np.array(logit_rows, np.int64),
        draws=Draws.of(drawing(chunks, forks)),
    )


def _places(chunks: Seq[Chunk], starts: Ints, size: int, block_size: int) -> tuple[Ints, Ints]:
    """Positions and blocks [size] of the chunks' tokens; what is behind them is padding, at 0."""
    positions, blocks = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for chunk, row in zip(chunks, starts, strict=False):
        if chunk.count == 1:  # without arrays of one, since most are
            positions[row] = chunk.start
            blocks[row] = chunk.sequence.table.blocks[chunk.start // block_size]
        else:
            places = np.arange(chunk.start, chunk.start + chunk.count)
            positions[row : row + chunk.count] = places
            table = np.asarray(chunk.sequence.table.blocks, np.int64)
            blocks[row : row + chunk.count] = table[places // block_size]
    return positions, blocks


def _token_ids(chunks: Seq[Chunk], starts: Ints, size: int) -> tuple[Ints, Ints]:
    """Ids [size] that the host knows, and [3, S]: rows, slots and positions of those that the device has drawn."""
    ids = np.zeros(size, np.int64)
    table: list[tuple[int, int, int]] = []
    for chunk, row in zip(chunks, starts.tolist(), strict=False):
        sequence, end = chunk.sequence, chunk.start + chunk.count
        drawn = sequence.positions_on_device(chunk.start, end)
        if len(drawn) < chunk.count:
            ids[row : row + chunk.count] = sequence.token_ids[chunk.start : end]
        for position in drawn:
            ids[row + position - chunk.start] = 0
            table.append((row + position - chunk.start, sequence.slot, position))
    return ids, np.array(table, np.int64).reshape(-1, 3).T


def _attention_spans(chunks: Seq[Chunk], starts: Ints, cache: KVCache, group_siblings: bool) -> list[QuerySpan]:
    """What attends what: siblings that decode share one product over their common prompt's whole segments."""
    siblings: dict[Request, list[tuple[int, Chunk]]] = defaultdict(list)
    spans: list[QuerySpan] = []
    for row, chunk in zip(starts.tolist(), chunks, strict=False):
        if group_siblings and _shared_segments(chunk, cache.block_size):
            siblings[chunk.sequence.request.family].append((row, chunk))
        else:
            spans.append(_span(row, chunk, 0, cache))
    for members in siblings.values():
        shared = _shared_segments(members[0][1], cache.block_size) if len(members) > 1 else 0
        spans.extend(_span(row, chunk, shared, cache) for row, chunk in members)
        if shared:
            members.sort(key=lambda member: member[1].start)
            rows = np.array([row for row, _ in members], np.int64)
            lengths = np.array([chunk.start + 1 for _, chunk in members], np.int64)
            prefix = members[0][1].sequence.table.blocks[: shared * SEGMENT_SIZE // cache.block_size]
            spans.append(QuerySpan(rows, lengths, cache.units(prefix), 0, shared))
    return spans


def _shared_segments(chunk: Chunk, block_size: int) -> int:
    """Leading segments that a decoding completion may attend together with its siblings; 0 for a longer chunk."""
    num_prompt = chunk.sequence.request.num_prompt_tokens
    if chunk.count > 1 or chunk.start < num_prompt or SEGMENT_SIZE % block_size:
        return 0
    return num_prompt // block_size * block_size // SEGMENT_SIZE


def _span(row: int, chunk: Chunk, first_segment: int, cache: KVCache) -> QuerySpan:
    # sequences that share a prefix have blocks that segments do not cut
    units = cache.units(chunk.sequence.table.blocks[first_segment * SEGMENT_SIZE // cache.block_size :])
    lengths = np.arange(chunk.start + 1, chunk.start + chunk.count + 1)
    return QuerySpan(np.arange(row, row + chunk.count), lengths, units, first_segment)
