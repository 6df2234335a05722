"""One call, resolved: what `generate`, `stream` and `generate` over many prompts have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from everystep.api.inputs import Inputs
from everystep.api.lengths import Limits, read_limits, settled
from everystep.api.resolve import (
    Tokens,
    read_draws,
    read_logprobs,
    read_stops,
    read_strategy,
)
from everystep.cache.containers import Cache
from everystep.cache.formats import Quantization
from everystep.config import Effective, GenerationConfig
from everystep.config.effective import for_rows
from everystep.engine import Guidance
from everystep.errors import RequestError, message
from everystep.executors.base import Executor
from everystep.nn.network import Heard, Store
from everystep.processors.build import build
from everystep.processors.facts import Facts
from everystep.processors.guidance import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor as _UnbatchedGuidance,
)
from everystep.processors.stacking import varies
from everystep.stops.criteria import longest
from everystep.types import Prompt, Request, Wants


class Host(Protocol):
    """The model, as far as a call needs to know it."""

    generation_config: GenerationConfig

    @property
    def device(self) -> torch.device:
        """Where the weights lie, and results go."""
        ...

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        ...

    @property
    def hidden_size(self) -> int:
        """The width of the embeddings."""
        ...

    @property
    def context(self) -> int | None:
        """The longest sequence the model was made for."""
        ...

    @property
    def config(self) -> Any:
        """The values of config.json, as attributes."""
        ...

    @property
    def windows(self) -> Sequence[int | None]:
        """Per layer, how many positions it looks back; None for all."""
        ...

    @property
    def stores(self) -> Sequence[Sequence[Store]]:
        """What each layer keeps of a row."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and of a cache."""
        ...

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt."""
        ...

    def encode(self, prompt: Prompt, heard: Heard | None = None) -> Tensor:
        """(S, E) encoder states of one prompt; `heard` gets what the encoder's layers show."""
        ...

    def executor(
        self, needs: Set[str] = frozenset(), quantization: Quantization | None = None
    ) -> Executor:
        """A fresh executor with no rows that has the abilities in `needs`.

        `quantization`: how its rows will keep what they hold, None for full precision.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class UserParts:
    """What a caller brings of his own: objects, not configuration values."""

    processors: Sequence[Any] = ()
    criteria: Any = None
    prefix_allowed_tokens: Callable[[int, Any], list[int]] | None = None
    tokenizer: Any = None
    seed: int | Sequence[int] | None = None
    negative: tuple[Prompt, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """What the encoder showed of B rows, padding left empty: `layers`, (B, S, E) each, the last
    one normalised; `attentions`, (B, H, S, S) each; None where they were not asked for. `starts`:
    (B,) where each row begins in a rectangle of `width` positions."""

    starts: tuple[int, ...]
    width: int
    layers: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Frozen choices of a call and its inputs; makes the requests.

    `past`: the cache object that it continues from, if that holds something, and fills.
    `quantization`: how its rows keep what they hold, None for full precision.
    """

    effective: Effective
    tokens: Tokens
    inputs: Inputs
    limits: Limits
    strategy: Any
    stops: tuple[Any, ...]
    user: UserParts
    vocabulary: int
    encoder_ids: Sequence[np.ndarray] = ()
    past: Cache | None = None
    encoder: Encoder | None = None
    quantization: Quantization | None = None

    @property
    def wants(self) -> Wants:
        """What is recorded only because the caller asked for outputs."""
        asked = bool(self.effective.return_dict_in_generate)
        return Wants(
            layers=asked and bool(self.effective.output_hidden_states),
            attentions=asked and bool(self.effective.output_attentions),
            columns="columns" in self.strategy.needs,
            logprobs=self.user.logprobs,
            prompt_logprobs=self.user.prompt_logprobs,
            cache=self.keeps_cache,
            history=asked and bool(self.effective.output_scores) and self._one_history,
        )

    @property
    def _one_history(self) -> bool:
        """Whether criteria read scores and all rows take the same steps: drafts of several are
        not accepted alike, and of candidates it is known a step later which row they came from."""
        alike = "truncate" not in self.strategy.needs or self.inputs.batch == 1
        settled = self.strategy.kept_rows == self.strategy.width
        return bool(self.user.criteria) and alike and settled

    @property
    def keeps_cache(self) -> bool:
        """Whether what the rows hold at the end is part of the result."""
        return self.past is not None

    @property
    def positions(self) -> int:
        """How many positions of a row are cached in the end, at most: all but the last token."""
        return self.inputs.total_width + self.limits.new - 1

    @property
    def lingers(self) -> bool:
        """Whether finished rows must stay: their scores or cached positions are part of the result,
        or the caller's own processors and criteria count on the rows of the whole rectangle."""
        e = self.effective
        asked = (e.output_scores, e.output_logits, e.output_hidden_states, e.output_attentions)
        watched = self.user.processors or self.user.criteria
        return bool(watched) or (bool(e.return_dict_in_generate) and any(asked)) or self.keeps_cache

    def requests(self, *, lingers: bool) -> list[Request]:
        """One request per row, in order."""
        draws = read_draws(self.user.seed, self.inputs.batch)
        processors = self._processors()
        requests = []
        for row, prompt in enumerate(self.inputs.prompts):
            pad = self.inputs.pads[row]
            shift = pad - prompt.hidden
            requests.append(
                Request(
                    request_id=str(row),
                    prompt=prompt,
                    strategy=self.strategy,
                    draws=draws[row],
                    processors=processors[row],
                    stops=self.stops,
                    companions=self._companions(row, prompt),
                    readout=self._readout(),
                    wants=replace(self.wants, history=self.wants.history and lingers),
                    max_length=self.limits.reach - shift,
                    pad_prefix=pad,
                    pad_token=self.tokens.fill,
                    prefix_token=self.inputs.fills[row] if self.inputs.fills else None,
                    linger=lingers,
                )
            )
        return requests

    def _processors(self) -> list[tuple[Any, ...]]:
        """One tuple per row; the same one for all rows unless something depends on the row."""
        e = self.effective.replaced("default", min_length=self._visible_least())
        each = for_rows(e, self.inputs.batch)
        differ = (
            each[0] is not each[-1],
            e.encoder_repetition_penalty != 1.0,
            e.encoder_no_repeat_ngram_size,
            self.user.prefix_allowed_tokens is not None,
            *map(varies, self.user.processors),
        )
        if not any(differ):
            return [build(each[0], self._facts(0))] * self.inputs.batch
        return [build(one, self._facts(row)) for row, one in enumerate(each)]

    def _visible_least(self) -> int:
        """`min_length` in visible ids: positions of embeddings count, and `min_new_tokens` goes
        before it."""
        if self.effective.min_new_tokens is not None:
            return 0
        return max(int(self.effective.min_length or 0) - self.inputs.embeds_width, 0)

    def _visible_prompt(self, row: int) -> np.ndarray | None:
        """A prompt's ids with its padding, as processors see it."""
        if self.inputs.prompts[row].ids is None:
            return None
        return self.inputs.visible(row, self.tokens.fill)

    def _facts(self, row: int) -> Facts:
        source = self.encoder_ids[row] if self.encoder_ids else self._visible_prompt(row)
        beams = int(self.effective.num_beams or 1)
        return Facts(
            eos=self.tokens.eos,
            prompt_length=self.inputs.width,
            max_length=self.limits.visible,
            encoder_ids=None if source is None else tuple(source.tolist()),
            beams=beams,
            vocab_size=self.vocabulary,
            row=row,
            rows=self.inputs.batch,
            first_row=row if beams > 1 else row * self.strategy.width,
            prefix_allowed_tokens_fn=self.user.prefix_allowed_tokens,
            user=tuple(self.user.processors),
            encode=self._encode if self.user.tokenizer is not None else None,
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.user.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _readout(self) -> Guidance | None:
        scale = self.effective.guidance_scale
        own = any(type(one) is _UnbatchedGuidance for one in self.user.processors)
        return None if scale is None or scale == 1 or own else Guidance(float(scale))

    def _companions(self, row: int, prompt: Prompt) -> tuple[Prompt, ...]:
        """Guidance reads the negative prompt, or the last token of the prompt, beside the row."""
        if self._readout() is None:
            return ()
        if self.user.negative:
            return (self.user.negative[row],)
        if prompt.ids is None:
            raise RequestError(
                message(
                    "guidance_scale needs something to guide away from",
                    wanted="negative_prompt_ids, or a prompt given as ids",
                    got="inputs_embeds only",
                    do="Pass negative_prompt_ids",
                )
            )
        return (Prompt(ids=prompt.ids[-1:], encoder=prompt.encoder),)


def resolve(
    effective: Effective,
    tokens: Tokens,
    inputs: Inputs,
    user: UserParts,
    *,
    vocabulary: int,
    context: int | None,
    encoder_ids: Sequence[np.ndarray] = (),
) -> Call:
    """Every choice of a call, checked against each other before any compute."""
    read_logprobs("logprobs", user.logprobs, vocabulary)
    read_logprobs("prompt_logprobs", user.prompt_logprobs, vocabulary)
    if user.prompt_logprobs is not None and any(one.ids is None for one in inputs.prompts):
        raise RequestError(
            message(
                "prompt_logprobs needs to know what the prompt says",
                wanted="a prompt given as ids",
                got="inputs_embeds only",
                do="Pass input_ids too, or leave prompt_logprobs out",
            )
        )
    limits = read_limits(effective, inputs, context, longest(user.criteria))
    strategy = read_strategy(effective, tokens, limits)
    stops = read_stops(effective, tokens, limits, user.tokenizer, user.criteria)
    effective = settled(effective, inputs, limits, tokens.pad)
    return Call(effective, tokens, inputs, limits, strategy, stops, user, vocabulary, encoder_ids)
