"""The only way into the engine: options and prompts become requests, in which no choice is open.

`generate()`, many prompts, streams and loops of the caller's all come through `prepare`. Whatever
can be wrong with a call is known when it returns, before any compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from warnings import warn

from everystep.cache.containers import Cache
from everystep.cache.formats import Quantization
from everystep.config import Effective
from everystep.config.effective import for_rows
from everystep.engine.collect import kept_rows
from everystep.engine.draft_model import DraftModel
from everystep.errors import CapacityError, RequestError
from everystep.nn.network import Heard
from everystep.processors.base import UserProcessor
from everystep.processors.order import Facts, build
from everystep.processors.stacking import varies
from everystep.requests.caches import continued, new_cache, require_possible, row_quantization
from everystep.requests.drafts import drafts_of
from everystep.requests.grammars import allowed_in, length_of_allowed, with_forced
from everystep.requests.inputs import Inputs, placed, require_begun
from everystep.requests.needs import require_rows_fit
from everystep.requests.options import Assistant, Options
from everystep.requests.prefixes import after_prefix, refuse_unseen_states
from everystep.requests.reading import unseen_prompt
from everystep.requests.readouts import readout_of
from everystep.requests.strategies import require_known_words, strategy_of
from everystep.requests.subject import Subject
from everystep.stops.criteria import longest, merge
from everystep.stops.ends import EosToken, MaxLength, MaxTime, UserStop
from everystep.stops.strings import StopStrings
from everystep.text import Spelling
from everystep.types import Request, Wants
from everystep.types.request import Drafter, Stop, Strategy

Runs = Literal["continuous", "lockstep", "loop"]
DEFAULT_NEW = 20


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The options in force, the inputs, and a request per row.

    `runs`: as `prepare` was asked. `cache`: the cache object that is filled with what the rows hold
    in the end, if one is. `quantization`: how the rows keep what they hold, None for full
    precision. `heard`: (B,) what the encoder showed of each row, where that is asked for.
    """

    options: Options
    inputs: Inputs
    requests: tuple[Request, ...]
    runs: Runs
    cache: Cache | None = None
    quantization: Quantization | None = None
    heard: tuple[Heard, ...] = ()

    @property
    def strategy(self) -> Strategy:
        """The strategy of every row."""
        return self.requests[0].strategy

    @property
    def kept_rows(self) -> int:
        """Rows per prompt in the scores and layers of a step that callers get."""
        return kept_rows(self.strategy)


def prepare(
    model: Subject,
    options: Options,
    inputs: Inputs,
    past: Cache | None = None,
    runs: Runs = "continuous",
) -> Call:
    """Every choice made and checked against every other.

    `past`: the cache object that was passed, which the prompts continue from and which is filled.
    `runs`: whether the rows come and go ("continuous"), are one rectangle and take their steps
    together ("lockstep"), or a loop of the caller's decodes such a rectangle ("loop").
    """
    inputs = after_prefix(model, inputs, options)
    if options.effective.token_healing:
        require_healable(inputs, options)
    new = _most_new(options, inputs, model.context)
    options = replace(options, effective=_settled(options, inputs, new, model.context))
    reach = max(inputs.width + new, longest(options.criteria))
    strategy = strategy_of(options, reach - inputs.width)
    drafter, verification = drafts_of(model, options, strategy)
    _require_places(model, drafter, inputs, new)
    require_known_words(strategy, model.vocab_size)
    drafts = drafter is not None
    inputs, cache = _cached(model, options, inputs, past, runs, strategy, new, drafts)
    how = row_quantization(options.effective, model, past)
    stops = _stops(options, inputs.width + new)
    drafter = drafter if runs == "loop" else with_forced(drafter, options, strategy, model)
    processors = _processors(model, options, inputs, new, strategy)
    rows = options.captures or options.returns("output_scores", "output_logits")
    returned = rows or cache is not None
    lingers = runs == "lockstep" and (returned or _watches(processors, stops))
    alike = kept_rows(strategy) == strategy.width and (inputs.batch == 1 or drafter is None)
    wants = _wants(options, inputs, cached=cache is not None, history=alike and lingers)
    readout, companions = readout_of(model, options, inputs)
    draws = options.draws(inputs.number, inputs.batch)
    adapters = options.adapters(inputs.batch)
    requests = tuple(
        Request(
            request_id=str(inputs.number + row),
            prompt=prompt,
            strategy=strategy,
            draws=draws[row],
            processors=processors[row],
            stops=stops,
            companions=companions[row],
            readout=readout,
            drafter=drafter,
            verification=verification,
            wants=wants,
            max_length=reach - inputs.pads[row] + prompt.hidden,
            pad_prefix=inputs.pads[row],
            # A row that has ended is fed with it, so it must be a token.
            pad_token=options.fill if 0 <= options.fill < model.vocab_size else 0,
            prefix_token=inputs.fills[row] if inputs.fills else None,
            linger=lingers,
            salt=options.salt,
            hooks=options.hooks,
            adapters=adapters[row],
        )
        for row, prompt in enumerate(inputs.prompts)
    )
    return _fitting(model, Call(options, inputs, requests, runs, cache, how))


