"""The only way into the engine: options and prompts become requests, in which no choice is open.

`generate()`, many prompts, streams and loops of the caller's all come through `prepare`. Whatever
can be wrong with a call is known when it returns, before any compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from warnings import warn

import torch

from everystep.adapters import without_steering
from everystep.cache.containers import Cache
from everystep.cache.formats import Quantization
from everystep.cache.layers import StaticLayer
from everystep.config import Effective
from everystep.config.effective import for_rows
from everystep.config.fields import PER_ROW
from everystep.engine.collect import kept_rows
from everystep.engine.draft_model import DraftModel
from everystep.engine.forced import ForcedTokens
from everystep.engine.recording import RunRecorder
from everystep.errors import OversizeError, RequestError
from everystep.memory import require_memory
from everystep.nn.network import Full, Heard, State, Store, Window
from everystep.processors.allowed import AllowedSequences
from everystep.processors.base import UserProcessor
from everystep.processors.order import Facts, build
from everystep.processors.stacking import varies
from everystep.records import RecordWriter
from everystep.requests.caches import continued, new_cache, require_possible, row_quantization
from everystep.requests.drafts import drafts_of
from everystep.requests.grammars import allowed_in, forces
from everystep.requests.inputs import (
    Inputs,
    placed,
    refuse_second_encoders,
    require_begun,
    require_unmasked,
)
from everystep.requests.options import (
    NO_DRAFTING,
    Assistant,
    Options,
    Recording,
    adapters_of,
    draws_of,
)
from everystep.requests.prefixes import after_prefix, refuse_unseen_states
from everystep.requests.reading import unseen_prompt
from everystep.requests.readouts import readout_of
from everystep.requests.strategies import require_candidates, require_known_words, strategy_of
from everystep.requests.subject import Subject
from everystep.stops.criteria import longest, merge
from everystep.stops.ends import EosToken, MaxLength, MaxTime, UserStop
from everystep.stops.strings import StopStrings
from everystep.strategies import BestOf, ConstrainedBeam, Contrastive, Greedy, Sample
from everystep.strategies.beams import BeamSettings
from everystep.text import Spelling
from everystep.text.digest import tokenizer_digest
from everystep.types import DraftVerification, Prompt, Request, Wants
from everystep.types.protocols import MATCHING, Processor
from everystep.types.request import Drafter, Stop, Strategy

Runs = Literal["continuous", "lockstep", "loop"]
DEFAULT_NEW = 20
_NOT_FIRST = (
    "forced_bos_token_id has no effect after a prompt of several ids: it is the id after a single "
    "one. Pass the id at the end of the prompt, or leave forced_bos_token_id out."
)
_OF_ROWS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


# Every row gets room for so many positions of its own at once.
_AHEAD = 16
# A row's ids, numbers and objects, in bytes.
_BOOKS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The options in force, the inputs, and a request per row.

    `runs`: as `prepare` was asked. `strategy`: that of every row; `kept_rows`: how many rows per
    prompt a caller gets of the scores and layers of a step. `captures`: whether hidden states or
    attentions are part of the result. `cache`: the cache object that is filled with what the rows
    hold in the end, if one is. `quantization`: how the rows keep what they hold, None for full
    precision. `heard`: (B,) what the encoder showed of each row, where that is asked for.
    """

    options: Options
    inputs: Inputs
    requests: tuple[Request, ...]
    runs: Runs
    strategy: Strategy
    kept_rows: int
    captures: bool
    cache: Cache | None = None
    quantization: Quantization | None = None
    heard: tuple[Heard, ...] = ()


