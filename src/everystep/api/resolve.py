"""From an effective configuration to frozen choices: strategy, stops, draws, limits.

After this no configuration object goes any further down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everystep.api.inputs import Inputs
from everystep.config import FIELDS, Effective
from everystep.draws import Draws, SeededDraws, SharedDraws
from everystep.errors import RequestError, UnsupportedError, message
from everystep.stops.base import Stop
from everystep.stops.criteria import merge
from everystep.stops.ends import EosToken, MaxLength, MaxTime
from everystep.stops.strings import StopStrings
from everystep.strategies import Beam, Contrastive, Greedy, PromptLookup, Sample, Speculative
from everystep.text import Spelling

LATER = {
    "assistant_early_exit": "speculation with the model's own early layers",
    "dola_layers": "DoLa",
    "constraints": "constrained beams",
    "force_words_ids": "constrained beams",
    "token_healing": "token healing",
    "watermarking_config": "watermarking",
    "cache_implementation": "choosing a cache",
    "cache_config": "choosing a cache",
    "use_mtp": "multi-token prediction heads",
    "speculation_type": "block drafters",
    "low_memory": "sequential beams",
    "compile_config": "compiled forwards",
    "assistant_ensemble_weight": "ensemble verification",
    "num_beam_groups": "diverse beams",
    "max_cache_len": "choosing a cache",
    "continuous_batching_config": "settings of the continuous scheduler",
    "is_assistant": "drafting with a second model",
    "num_assistant_tokens": "drafting with a second model",
    "num_assistant_tokens_schedule": "drafting with a second model",
    "assistant_confidence_threshold": "drafting with a second model",
    "assistant_lookbehind": "drafting with a second model",
    "target_lookbehind": "drafting with a second model",
}
"""Fields that are read and checked, whose capability is not built yet -> its name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a row may go: `visible` ids in all, pad prefix included, and `new` tokens of it."""

    visible: int
    new: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The special ids of a call."""

    eos: tuple[int, ...]
    pad: int | None
    bos: int | None
    start: int | None

    @property
    def fill(self) -> int:
        """What stands where a row has nothing to say."""
        if self.pad is not None:
            return self.pad
        return self.eos[0] if self.eos else 0


def read_tokens(effective: Effective) -> Tokens:
    """Special ids, the pad id taken from the first end id where there is none."""
    eos = effective.eos_token_id
    ends = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    pad = effective.pad_token_id
    if pad is None and ends:
        pad = ends[0]
    start = effective.decoder_start_token_id
    return Tokens(
        ends, pad, effective.bos_token_id, effective.bos_token_id if start is None else start
    )


def refuse_unbuilt(effective: Effective) -> None:
    """Raises if the caller set a field whose capability is not built yet."""
    for name, capability in LATER.items():
        asked = effective.source(name) in ("call", "config")
        if asked and getattr(effective, name) != FIELDS[name].default:
            raise UnsupportedError(
                message(
                    f"{name} asks for {capability}, which this version does not have",
                    got=repr(getattr(effective, name)),
                    do=f"Leave {name} out",
                )
            )


def read_limits(effective: Effective, inputs: Inputs, context: int | None) -> Limits:
    """The most ids a row may have, counted as the reference counts them.

    `max_new_tokens` wins over `max_length`; without either, 20 new tokens, or as many as the
    model's context leaves. `max_length` counts prompt positions once, as ids or as embeddings.
    """
    prompt = inputs.prompt_width
    set_length = effective.source("max_length") != "default" and effective.max_length is not None
    if effective.max_new_tokens is not None:
        new = int(effective.max_new_tokens)
    elif set_length:
        new = int(effective.max_length) - prompt
        if new <= 0:
            raise RequestError(
                message(
                    "the prompt leaves no room for new tokens",
                    wanted=f"a prompt shorter than max_length={effective.max_length}",
                    got=f"{prompt} positions",
                    do="Raise max_length, or set max_new_tokens instead",
                )
            )
    else:
        new = 20 if context is None else min(20, context - prompt)
        if new <= 0:
            raise RequestError(
                message(
                    "the prompt fills the model's context",
                    wanted=f"fewer than {context} positions, or max_new_tokens",
                    got=f"{prompt} positions",
                    do="Shorten the prompt, or set max_new_tokens",
                )
            )
    return Limits(inputs.width + new, new)


