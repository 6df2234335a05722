"""From an effective configuration to frozen choices: strategy, stops, draws, limits.

After this no configuration object goes any further down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everystep.api.lengths import Limits
from everystep.config import FIELDS, Effective
from everystep.draws import Draws, SeededDraws, SharedDraws
from everystep.errors import RequestError, UnsupportedError, message
from everystep.stops.criteria import merge
from everystep.stops.ends import EosToken, MaxLength, MaxTime
from everystep.stops.strings import StopStrings
from everystep.strategies import Beam, Contrastive, Greedy, PromptLookup, Sample, Speculative
from everystep.text import Spelling
from everystep.types.protocols import Stop

_LOOKUP = "Set prompt_lookup_num_tokens, which drafts without a second model"
_BEAMS = "Set num_beams alone, or bad_words_ids and sequence_bias to steer words"
LATER = {
    "assistant_early_exit": ("speculation with the model's own early layers", _LOOKUP),
    "dola_layers": ("DoLa", "Leave it out, or set penalty_alpha and top_k for contrastive search"),
    "constraints": ("constrained beams", _BEAMS),
    "force_words_ids": ("constrained beams", _BEAMS),
    "use_mtp": ("multi-token prediction heads", _LOOKUP),
    "speculation_type": ("block drafters", _LOOKUP),
    "low_memory": ("sequential beams", "Leave it out: beams share their prompt's memory"),
    "compile_config": ("compiled forwards", "Leave it out: forwards run as they are"),
    "assistant_ensemble_weight": ("ensemble verification", _LOOKUP),
    "num_beam_groups": ("diverse beams", "Set num_beams with do_sample=True for various beams"),
    "continuous_batching_config": (
        "settings of the continuous scheduler",
        "Call everystep.generate(model, tokenizer, prompts), which schedules by itself",
    ),
    "is_assistant": ("drafting with a second model", _LOOKUP),
    "num_assistant_tokens": ("drafting with a second model", _LOOKUP),
    "num_assistant_tokens_schedule": ("drafting with a second model", _LOOKUP),
    "assistant_confidence_threshold": ("drafting with a second model", _LOOKUP),
    "assistant_lookbehind": ("drafting with a second model", _LOOKUP),
    "target_lookbehind": ("drafting with a second model", _LOOKUP),
}
"""Fields that are read and checked, whose capability is not built yet -> what it is, what to do."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The special ids of a call; `starts`: a decoder's first id, one for all rows or one each."""

    eos: tuple[int, ...]
    pad: int | None
    bos: int | None
    starts: tuple[int, ...]

    @property
    def fill(self) -> int:
        """What stands where a row has nothing to say."""
        if self.pad is not None:
            return self.pad
        return self.eos[0] if self.eos else 0


def read_tokens(effective: Effective, vocabulary: int) -> Tokens:
    """Special ids, the pad id taken from the first end id where there is none.

    RequestError if the caller set one that the vocabulary does not have.
    """
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        outside = [token for token in _listed(effective[name]) if token >= vocabulary]
        if outside and name in effective.caller:
            raise RequestError(
                message(
                    f"{name} is outside the vocabulary",
                    wanted=f"0 to {vocabulary - 1}",
                    got=outside[0],
                    do="Check that tokenizer and model belong together",
                )
            )
    ends, pad = _listed(effective.eos_token_id), effective.pad_token_id
    if pad is None and ends:
        pad = ends[0]
    start = effective.decoder_start_token_id
    starts = _listed(effective.bos_token_id if start is None else start)
    return Tokens(ends, pad, effective.bos_token_id, starts)


def _listed(value: Any) -> tuple[int, ...]:
    """One id, several or none, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


# What a configuration that is passed may not ask for in vain, whoever wrote it: other tokens.
_CHOOSES = ("dola_layers", "constraints", "force_words_ids", "num_beam_groups")


def refuse_unbuilt(effective: Effective) -> None:
    """Raises if the caller set a field whose capability is not built yet."""
    for name, (capability, do) in LATER.items():
        passed = effective.source(name) == "config" and name in _CHOOSES
        asked = passed or name in effective.caller
        if asked and getattr(effective, name) != FIELDS[name].default:
            raise UnsupportedError(
                message(
                    f"{name} asks for {capability}, which this version does not have",
                    got=repr(getattr(effective, name)),
                    do=do,
                )
            )


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
            max_new=limits.most,
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
    return tuple(map(SeededDraws, read_seeds(seed, batch)))


def read_seeds(seed: Any, rows: int) -> tuple[int, ...]:
    """(rows,) the seed of each, where one is given for all or one for each; RequestError if not."""
    several = isinstance(seed, Sequence) and not isinstance(seed, str)
    seeds = tuple(seed) if several else (seed,) * rows
    if len(seeds) == rows and all(type(one) is int for one in seeds):
        return seeds
    raise RequestError(
        message(
            "seed does not fit the call",
            wanted=f"an integer, or {rows} of them",
            got=repr(seed),
            do="Pass one seed, or one per row of the prompt or prompt of the list",
        )
    )


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