def prepare(
    subject: Subject,
    options: Options,
    inputs: Inputs,
    past: Cache | None = None,
    runs: Runs = "continuous",
) -> Call:
    """Return the call with every choice made and checked against every other.

    `past`: the cache object that was passed, which the prompts continue from and which is filled.
    `runs`: whether the rows come and go ("continuous"), are one rectangle and take their steps
    together ("lockstep"), or a loop of the caller's decodes such a rectangle ("loop").
    """
    fields, ends, prefix = options.effective, options.ends, options.prefix
    if prefix is not None:
        inputs = after_prefix(prefix, subject, inputs, options, past)
    if fields.token_healing:
        require_healable(inputs, options.tokenizer)
    if inputs.source is not None and fields.return_dict_in_generate and fields.output_attentions:
        require_unmasked(inputs.source)
    new = _most_new(fields, inputs, subject.context, options.steering.allowed)
    each = isinstance(fields.max_new_tokens, list)
    limits = _limits(fields, inputs.batch) if each else (new,) * inputs.batch
    fields = _settled(fields, ends.pad, inputs, limits, subject.context)
    options, most = replace(options, effective=fields), new
    if options.steering.criteria is not None:
        most = max(new, longest(options.steering.criteria) - inputs.width)
    strategy = strategy_of(fields, options.choosing, _end_count(ends.eos, subject), most)
    if isinstance(strategy, ConstrainedBeam):
        require_known_words(strategy.constraints, subject.vocab_size)
    if isinstance(strategy, Contrastive):
        require_candidates(strategy.top_k, subject.vocab_size)
    drafts: tuple[Drafter | None, DraftVerification] = (None, MATCHING)
    by_field = fields.prompt_lookup_num_tokens or fields.assistant_early_exit
    if by_field or options.drafting is not NO_DRAFTING:
        drafts = drafts_of(subject, options, strategy)
    source, second = inputs.source, (options.drafting.assistant, options.choosing.amateur)
    if second != (None, None) or (source is not None and source.assistant):
        refuse_second_encoders(subject, source, *second)
    _require_places(subject.core.network.most_positions, drafts[0], inputs, new)
    hidden, drafted = strategy.reads.hidden and runs != "loop", drafts[0] is not None
    if prefix is not None and prefix.past is not None and hidden:
        refuse_unseen_states()
    cache, how = past, None
    if past is None:
        cache = _new_cache(subject, fields, inputs, runs, new, drafts=drafted)
    else:
        heals, known = bool(fields.token_healing), options.recording.prompt_logprobs is not None
        positions = inputs.total_width + new - 1
        require_possible(past, positions, drafts=drafted, heals=heals, prompt_logprobs=known)
        inputs = continued(inputs, past, strategy.width, hidden=hidden)
    if past is not None or fields.cache_implementation is not None:
        how = row_quantization(fields, subject, past)
    if cache is not None:
        _require_room(subject, cache, inputs.batch)
    if inputs.place is not None:
        inputs = placed(inputs, inputs.place, new)
    if past is not None or prefix is not None:
        require_begun(inputs.prompts)
    together, coded, fills = runs != "continuous", how is not None, cache is not None
    require_rows_fit(subject, inputs, strategy.width, together=together, coded=coded)
    rows = _requests(subject, options, inputs, runs, strategy, drafts, limits, most, fills=fills)
    if new > _AHEAD and _ends_by_length(strategy, rows[0].stops, bool(options.steering.hooks)):
        width, ahead = strategy.width, new - 1  # the last token is not fed
        require_rows_fit(subject, inputs, width, ahead, together=together, coded=coded)
    if options.record is not None:
        rows = _recorded(subject, options, options.record, inputs, rows)
    shows = fields.output_hidden_states or fields.output_attentions
    captures, kept = bool(fields.return_dict_in_generate and shows), kept_rows(strategy)
    return Call(options, inputs, rows, runs, strategy, kept, captures, cache, how)


