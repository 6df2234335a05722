"""SynthID: a tournament of g-values, which the last ids seed, among all tokens.

What a row's marks depend on is its generated ids alone, so they are right for every beam and after
every rewound draft. By hand, as in transformers, the calls of one instance are the steps of one
generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import plain
from everystep.config.nested import SynthIDTextWatermarkingConfig as Config
from everystep.devices import on_device
from everystep.errors import RequestError
from everystep.processors.base import LogitsProcessor, remembers
from everystep.types import Rows

_MULTIPLIER = 6364136223846793005
_BLOCK = 2**18  # scores that are marked at once, so that they stay in the processor's cache
_PERIODIC = 2**18  # the longest table whose g-values are laid out for every context


@dataclass(frozen=True)
class SynthIDTextWatermarkLogitsProcessor(LogitsProcessor):
    """Log-probabilities after one tournament per key, in contexts that are new.

    Contexts are the last `ngram_len` - 1 generated ids, after zeros; one that stood among the last
    `context_history_size` is not marked. Source: Dathathri et al. 2024 (doi
    10.1038/s41586-024-08025-4); SynthIDTextWatermarkLogitsProcessor.
    """

    ngram_len: int
    keys: Any
    sampling_table_size: int
    sampling_table_seed: int
    context_history_size: int
    device: Any = "cpu"
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False
    _by_hand: list[list[int]] = field(default_factory=list, init=False, repr=False, compare=False)
    _layers: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keys = plain(self.keys)
        keys = tuple(keys) if isinstance(keys, list | tuple | range) else keys
        object.__setattr__(self, "keys", keys)
        values = {one.name: getattr(self, one.name) for one in fields(Config)}
        Config.from_dict(values)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        contexts = self._contexts(rows) if remembers(rows) else self._called(rows)
        result = torch.ones_like(scores) if self.debug_mode else scores.clone()
        marked = [r for r, context in enumerate(contexts) if context is not None]
        step = max(_BLOCK // scores.shape[-1], 1)
        for begin in range(0, len(marked), step):
            block = marked[begin : begin + step]
            at = on_device(scores.device, torch.tensor(block))
            result[at] = self._marked(result[at], [contexts[r] or 0 for r in block])
        return result

    def _contexts(self, rows: Rows) -> list[int | None]:
        """Return per row the hash of its context, or None where nothing is marked."""
        ends = zip(rows.sequences, rows.lengths.tolist(), strict=True)
        ids = rows.table.data
        return [self._new(ids[one.line, one.request.prompt_visible : end]) for one, end in ends]

    def _called(self, rows: Rows) -> list[int | None]:
        """Return `_contexts` for the next call by hand.

        What was generated is each call's last id.
        """
        if len(self._by_hand) != len(rows):
            self._by_hand[:] = [[] for _ in range(len(rows))]
        else:
            for ids, line, length in zip(self._by_hand, rows.ids(), rows.lengths, strict=True):
                ids.append(int(line[length - 1]))
        return [self._new(np.array(ids, dtype=np.int64)) for ids in self._by_hand]

    def _new(self, ids: np.ndarray) -> int | None:
        """Return the hash of the context after these ids, None if it is repeated or skipped."""
        size, last = self.ngram_len - 1, len(ids)
        first = size if self.skip_first_ngram_calls else 0
        if last < first:
            return None
        begin = max(first, last - self.context_history_size)
        given = ids[max(begin - size, 0) :]
        padded = np.zeros(last - begin + size, dtype=np.int64)  # zeros stand before the first id
        padded[len(padded) - len(given) :] = given
        hashes = _hashes(np.lib.stride_tricks.sliding_window_view(padded, size))
        return None if (hashes[:-1] == hashes[-1]).any() else int(hashes[-1])

    def _marked(self, scores: Tensor, contexts: list[int]) -> Tensor:
        """Turn (R, V) scores into log-probabilities after the tournament; `contexts`: R hashes."""
        p = torch.softmax(scores, dim=-1)
        for layer in range(len(self.keys)):
            g = self._tokens_g(layer, contexts, scores)
            mass = (g * p).sum(dim=1, keepdim=True)
            p = p * (1 + g - mass)
        logs = torch.log(p)
        return torch.where(torch.isfinite(logs), logs, torch.finfo(logs.dtype).min)

    def _tokens_g(self, layer: int, contexts: list[int], scores: Tensor) -> Tensor:
        """Return (R, V) the g-value of every token after R contexts."""
        size, width = self.sampling_table_size, scores.shape[-1]
        if size & (size - 1) == 0 and size <= _PERIODIC:
            # Modulo a power of 2 a g-value depends on context + token modulo that power alone.
            wide = self._periodic(size + width, scores)[layer]
            parts = [wide[context % size :][:width] for context in contexts]
            return torch.stack(parts) if len(parts) > 1 else parts[0][None]
        tokens = np.arange(width, dtype=np.uint64)
        hashes = np.array(contexts, dtype=np.uint64)[:, None]
        g = self._g(_step(hashes, tokens), [self.keys[layer]])[..., 0]
        return on_device(scores.device, g, scores.dtype)

    def _periodic(self, width: int, scores: Tensor) -> Tensor:
        """Return (depth, width) the g-values of every context + token from 0 on."""
        key = (width, scores.dtype, scores.device)
        if key not in self._layers:
            size = self.sampling_table_size
            one = self._g(_step(np.uint64(0), np.arange(size, dtype=np.uint64)), self.keys)
            self._layers[key] = torch.from_numpy(np.resize(one, (width, len(self.keys))).T).to(
                scores, memory_format=torch.contiguous_format
            )
        return self._layers[key]

    def _g(self, hashes: np.ndarray, keys: Sequence[int]) -> np.ndarray:
        """Return (..., depth) the g-values of hashed n-grams (...)."""
        mixed = _step(hashes[..., None], np.array(keys, dtype=np.int64).astype(np.uint64))
        # As signed numbers, whose remainder takes the sign of the table's size.
        place = mixed.astype(np.int64) % self.sampling_table_size
        return _table(self.sampling_table_size, self.sampling_table_seed)[place]

    def compute_g_values(self, input_ids: Tensor) -> Tensor:
        """Return (B, T - n + 1, depth) the g-values of the n-grams of (B, T) ids."""
        ids = _rectangle(input_ids)
        windows = np.lib.stride_tricks.sliding_window_view(ids, self.ngram_len, axis=1)
        return torch.from_numpy(self._g(_hashes(windows), self.keys)).to(input_ids.device)

    def compute_context_repetition_mask(self, input_ids: Tensor) -> Tensor:
        """Return (B, T - n + 1) bool: whether the context of each n-gram of (B, T) ids is new."""
        ids = _rectangle(input_ids)
        windows = np.lib.stride_tricks.sliding_window_view(ids[:, :-1], self.ngram_len - 1, axis=1)
        hashes = _hashes(windows)
        new = np.ones(hashes.shape, dtype=bool)
        for b, row in enumerate(hashes.tolist()):
            seen: dict[int, int] = {}
            for place, value in enumerate(row):
                new[b, place] = place - seen.get(value, -math.inf) > self.context_history_size
                seen[value] = place
        return torch.from_numpy(new).to(input_ids.device)

    def compute_eos_token_mask(self, input_ids: Tensor, eos_token_id: int) -> Tensor:
        """Return (B, T) 1 before the first end token of (B, T) ids, 0 from it on."""
        _rectangle(input_ids)
        return (input_ids.eq(eos_token_id).cumsum(dim=1) == 0).to(torch.int64)

    def expected_mean_g_value(self, vocab_size: int, coinflip_prob: float = 0.5) -> float:
        """Return the mean g-value that one layer reaches if all tokens are equally likely."""
        return coinflip_prob + coinflip_prob * (1 - coinflip_prob) * (1 - 1 / vocab_size)


def _rectangle(input_ids: Tensor) -> np.ndarray:
    if input_ids.dim() != 2:
        raise RequestError(
            "input_ids is not a rectangle",
            wanted="a tensor of shape (rows, length)",
            got=tuple(input_ids.shape),
            do="Pass one row of ids per text",
        )
    return input_ids.detach().cpu().numpy()


def _hashes(windows: np.ndarray) -> np.ndarray:
    """Hash (..., n) ids -> (...)."""
    hashes = np.ones(windows.shape[:-1], dtype=np.uint64)
    for k in range(windows.shape[-1]):
        hashes = _step(hashes, windows[..., k].astype(np.uint64))
    return hashes


def _step(hashes: Any, data: np.ndarray) -> np.ndarray:
    """Take one step of the linear congruential generator, modulo 2^64."""
    with np.errstate(over="ignore"):
        mixed: np.ndarray = (hashes + data) * np.uint64(_MULTIPLIER) + np.uint64(1)
    return mixed


@lru_cache(maxsize=8)
def _table(size: int, seed: int) -> np.ndarray:
    """Return (size,) random bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator).numpy()