def _cached(
    model: Subject,
    options: Options,
    inputs: Inputs,
    past: Cache | None,
    runs: Runs,
    strategy: Strategy,
    new: int,
    drafts: bool,
) -> tuple[Inputs, Cache | None]:
    """The inputs after what is cached, at their positions, and the cache object that is filled."""
    hidden = strategy.reads.hidden and runs != "loop"
    if options.prefix is not None and hidden:
        refuse_unseen_states()
    cache, positions = past, inputs.total_width + new - 1
    if past is not None:
        require_possible(past, options, positions, drafts=drafts)
        inputs = continued(inputs, past, strategy.width, hidden=hidden)
    elif runs != "continuous":
        made = new_cache(options.effective, inputs, model, positions, drafts=drafts)
        cache = made if runs == "loop" or options.effective.return_dict_in_generate else None
    inputs = placed(inputs, new)
    require_begun(inputs)
    return inputs, cache


def _fitting(model: Subject, call: Call) -> Call:
    """The call; CapacityError where its rows cannot be held."""
    together, coded = call.runs != "continuous", call.quantization is not None
    require_rows_fit(model, call.inputs, call.strategy.width, together=together, coded=coded)
    return call


def _most_new(options: Options, inputs: Inputs, context: int | None) -> int:
    """How many tokens may follow the positions of a prompt, which count once, whether they are ids,
    embeddings or both; padding counts with them, as it stands in the rectangle that is returned.
    Ids that are not those of the positions count beside them in `max_length`, as in transformers.

    `max_new_tokens` wins over `max_length`; without either, as many as the context leaves, at most
    the default or what the allowed sequences need.
    """
    e, prompt = options.effective, inputs.prompt_width
    default = length_of_allowed(options, DEFAULT_NEW)
    if e.max_new_tokens is not None:
        return int(e.max_new_tokens)
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
        raise RequestError(
            "the prompt fills the model's context",
            wanted=f"fewer than {context} positions, or max_new_tokens",
            got=f"{prompt} positions",
            do="Shorten the prompt, or set max_new_tokens",
        )
    return default if context is None else min(default, context - prompt)


def require_unfilled(length: int, context: int | None) -> None:
    """Raise CapacityError where so many positions leave no room in what the model was made for."""
    if context is not None and length >= context:
        raise CapacityError(
            "the prompt fills the model's context",
            wanted=f"fewer than {context} tokens",
            got=length,
            do="Shorten the prompt, or take a model with a longer context",
        )


def _require_places(model: Subject, drafter: Drafter | None, inputs: Inputs, new: int) -> None:
    """RequestError where a row may leave the positions that its model has embeddings for, or the
    one that drafts for it."""
    limits = {"the model": model.core.network.most_positions}
    if isinstance(drafter, DraftModel) and isinstance(drafter.open, Assistant):
        limits["assistant_model"] = drafter.open.most_positions
    prompt = max(one.length for one in inputs.prompts)
    for name, most in limits.items():
        # The last token is not fed.
        if most is not None and prompt + new - 1 > most:
            raise RequestError(
                f"{name} learned embeddings of {most} positions, and cannot read beyond them",
                wanted=f"at most {max(most + 1 - prompt, 0)} new tokens after this prompt",
                got=f"a prompt of {prompt} positions and up to {new} new tokens",
                do="Lower max_new_tokens or max_length, or shorten the prompt",
            )


def _settled(options: Options, inputs: Inputs, new: int, context: int | None) -> Effective:
    """The configuration with the length and the pad id in force, and a notice to a caller who asks
    for more than the model was made for."""
    e = options.effective
    by = "max_length" if e.max_new_tokens is None else "max_new_tokens"
    _check_least(e, by, inputs.counted_width, new)
    positions = inputs.total_width + new - 1  # the last token is not fed
    if context is not None and by in e.caller and positions > context:
        notice = (
            f"{by}={e[by]} leads beyond what the model was made for; wanted at most {context} "
            f"positions; got {inputs.total_width} of the prompt and up to {new} new ones. "
            f"Lower {by}, or expect the text to get worse there."
        )
        e = replace(e, notices=(*e.notices, notice))
    if not inputs.width and inputs.source is None:
        e = replace(e, notices=(*e.notices, *unseen_prompt(e)))
    e = e.replaced(e.source(by), max_length=inputs.counted_width + new)
    if e.pad_token_id is None and options.pad is not None:
        e = e.replaced(e.source("eos_token_id"), pad_token_id=options.pad)
    return e


def _check_least(e: Effective, most: str, prompt: int, new: int) -> None:
    """A minimum beyond the maximum, which the field `most` set: an error if the caller set both, a
    warning if the minimum."""
    name = "min_length" if e.min_new_tokens is None else "min_new_tokens"
    before = prompt if name == "min_length" else 0
    if int(e[name] or 0) - before <= new or name not in e.caller:
        return
    what = f"{name}={e[name]} cannot be reached after a prompt of {prompt} positions"
    wanted, got = f"at most {new + before}", f"{most}={e[most]} ({e.source(most)})"
    if most in e.caller:
        raise RequestError(what, wanted=wanted, got=got, do=f"Lower {name} or raise {most}")
    text = f"{what}; wanted {wanted}; got {got}. Lower {name} or raise {most}."
    warn(text, UserWarning, stacklevel=6)