def _requests(
    subject: Subject,
    options: Options,
    inputs: Inputs,
    runs: Runs,
    strategy: Strategy,
    drafts: tuple[Drafter | None, DraftVerification],
    limits: tuple[int, ...],
    most: int,
    *,
    fills: bool,
) -> tuple[Request, ...]:
    """Return the request of each row.

    `limits`: (B,) the new tokens that a row may get; `most`: those for which all have room, where
    criteria allow more. `fills`: whether a cache object gets what the rows hold in the end.
    """
    fields, steering, ends = options.effective, options.steering, options.ends
    (drafter, verification), new = drafts, max(limits)
    stops = _stops(fields, ends.eos, options.tokenizer, steering.criteria, inputs.width + new)
    strategies, ends_by = dict.fromkeys(limits, strategy), dict.fromkeys(limits, stops)
    if min(limits) < new:
        # The caller's own criterion takes the place of limits; a search knows of them.
        whole = new if longest(steering.criteria) else 0
        ends_by = {limit: _within(stops, new - max(whole, limit)) for limit in limits}
        made = partial(strategy_of, fields, options.choosing, _end_count(ends.eos, subject))
        strategies = {limit: made(most if limit == new else limit) for limit in limits}
    processors = _processors(subject, options, inputs, limits, strategy)
    free = steering.grammar is not None and not steering.watches and strategy.reads.alone
    if free and runs != "loop" and forces(subject):
        drafter = ForcedTokens(drafter)
    # Rows of a rectangle stay until the last has ended where the result has them all, or where code
    # of the caller's counts on them; ours looks at each row by itself, also what a caller has made.
    own = (one for each in processors for one in each if isinstance(one, UserProcessor))
    counted = not all(one.takes_rows for one in own) or any(isinstance(s, UserStop) for s in stops)
    returned = bool(fields.return_dict_in_generate)
    shown = fills or (returned and any(fields[name] for name in _OF_ROWS))
    lingers = runs == "lockstep" and (counted or shown)
    wants = _wants(fields, options.recording, options.choosing.best_of, inputs, cached=fills)
    # Criteria may read scores where all rows take the same steps and stay: drafts of several are
    # not accepted alike, and of candidates it is known a step later which row they came from.
    alike = kept_rows(strategy) == strategy.width and (inputs.batch == 1 or drafter is None)
    if lingers and alike and steering.criteria and returned and fields.output_scores:
        wants = replace(wants, history=True)
    readout, companions = readout_of(subject, options, inputs)
    adapters = adapters_of(options.adapters, inputs.batch)
    draws, pads = draws_of(options.seed, inputs.number, inputs.batch), inputs.pads
    return tuple(
        Request(
            request_id=str(inputs.number + row),
            prompt=prompt,
            strategy=strategies[limits[row]],
            draws=draws[row],
            processors=processors[row],
            stops=ends_by[limits[row]],
            readout=readout,
            companions=companions[row],
            drafter=drafter,
            verification=verification,
            wants=wants,
            max_length=inputs.width + most - pads[row] + prompt.hidden,
            pad_prefix=pads[row],
            # A row that has ended is fed with it, so it must be a token.
            pad_token=ends.fill if 0 <= ends.fill < subject.vocab_size else 0,
            prefix_token=inputs.fills[row] if inputs.fills else None,
            linger=lingers,
            adapters=adapters[row],
            resolved=options.resolved_of(adapters[row]),
            salt=options.salt,
            weight_changes=options.weight_changes,
            hooks=steering.hooks,
            deadline=options.deadline,
        )
        for row, prompt in enumerate(inputs.prompts)
    )


def _recorded(
    subject: Subject,
    options: Options,
    writer: RecordWriter,
    inputs: Inputs,
    rows: tuple[Request, ...],
) -> tuple[Request, ...]:
    """Return the requests with what writes down their steps."""
    fields, tokenizer, source = options.effective, options.tokenizer, inputs.source
    digests = subject.digest(), tokenizer_digest(tokenizer)
    about = partial(RunRecorder.of, writer, fields, tokenizer, digests, options.trims)
    mixes = (without_steering(row.adapters) for row in rows)
    adapted = (subject.digest(names) if names else None for names in mixes)
    read: Sequence[Prompt | None] = [None] * len(rows)
    if source is not None:
        read = source.prompts or [Prompt(encoder=one) for one in source.states]
    shown = [inputs.shown(row) for row in range(len(rows))]
    each = zip(adapted, read, shown, rows, strict=True)
    watchers = [about(digest, own, beside, row) for digest, own, beside, row in each]
    return tuple(replace(row, watcher=one) for row, one in zip(rows, watchers, strict=True))