@dataclass(frozen=True)
class WeightedMeanDetector:
    """The mean g-value of what the mask keeps, earlier layers weighing more; needs no training.

    Weights fall evenly from 10 to 1. About 0.5 for unmarked texts, more for marked ones. Source:
    Dathathri et al. 2024, the weighted mean score.
    """

    def __call__(self, g_values: Tensor, mask: Tensor) -> Tensor:
        """Score (B, T, depth) g-values by a (B, T) mask -> (B,), nan where nothing is kept."""
        depth = g_values.shape[-1]
        weights = torch.linspace(10, 1, depth, dtype=torch.float64, device=g_values.device)
        weights = weights / weights.mean()
        kept = mask.to(torch.float64)
        total = (g_values * weights * kept[..., None]).sum(dim=(1, 2))
        return total / (depth * kept.sum(dim=1))


class SynthIDTextWatermarkDetector:
    """Scores how likely texts carry a SynthID watermark.

    `detector_module(g_values, mask)` judges; `WeightedMeanDetector()` where none is given.
    `tokenizer` has the `eos_token_id` from which on a text does not count. Source:
    SynthIDTextWatermarkDetector.
    """

    def __init__(
        self,
        detector_module: Callable[[Tensor, Tensor], Any] | None,
        logits_processor: SynthIDTextWatermarkLogitsProcessor,
        tokenizer: Any,
    ) -> None:
        self.detector_module = detector_module or WeightedMeanDetector()
        self.logits_processor = logits_processor
        self.tokenizer = tokenizer

    def __call__(self, tokenized_outputs: Tensor) -> Any:
        """Return what the module says of the g-values of (B, T) ids."""
        processor, ids = self.logits_processor, tokenized_outputs
        before_end = processor.compute_eos_token_mask(ids, self.tokenizer.eos_token_id)
        mask = processor.compute_context_repetition_mask(ids)
        mask = mask * before_end[:, processor.ngram_len - 1 :]
        return self.detector_module(processor.compute_g_values(ids), mask)