def _stops(options: Options, visible: int) -> tuple[Stop, ...]:
    """Every reason to end a sequence, the caller's own criteria included."""
    e = options.effective
    stops: list[Stop] = [MaxLength(visible)]
    if e.max_time is not None:
        stops.append(MaxTime.after(float(e.max_time)))
    if e.stop_strings is not None:
        if options.tokenizer is None:
            do = "Pass tokenizer=tokenizer to generate"
            raise RequestError(
                "stop_strings needs a tokenizer", wanted="tokenizer=...", got="none", do=do
            )
        one = isinstance(e.stop_strings, str)
        strings = (e.stop_strings,) if one else tuple(e.stop_strings)
        stops.append(StopStrings(strings, Spelling.of(options.tokenizer)))
    if options.eos:
        stops.append(EosToken(options.eos))
    return merge(stops, options.criteria)


def _wants(options: Options, inputs: Inputs, *, cached: bool, history: bool) -> Wants:
    """What is recorded only because the caller asked for it.

    `history`: criteria may read scores, since all rows take the same steps and stay. Drafts of
    several are not accepted alike, and of candidates it is known a step later which row they came
    from.
    """
    if options.prompt_logprobs is not None and inputs.embeds_width:
        raise RequestError(
            "prompt_logprobs needs to know what the prompt says",
            wanted="a prompt with one id per position",
            got=f"inputs_embeds and {inputs.width} ids" if inputs.width else "inputs_embeds only",
            do="Pass input_ids too, or leave prompt_logprobs out",
        )
    judged = options.best_of is not None and options.best_of.by == "likelihood"
    return Wants(
        layers=options.returns("output_hidden_states"),
        attentions=options.returns("output_attentions"),
        logprobs=0 if judged and options.logprobs is None else options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        cache=cached,
        history=history and options.returns("output_scores") and bool(options.criteria),
    )


def _watches(processors: Sequence[tuple[Any, ...]], stops: Sequence[Stop]) -> bool:
    """Whether the caller's own processors or criteria count on the rows of the whole rectangle.

    Ours look at each row by itself, also those that a caller has made.
    """
    own = (one for each in processors for one in each if isinstance(one, UserProcessor))
    criteria = any(isinstance(one, UserStop) for one in stops)
    return criteria or not all(one.takes_rows for one in own)


def _processors(
    model: Subject, options: Options, inputs: Inputs, new: int, strategy: Strategy
) -> list[tuple[Any, ...]]:
    """One tuple per row; the same one for all rows unless something depends on the row."""
    e, rows = options.effective, range(inputs.batch)
    # In visible ids: positions of embeddings count, and `min_new_tokens` goes before `min_length`.
    least = 0 if e.min_new_tokens is not None else int(e.min_length or 0) - inputs.embeds_width
    each = for_rows(e.replaced("default", min_length=max(least, 0)), inputs.batch)
    allowed = allowed_in(options, inputs.batch, new, model.vocab_size)
    searches = not strategy.streams and options.best_of is None
    beams = strategy.width if searches else 1

    def encode(text: str) -> list[int]:
        ids: list[int] = options.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def made(row: int) -> tuple[Any, ...]:
        number = inputs.number + row
        facts = Facts(
            eos=options.eos,
            prompt_length=inputs.width,
            max_length=inputs.width + new,
            encoder_ids=_read_ids(options, inputs, row),
            beams=beams,
            vocab_size=model.vocab_size,
            row=row,
            rows=inputs.batch,
            first_row=number if beams > 1 else number * strategy.width,
            prefix_allowed_tokens_fn=options.prefix_allowed_tokens,
            user=options.processors,
            allowed=allowed[row] if allowed else None,
            encode=None if options.tokenizer is None else encode,
            grammar=options.grammar,
        )
        return build(each[row], facts)

    differ = (
        each[0] is not each[-1],
        e.encoder_repetition_penalty != 1.0,
        e.encoder_no_repeat_ngram_size,
        options.prefix_allowed_tokens is not None,
        len(options.allowed) > 1,
        *map(varies, options.processors),
    )
    return [made(row) for row in rows] if any(differ) else [made(0)] * inputs.batch


def _read_ids(options: Options, inputs: Inputs, row: int) -> tuple[int, ...] | None:
    """The ids that the encoder, or a decoder alone, reads with their padding; None if unknown."""
    if inputs.source is not None:
        return tuple(inputs.source.ids[row].tolist()) if inputs.source.ids else None
    if inputs.prompts[row].ids is None:
        return None
    return tuple(inputs.visible(row, options.fill).tolist())


def require_healable(inputs: Inputs, options: Options) -> None:
    """RequestError unless these prompts are text of a tokenizer whose vocabulary can be read."""
    tokenizer = options.tokenizer
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
