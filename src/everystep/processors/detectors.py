"""Detectors of watermarks: from ids and the settings they were made with to how sure one can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.nested import WatermarkingConfig
from everystep.errors import RequestError, message
from everystep.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from everystep.processors.watermark import WatermarkLogitsProcessor


@dataclass
class WatermarkDetectorOutput:
    """Per text, all (B,): how many ids were scored and green, and what follows from that.

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
        values = given if isinstance(given, dict) else given.to_dict()
        encodes = getattr(model_config, "is_encoder_decoder", False)
        start = "decoder_start_token_id" if encodes else "bos_token_id"
        self.bos_token_id = getattr(model_config, start, None)
        self.ignore_repeated_ngrams = ignore_repeated_ngrams
        self.processor = WatermarkLogitsProcessor(model_config.vocab_size, device, **values)

    def __call__(
        self, input_ids: Tensor, z_threshold: float = 3.0, return_dict: bool = False
    ) -> WatermarkDetectorOutput | np.ndarray:
        """(B, T) ids -> (B,) whether each text is marked, or everything about it.

        A leading begin token is left out; it is advised to leave the prompt out as well.
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
            text = message(
                "some texts begin with the begin token and others do not",
                wanted="all or none",
                got=f"{int(begins.sum())} of {len(begins)}",
                do="Tokenize all texts in the same way",
            )
            raise RequestError(text)
        ids = ids[:, 1:] if begins.all() else ids
        width = self.processor.context_width
        if ids.shape[1] <= width:
            text = message(
                "the texts are too short to score",
                wanted=f"more than context_width={width} ids",
                got=ids.shape[1],
                do="Pass longer texts",
            )
            raise RequestError(text)
        return ids

    def _counts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(B,) how many n-grams are scored, and how many of their last ids are green."""
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


@dataclass(frozen=True)
class WeightedMeanDetector:
    """The mean g-value of what the mask keeps, earlier layers weighing more; needs no training.

    Weights fall evenly from 10 to 1. About 0.5 for unmarked texts, more for marked ones. Source:
    Dathathri et al. 2024, the weighted mean score.
    """

    def __call__(self, g_values: Tensor, mask: Tensor) -> Tensor:
        """(B, T, depth) g-values, (B, T) mask -> (B,) scores, nan where nothing is kept."""
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
        """(B, T) ids -> what the module says of their g-values."""
        processor, ids = self.logits_processor, tokenized_outputs
        before_end = processor.compute_eos_token_mask(ids, self.tokenizer.eos_token_id)
        mask = processor.compute_context_repetition_mask(ids)
        mask = mask * before_end[:, processor.ngram_len - 1 :]
        return self.detector_module(processor.compute_g_values(ids), mask)
