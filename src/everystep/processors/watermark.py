"""The green-list watermark: ids of a list that the text itself seeds gain a bias; and its detector.

The list is transformers' on the CPU whatever the device, so that a text marked on one machine is
recognised on another: the first ids of `torch.randperm` with a CPU generator, whose step i swaps
places i and j >= i. Only the set of the first ids matters, and that is found from the swaps with a
few operations on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import BETWEEN_0_AND_1, NUMBER, SIZE, integer, one_of
from everystep.config.nested import WatermarkingConfig
from everystep.devices import on_device
from everystep.errors import RequestError, shown
from everystep.processors.base import Overwriting
from everystep.processors.edits import Edit, places
from everystep.processors.stacking import Argument
from everystep.types import Rows

_REMEMBERED_BYTES = 2**26  # of lists of one vocabulary, at an eighth of a byte per id


def seed_of(value: int) -> int:
    """Return what torch's CPU generator makes of a seed that is taken modulo 2^64 - 1."""
    return value % (2**64 - 1) & 0xFFFFFFFF


def green_bits(vocab_size: int, size: int, seed: int) -> np.ndarray:
    """Return packed (V,) bits: which ids are among the first `size` of the shuffle by that seed."""
    return _remembering(vocab_size)(vocab_size, size, seed)


