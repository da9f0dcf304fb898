"""Segment attention: the one attention primitive, for prefill, decode and training alike.

Every query row attends an ordered list of KV segments, cut at absolute multiples of SEGMENT_SIZE positions. A segment
gives a row a partial result (maximum, sum, output) that depends on that row and that segment only; partials are merged
in segment order in fp32. So a row's bits are the same whoever shares the launch: alone or in a batch, decoded or packed
for training, against its own KV or grouped with siblings over a shared prefix.

Legend: T rows of queries, H query heads, K kv heads, G = H / K, D head size (a multiple of 16), W tiles, M rows per
tile (M * G a multiple of 16), S segments per tile, N rows of KV in storage, U positions per KV unit.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_kernels.tiles import ROW_MULTIPLE, SEGMENT_SIZE, round_up

_STATE_COLUMNS = 2  # after the D columns of the weighted sum: the sum of weights, then the maximum


@dataclass
class AttentionTiles:
    """W equal-shaped tiles: M query rows, each against the same S consecutive KV segments.

    query_rows: [W, M] int64, row of q that fills the place; padding repeats any row.
    lengths: [W, M] int64, how many KV positions (counted from position 0) the row may see; 0 for padding.
    kv_units: [W, K, S * SEGMENT_SIZE / U] int64, which units of the flat KV hold those positions; padding points at
        any unit that holds finite numbers.
    first_positions, end_positions: [W] int64, the absolute positions where each tile's own segments begin and end
        (multiples of SEGMENT_SIZE); what lies between the end and S segments is padding.
    places, rows: [n] int64, the places in the flattened [W * M] that hold real rows, and which rows they are.
    reach: how many positions from first_positions on some row of some tile sees.
    continues: whether earlier tiles have begun these rows (their earlier segments).
    """

    query_rows: Tensor
    lengths: Tensor
    kv_units: Tensor
    first_positions: Tensor
    end_positions: Tensor
    places: Tensor
    rows: Tensor
    reach: int
    continues: bool = False
    _bias: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def bias(self, num_positions: int, window: int | None) -> Tensor:
        """fp32 [W, 1, M, 1, num_positions]: 0 where the row sees the position, -inf elsewhere. Kept for all layers."""
        key = (num_positions, window or 0)
        if key not in self._bias:
            offsets = torch.arange(num_positions, device=self.lengths.device)
            positions = (self.first_positions[:, None] + offsets)[:, None]
            lengths = self.lengths[:, :, None]
            visible = (positions < lengths) & (positions < self.end_positions[:, None, None])
            if window:
                visible &= positions >= lengths - window
            bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._bias[key] = bias[:, None, :, None]
        return self._bias[key]


def _tile_queries(q: Tensor, tiles: AttentionTiles, num_kv_heads: int) -> Tensor:
    """q [T, H, D] -> [W * K, M * G, D]."""
    num_tiles, tile_rows = tiles.query_rows.shape
    _, heads, dim = q.shape
    groups = heads // num_kv_heads
    picked = q.index_select(0, tiles.query_rows.reshape(-1)).view(num_tiles, tile_rows, num_kv_heads, groups, dim)
    return picked.transpose(1, 2).reshape(num_tiles * num_kv_heads, tile_rows * groups, dim)


def _untile(x: Tensor, tiles: AttentionTiles) -> Tensor:
    """[W * K, M * G, C] -> [n, K * G, C], the real rows in the order of `tiles.rows`."""
    num_tiles, tile_rows = tiles.query_rows.shape
    kv_heads = x.shape[0] // num_tiles
    groups = x.shape[1] // tile_rows
    by_row = x.view(num_tiles, kv_heads, tile_rows, groups, -1).transpose(1, 2)
    return by_row.reshape(num_tiles * tile_rows, kv_heads * groups, -1).index_select(0, tiles.places)


def _tile_kv(kv: Tensor, units: Tensor) -> Tensor:
    """kv [N / U, U, D], units [W, K, P / U] -> [W * K, P, D]."""
    num_tiles, kv_heads, count = units.shape
    return kv.index_select(0, units.reshape(-1)).view(num_tiles * kv_heads, count * kv.shape[1], -1)


def _scores(q: Tensor, k: Tensor, tiles: AttentionTiles, scale: float, window: int | None) -> Tensor:
    """Masked fp32 scores of tiled q [W * K, M * G, D] against tiled k [W * K, P, D]: [W * K, M * G, P]."""
    num_tiles, tile_rows = tiles.query_rows.shape
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
    shape = (num_tiles, q.shape[0] // num_tiles, tile_rows, q.shape[1] // tile_rows, k.shape[1])
    return scores.view(shape).add_(tiles.bias(k.shape[1], window)).view(scores.shape)


def _partials(q: Tensor, k: Tensor, v: Tensor, tiles: AttentionTiles, scale: float, window: int | None) -> Tensor:
    """Each segment's own (weighted sum, sum of weights, maximum): fp32 [W * K, S, M * G, D + 2]."""
    batch, rows, dim = q.shape
    segments = k.shape[1] // SEGMENT_SIZE
    scores = _scores(q, k, tiles, scale, window).view(batch, rows, segments, SEGMENT_SIZE).transpose(1, 2)
    maximum = scores.amax(-1, keepdim=True)
    # a segment that is masked whole has maximum -inf; any finite stand-in gives it weights of exactly 0
    weights = torch.exp(scores - maximum.clamp_min(torch.finfo(torch.float32).min))
    state = weights.new_empty(batch, segments, rows, dim + _STATE_COLUMNS)
    product = torch.bmm(
        weights.to(v.dtype).reshape(batch * segments, rows, SEGMENT_SIZE),
        v.view(batch * segments, SEGMENT_SIZE, dim),
    )
    state[..., :dim] = product.view(batch, segments, rows, dim)
    state[..., dim] = weights.sum(-1)
    state[..., dim + 1] = maximum[..., 0]
    return state


