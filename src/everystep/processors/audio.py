"""Processors that a family of speech models asks for: Whisper, Bark and Dia.

They are called by those models' own decoding, or passed in `logits_processor`.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from everystep.config.kinds import COUNT, ONE_OR_MORE_IDS, POSITIVE, SIZE, integer
from everystep.devices import on_device, on_host
from everystep.nn.modes import modes_kept
from everystep.processors.base import LogitsProcessor, Overwriting
from everystep.processors.stacking import Argument
from everystep.types import Rows


class WhisperTimeStampLogitsProcessor(LogitsProcessor):
    """Timestamps come in pairs and never run backwards; one begins the text.

    Where they hold more probability than any text token, one is chosen. `generate_config` has
    `no_timestamps_token_id`, `eos_token_id`, and perhaps `max_initial_timestamp_index`. Source:
    Radford et al. 2022.
    """

    def __init__(
        self,
        generate_config: Any,
        begin_index: int,
        _detect_timestamp_from_logprob: bool | None = None,
    ) -> None:
        self.begin_index = integer().checked(begin_index, "begin_index")
        self.no_timestamps_token_id: int = generate_config.no_timestamps_token_id
        self.timestamp_begin = self.no_timestamps_token_id + 1
        self.eos_token_id: int = generate_config.eos_token_id or generate_config.bos_token_id
        self.max_initial_timestamp_index: int | None = getattr(
            generate_config, "max_initial_timestamp_index", None
        )
        self._detects = _detect_timestamp_from_logprob
        if self._detects is None:
            self._detects = getattr(generate_config, "_detect_timestamp_from_logprob", True)

    def set_begin_index(self, begin_index: int) -> None:
        """Let the text begin at that place from now on."""
        self.begin_index = begin_index

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        result = scores.clone()
        result[:, self.no_timestamps_token_id] = -math.inf
        ids = rows.ids()
        for r, length in enumerate(rows.lengths.tolist()):
            self._restrict(result[r], ids[r, self.begin_index : length].tolist())
            if length == self.begin_index:
                self._begin(result[r])
        if self._detects:
            self._prefer_timestamps(result)
        return result

    def _restrict(self, scores: Tensor, text: list[int]) -> None:
        """Restrict (V,) scores that follow a text: no timestamp alone, none before the last."""
        first = self.timestamp_begin
        last = bool(text) and text[-1] >= first
        paired = len(text) < 2 or text[-2] >= first
        if last and paired:
            scores[first:] = -math.inf
        elif last:
            scores[: self.eos_token_id] = -math.inf
        stamps = [token for token in text if token >= first]
        if stamps:
            scores[first : stamps[-1] + (0 if last and not paired else 1)] = -math.inf

    def _begin(self, scores: Tensor) -> None:
        """Restrict (V,) scores of the first token to a timestamp that is not too late."""
        scores[: self.timestamp_begin] = -math.inf
        if self.max_initial_timestamp_index is not None:
            scores[self.timestamp_begin + self.max_initial_timestamp_index + 1 :] = -math.inf

    def _prefer_timestamps(self, scores: Tensor) -> None:
        logs = torch.log_softmax(scores.float(), dim=-1)
        stamps = logs[:, self.timestamp_begin :].logsumexp(dim=-1)
        text = logs[:, : self.timestamp_begin]
        wins = (stamps > text.max(dim=-1).values)[:, None]
        scores[:, : self.timestamp_begin].masked_fill_(wins, -math.inf)


class WhisperNoSpeechDetection(LogitsProcessor):
    """Leaves scores as they are, and reads from the first ones how likely silence is.

    Where the text does not begin right after the start token, `set_model` and `set_inputs` say what
    is to be read for it. Source: Radford et al. 2022.
    """

    def __init__(
        self, no_speech_token: int, begin_index: int, scores_is_logprobs: bool = False
    ) -> None:
        self.no_speech_token = no_speech_token
        self.start_of_trans_offset = begin_index
        self.begin_index = begin_index
        self.is_scores_logprobs = scores_is_logprobs
        self.model: Any = None
        self.inputs: dict[str, Any] | None = None
        self.no_speech_prob: Any = [0.0]
        """(R,) how likely each row is silence; [0.0] before the text began."""

    def set_model(self, model: Any) -> None:
        """Set the model that reads the inputs."""
        self.model = model

    def set_inputs(self, inputs: dict[str, Any]) -> None:
        """Set what the model reads: the arguments of the generation, its inputs as features."""
        prepared = {**self.model.prepare_inputs_for_generation(**inputs), **inputs}
        prepared["input_features"] = prepared.pop("inputs")
        if "input_ids" not in inspect.signature(self.model.forward).parameters:
            prepared.pop("input_ids", None)
        self.inputs = prepared

    def set_begin_index(self, begin_index: int) -> None:
        """Let the text begin at that place from now on."""
        self.begin_index = begin_index

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores, untouched."""
        if input_ids.shape[1] == self.begin_index:
            self.no_speech_prob = self._first(scores)[:, self.no_speech_token]
        return scores

    def _first(self, scores: Tensor) -> Tensor:
        """Return (R, V) probabilities after the start token."""
        if self.start_of_trans_offset > 1:
            with modes_kept(), torch.no_grad():
                logits: Tensor = self.model(**(self.inputs or {})).logits
            return logits[:, self.begin_index - self.start_of_trans_offset].float().softmax(dim=-1)
        return scores.exp() if self.is_scores_logprobs else scores.float().softmax(dim=-1)