def _end_count(ends: Sequence[int], subject: Subject) -> int:
    """Return how many tokens a search counts as ends: with all but one of the vocabulary it looks
    at every token already."""
    return min(len(ends), subject.vocab_size - 1)


def _new_cache(
    subject: Subject, e: Effective, inputs: Inputs, runs: Runs, new: int, *, drafts: bool
) -> Cache | None:
    """Return the cache object that the call fills, if it returns one; refuse one that cannot be."""
    returned = runs == "loop" or (runs == "lockstep" and bool(e.return_dict_in_generate))
    if not returned and (runs != "lockstep" or e.cache_implementation is None):
        return None
    cache = new_cache(e, inputs, subject, inputs.total_width + new - 1, drafts=drafts)
    return cache if returned else None


def _most_new(
    e: Effective, inputs: Inputs, context: int | None, allowed: Sequence[AllowedSequences]
) -> int:
    """Return how many tokens may follow the positions of a prompt, which count once, whether they
    are ids, embeddings or both; padding counts with them, as it stands in the rectangle that is
    returned. Ids that are not those of the positions count beside them in `max_length`, as in
    transformers.

    `max_new_tokens` wins over `max_length`; without either, as many as the context leaves, at most
    the default, that of a chat, or what the allowed sequences need.
    """
    if isinstance(e.max_new_tokens, list):
        return int(max(e.max_new_tokens))
    if e.max_new_tokens is not None:
        new = int(e.max_new_tokens)
        if context is None or e.sources["max_new_tokens"] != "chat":
            return new
        return min(new, max(1, context - inputs.prompt_width))
    prompt = inputs.prompt_width
    default = max((one.longest + 1 for one in allowed), default=DEFAULT_NEW)
    if e.source("max_length") != "default" and e.max_length is not None:
        counted = inputs.counted_width
        if counted >= int(e.max_length):
            raise RequestError(
                "the prompt leaves no room for new tokens",
                wanted=f"a prompt shorter than max_length={e.max_length}",
                got=f"{counted} positions",
                do="Raise max_length, or set max_new_tokens instead",
            )
        return int(e.max_length) - counted
    if context is not None and prompt >= context:
        raise OversizeError(
            "the prompt fills the model's context",
            wanted=f"fewer than {context} positions, or max_new_tokens",
            got=f"{prompt} positions",
            do="Shorten the prompt, or set max_new_tokens",
        )
    return default if context is None else min(default, context - prompt)


def _limits(e: Effective, rows: int) -> tuple[int, ...]:
    """Return (rows,) how many new tokens each may get, where that is said of each."""
    return tuple(int(one.max_new_tokens) for one in for_rows(e, rows))


def _within(stops: tuple[Stop, ...], less: int) -> tuple[Stop, ...]:
    """Return the stops of a row that may get so many tokens `less` than another."""
    cut = (MaxLength(one.limit - less) if type(one) is MaxLength else one for one in stops)
    return tuple(cut)


def require_unfilled(length: int, model: Subject) -> None:
    """Raise OversizeError where so many positions leave no room in what the model was made for."""
    context = model.context
    if context is not None and length >= context and length >= (model.reach or 0):
        raise OversizeError(
            "the prompt fills the model's context",
            wanted=f"fewer than {model.reach} tokens",
            got=length,
            do="Shorten the prompt, or take a model with a longer context",
        )