def _merge(earlier: Tensor, later: Tensor) -> Tensor:
    """Merge two states [..., D + 2]; one that saw nothing changes no bit of the other."""
    maximum = torch.maximum(earlier[..., -1:], later[..., -1:])
    finite = maximum.clamp_min(torch.finfo(torch.float32).min)
    merged = earlier * torch.exp(earlier[..., -1:] - finite) + later * torch.exp(later[..., -1:] - finite)
    merged[..., -1:] = maximum
    return merged


def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[AttentionTiles], scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, D] over the KV that `tiles` name.

    k, v: [N / U, U, D], flat storage in units of U consecutive positions of one kv head. window: a row sees at most
    this many positions, itself the last. Returns out [T, H, D] in q's dtype and its log-sum-exp [T, H] in fp32; a row
    that no tile covers gets zeros (and -inf).
    """
    num_rows, heads, dim = q.shape
    state = q.new_zeros(num_rows, heads, dim + _STATE_COLUMNS, dtype=torch.float32)
    state[..., -1] = -torch.inf
    for tile in tiles:
        partials = _partials(
            _tile_queries(q, tile, tile.kv_units.shape[1]),
            _tile_kv(k, tile.kv_units),
            _tile_kv(v, tile.kv_units),
            tile,
            scale,
            window,
        )
        merged = partials[:, 0]
        if tile.continues:
            begun = state.index_select(0, tile.query_rows.reshape(-1))
            merged = _merge(_retile(begun, tile, merged.shape), merged)
        for segment in range(1, partials.shape[1]):
            merged = _merge(merged, partials[:, segment])
        state.index_copy_(0, tile.rows, _untile(merged, tile))
    weight = state[..., dim : dim + 1]
    out = (state[..., :dim] / torch.where(weight > 0, weight, 1.0)).to(q.dtype)
    return out, state[..., -1] + weight[..., 0].log()


def _retile(state: Tensor, tiles: AttentionTiles, shape: torch.Size) -> Tensor:
    """State rows [W * M, H, D + 2] -> [W * K, M * G, D + 2]."""
    num_tiles, tile_rows = tiles.query_rows.shape
    kv_heads = shape[0] // num_tiles
    return state.view(num_tiles, tile_rows, kv_heads, -1, shape[-1]).transpose(1, 2).reshape(shape)


class _TrainingAttention(torch.autograd.Function):
    """`attend` over the rows of one pack, with a deterministic backward that recomputes from the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[AttentionTiles], scale: float, window: int | None
    ) -> Tensor:
        # each pack row of each kv head is a unit of one position
        out, lse = attend(q, k.reshape(-1, 1, k.shape[-1]), v.reshape(-1, 1, v.shape[-1]), tiles, scale, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles, ctx.scale, ctx.window = tiles, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        delta = (grad_out.float() * out.float()).sum(-1)
        flat_k, flat_v = k.reshape(-1, 1, k.shape[-1]), v.reshape(-1, 1, v.shape[-1])
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        grad_k, grad_v = (torch.zeros_like(x[:, 0], dtype=torch.float32) for x in (flat_k, flat_v))
        for tile in ctx.tiles:
            kv_heads = tile.kv_units.shape[1]
            # nothing here has to agree with the generator's bits, so positions that no row sees are left out
            units = tile.kv_units[..., : round_up(tile.reach, ROW_MULTIPLE)]
            tile_q, tile_k, tile_v = _tile_queries(q, tile, kv_heads), _tile_kv(flat_k, units), _tile_kv(flat_v, units)
            tile_grad = _tile_queries(grad_out, tile, kv_heads)
            row_stats = _tile_queries(torch.stack((lse, delta), -1), tile, kv_heads)
            # padding rows see nothing: every score is -inf, so every weight is 0 against a finite log-sum-exp
            row_lse = torch.where(row_stats[..., :1].isfinite(), row_stats[..., :1], 0.0)
            weights = torch.exp(_scores(tile_q, tile_k, tile, ctx.scale, ctx.window) - row_lse)
            grad_weights = torch.bmm(tile_grad, tile_v.transpose(1, 2)).float()
            grad_scores = (weights * (grad_weights - row_stats[..., 1:]) * ctx.scale).to(q.dtype)
            grad_q.index_add_(0, tile.rows, _untile(torch.bmm(grad_scores, tile_k).float(), tile))
            for total, part in (
                (grad_k, torch.bmm(grad_scores.transpose(1, 2), tile_q)),
                (grad_v, torch.bmm(weights.to(q.dtype).transpose(1, 2), tile_grad)),
            ):
                total.index_add_(0, units.reshape(-1), part.reshape(units.numel(), -1).float())
        return grad_q.to(q.dtype), grad_k.view_as(k).to(k.dtype), grad_v.view_as(v).to(v.dtype), None, None, None


def training_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[AttentionTiles], scale: float | None = None, window: int | None = None
) -> Tensor:
    """Differentiable `attend` within one pack: q [T, H, D], k and v [K, T, D] (unit j * T + t is row t of kv head j).

    Same bits as decoding the same rows one by one. Returns [T, H, D].
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = _TrainingAttention.apply(q, k, v, tiles, scale, window)  # type: ignore[no-untyped-call]
    return out