@dataclass(frozen=True)
class AlternatingCodebooksLogitsProcessor(Overwriting):
    """Tokens come in turn from the two codebooks, whose ids follow those of the semantic tokens."""

    input_start_len: int
    semantic_vocab_size: int
    codebook_size: int

    checked = (Argument("input_start_len", COUNT),)

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        first = self.semantic_vocab_size
        middle = first + self.codebook_size
        opens = (rows.lengths - self.input_start_len) % 2 == 0
        scores[:, :first] = -math.inf
        for which, closed in ((opens, slice(middle, None)), (~opens, slice(first, middle))):
            if which.all():
                scores[:, closed] = -math.inf
            elif which.any():
                scores[on_device(scores.device, which), closed] = -math.inf
        return scores


@dataclass(frozen=True)
class BarkEosPrioritizerLogitsProcessor(LogitsProcessor):
    """A processor that leaves nothing but the end where that has more than `min_eos_p`."""

    eos_token_id: Any
    min_eos_p: float | None
    device: InitVar[str] = "cpu"

    checked = (
        Argument("eos_token_id", ONE_OR_MORE_IDS),
        Argument("min_eos_p", POSITIVE, optional=True),
    )
    reads_ids = False

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        if self.min_eos_p is None:
            return scores
        ends = torch.tensor(self.eos_token_id, device=scores.device)
        likely = scores.float().softmax(dim=-1)[:, ends] > self.min_eos_p
        if on_host(scores) and not likely.any():
            return scores
        only = torch.full_like(scores, -math.inf).index_copy(1, ends, scores[:, ends])
        return torch.where(likely.any(dim=1, keepdim=True), only, scores)


@dataclass(frozen=True)
class DiaEOSChannelFilterLogitsProcessor(LogitsProcessor):
    """Only the first channel may end, and it ends exactly where ending is its best token."""

    num_channels: int
    eos_token_id: int

    checked = (Argument("num_channels", SIZE), Argument("eos_token_id", SIZE))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process (batch * channels, V) or (batch, channels, V) scores -> (batch * channels, V)."""
        end, size = self.eos_token_id, scores.shape[-1]
        scores = scores.reshape(-1, size)
        token = torch.arange(size, device=scores.device)
        channel = torch.arange(len(scores), device=scores.device)[:, None] % self.num_channels
        open_scores = scores.masked_fill(
            token >= torch.where(channel == 0, end + 1, end), -math.inf
        )
        ends = open_scores.argmax(dim=-1, keepdim=True) == end
        return open_scores.masked_fill(torch.where(ends, token < end, token == end), -math.inf)


class DiaEOSDelayPatternLogitsProcessor(LogitsProcessor):
    """Once the first channel ends, or the length is nearly used up, each channel ends after its
    delay. An object serves one generation: it counts the delays down."""

    def __init__(
        self,
        delay_pattern: list[int],
        eos_token_id: int,
        max_generation_len: int,
        device: str = "cpu",
    ) -> None:
        self.num_channels = len(delay_pattern)
        self.eos_token_id = eos_token_id
        self.max_generation_len = max_generation_len - max(delay_pattern) - 1
        self._delays = torch.tensor(delay_pattern)
        self._left: Tensor | None = None
        self._ending: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process (batch * channels, V) or (batch, channels, V) scores -> (batch * channels, V)."""
        grid = scores.reshape(-1, self.num_channels, scores.shape[-1])
        scores = scores.reshape(-1, scores.shape[-1])
        if self._left is None or self._ending is None:
            self._left = self._delays.to(scores.device).repeat(len(grid), 1)
            self._ending = torch.zeros(len(grid), dtype=torch.bool, device=scores.device)
        self._ending |= grid[:, 0].argmax(dim=-1) == self.eos_token_id
        self._ending |= input_ids.shape[1] == self.max_generation_len
        forced = (self._ending[:, None] & (self._left == 0)).view(-1, 1)
        self._left = self._left - self._ending[:, None].long()
        only = torch.full_like(scores[:1], -math.inf)
        only[:, self.eos_token_id] = 0.0
        return torch.where(forced, only, scores)