def read_strategy(effective: Effective, tokens: Tokens, limits: Limits) -> Any:
    """The strategy that the configuration names."""
    width = int(effective.num_beams or 1)
    returns = int(effective.num_return_sequences or 1)
    if width > 1:
        _refuse_speculation(effective, "num_beams > 1")
        return Beam(
            width=width,
            returns=returns,
            length_penalty=float(effective.length_penalty),
            early_stopping=effective.early_stopping,
            eos_count=len(tokens.eos),
            max_new=limits.new,
            sampled=bool(effective.do_sample),
        )
    contrastive = _contrastive(effective)
    if contrastive is not None:
        return contrastive
    base = Sample(returns) if effective.do_sample else Greedy()
    if effective.prompt_lookup_num_tokens is None:
        return base
    ngram = effective.max_matching_ngram_size
    return Speculative(
        PromptLookup(
            int(effective.prompt_lookup_num_tokens), 2 if ngram is None else int(ngram), tokens.eos
        ),
        base,
    )


def _contrastive(effective: Effective) -> Contrastive | None:
    alpha, top_k = effective.penalty_alpha, effective.top_k
    if effective.do_sample or not alpha or alpha <= 0 or top_k is None or top_k <= 1:
        return None
    _refuse_speculation(effective, "penalty_alpha")
    return Contrastive(int(top_k), float(alpha))


def _refuse_speculation(effective: Effective, other: str) -> None:
    if effective.prompt_lookup_num_tokens is not None:
        raise RequestError(
            message(
                f"prompt_lookup_num_tokens cannot be combined with {other}",
                wanted="greedy decoding or sampling",
                got=f"prompt_lookup_num_tokens={effective.prompt_lookup_num_tokens}",
                do="Leave one of the two out",
            )
        )


def read_stops(
    effective: Effective,
    tokens: Tokens,
    limits: Limits,
    tokenizer: Any,
    criteria: Any,
) -> tuple[Stop, ...]:
    """Every reason to end a sequence, the caller's own criteria included."""
    stops: list[Stop] = [MaxLength(limits.visible)]
    if effective.max_time is not None:
        stops.append(MaxTime.after(float(effective.max_time)))
    if effective.stop_strings is not None:
        if tokenizer is None:
            raise RequestError(
                message(
                    "stop_strings needs a tokenizer",
                    wanted="tokenizer=...",
                    got="none",
                    do="Pass tokenizer=tokenizer to generate",
                )
            )
        strings = effective.stop_strings
        strings = (strings,) if isinstance(strings, str) else tuple(strings)
        stops.append(StopStrings(strings, Spelling.of(tokenizer)))
    if tokens.eos:
        stops.append(EosToken(tokens.eos))
    return merge(stops, criteria)


def read_draws(seed: int | Sequence[int] | None, batch: int) -> tuple[Draws, ...]:
    """(B,) where each row's randomness comes from: the global generator without a seed."""
    if seed is None:
        return (SharedDraws(),) * batch
    seeds = [seed] * batch if isinstance(seed, int) else list(seed)
    wrong = [s for s in seeds if isinstance(s, bool) or not isinstance(s, int)]
    if len(seeds) != batch or wrong:
        raise RequestError(
            message(
                "seed does not fit the call",
                wanted=f"an integer, or {batch} of them",
                got=repr(seed),
                do="Pass one seed, or one per row of the prompt",
            )
        )
    return tuple(SeededDraws(s) for s in seeds)


def read_logprobs(name: str, value: object, vocabulary: int) -> None:
    """Raises unless `value` is None or a number of tokens of the vocabulary."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= vocabulary:
        raise RequestError(
            message(
                f"{name} is impossible",
                wanted=f"how many of the best tokens to keep, from 0 to {vocabulary}",
                got=repr(value),
                do=f"Pass {name}=5, say",
            )
        )


def require_output_object(logprobs: object, prompt_logprobs: object, returned: object) -> None:
    """Log-probabilities have their place in the output object, so there must be one."""
    if (logprobs is not None or prompt_logprobs is not None) and not returned:
        raise RequestError(
            message(
                "logprobs and prompt_logprobs are part of the output object",
                wanted="return_dict_in_generate=True with them",
                do="Set it, or leave them out",
            )
        )
