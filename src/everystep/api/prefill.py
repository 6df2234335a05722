"""`prefill`: a prompt is fed once, and many calls go on from what the model holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from torch import Tensor, nn

from everystep.adapters import Mix
from everystep.api.model import LanguageModel, paired
from everystep.cache.pasts import without_across
from everystep.draws import SeededDraws
from everystep.drivers.complete import encoder_states
from everystep.drivers.driver import Driver, finished
from everystep.drivers.synced import synced
from everystep.engine import Engine, Lockstep
from everystep.errors import RequestError, UnsupportedError
from everystep.models import Model
from everystep.models.dense import require_within
from everystep.nn.modes import inference_mode
from everystep.requests.door import KEYWORDS, Arguments, Objects, PromptValues, lists_options, sort
from everystep.requests.features import Rows, with_features
from everystep.requests.options import Prefix, adapters_of
from everystep.requests.pictures import Pictures, with_pictures
from everystep.requests.prefixes import after_prefix, require_whole
from everystep.requests.prompts import PromptLike, TokenizerLike, read_prompt
from everystep.requests.reading import read_options
from everystep.requests.rectangles import read_inputs
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy
from everystep.types import EncoderSource, Past, Prompt, Request, ResolvedAdapter, Wants

if TYPE_CHECKING:
    from everystep.requests.keywords import PromptInputs

_CHUNK = 1024
"""How many positions are fed at once."""
_BEGUN = "decoder_input_ids"


@lists_options("prefill")
def prefill(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None = None,
    prompt: PromptLike | None = None,
    *,
    prefix: Prefix | None = None,
    adapter_names: str | None = None,
    steer: Mapping[int, Tensor] | None = None,
    **inputs: Unpack[PromptInputs],
) -> Prefix:
    """Feed a prompt once, and return the prefix from which calls go on.

    `prompt`: a text, a list of ids, messages, which are rendered without the beginning of an
    answer, or a mapping of any of these and what stands beside them, as for `es.generate`. Without
    it, one row of what `model.generate` reads: `input_ids`, `inputs_embeds`, `position_ids`,
    `attention_mask`, and what the model declares. `prefix`: another one that this one goes on from.
    `adapter_names`: the adapter that it is fed with; `steer`: vectors that are added after layers,
    which calls that go on from it need too. The handle keeps a copy of the keys and
    values, `prefix.nbytes` of them. UnsupportedError for a model with weights that learn,
    RequestError for what does not fit.

    Where an encoder reads the prompt, it reads it here and in no call that goes on from the prefix,
    and `encoder_outputs` may stand in its place. The decoder begins with `decoder_input_ids`, or
    with its start token.

    Example:

        >>> prefix = es.prefill(model, tokenizer, "All that follows is true.")
        >>> text = es.generate(model, tokenizer, " So", prefix=prefix, max_new_tokens=4)
    """
    model = paired(model, tokenizer)
    if isinstance(model.core, Model) and model.core.learns:
        raise UnsupportedError(
            "a prefix of weights that may change would be of weights of before",
            wanted="a model whose weights stay as they are",
            got="one that learns",
            do="Pass model.frozen()",
        )
    given = _passed(model, tokenizer, prompt, prefix, {**inputs})
    objects = Objects(prefix=prefix, adapter_names=adapter_names)
    if steer is not None:
        objects = replace(objects, steer=[steer])
    asked = Arguments(objects=objects)
    options = read_options(model, asked, tokenizer)
    with synced(model, (options,), None):
        read = read_inputs(model, given, options.ends, options.prefix)
        if options.prefix is not None:
            read = after_prefix(options.prefix, model, read, options)
        if read.batch != 1:
            do = "Make one per row"
            raise RequestError("a prefix is one row", wanted=1, got=read.batch, do=do)
        (own,) = read.prompts
        require_whole(own)
        require_within(own.length, model.core.network.most_positions, "the decoder")
        (adapters,) = adapters_of(options.adapters, 1)
        resolved = options.resolved_of(adapters)
        with inference_mode():
            past: Past | None
            source = None if read.source is None else _encoded(model, read.source)
            if source is None:
                past = _held(model, own, read.values, read.pictures, adapters, resolved)
            else:
                own = replace(own, encoder=source.states[0])
                past = _held_beside(model, own, adapters, resolved)
    own, changes = replace(own, past=None), options.weight_changes
    return Prefix(own, past, model.core, adapters, resolved, changes, source)


def _passed(
    model: LanguageModel,
    tokenizer: TokenizerLike | None,
    prompt: PromptLike | None,
    prefix: Prefix | None,
    inputs: Mapping[str, object],
) -> PromptValues:
    """Return what is read, from a prompt or from inputs by name; ids of a decoder may stand beside
    a prompt for its encoder."""
    passed = {name: value for name, value in inputs.items() if value is not None}
    beside = passed.pop(_BEGUN, None) if prompt is not None else None
    if (prompt is None) == (not passed):
        raise RequestError(
            "prefill needs one prompt", wanted="prompt, or inputs by name", got="both or neither"
        )
    _refuse_choices(passed, listens=model.listens)
    given = sort("prefill", model, passed).prompt
    if prompt is not None:
        given = read_prompt(model, tokenizer, prompt, starts_answer=False, prefix=prefix)
    if beside is not None:
        if given.decoder_input_ids is not None:
            raise RequestError(f"{_BEGUN} was given twice", wanted="one of them", got="both")
        given = replace(given, decoder_input_ids=beside)
    if given.past_key_values is not None:
        do = "Pass past_key_values to model.generate, or the whole prompt here"
        raise RequestError("a prefix is made from what is fed", got="past_key_values", do=do)
    if given.assistant_encoder_outputs is not None:
        do = "Pass assistant_encoder_outputs to the calls that go on from it"
        raise RequestError("a prefix is of one model", got="assistant_encoder_outputs", do=do)
    return given


def _refuse_choices(given: Mapping[str, object], *, listens: bool) -> None:
    """Refuse keywords that are about tokens, of which none is chosen here."""
    owners = {"field", "object", "speech"} if listens else {"field", "object"}
    if others := [name for name in given if name in KEYWORDS and KEYWORDS[name].owner in owners]:
        raise RequestError(
            "nothing is chosen while a prefix is fed",
            wanted="what is read, adapter_names and steer",
            got=", ".join(others),
            do="Pass these to the calls that go on from it",
        )


def _encoded(model: LanguageModel, source: EncoderSource) -> EncoderSource:
    """Return what an encoder reads, with the states that it has made of it."""
    return source if source.states else source.held(encoder_states(model, source))


def _held_beside(
    model: LanguageModel,
    prompt: Prompt,
    adapters: Mix,
    resolved: tuple[ResolvedAdapter, ...],
) -> Past | None:
    """Return the past of a row of a decoder beside an encoder after all ids but the last, which a
    call may choose after; None if there are none."""
    if prompt.length == 1 or prompt.ids is None:
        return None
    past = _held(model, replace(prompt, ids=prompt.ids[:-1]), adapters=adapters, resolved=resolved)
    # Rows of this library make keys and values of encoder states from these.
    return without_across(past) if isinstance(model.core, Model) else past


def _held(
    model: LanguageModel,
    prompt: Prompt,
    values: Rows = (),
    pictures: Sequence[Pictures] = (),
    adapters: Mix = (),
    resolved: tuple[ResolvedAdapter, ...] = (),
) -> Past:
    """Return the past of a row after the whole prompt, features of values and pictures included."""
    request = Request(
        "prefix",
        prompt,
        Greedy(),
        SeededDraws(0),
        stops=(MaxLength(0),),
        wants=Wants(cache=True),
        linger=True,
        adapters=adapters,
        resolved=resolved,
    )
    requests = with_features(model.prompt_inputs, (request,), values, model.width)
    (request,) = with_pictures(model, requests, pictures) if any(pictures) else requests
    engine = Engine(model.executor(request.needs), Lockstep(_CHUNK))
    (group,) = finished(Driver(engine), (request,))
    (past,) = group.pasts
    return past
