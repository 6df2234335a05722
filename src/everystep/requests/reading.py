"""What a call asks for beside its prompt: every keyword sorted, read, judged and kept once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from everystep.config import FIELDS, Effective, merge_configs
from everystep.config.fields import ELSEWHERE
from everystep.errors import RequestError, UnknownArgumentError, nearest, shown
from everystep.requests.absent import (
    ARGUMENTS_LATER,
    ARGUMENTS_NEVER,
    refuse_argument,
    refuse_fields,
)
from everystep.requests.arrays import read_adapters, read_functions, read_hooks, read_text, require
from everystep.requests.drafts import read_assistant, read_corpus, with_draft_notices
from everystep.requests.grammars import read_allowed, read_grammar
from everystep.requests.options import (
    CONFIG_FIELDS,
    OBJECTS,
    Options,
)
from everystep.requests.pictures import prompt_names
from everystep.requests.prefixes import read_prefix
from everystep.requests.readouts import read_contrast
from everystep.requests.strategies import read_best_of, read_n_best, read_strategy, refuse_beside
from everystep.requests.subject import Subject
from everystep.stops.criteria import MaxLengthCriteria
from everystep.types import FinishReason

_READ_IDS = ("repetition_penalty", "no_repeat_ngram_size")


def read_options(
    model: Subject, given: Mapping[str, Any], beside: Iterable[str], tokenizer: Any
) -> Options:
    """The options of a call with these keywords: fields of the configuration, `OBJECTS`, and names
    `beside` them, which are for others to read.

    UnknownArgumentError, which proposes the nearest name, for other names; RequestError for what is
    impossible, contradicts something else, or cannot be done.
    """
    named = (*model.inputs, *prompt_names(model))
    _refuse_unknown(given, {*OBJECTS, *named, *beside})
    given, own = read_strategy(given)
    config = {name: value for name, value in given.items() if name in CONFIG_FIELDS}
    effective = merge_configs(config, given.get("generation_config"), model.generation_config)
    refuse_fields(effective)
    if own is not None:
        refuse_beside(effective, own)
    effective = _with_pad_notice(effective, model.vocab_size)
    assistant, corpus = read_assistant(given), read_corpus(given)
    effective = with_draft_notices(effective, assistant, corpus)
    for name in ("logprobs", "prompt_logprobs"):
        if given.get(name) is not None:
            require_count(name, given[name], model.vocab_size)
    prefix = given.get("prefix_allowed_tokens_fn")
    special = _special_ids(effective, model.vocab_size)
    return Options(
        effective,
        *special,
        processors=read_functions("logits_processor", given.get("logits_processor")),
        criteria=given.get("stopping_criteria"),
        prefix_allowed_tokens=require("prefix_allowed_tokens_fn", prefix, "__call__"),
        allowed=read_allowed(given.get("allowed_sequences"), tokenizer),
        tokenizer=require("tokenizer", tokenizer, "decode"),
        seed=given.get("seed"),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        legacy_cache=bool(given.get("return_legacy_cache")),
        prefix=read_prefix(given.get("prefix")),
        salt=read_text("cache_salt", given.get("cache_salt")),
        hooks=read_hooks(given.get("hooks")),
        contrast=read_contrast(model, given),
        n_best=read_n_best(given, effective),
        best_of=read_best_of(given, effective, tokenizer),
        adapter_names=read_adapters(given.get("adapter_names"), model.adapters),
        grammar=read_grammar(given, tokenizer, special[0], model.vocab_size),
        assistant=assistant,
        corpus=corpus,
        strategy=own,
    )


def require_output_object(options: Options) -> None:
    """Log-probabilities and tuples have their place in the output object, so there must be one."""
    e = options.effective
    if options.legacy_cache and not (e.return_dict_in_generate and e.use_cache is not False):
        raise RequestError(
            "return_legacy_cache is about the cache of the output object",
            wanted="return_dict_in_generate=True with it, and use_cache",
            do="Set it, or leave return_legacy_cache out",
        )
    asked = options.logprobs is not None or options.prompt_logprobs is not None
    if asked and not options.effective.return_dict_in_generate:
        raise RequestError(
            "logprobs and prompt_logprobs are part of the output object",
            wanted="return_dict_in_generate=True with them",
            do="Set it, or leave them out",
        )


def cut_by_default(options: Options, reasons: Iterable[FinishReason]) -> tuple[str, ...]:
    """What to tell a caller, none of whose settings says how long an answer may be, where one of
    these ends was that length."""
    e, criteria = options.effective, options.criteria or ()
    named = e.max_new_tokens is not None or e.source("max_length") != "default"
    named = named or any(isinstance(one, MaxLengthCriteria) for one in criteria)
    if named or all(reason.kind != "length" for reason in reasons):
        return ()
    return (
        "what was generated is cut at the default length, as nothing says how long it may be. Set "
        "max_new_tokens.",
    )


def unseen_prompt(effective: Effective) -> tuple[str, ...]:
    """What to tell a caller whose settings look at ids, where the prompt has none."""
    asked = [name for name in _READ_IDS if name in effective.caller]
    blind = [name for name in asked if effective[name] != FIELDS[name].default]
    if not blind:
        return ()
    return (
        f"{', '.join(blind)}: a prompt given as embeddings has no ids, so only generated ones "
        "count. Pass input_ids beside inputs_embeds to have those of the prompt counted too.",
    )


def _refuse_unknown(given: Mapping[str, Any], known: set[str]) -> None:
    """Raises for keywords that are neither known nor fields of the configuration."""
    unknown = [name for name in given if name not in known and name not in CONFIG_FIELDS]
    for name in [one for one in unknown if one in ARGUMENTS_LATER or one in ARGUMENTS_NEVER]:
        refuse_argument(name, given[name])
        unknown.remove(name)
    if unknown:
        names = (*CONFIG_FIELDS, *known)
        guesses = [(name, ELSEWHERE.get(name) or nearest(name, names)) for name in unknown]
        hints = [f"{near} instead of {name}" for name, near in guesses if near]
        do = f"Perhaps you meant {', '.join(hints)}" if hints else "See help(model.generate)"
        noun = "argument" if len(unknown) == 1 else "arguments"
        listed = ", ".join(map(repr, unknown))
        raise UnknownArgumentError(f"generate() knows no {noun} {listed}", do=do)


def require_count(name: str, value: object, vocabulary: int) -> None:
    """RequestError unless `value` is a number of tokens of the vocabulary."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= vocabulary:
        raise RequestError(
            f"{name} is impossible",
            wanted=f"how many of the best tokens to keep, from 0 to {vocabulary}",
            got=shown(value),
            do=f"Pass {name}=5, say",
        )


