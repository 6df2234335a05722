"""`prefill`: a prompt is fed once, and many calls go on from what the model holds of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from everystep.api.inputs import read_inputs
from everystep.api.model import LanguageModel
from everystep.api.options import MODEL_INPUTS, read_options
from everystep.api.prefixes import Prefix, after_prefix, require_whole
from everystep.api.prompts import PromptLike, read_prompt
from everystep.draws import SeededDraws
from everystep.engine import Engine, Lockstep
from everystep.errors import RequestError, UnsupportedError
from everystep.nn.modes import inference_mode
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy
from everystep.text import Tokenizer
from everystep.types import Past, Prompt, Request, Wants

_CHUNK = 1024
"""How many positions are fed at once."""


def prefill(
    model: LanguageModel,
    tokenizer: Tokenizer | None = None,
    prompt: PromptLike | None = None,
    *,
    prefix: Prefix | None = None,
    **inputs: Any,
) -> Prefix:
    """The prompt is fed once, and everything that continues from it starts there.

    `prompt`: a text, a list of ids, or messages, which are rendered without the beginning of an
    answer. Without it, one row of what `model.generate` reads: `input_ids`, `inputs_embeds`,
    `position_ids`, `attention_mask`. `prefix`: another one that this one goes on from. The handle
    keeps a copy of the keys and values, `prefix.nbytes` of them. UnsupportedError for a model with
    an encoder, RequestError for what does not fit.
    """
    if model.core.network.encodes:
        raise UnsupportedError(
            "a model with an encoder has no prefix: its decoder starts from one token",
            do="Pass encoder_outputs to skip the encoder",
        )
    if (prompt is None) == (not inputs):
        raise RequestError(
            "prefill needs one prompt", wanted="prompt, or inputs by name", got="both or neither"
        )
    given = {name: value for name, value in inputs.items() if value is not None}
    if prompt is not None:
        given = read_prompt(model, tokenizer, prompt, starts_answer=False, prefix=prefix)
    if "past_key_values" in given:
        do = "Pass past_key_values to model.generate, or the whole prompt here"
        raise RequestError("a prefix is made from what is fed", got="past_key_values", do=do)
    options = read_options(model, {**given, "prefix": prefix}, MODEL_INPUTS, tokenizer)
    read = after_prefix(model, read_inputs(model, given, options), options)
    if read.batch != 1:
        raise RequestError("a prefix is one row", wanted=1, got=read.batch, do="Make one per row")
    (own,) = read.prompts
    require_whole(own)
    with inference_mode():
        past = _held(model, own)
    return Prefix(replace(own, past=None), past, model.core)


def _held(model: LanguageModel, prompt: Prompt) -> Past:
    """What a row holds after the whole prompt."""
    request = Request(
        "prefix",
        prompt,
        Greedy(),
        SeededDraws(0),
        stops=(MaxLength(0),),
        wants=Wants(cache=True),
        linger=True,
    )
    engine = Engine(model.executor(request.needs), Lockstep(_CHUNK))
    group = engine.submit(request)
    while engine.pending:
        engine.step()
    if group.error is not None:
        raise group.error
    (past,) = group.pasts
    return past