@lru_cache(maxsize=4)
def _remembering(vocab_size: int) -> Callable[[int, int, int], np.ndarray]:
    """Return `_found_bits`, with as many lists of one vocabulary as fit into their memory."""
    return lru_cache(maxsize=8 * _REMEMBERED_BYTES // vocab_size + 1)(_found_bits)


def _found_bits(vocab_size: int, size: int, seed: int) -> np.ndarray:
    swapped = _swaps(vocab_size, size, seed)
    step = np.arange(size, dtype=np.int32)
    last = np.full(vocab_size, -1, dtype=np.int32)  # place -> the last step that swapped it away
    stays = np.flatnonzero(swapped == step)
    if len(stays):
        swapped, step = np.delete(swapped, stays), np.delete(step, stays)
    last[swapped] = step
    green = last >= 0
    green[:size] = True
    # What the last swap with a place beyond the first `size` has thrown out stays out.
    out = step[np.flatnonzero((last[swapped] == step) & (swapped >= size))]
    green[_held(last[:size])[out]] = False
    return np.packbits(green)


def _held(last: np.ndarray) -> np.ndarray:
    """Return (size,) which id is at place i at step i; `last`: (size,) as in `_found_bits`."""
    held = np.arange(len(last))
    going = np.flatnonzero(last >= 0)
    while len(going):
        held[going] = earlier = last[held[going]]
        going = going[last[earlier] >= 0]
    return held


@lru_cache(maxsize=2**16)
def is_green(vocab_size: int, size: int, seed: int, token: int) -> bool:
    """Return whether one id stands among the first `size`, by its way through the swaps."""
    swapped = _swaps(vocab_size, size, seed)
    place, done = token, 0
    while True:
        # Until its own step comes, an id at `place` moves only to that of an earlier step.
        if (swapped[done : min(place, size)] == place).any():
            return True
        if place >= size:
            return False
        if swapped[place] == place:
            return True
        place, done = int(swapped[place]), place + 1


def _swaps(vocab_size: int, size: int, seed: int) -> np.ndarray:
    """Return (size,) the place that each step of the shuffle swaps with its own."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.empty((size + 1) // 2, dtype=torch.int64)
    numbers = pairs.random_(-(2**63), None, generator=generator).numpy().view(np.uint64)
    # A number of 64 bits is two of 32, the first one in its upper half.
    halves = (numbers << _HALF | numbers >> _HALF).view(np.uint32)[:size]
    step, left = _steps(vocab_size, size)
    return (halves % left + step).astype(np.int64)


_HALF = np.uint64(32)


@lru_cache(maxsize=4)
def _steps(vocab_size: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the steps, and how many places each may swap with."""
    step = np.arange(size, dtype=np.uint32)
    return step, np.uint32(vocab_size) - step


_TABLE = 1_000_003
_CANDIDATES = 40


@dataclass(frozen=True)
class WatermarkLogitsProcessor(Overwriting):
    """Green ids gain `bias`; the last `context_width` ids decide which are green.

    "lefthash": the last id seeds one list for all. "selfhash": each of the 40 best ids seeds its
    own list, with the ids before it. Prefixes shorter than `context_width` are not marked. Source:
    Kirchenbauer et al. 2023 (arXiv 2301.10226 and 2306.04634); WatermarkLogitsProcessor.
    """

    vocab_size: int
    device: Any = "cpu"
    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    checked = (
        Argument("vocab_size", SIZE),
        Argument("greenlist_ratio", BETWEEN_0_AND_1),
        Argument("bias", NUMBER),
        Argument("hashing_key", integer()),
        Argument("seeding_scheme", one_of("lefthash", "selfhash")),
        Argument("context_width", SIZE),
    )

    @property
    def greenlist_size(self) -> int:
        """The number of green ids."""
        return int(self.vocab_size * self.greenlist_ratio)

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        marked = np.flatnonzero(rows.lengths >= self.context_width)
        if not len(marked):
            return scores
        if self.seeding_scheme == "selfhash":
            return self._candidates(rows, scores, marked).written(scores)
        buffer = np.empty((-(-self.vocab_size // 8), 8), dtype=np.float32)
        green = torch.from_numpy(buffer).view(-1)[: self.vocab_size]
        for r in marked:
            last = int(rows.table.data[rows.sequences[r].line, rows.lengths[r] - 1])
            seed = seed_of(self.hashing_key * last)
            bits = green_bits(self.vocab_size, self.greenlist_size, seed)
            # Bits as numbers 0 and 1; a look-up per byte is faster than unpacking.
            np.take(_BYTES, bits, axis=0, out=buffer, mode="clip")
            scores[r, : self.vocab_size].add_(green.to(scores), alpha=self.bias)
        return scores

    def _candidates(self, rows: Rows, scores: Tensor, marked: np.ndarray) -> Edit:
        """Return the raised scores of those best ids that are green after their prefixes."""
        at = on_device(scores.device, marked)
        count = min(_CANDIDATES, scores.shape[-1])
        best = torch.topk(scores[at], count, dim=-1).indices.cpu().numpy()
        last = rows.lengths[marked, None] + np.arange(1 - self.context_width, 0)
        lines = np.array([rows.sequences[r].line for r in marked])
        before = np.repeat(rows.table.data[lines[:, None], last], count, axis=0)
        green = self.greens(np.concatenate([before, best.reshape(-1, 1)], axis=1))
        row, token = np.repeat(marked, count)[green], best.reshape(-1)[green]
        index = places(scores, row, token)
        return Edit(index, scores.view(-1)[index] + self.bias)

    def greens(self, ngrams: np.ndarray) -> np.ndarray:
        """Return (N,) whether the last id of each n-gram is green after those before it.

        `ngrams`: (N, n) ids; all n seed the list with "selfhash", the last but one with "lefthash".
        """
        if self.seeding_scheme == "selfhash":
            table = _table(self.hashing_key)
            hashed = table[ngrams % _TABLE] + 1
            seeds = (self.hashing_key * hashed * hashed[:, -1:]).min(axis=1).tolist()
        else:
            seeds = [self.hashing_key * int(token) for token in ngrams[:, -2]]
        size = (self.vocab_size, self.greenlist_size)
        pairs = zip(seeds, ngrams[:, -1].tolist(), strict=True)
        return np.array([is_green(*size, seed_of(seed), token) for seed, token in pairs], bool)


@lru_cache(maxsize=4)
def _table(hashing_key: int) -> np.ndarray:
    """Return a fixed shuffle, through which ids are hashed."""
    generator = torch.Generator().manual_seed(hashing_key)
    return torch.randperm(_TABLE, generator=generator).numpy()


_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)


@dataclass
class WatermarkDetectorOutput:
    """The findings on each text, all (B,): how many ids were scored and green, and what follows.

    `z_score`: standard deviations above the green count of unmarked text; `p_value`: its chance.
    """

    num_tokens_scored: np.ndarray | None = None
    num_green_tokens: np.ndarray | None = None
    green_fraction: np.ndarray | None = None
    z_score: np.ndarray | None = None
    p_value: np.ndarray | None = None
    prediction: np.ndarray | None = None
    confidence: np.ndarray | None = None


class WatermarkDetector:
    """Says whether texts carry a green-list watermark with the given settings.

    `model_config` has `vocab_size`, `bos_token_id` and, for an encoder-decoder,
    `decoder_start_token_id`. With `ignore_repeated_ngrams` an n-gram counts once. `device` and
    `max_cache_size` change nothing: lists do not depend on the one and are remembered anyway.
    Source: Kirchenbauer et al. 2023; WatermarkDetector.
    """

    def __init__(
        self,
        model_config: Any,
        device: Any,
        watermarking_config: WatermarkingConfig | dict[str, Any],
        ignore_repeated_ngrams: bool = False,
        max_cache_size: int = 128,
    ) -> None:
        given = watermarking_config
        values = given.to_dict() if isinstance(given, WatermarkingConfig) else given
        known = WatermarkingConfig().to_dict()
        if not isinstance(values, dict) or not all(name in known for name in values):
            wanted = f"a WatermarkingConfig, or a mapping of {', '.join(known)}"
            raise RequestError("this is no watermark", wanted=wanted, got=shown(given))
        encodes = getattr(model_config, "is_encoder_decoder", False)
        start = "decoder_start_token_id" if encodes else "bos_token_id"
        self.bos_token_id = getattr(model_config, start, None)
        self.ignore_repeated_ngrams = ignore_repeated_ngrams
        self.processor = WatermarkLogitsProcessor(model_config.vocab_size, device, **values)

    def __call__(
        self, input_ids: Tensor, z_threshold: float = 3.0, return_dict: bool = False
    ) -> WatermarkDetectorOutput | np.ndarray:
        """Return (B,) whether each text of (B, T) ids is marked, or everything about it.

        A leading begin token is left out; it is advised to leave the prompt out as well. Raise
        RequestError if only some texts have one, or if no id can be scored.
        """
        scored, green = self._counts(self._without_bos(input_ids))
        ratio = self.processor.greenlist_ratio
        z = (green - ratio * scored) / np.sqrt(scored * ratio * (1 - ratio))
        prediction: np.ndarray = z > z_threshold
        if not return_dict:
            return prediction
        p = 0.5 * torch.special.erfc(torch.as_tensor(z / np.sqrt(2))).numpy()
        return WatermarkDetectorOutput(scored, green, green / scored, z, p, prediction, 1 - p)

    def _without_bos(self, input_ids: Tensor) -> np.ndarray:
        ids: np.ndarray = input_ids.detach().cpu().numpy()
        begins = ids[:, 0] == self.bos_token_id
        if begins.any() != begins.all():
            raise RequestError(
                "some texts begin with the begin token and others do not",
                wanted="all or none",
                got=f"{int(begins.sum())} of {len(begins)}",
                do="Tokenize all texts in the same way",
            )
        ids = ids[:, 1:] if begins.all() else ids
        width = self.processor.context_width
        if ids.shape[1] <= width:
            raise RequestError(
                "the texts are too short to score",
                wanted=f"more than context_width={width} ids",
                got=ids.shape[1],
                do="Pass longer texts",
            )
        return ids

    def _counts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (B,) how many n-grams are scored, and how many of their last ids are green."""
        alone = self.processor.seeding_scheme == "selfhash"
        size = self.processor.context_width + (0 if alone else 1)
        scored, green = np.zeros(len(ids)), np.zeros(len(ids))
        for b, row in enumerate(ids):
            windows = np.lib.stride_tricks.sliding_window_view(row, size)
            ngrams, times = np.unique(windows, axis=0, return_counts=True)
            weight = np.ones_like(times) if self.ignore_repeated_ngrams else times
            scored[b] = weight.sum()
            green[b] = weight[self.processor.greens(ngrams)].sum()
        return scored, green