def _special_ids(
    effective: Effective, vocabulary: int
) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
    """End ids, the pad id (the first end id where there is none), first ids of a decoder.

    What is no token ends nothing, and so is no end id. RequestError if the caller set an end or a
    start beyond the vocabulary; a pad id is never read, so that it may be any.
    """
    for name in ("eos_token_id", "decoder_start_token_id"):
        outside = [token for token in _listed(effective[name]) if token >= vocabulary]
        if outside and name in effective.caller:
            raise RequestError(
                f"{name} is outside the vocabulary",
                wanted=f"0 to {vocabulary - 1}",
                got=outside[0],
                do="Check that tokenizer and model belong together",
            )
    ends, pad = _listed(effective.eos_token_id), effective.pad_token_id
    start = effective.decoder_start_token_id
    starts = _listed(effective.bos_token_id if start is None else start)
    fill = ends[0] if pad is None and ends else pad
    return tuple(token for token in ends if 0 <= token < vocabulary), fill, starts


def _with_pad_notice(effective: Effective, vocabulary: int) -> Effective:
    """With a notice to a caller whose pad id is beyond the vocabulary."""
    pad = effective.pad_token_id
    if pad is None or pad < vocabulary or "pad_token_id" not in effective.caller:
        return effective
    notice = (
        f"pad_token_id={pad} is beyond the vocabulary of {vocabulary}: it fills up what is "
        "returned, and no prompt can hold it. Set it to an id of the vocabulary."
    )
    return replace(effective, notices=(*effective.notices, notice))


def _listed(value: Any) -> tuple[int, ...]:
    """One id, several or none, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
