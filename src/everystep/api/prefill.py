"""`prefill`: a prompt is fed once, and many calls go on from what the model holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from torch import Tensor, nn

from everystep.adapters import Mix
from everystep.api.model import LanguageModel, paired
from everystep.draws import SeededDraws
from everystep.drivers.driver import Driver, finished
from everystep.drivers.synced import synced
from everystep.engine import Engine, Lockstep
from everystep.errors import RequestError, UnsupportedError
from everystep.models import Model
from everystep.nn.modes import inference_mode
from everystep.requests.door import KEYWORDS, Arguments, Objects, lists_options, sort
from everystep.requests.features import Rows, with_features
from everystep.requests.options import Prefix, adapters_of
from everystep.requests.pictures import Pictures, with_pictures
from everystep.requests.prefixes import after_prefix, require_fitting, require_whole
from everystep.requests.prompts import PromptLike, TokenizerLike, read_prompt
from everystep.requests.reading import read_options
from everystep.requests.rectangles import read_inputs
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy
from everystep.types import Past, Prompt, Request, ResolvedAdapter, Wants

if TYPE_CHECKING:
    from everystep.requests.keywords import PromptInputs

_CHUNK = 1024
"""How many positions are fed at once."""


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
    values, `prefix.nbytes` of them. UnsupportedError for a model with an encoder, or with weights
    that learn, RequestError for
    what does not fit.

    Example:

        >>> prefix = es.prefill(model, tokenizer, "All that follows is true.")
        >>> text = es.generate(model, tokenizer, " So", prefix=prefix, max_new_tokens=4)
    """
    model = paired(model, tokenizer)
    if model.core.network.encodes:
        raise UnsupportedError(
            "a model with an encoder has no prefix: its decoder starts from one token",
            do="Pass encoder_outputs to skip the encoder, and past_key_values to go on after what "
            "its decoder has read",
        )
    if isinstance(model.core, Model) and model.core.learns:
        raise UnsupportedError(
            "a prefix of weights that may change would be of weights of before",
            wanted="a model whose weights stay as they are",
            got="one that learns",
            do="Pass model.frozen()",
        )
    if (prompt is None) == (not inputs):
        raise RequestError(
            "prefill needs one prompt", wanted="prompt, or inputs by name", got="both or neither"
        )
    if prompt is None:
        passed = {name: value for name, value in inputs.items() if value is not None}
        _refuse_choices(passed)
        given = sort("prefill", model, passed).prompt
    else:
        given = read_prompt(model, tokenizer, prompt, starts_answer=False, prefix=prefix)
    if given.past_key_values is not None:
        do = "Pass past_key_values to model.generate, or the whole prompt here"
        raise RequestError("a prefix is made from what is fed", got="past_key_values", do=do)
    objects = Objects(prefix=prefix, adapter_names=adapter_names)
    if steer is not None:
        objects = replace(objects, steer=[steer])
    asked = Arguments(objects=objects)
    options = read_options(model, asked, tokenizer)
    with synced(model, (options,), None):
        read = read_inputs(model, given, options.ends, options.prefix)
        if options.prefix is not None:
            require_fitting(options.prefix, model, read, options)
            read = after_prefix(options.prefix, model, read)
        if read.batch != 1:
            do = "Make one per row"
            raise RequestError("a prefix is one row", wanted=1, got=read.batch, do=do)
        (own,) = read.prompts
        require_whole(own)
        (adapters,) = adapters_of(options.adapters, 1)
        resolved = options.resolved_of(adapters)
        with inference_mode():
            past = _held(model, own, read.values, read.pictures, adapters, resolved)
    own, changes = replace(own, past=None), options.weight_changes
    return Prefix(own, past, model.core, adapters, resolved, changes)


def _refuse_choices(given: Mapping[str, object]) -> None:
    """Refuse keywords that are about tokens, of which none is chosen here."""
    known = ((name, KEYWORDS.get(name)) for name in given)
    if others := [name for name, row in known if row and row.owner in ("field", "object")]:
        raise RequestError(
            "nothing is chosen while a prefix is fed",
            wanted="what is read, adapter_names and steer",
            got=", ".join(others),
            do="Pass these to the calls that go on from it",
        )


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
