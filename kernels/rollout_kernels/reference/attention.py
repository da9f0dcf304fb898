"""Segment attention: the one attention primitive, for prefill, decode and training alike.

Every query row attends an ordered list of KV segments, cut at absolute multiples of SEGMENT_SIZE positions. Its bits
are the same whoever shares the launch: alone or in a batch, decoded or packed for training, against its own KV or
grouped with siblings over a shared prefix. A row's scores are taken relative to their maximum over all that it sees,
which no order of work can change; each segment gives a partial (weighted sum of values, sum of weights) that depends on
that row and that segment only; partials are added up in segment order in fp32.

Legend: T rows of queries, H query heads, K kv heads, G = H / K, D head size (a multiple of 16), W tiles, M rows per
tile (M * G a multiple of 16), of which at most R are real, S segments per tile, P = S * SEGMENT_SIZE positions, N rows
of KV in storage, U positions per KV unit.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_kernels.attention_plan import AttentionPlan
from rollout_kernels.reference.activations import exp2_
from rollout_kernels.shapes import ROW_MULTIPLE, SEGMENT_SIZE, AttentionTiles, round_up

_LOG2E = math.log2(math.e)  # scores are taken in units of ln 2, since 2 ** x is computed faster than e ** x


def _tile_rows(x: Tensor, tiles: AttentionTiles, num_rows: int) -> Tensor:
    """x [T, H, C] -> [W * K, num_rows * G, C], the first num_rows of each tile's query rows."""
    num_tiles, kv_heads = len(tiles.query_rows), tiles.kv_units.shape[1]
    picked = x.index_select(0, tiles.query_rows[:, :num_rows].reshape(-1))
    by_head = picked.view(num_tiles, num_rows, kv_heads, -1, x.shape[-1]).transpose(1, 2)
    return by_head.reshape(num_tiles * kv_heads, -1, x.shape[-1])