def _require_places(most: int | None, drafter: Drafter | None, inputs: Inputs, new: int) -> None:
    """OversizeError where a row may leave the positions that its model has embeddings for, or the
    one that drafts for it."""
    limits: dict[str, int | None] = {"the model": most}
    if isinstance(drafter, DraftModel) and isinstance(drafter.open, Assistant):
        limits["assistant_model"] = drafter.open.most_positions
    prompt = max(one.length for one in inputs.prompts)
    for name, most in limits.items():
        # The last token is not fed.
        if most is not None and prompt + new - 1 > most:
            raise OversizeError(
                f"{name} learned embeddings of {most} positions, and cannot read beyond them",
                wanted=f"at most {max(most + 1 - prompt, 0)} new tokens after this prompt",
                got=f"a prompt of {prompt} positions and up to {new} new tokens",
                do="Lower max_new_tokens or max_length, or shorten the prompt",
            )


def _settled(
    e: Effective, pad: int | None, inputs: Inputs, limits: tuple[int, ...], context: int | None
) -> Effective:
    """Return the configuration with the length and the pad id in force, and a notice to a caller
    who asks for more than the model was made for, or whose checkpoint does."""
    by = "max_length" if e.max_new_tokens is None else "max_new_tokens"
    if "min_length" in e.caller or "min_new_tokens" in e.caller:
        _check_least(e, by, inputs.counted_width, limits)
    new = max(limits)
    positions = inputs.total_width + new - 1  # the last token is not fed
    whose = " of the checkpoint" if e.sources[by] == "checkpoint" else ""
    if context is not None and (whose or by in e.caller) and positions > context:
        e = e.noting(
            f"{by}={e[by]}{whose} leads beyond what the model was made for; wanted at most "
            f"{context} positions; got {inputs.total_width} of the prompt and up to {new} new "
            f"ones. Lower {by}, or expect the text to get worse there."
        )
    if not inputs.width and inputs.source is None:
        e = e.noting(*unseen_prompt(e))
    if inputs.width > 1 and "forced_bos_token_id" in e.caller:
        e = e.noting(_NOT_FIRST)
    e = e.replaced(e.sources[by], max_length=inputs.counted_width + new)
    if e.pad_token_id is None and pad is not None:
        e = e.replaced(e.source("eos_token_id"), pad_token_id=pad)
    return e


def _check_least(e: Effective, most: str, prompt: int, limits: tuple[int, ...]) -> None:
    """A minimum beyond the maximum, which the field `most` set: an error if the caller set both, a
    warning if the minimum."""
    name = "min_length" if e.min_new_tokens is None else "min_new_tokens"
    before = prompt if name == "min_length" else 0
    fewest = e[name] if isinstance(e[name], list) else [e[name]] * len(limits)
    reached = [int(one or 0) - before <= new for one, new in zip(fewest, limits, strict=True)]
    if all(reached) or name not in e.caller:
        return
    what = f"{name}={e[name]} cannot be reached after a prompt of {prompt} positions"
    wanted, got = (
        f"at most {limits[reached.index(False)] + before}",
        f"{most}={e[most]} ({e.source(most)})",
    )
    if most in e.caller:
        raise RequestError(what, wanted=wanted, got=got, do=f"Lower {name} or raise {most}")
    text = f"{what}; wanted {wanted}; got {got}. Lower {name} or raise {most}."
    warn(text, UserWarning, stacklevel=6)


def _stops(
    e: Effective, eos: tuple[int, ...], tokenizer: object, criteria: object, visible: int
) -> tuple[Stop, ...]:
    """Return every reason to end a sequence, the caller's own criteria included."""
    stops: list[Stop] = [MaxLength(visible)]
    if e.max_time is not None:
        stops.append(MaxTime.after(float(e.max_time)))
    if e.stop_strings is not None:
        if tokenizer is None:
            do = "Pass tokenizer=tokenizer to generate"
            raise RequestError(
                "stop_strings needs a tokenizer", wanted="tokenizer=...", got="none", do=do
            )
        one = isinstance(e.stop_strings, str)
        strings = (e.stop_strings,) if one else tuple(e.stop_strings)
        stops.append(StopStrings(strings, Spelling.of(tokenizer)))
    if eos:
        stops.append(EosToken(eos))
    return tuple(stops) if criteria is None else merge(stops, criteria)


