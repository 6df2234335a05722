"""The arguments of a call beside its prompt: read, judged and kept once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from everystep.adapters import Mix, read_steering
from everystep.bridge.core import ForeignModel
from everystep.config import FIELDS, ChatDefaults, Effective, merge_configs
from everystep.errors import RequestError, shown
from everystep.processors.grammars.source import KINDS
from everystep.records import record_writer
from everystep.requests.absent import REFUSED_FIELDS, refuse_fields
from everystep.requests.arrays import read_adapters, read_hooks, read_processors, read_text, require
from everystep.requests.door import NO_OBJECTS, Arguments, Objects
from everystep.requests.drafts import OF_DRAFTING, draft_notices, read_sources
from everystep.requests.grammars import read_allowed, read_grammar
from everystep.requests.options import (
    BY_FIELDS,
    NO_DRAFTING,
    Choosing,
    Ends,
    Options,
    Recording,
    Steering,
)
from everystep.requests.prefixes import read_prefix
from everystep.requests.readouts import read_contrast
from everystep.requests.strategies import (
    read_best_of,
    read_n_best,
    read_strategy,
    refuse_beside,
    require_groups,
)
from everystep.requests.subject import Subject, weight_changes
from everystep.stops.criteria import MaxLengthCriteria
from everystep.types import FinishReason

_BEYOND = (
    "pad_token_id={} is beyond the vocabulary of {}: it fills up what is returned, and no prompt "
    "can hold it. Set it to an id of the vocabulary."
)
_NO_DECODER = (
    "decoder_start_token_id has no effect, as the model has no encoder: its decoder goes on from "
    "the prompt. Begin the prompt with the id, or leave decoder_start_token_id out."
)
_READ_IDS = {
    "repetition_penalty": (None, "all"),
    "presence_penalty": ("all",),
    "frequency_penalty": ("all",),
    "no_repeat_ngram_size": (None, "all", "new"),
}
"""What looks at ids of the prompt -> with which values of `penalty_scope`."""


def read_options(
    subject: Subject, given: Arguments, tokenizer: object, chat: ChatDefaults | None = None
) -> Options:
    """Return what a call with these arguments asks for beside its prompt; RequestError for what is
    impossible, contradicts something else, or cannot be done.

    `chat`: what holds for the prompt if it is a conversation, None for any other.
    """
    objects, beside, size = given.objects, given.beside, subject.vocab_size
    own, passed = subject.generation_config, objects.generation_config
    chosen = objects.strategy is not None or objects.amateur_model is not None
    fields = merge_configs(given.fields, passed, own, chat, chosen=chosen)
    if not fields.caller.isdisjoint(REFUSED_FIELDS):
        refuse_fields(fields)
    ends, drafting = _special_ids(fields, size), NO_DRAFTING
    if (fields.pad_token_id or 0) >= size and "pad_token_id" in fields.caller:
        fields = fields.noting(_BEYOND.format(fields.pad_token_id, size))
    if "decoder_start_token_id" in fields.caller and not subject.is_encoder_decoder:
        fields = fields.noting(_NO_DECODER)
    if objects is not NO_OBJECTS:
        helper, helps = objects.assistant_model, objects.assistant_tokenizer
        drafting = read_sources(helper, helps, objects.draft_corpus)
    if not fields.caller.isdisjoint(OF_DRAFTING):
        fields = fields.noting(*draft_notices(fields, drafting, size, tokenizer))
    options = Options(
        fields,
        ends,
        drafting=drafting,
        tokenizer=None if tokenizer is None else require("tokenizer", tokenizer, "decode"),
        seed=objects.seed,
    )
    if objects is not NO_OBJECTS:
        core = subject.core
        fixed = core.foreign.fixed_adapters if isinstance(core, ForeignModel) else ()
        said = objects.adapter_names, objects.adapters, subject.adapters
        options = replace(
            options,
            steering=_read_steering(objects, fields, tokenizer, ends, size),
            choosing=_read_choosing(subject, objects, fields, tokenizer),
            recording=Recording(
                read_count("logprobs", objects.logprobs, size),
                read_count("prompt_logprobs", objects.prompt_logprobs, size),
                bool(beside.return_legacy_cache),
            ),
            prefix=read_prefix(objects.prefix),
            adapters=read_adapters(*said, fixed),
            record=None if objects.record is None else record_writer(objects.record),
        )
    elif beside.return_legacy_cache:
        options = replace(options, recording=Recording(legacy_cache=True))
    if options.adapters:
        mixes = options.adapters if isinstance(options.adapters, list) else [options.adapters]
        resolved = subject.resolved(dict.fromkeys(name for mix in mixes for name, _ in mix))
        options = replace(options, resolved=resolved)
    if objects.steer is not None:
        options = _steered(subject, options, objects.steer)
    if beside.cache_salt is not None:
        options = replace(options, salt=read_text("cache_salt", beside.cache_salt))
    if changes := weight_changes(subject.core):
        options = replace(options, weight_changes=changes)
    return options


def _steered(subject: Subject, options: Options, steer: object) -> Options:
    """Return the options with steering as the outermost adapter of each mix."""
    each = [*steer] if isinstance(steer, list | tuple) else [steer]
    found = [read_steering(subject.core, one) for one in each]
    resolved = {**options.resolved, **{one.name: one.adapter for one in found if one is not None}}
    own: list[Mix] = [() if one is None else ((one.name, 1.0),) for one in found]
    mixes = options.adapters
    if not isinstance(steer, list | tuple):
        one = own[0]
        among = mixes if isinstance(mixes, list) else None
        added = (*(mixes or ()), *one) if among is None else [(*mix, *one) for mix in among]
        return replace(options, adapters=added, resolved=resolved)
    before = mixes if isinstance(mixes, list) else [mixes or ()] * len(own)
    if len(before) != len(own):
        what = "steer and the adapters are not of equally many rows"
        raise RequestError(what, wanted=f"{len(before)} of each", got=f"{len(own)} in steer")
    pairs = zip(before, own, strict=True)
    return replace(options, adapters=[(*mix, *one) for mix, one in pairs], resolved=resolved)


def _read_steering(
    objects: Objects, fields: Effective, tokenizer: object, ends: Ends, vocabulary: int
) -> Steering:
    asked = {kind: getattr(objects, kind) for kind in KINDS}
    prefix_allowed = objects.prefix_allowed_tokens_fn
    processors = read_processors(objects.logits_processor)
    require_groups(processors, int(fields.num_beam_groups or 1))
    return Steering(
        processors,
        objects.stopping_criteria,
        require("prefix_allowed_tokens_fn", prefix_allowed, "__call__"),
        read_allowed(objects.allowed_sequences, tokenizer),
        read_grammar(asked, tokenizer, ends.eos, vocabulary),
        hooks=read_hooks(objects.hooks),
    )


def _read_choosing(
    subject: Subject, objects: Objects, fields: Effective, tokenizer: object
) -> Choosing:
    strategy = read_strategy(objects.strategy, objects.strategy_options)
    if strategy is not None:
        refuse_beside(fields, strategy)
    amateur = objects.amateur_model, objects.contrast_alpha, objects.contrast_beta
    contrast = read_contrast(subject, *amateur)
    n_best = read_n_best(objects.n_best, fields)
    choice = objects.best_of, objects.majority, objects.scorer
    best_of = read_best_of(*choice, fields, tokenizer)
    if strategy is None and contrast is None and n_best is None and best_of is None:
        return BY_FIELDS
    return Choosing(strategy, best_of, n_best, contrast, objects.amateur_model)


def require_output_object(recording: Recording, e: Effective) -> None:
    """Refuse log-probabilities and tuples of a call without the output object that holds them."""
    if recording.legacy_cache and not (e.return_dict_in_generate and e.use_cache is not False):
        raise RequestError(
            "return_legacy_cache is about the cache of the output object",
            wanted="return_dict_in_generate=True with it, and use_cache",
            do="Set it, or leave return_legacy_cache out",
        )
    asked = recording.logprobs is not None or recording.prompt_logprobs is not None
    if asked and not e.return_dict_in_generate:
        raise RequestError(
            "logprobs and prompt_logprobs are part of the output object",
            wanted="return_dict_in_generate=True with them",
            do="Set it, or leave them out",
        )


def cut_by_default(
    e: Effective, criteria: Iterable[object] | None, reasons: Iterable[FinishReason]
) -> tuple[str, ...]:
    """Return what to tell a caller where one of these ends was the default length, since no setting
    says how long an answer may be."""
    named = e.max_new_tokens is not None or e.source("max_length") != "default"
    named = named or any(isinstance(one, MaxLengthCriteria) for one in criteria or ())
    if named or all(reason.kind != "length" for reason in reasons):
        return ()
    return (
        "what was generated is cut at the default length, as nothing says how long it may be. Set "
        "max_new_tokens.",
    )


def unseen_prompt(effective: Effective) -> tuple[str, ...]:
    """Return what to tell a caller whose settings look at ids, where the prompt has none."""
    scope, caller = effective.penalty_scope, effective.caller
    asked = [name for name, reads in _READ_IDS.items() if name in caller and scope in reads]
    blind = [name for name in asked if effective[name] != FIELDS[name].default]
    if not blind:
        return ()
    return (
        f"{', '.join(blind)}: a prompt given as embeddings has no ids, so only generated ones "
        "count. Pass input_ids beside inputs_embeds to have those of the prompt counted too.",
    )


def read_count(name: str, value: object, vocabulary: int) -> int | None:
    """Return the value, a number of tokens of the vocabulary or None; RequestError for others."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= vocabulary:
        raise RequestError(
            f"{name} is impossible",
            wanted=f"how many of the best tokens to keep, from 0 to {vocabulary}",
            got=shown(value),
            do=f"Pass {name}=5, say",
        )
    return value


def _special_ids(effective: Effective, vocabulary: int) -> Ends:
    """Return the special ids; the pad id is the first end id where there is none.

    What is no token ends nothing, and so is no end id. RequestError if the caller set an end or a
    start beyond the vocabulary; a pad id is never read, so that it may be any.
    """
    every = {name: _listed(effective[name]) for name in ("eos_token_id", "decoder_start_token_id")}
    for name, ids in every.items():
        outside = [token for token in ids if token >= vocabulary]
        if outside and name in effective.caller:
            raise RequestError(
                f"{name} is outside the vocabulary",
                wanted=f"0 to {vocabulary - 1}",
                got=outside[0],
                do="Check that tokenizer and model belong together",
            )
    ends, starts = every.values()
    begin, pad = effective.bos_token_id, effective.pad_token_id
    if effective.decoder_start_token_id is None:
        starts = _listed(begin)
    fill = ends[0] if pad is None and ends else pad
    known = tuple(token for token in ends if 0 <= token < vocabulary)
    return Ends(known, fill, starts, begin)


def _listed(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return one id, several or none as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
