"""Float values as GGUF's quantised blocks, with the least error that matters.

Every encoder turns values, (n, elements) float32, and how much each matters, of the same shape and
not negative, into blocks, (n, bytes) uint8, the inverse of `gguf_decoders.py`. The error is the sum
of `weights * (value - decoded)^2`. Where parts of 16 or 32 have a scale of their own, several are
tried, each with the codes that it leads to and the scale that fits those codes best; so are the
neighbours of the small number that a block stores for it. Every code is the nearest one for the
scales that are stored.

Source of the search: ggml's `make_qx_quants` and `make_qkx2_quants`, which round once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from everystep.files.gguf_blocks import BlockType
from everystep.nn.rounding import nearest, storable

# How far from the range of the values, in steps of a code, the tried scales reach.
_SHORTER = tuple(step / 10 for step in range(-12, 13))
_NEIGHBOURS = (-1, 0, 1)

# Values encoded at a time: two dozen tensors of their size stay in a core's cache.
_CHUNK_VALUES = 1 << 16

Encoder = Callable[[Tensor, Tensor], Tensor]


def encode_rows(kind: BlockType, values: Tensor, columns: Tensor | None = None) -> Tensor:
    """Encode a float matrix (rows, columns) as blocks, uint8 (rows, bytes of a row).

    `columns`: (columns,) float32, the mean square of what each column is multiplied by, where it is
    known. Raise UnsupportedError for values that no scale of float16 reaches, or no numbers.
    """
    encode = ENCODERS[kind.name]
    made = []
    for rows in values.split(max(1, _CHUNK_VALUES // values.shape[1])):  # type: ignore[no-untyped-call]
        plain = rows.float()
        storable(plain.abs().amax(1) / 128)  # a search among numbers that are none finds zeros
        weights = importance_of(plain, columns)
        blocks = encode(plain.view(-1, kind.elements), weights.view(-1, kind.elements))
        made.append(blocks.view(len(rows), -1))
    return torch.cat(made)


def encode_q8_0(values: Tensor, weights: Tensor) -> Tensor:
    """Encode as a scale and 32 int8: 8 bits leave nothing to choose."""
    scales = storable(values.abs().amax(1, keepdim=True) / 127)
    codes = nearest(values, scales.float(), -127, 127).to(torch.int8)
    return torch.cat([_bytes(scales), codes.view(torch.uint8)], 1)


def encode_q5_0(values: Tensor, weights: Tensor) -> Tensor:
    """Encode as a scale, the fifth bits of 32 numbers, their other four: 0..31 for -16..15."""
    scales = storable(_symmetric(values, weights, 16)[:, None])
    codes = (nearest(values, scales.float(), -16, 15) + 16).to(torch.uint8)
    fifth = (codes >> 4).unflatten(1, (4, 8))  # type: ignore[no-untyped-call]
    bits = (fifth << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)
    return torch.cat([_bytes(scales), bits, _joined_nibbles(codes & 15, 16)], 1)


def encode_q4_k(values: Tensor, weights: Tensor) -> Tensor:
    """Encode 8 parts of 32.

    A block is both scales, six bits each for scale and minimum, 256 numbers of four bits.
    """
    head, codes = _lifted(values, weights, 15)
    return torch.cat([head, _joined_nibbles(codes, 32)], 1)


def encode_q5_k(values: Tensor, weights: Tensor) -> Tensor:
    """Encode 8 parts of 32 as in Q4_K, with fifth bits before the other four."""
    head, codes = _lifted(values, weights, 31)
    fifth = _planes(codes >> 4, 32, 1)
    return torch.cat([head, fifth, _joined_nibbles(codes & 15, 32)], 1)


def encode_q6_k(values: Tensor, weights: Tensor) -> Tensor:
    """Encode 16 parts of 16.

    A block is 256 numbers of six bits around 32, four of them first, 16 int8 scales, the scale.
    """
    parts, important = _parts(values, 16), _parts(weights, 16)
    scales = _symmetric(parts, important, 32)
    far = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    scale = storable(far / -128)
    ideal = nearest(scales, scale.float(), -128, 127)

    def codes_at(small: Tensor) -> Tensor:
        return nearest(parts, (scale.float() * small)[..., None], -32, 31)

    def error_at(small: Tensor) -> Tensor:
        fitted = (scale.float() * small)[..., None] * codes_at(small)
        return (important * (parts - fitted).square()).sum(2)

    near = ((ideal + step).clamp_(-128, 127) for step in _NEIGHBOURS)
    small = _best(near, error_at)
    codes = (codes_at(small) + 32).to(torch.uint8).flatten(1)
    low, high = _joined_nibbles(codes & 15, 64), _planes(codes >> 4, 32, 2)
    return torch.cat([low, high, small.to(torch.int8).view(torch.uint8), _bytes(scale)], 1)


def importance_of(values: Tensor, columns: Tensor | None) -> Tensor:
    """Return how much the error of each value of some rows matters, (rows, columns).

    `columns`: (columns,) the mean square of what each column is multiplied by, where it is known.
    Large values matter more: the errors of the small ones average out.
    """
    squares = values.square()
    around = squares.mean(1, keepdim=True)
    if columns is None:
        return around.sqrt() + values.abs()
    # A column that was never used must still not be given up.
    known = columns + columns.mean() * 1e-3
    return known / known.mean().clamp_min(1e-30) * (around + squares).sqrt()


def _symmetric(values: Tensor, weights: Tensor, most: int) -> Tensor:
    """Fit (..., parts, e): (..., parts) the scale of codes -most..most - 1 with the least error.

    The value farthest from zero becomes about -most, the code without a twin.
    """
    far = values.gather(-1, values.abs().argmax(-1, keepdim=True))

    def fitted(shorter: float) -> Tensor:
        codes = nearest(values, far / -(most + shorter), -most, most - 1)
        products = (weights * codes * codes).sum(-1)
        return torch.where(products > 0, (weights * codes * values).sum(-1) / products, 0.0)

    def error(scales: Tensor) -> Tensor:
        codes = nearest(values, scales[..., None], -most, most - 1)
        return (weights * (values - scales[..., None] * codes).square()).sum(-1)

    return _best(map(fitted, _SHORTER), error)


def _lifted(values: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the first 16 bytes of blocks of 256 with minimums, and codes 0..most, (n, 256)."""
    parts, important = _parts(values, 32), _parts(weights, 32)
    pairs = _affine(parts, important, most)
    shared = [storable(one.amax(1, keepdim=True) / 63) for one in pairs]
    scale, lift = (one.float() for one in shared)
    ideal = [nearest(one, by, 0, 63) for one, by in zip(pairs, (scale, lift), strict=True)]

    def codes_at(small: Tensor) -> Tensor:
        lifted = parts + (lift * small[1])[..., None]
        return nearest(lifted, (scale * small[0])[..., None], 0, most)

    def error_at(small: Tensor) -> Tensor:
        fitted = (scale * small[0])[..., None] * codes_at(small) - (lift * small[1])[..., None]
        return (important * (parts - fitted).square()).sum(2)

    near = (
        torch.stack([ideal[0] + first, ideal[1] + second]).clamp_(0, 63)
        for first in _NEIGHBOURS
        for second in _NEIGHBOURS
    )
    small = _best(near, error_at)
    codes = codes_at(small).to(torch.uint8).flatten(1)
    scales, mins = small.to(torch.uint8).unbind()
    # Six bits each: see `k_scales`.
    packed = [
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        mins[:, :4] | mins[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | mins[:, 4:] << 4,
    ]
    return torch.cat([*map(_bytes, shared), *packed], 1), codes


def _affine(values: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Fit scales and minimums (n, parts), neither negative, to (n, parts, e).

    Of them codes 0..most make `code * scale - minimum` with the least error.
    """
    low, high = values.amin(-1).clamp_max(0), values.amax(-1)
    sums = weights.sum(-1), (weights * values).sum(-1)

    def fitted(shorter: float) -> Tensor:
        """Fit scale and minimum to the codes of a slightly longer or shorter range."""
        scales = (high - low) / (most + shorter)
        codes = nearest(values - low[..., None], scales[..., None], 0, most)
        weighted = weights * codes
        first, second = weighted.sum(-1), (weighted * codes).sum(-1)
        product = (weighted * values).sum(-1)
        spread = sums[0] * second - first.square()
        slope = (sums[0] * product - sums[1] * first) / spread
        lift = (first * product - second * sums[1]) / spread
        # Below zero the minimum is 0, and the scale that fits best goes through zero.
        through = torch.where(second > 0, product / second, 0.0)
        slope = torch.where(lift < 0, through, slope)
        # All codes are the same: nothing can be fitted.
        usable = (spread > 0) & (slope > 0)
        return torch.stack(
            [torch.where(usable, slope, scales), torch.where(usable, lift.clamp_min(0), -low)]
        )

    def error(pair: Tensor) -> Tensor:
        scales, mins = pair[0][..., None], pair[1][..., None]
        codes = nearest(values + mins, scales, 0, most)
        return (weights * (values - scales * codes + mins).square()).sum(-1)

    scales, mins = _best(map(fitted, _SHORTER), error).unbind()
    return scales, mins


def _best(tried: Iterable[Tensor], error: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, of several (..., parts), the one with the smallest error (parts), part by part."""
    found, *others = tried
    least = error(found)
    for one in others:
        wrong = error(one)
        better = wrong < least
        found, least = torch.where(better, one, found), torch.where(better, wrong, least)
    return found


def _parts(values: Tensor, size: int) -> Tensor:
    """View (n, e) as (n, e / size, size)."""
    return values.unflatten(1, (-1, size))  # type: ignore[no-untyped-call]


def _bytes(values: Tensor) -> Tensor:
    """View (n, m) of float16 as (n, 2 m) uint8."""
    return values.contiguous().view(torch.uint8)


def _joined_nibbles(codes: Tensor, width: int) -> Tensor:
    """Join (n, e) -> (n, e / 2): of two runs of `width` codes the first lies in the low halves."""
    runs = _parts(codes, width).unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)


def _planes(codes: Tensor, width: int, bits: int) -> Tensor:
    """Join (n, e) -> (n, e * bits / 8): of 8 / bits runs of `width` codes the first lies lowest."""
    runs = _parts(codes, width).unflatten(1, (-1, 8 // bits))  # type: ignore[no-untyped-call]
    by = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (runs << by).sum(2, dtype=torch.uint8).flatten(1)


ENCODERS: dict[str, Encoder] = {
    "Q8_0": encode_q8_0,
    "Q5_0": encode_q5_0,
    "Q4_K": encode_q4_k,
    "Q5_K": encode_q5_k,
    "Q6_K": encode_q6_k,
}