def _wants(
    e: Effective, recording: Recording, best_of: BestOf | None, inputs: Inputs, *, cached: bool
) -> Wants:
    """Return what is recorded only because the caller asked for it."""
    returned = bool(e.return_dict_in_generate)
    best = recording.prompt_logprobs
    if best is not None and inputs.embeds_width and (inputs.width or not best):
        raise RequestError(
            "prompt_logprobs needs to know what the prompt says",
            wanted="a prompt with one id per position, or embeddings alone and prompt_logprobs > 0",
            got=f"inputs_embeds and {inputs.width} ids" if inputs.width else "inputs_embeds only",
            do="Pass an id for each position, or ask for the best tokens there: prompt_logprobs=5",
        )
    judged = best_of is not None and best_of.by == "likelihood"
    return Wants(
        layers=returned and bool(e.output_hidden_states),
        attentions=returned and bool(e.output_attentions),
        logprobs=0 if judged and recording.logprobs is None else recording.logprobs,
        prompt_logprobs=recording.prompt_logprobs,
        cache=cached,
    )


def _processors(
    subject: Subject,
    options: Options,
    inputs: Inputs,
    limits: tuple[int, ...],
    strategy: Strategy,
) -> list[tuple[Processor, ...]]:
    """Return one tuple per row; the same one for all rows unless something depends on the row."""
    e, steering, ends = options.effective, options.steering, options.ends
    # In visible ids: positions of embeddings count, and `min_new_tokens` goes before `min_length`.
    least = 0 if e.min_new_tokens is not None else int(e.min_length or 0) - inputs.embeds_width
    if e.min_length != max(least, 0):
        e = e.replaced("default", min_length=max(least, 0))
    each = [e] * inputs.batch
    if any(isinstance(e[name], list) for name in PER_ROW):
        each = for_rows(e, inputs.batch)
    allowed = steering.allowed
    if allowed:
        allowed = allowed_in(allowed, ends.eos, inputs.batch, min(limits), subject.vocab_size)
    searches = not strategy.streams and options.choosing.best_of is None
    beams = strategy.width if searches else 1
    tokenizer: Any = options.tokenizer
    reads = (e.encoder_repetition_penalty or 1.0) != 1.0 or bool(e.encoder_no_repeat_ngram_size)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def made(row: int) -> tuple[Processor, ...]:
        number = inputs.number + row
        facts = Facts(
            eos=ends.eos,
            prompt_length=inputs.width,
            max_length=inputs.width + limits[row],
            encoder_ids=_read_ids(inputs, row, ends.fill) if reads else None,
            beams=beams,
            vocab_size=subject.vocab_size,
            row=row,
            rows=inputs.batch,
            first_row=number if beams > 1 else number * strategy.width,
            prefix_allowed_tokens_fn=steering.prefix_allowed_tokens,
            user=steering.processors,
            allowed=allowed[row] if allowed else None,
            encode=None if tokenizer is None else encode,
            grammar=steering.grammar,
            thoughts=steering.thoughts,
        )
        return build(each[row].values_by_name, facts)

    differ = (
        each[0] is not each[-1]
        or reads
        or steering.prefix_allowed_tokens is not None
        or len(steering.allowed) > 1
        or any(map(varies, steering.processors))
    )
    return [made(row) for row in range(inputs.batch)] if differ else [made(0)] * inputs.batch


def _read_ids(inputs: Inputs, row: int, fill: int) -> tuple[int, ...] | None:
    """Return the ids that the encoder, or a decoder alone, reads with their padding; None if
    unknown."""
    if inputs.source is not None:
        return tuple(inputs.source.ids[row].tolist()) if inputs.source.ids else None
    if inputs.prompts[row].ids is None:
        return None
    return tuple(inputs.visible(row, fill).tolist())