def _untile(x: Tensor, tiles: AttentionTiles) -> Tensor:
    """[W * K, R * G, C] -> [n, H, C], the real rows in the order of `tiles.rows`."""
    num_tiles, num_real = tiles.lengths.shape
    by_row = x.view(num_tiles, -1, num_real, x.shape[1] // num_real, x.shape[-1]).transpose(1, 2)
    every = by_row.reshape(num_tiles * num_real, -1, x.shape[-1])
    return every if len(tiles.places) == len(every) else every.index_select(0, tiles.places)


def _tile_kv(kv: Tensor, units: Tensor) -> Tensor:
    """kv [N / U, U, D], units [W, K, P / U] -> [W * K, P, D]."""
    num_tiles, kv_heads, count = units.shape
    return kv.index_select(0, units.reshape(-1)).view(num_tiles * kv_heads, count * kv.shape[1], -1)


def _scores(
    q: Tensor, k: Tensor, tiles: AttentionTiles, real: int, scale: float, window: int | None, mask_from: int
) -> Tensor:
    """Fp32 scores of the first `real` = R * G rows of tiled q [W * K, >= R * G, D] against tiled k [W * K, P, D].

    In units of ln 2. Positions from mask_from on are masked. Returns [W * K, R * G, P].
    """
    num_tiles, num_real = tiles.lengths.shape
    scores = torch.bmm(q, k.transpose(1, 2))[:, :real].float().contiguous().mul_(scale * _LOG2E)
    end = k.shape[1]
    if mask_from < end:
        by_row = scores.view(num_tiles, -1, num_real, real // num_real, end)
        by_row[..., mask_from:].add_(tiles.bias(mask_from, end, window))
    return scores


def _partials(scores: Tensor, maximum: Tensor, v: Tensor, padded_rows: int) -> tuple[Tensor, Tensor]:
    """Each segment's weighted sum of v, [W * K, S, R * G, D], and its sum of weights, [W * K, R * G, S], both fp32.

    scores [W * K, R * G, P] are overwritten; maximum [W * K, R * G, 1]; v [W * K, P, D]. The product has padded_rows
    rows.
    """
    batch, rows, positions = scores.shape
    segments, dim = positions // SEGMENT_SIZE, v.shape[-1]
    by_segment = exp2_(scores.sub_(maximum)).view(batch, rows, segments, SEGMENT_SIZE)
    weights = by_segment.transpose(1, 2)
    if rows < padded_rows:
        factor = v.new_zeros(batch, segments, padded_rows, SEGMENT_SIZE)
        factor[:, :, :rows] = weights
    else:
        factor = weights.to(v.dtype)
    product = torch.bmm(factor.reshape(-1, padded_rows, SEGMENT_SIZE), v.view(-1, SEGMENT_SIZE, dim))
    return product.view(batch, segments, padded_rows, dim)[:, :, :rows].float(), by_segment.sum(-1)


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, D] over the KV that the plan names.

    k, v: [N / U, U, D], flat storage in units of U consecutive positions of one kv head. window: a row sees at most
    this many positions, itself the last. Returns out [T, H, D] in q's dtype and its log-sum-exp [T, H] in fp32, in
    units of ln 2; a row that no span covers gets zeros (and -inf).
    """
    num_rows, heads, dim = q.shape
    sums = _Sums(
        values=q.new_zeros(num_rows, heads, dim, dtype=torch.float32),
        weights=q.new_zeros(num_rows, heads, 1, dtype=torch.float32),
    )
    maxima = q.new_full((num_rows, heads, 1), -torch.inf, dtype=torch.float32)
    held = []
    for tile in plan.tiles:
        tile_q, tile_k = _tile_rows(q, tile, tile.query_rows.shape[1]), _tile_kv(k, tile.kv_units)
        real = tile.num_real_rows * heads // tile.kv_units.shape[1]
        scores = _scores(tile_q, tile_k, tile, real, scale, window, 0 if window else tile.seen_by_all)
        maximum = scores.amax(-1, keepdim=True)
        if tile.chained:
            seen = maxima.index_select(0, tile.rows)
            maxima.index_copy_(0, tile.rows, torch.maximum(seen, _untile(maximum, tile)))
            held.append((tile, scores))
        else:
            maxima.index_copy_(0, tile.rows, _untile(maximum, tile))
            sums.add(scores, maximum, v, tile)
    # rows whose segments lie in several tiles: first all maxima, then all sums, in segment order
    for tile, scores in held:
        sums.add(scores, _tile_rows(maxima, tile, tile.num_real_rows), v, tile)
    out = (sums.values / torch.where(sums.weights > 0, sums.weights, 1.0)).to(q.dtype)
    return out, (maxima + sums.weights.log2())[..., 0]


@dataclass
class _Sums:
    """Running sums of every row: weighted values [T, H, D] and weights [T, H, 1], fp32."""

    values: Tensor
    weights: Tensor

    def add(self, scores: Tensor, maximum: Tensor, v: Tensor, tile: AttentionTiles) -> None:
        """Add a tile's partials to its rows, in segment order."""
        rows, segments = scores.shape[1], scores.shape[2] // SEGMENT_SIZE
        padded_rows = tile.query_rows.shape[1] * rows // tile.num_real_rows
        partials, partial_weights = _partials(scores, maximum, _tile_kv(v, tile.kv_units), padded_rows)
        values, weights = partials[:, 0], partial_weights[..., :1]
        if tile.chained and not tile.begins:
            values = values.add_(_tile_rows(self.values, tile, tile.num_real_rows))
            weights = weights + _tile_rows(self.weights, tile, tile.num_real_rows)
        for segment in range(1, segments):
            values = values.add_(partials[:, segment])
            weights = weights + partial_weights[..., segment : segment + 1]
        self.values.index_copy_(0, tile.rows, _untile(values, tile))
        self.weights.index_copy_(0, tile.rows, _untile(weights, tile))


def segment_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [T, H, D] and of flat k and v [N, 1, D] in fp32, tile by tile in a fixed order.

    lse: as `segment_attention` gave it. delta: [T, H] fp32, sum over D of the output times its gradient grad_out.
    """
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for tile in plan.tiles:
        # nothing here has to agree with the generator's bits, so rows and positions that nobody needs are left out
        units = tile.kv_units[..., : round_up(tile.reach, ROW_MULTIPLE)]
        real = tile.num_real_rows * q.shape[1] // tile.kv_units.shape[1]
        tile_q, tile_grad, row_stats = (
            _tile_rows(x, tile, tile.num_real_rows) for x in (q, grad_out, torch.stack((lse, delta), -1))
        )
        tile_k, tile_v = _tile_kv(k, units), _tile_kv(v, units)
        # padding rows see nothing: every score is -inf, so every weight is 0 against a finite log-sum-exp
        row_lse = torch.where(row_stats[..., :1].isfinite(), row_stats[..., :1], 0.0)
        weights = _scores(tile_q, tile_k, tile, real, scale, window, 0).sub_(row_lse).exp2_()
        grad_weights = torch.bmm(tile_grad, tile_v.transpose(1, 2)).float()
        grad_scores = grad_weights.sub_(row_stats[..., 1:]).mul_(weights).mul_(scale).to(q.dtype)
        grad_q.index_add_(0, tile.rows, _untile(torch.bmm(grad_scores, tile_k).float(), tile))
        for total, part in (
            (grad_k, torch.bmm(grad_scores.transpose(1, 2), tile_q)),
            (grad_v, torch.bmm(weights.to(q.dtype).transpose(1, 2), tile_grad)),
        ):
            total[:, 0].index_add_(0, units.reshape(-1), part.reshape(units.numel(), -1).float())
    return grad_q, grad_k, grad_v