def require_healable(inputs: Inputs, tokenizer: object) -> None:
    """RequestError unless these prompts are text of a tokenizer whose vocabulary can be read."""
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise RequestError(
            "token_healing needs a tokenizer",
            wanted="tokenizer=...",
            got="none" if tokenizer is None else type(tokenizer).__name__,
            do="Pass tokenizer=tokenizer to generate",
        )
    prompts = inputs.prompts
    for name, given in (
        ("an encoder", inputs.source is not None),
        ("inputs_embeds", any(prompt.embeds is not None for prompt in prompts)),
        ("position_ids", inputs.place is not None or any(p.positions is not None for p in prompts)),
        ("a mask inside the prompt", any(prompt.mask is not None for prompt in prompts)),
        (
            "named inputs",
            bool(inputs.values)
            or any(inputs.pictures)
            or any(p.inputs or p.whole for p in prompts),
        ),
    ):
        if given:
            raise RequestError(
                f"token_healing does not go with {name}",
                wanted="a prompt given as input_ids alone",
                got=name,
                do=f"Leave token_healing or {name} out",
            )


# --- what it takes of memory ----------------------------------------------------------------------


def require_rows_fit(
    model: Subject,
    inputs: Inputs,
    width: int,
    ahead: int = _AHEAD,
    *,
    together: bool,
    coded: bool,
) -> None:
    """CapacityError where the prompts, `width` rows each, cannot be held: all of them `together`,
    or one at a time.

    `ahead`: the positions of its own that a row is sure to get. `coded`: rows keep codes, of half a
    byte perhaps.
    """
    prompts, length = inputs.batch if together else 1, inputs.width
    size = 0.5 if coded else getattr(torch, model.cache_dtype).itemsize
    shared, own = _of_row(model, length), _of_row(model, ahead)
    needed = math.ceil(prompts * (size * (shared + width * own) + width * _BOOKS))
    rows = prompts * width
    counted = f"{rows} row{'s' * (rows > 1)} after {length} position{'s' * (length > 1)}"
    what = f"a call of {counted}"
    do = "Ask for fewer rows (num_beams, num_return_sequences, the batch) or shorten the prompts"
    if ahead > _AHEAD:
        what = f"{what}, with {ahead} new ones each,"
        do = "Lower max_new_tokens, or let something else end a row too, such as eos_token_id"
    require_memory(needed, what, do, model.device)


def _require_room(model: Subject, cache: Cache, rows: int) -> None:
    """CapacityError where the room of a static cache cannot be had."""
    unmade = (one for one in cache.layers if isinstance(one, StaticLayer) and one.keys is None)
    if most := max((one.max_cache_len for one in unmade), default=0):
        what = f"a static cache of {rows} rows with room for {most} positions each"
        needed = rows * row_bytes(model, most)
        require_memory(needed, what, "Make it with a smaller max_cache_len", model.device)


def _ends_by_length(strategy: Strategy, stops: tuple[Stop, ...], hooked: bool) -> bool:
    """Return whether nothing but its length can end a row."""
    ours = isinstance(strategy, Greedy | Sample | BestOf | BeamSettings | Contrastive)
    return ours and not hooked and all(isinstance(stop, MaxLength) for stop in stops)


def row_bytes(model: Subject, length: int) -> int:
    """Return the bytes that a row of so many positions keeps in full precision."""
    return int(getattr(torch, model.cache_dtype).itemsize * _of_row(model, length))


def _of_row(model: Subject, length: int) -> int:
    """Count the numbers that a row of so many positions keeps."""
    return sum(_numbers(one, length) for layer in model.core.network.stores for one in layer)


def _numbers(store: Store, length: int) -> int:
    """Count the numbers that a store keeps of so many positions."""
    if isinstance(store, State):
        return sum(map(math.prod, store.shapes))
    if isinstance(store, Full | Window):
        seen = min(length, store.size) if isinstance(store, Window) else length
        return store.heads * (store.key_dim + store.value_dim) * seen
    return 0
