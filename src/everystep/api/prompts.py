"""Every prompt of a call: what the model reads, what its encoder reads, what guidance avoids.

Checked before any compute; the encoder runs last, in `encode`, when nothing can be wrong any more.
What a rectangle of ids is, is known to `inputs`; what is done with prompts, to `call`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.api.call import Call, Encoder, Host
from everystep.api.inputs import Inputs, read_inputs, read_mask
from everystep.api.resolve import Tokens
from everystep.config import Effective
from everystep.errors import RequestError, message
from everystep.nn.modes import ordinary_mode
from everystep.nn.network import Heard
from everystep.types import Prompt, Wants

Given = Mapping[str, Any]

_ENCODER_ONLY = ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What stands on the encoder's side: B prompts to encode, or B states (S, E) that are done.

    `places`: (B,) where the states of each row stand in the rectangle that was passed, of `width`
    positions; `ids`: (B,) the rows of that rectangle, empty where ids are not known.
    """

    prompts: tuple[Prompt, ...] = ()
    states: tuple[Tensor, ...] = ()
    places: tuple[np.ndarray, ...] = ()
    width: int = 0
    ids: tuple[np.ndarray, ...] = ()


def read_prompts(model: Host, given: Given, tokens: Tokens) -> tuple[Inputs, Source]:
    """The rectangle that tokens are added to, and the encoder's side of it, empty without one."""
    if model.is_encoder_decoder:
        source, batch = _read_source(model, given, tokens)
        return _read_decoder(model, given, tokens, batch), source
    for name in _ENCODER_ONLY:
        if given.get(name) is not None:
            raise RequestError(
                message(
                    f"{name} was given to a model without an encoder",
                    do="Pass the prompt as input_ids or inputs_embeds",
                )
            )
    return _read_rectangle(model, given, tokens), Source()


def read_negative(
    model: Host, effective: Effective, user: Given, inputs: Inputs, tokens: Tokens
) -> tuple[Prompt, ...]:
    """(B,) what guidance leads away from; empty if it was not given."""
    ids, mask = user.get("negative_prompt_ids"), user.get("negative_prompt_attention_mask")
    if ids is None:
        if mask is not None:
            raise RequestError(
                message(
                    "negative_prompt_attention_mask was given without negative_prompt_ids",
                    do="Pass both or neither",
                )
            )
        return ()
    if effective.guidance_scale is None or effective.guidance_scale == 1:
        raise RequestError(
            message(
                "negative_prompt_ids has no effect without guidance_scale",
                wanted="guidance_scale > 1",
                got=effective.guidance_scale,
                do="Set guidance_scale, or leave negative_prompt_ids out",
            )
        )
    given = {"input_ids": ids, "attention_mask": mask}
    negative = _read_rectangle(model, given, tokens, "negative_prompt_ids")
    _require_rows("negative_prompt_ids", negative.batch, inputs.batch)
    return negative.prompts


def padding_notices(given: Given, inputs: Inputs, tokens: Tokens) -> tuple[str, ...]:
    """What to tell a caller whose prompts look padded, and whose padding cannot be recognised."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None or mask is not None or inputs.batch == 1 or tokens.pad not in tokens.eos:
        return ()
    table = torch.as_tensor(ids)
    edges = table[:, [0, -1]] == tokens.pad
    if not edges.any() or edges.all():
        return ()
    what = "prompts begin or end with the pad id, which also ends sequences"
    text = message(
        what,
        wanted="an attention_mask that says whether it is padding",
        got="none",
        do="Pass the attention_mask that the tokenizer returned; without it every id is read",
    )
    return (text,)


def encode(call: Call, model: Host, source: Source) -> Call:
    """The call, each row of it with its encoder states; as it was without an encoder."""
    if not source.prompts and not source.states:
        return call
    asked = call.wants.layers or call.wants.attentions
    heard = [Heard() if asked else None for _ in source.prompts]
    states = source.states or tuple(map(model.encode, source.prompts, heard))
    inputs = replace(call.inputs, prompts=_with_states(call.inputs.prompts, states))
    user = replace(call.user, negative=_with_states(call.user.negative, states))
    told = [one for one in heard if one is not None]
    # This goes to the caller, see `generate`.
    with ordinary_mode(), torch.no_grad():
        shown = _shown(call.wants, source, told)
    return replace(call, inputs=inputs, user=user, encoder=shown)


def _shown(wants: Wants, source: Source, heard: list[Heard]) -> Encoder:
    """What the rows' encoders told, each at its place in the rectangle that was passed."""
    starts = tuple(int(place[0]) for place in source.places)
    width = source.width or max(int(place[-1]) + 1 for place in source.places)
    layers = [one.layers for one in heard] if wants.layers else []
    attentions = [one.attentions for one in heard] if wants.attentions else []
    return Encoder(
        starts, width, _placed(layers, starts, width, 1), _placed(attentions, starts, width, 2)
    )


def _placed(
    rows: list[list[Tensor]], starts: tuple[int, ...], width: int, axes: int
) -> tuple[Tensor, ...] | None:
    """Per layer, (1, ..., S, ...) of every row -> one tensor; the S of the last two axes grow.

    `axes`: 1 for (S, E) with positions first, 2 for (S, S).
    """
    if not rows:
        return None

    def grown(layer: Tensor, start: int) -> Tensor:
        behind = width - start - layer.shape[-2]
        last = (start, behind) if axes == 2 else (0, 0)
        return torch.nn.functional.pad(layer[0], (*last, start, behind))

    return tuple(
        torch.stack([grown(layer, start) for layer, start in zip(told, starts, strict=True)])
        for told in zip(*rows, strict=True)
    )


def _with_states(prompts: tuple[Prompt, ...], states: tuple[Tensor, ...]) -> tuple[Prompt, ...]:
    return tuple(
        replace(prompt, encoder=state) for prompt, state in zip(prompts, states, strict=False)
    )


def _read_rectangle(model: Host, given: Given, tokens: Tokens, name: str = "input_ids") -> Inputs:
    return read_inputs(
        given.get("input_ids"),
        given.get("attention_mask"),
        given.get("inputs_embeds"),
        given.get("position_ids"),
        pad=tokens.pad,
        eos=tokens.eos,
        bos=tokens.bos,
        vocabulary=model.vocab_size,
        width=model.hidden_size,
        name=name,
    )


def _read_source(model: Host, given: Given, tokens: Tokens) -> tuple[Source, int]:
    """The encoder's side and how many rows it has."""
    if given.get("position_ids") is not None:
        raise RequestError(
            message(
                "position_ids has no meaning for this model, which knows distances alone",
                wanted="a model with a decoder only",
                got="one with an encoder",
                do="Leave position_ids out",
            )
        )
    if given.get("input_ids") is not None and given.get("inputs_embeds") is not None:
        raise RequestError(
            message(
                "inputs_embeds and input_ids both say what the encoder reads",
                wanted="one of them",
                got="both",
                do="Leave one of them out",
            )
        )
    if given.get("encoder_outputs") is not None:
        states, places = _read_states(given)
        return Source(states=states, places=places), len(states)
    read = _read_rectangle(model, given, tokens)
    rows = range(read.batch)
    places = tuple(map(read.passed, rows))
    ids = tuple(map(read.rectangle, rows)) if read.width else ()
    return Source(read.prompts, (), places, read.prompt_width, ids), read.batch


def _read_states(given: Given) -> tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]:
    """(B,) encoder states (S, E) of the caller's, those of padding left out, and their places."""
    outputs = given["encoder_outputs"]
    states = getattr(outputs, "last_hidden_state", None)
    if states is None and isinstance(outputs, tuple | list) and outputs:
        states = outputs[0]
    if not isinstance(states, Tensor) or states.dim() != 3 or not states.is_floating_point():
        raise RequestError(
            message(
                "encoder_outputs holds no encoder states",
                wanted="an object with last_hidden_state, a (batch, length, hidden) tensor",
                got=type(outputs).__name__,
                do="Pass what the encoder returned",
            )
        )
    if given.get("input_ids") is not None or given.get("inputs_embeds") is not None:
        raise RequestError(
            message(
                "encoder_outputs and a prompt for the encoder were both given",
                wanted="one of them",
                got="both",
                do="Leave input_ids and inputs_embeds out",
            )
        )
    mask = read_mask(given.get("attention_mask"), tuple(states.shape[:2]))
    places = tuple(np.flatnonzero(row) for row in mask)
    found = tuple(row[torch.from_numpy(own)] for row, own in zip(states, places, strict=True))
    return found, places


def _read_decoder(model: Host, given: Given, tokens: Tokens, batch: int) -> Inputs:
    """What the decoder starts from: the start token, or ids of the caller's behind it."""
    ids = given.get("decoder_input_ids")
    if ids is None:
        return _read_decoder_ids(model, _starts(tokens, batch), None, tokens)
    mask = given.get("decoder_attention_mask")
    read = _read_decoder_ids(model, ids, mask, tokens)
    _require_rows("decoder_input_ids", read.batch, batch)
    return _begun(read, tokens)


def _read_decoder_ids(model: Host, ids: Any, mask: Any, tokens: Tokens) -> Inputs:
    return read_inputs(
        ids,
        mask,
        None,
        None,
        pad=None,
        eos=tokens.eos,
        bos=tokens.bos,
        vocabulary=model.vocab_size,
        name="decoder_input_ids",
    )


def _starts(tokens: Tokens, batch: int) -> Tensor:
    """(B, 1) the first id of each row of the decoder."""
    starts = tokens.starts
    if not starts:
        raise RequestError(
            message(
                "the decoder has nothing to start from",
                wanted="decoder_start_token_id, bos_token_id or decoder_input_ids",
                got="none of them",
                do="Set decoder_start_token_id",
            )
        )
    if len(starts) not in (1, batch):
        raise RequestError(
            message(
                "decoder_start_token_id does not fit the rows",
                wanted=f"one id, or {batch}",
                got=len(starts),
                do="Pass one id, or one per row of the prompt",
            )
        )
    return torch.tensor(starts * (batch if len(starts) == 1 else 1))[:, None]


def _begun(read: Inputs, tokens: Tokens) -> Inputs:
    """The rows behind their start ids, unless a row has its own already."""
    if not tokens.starts:
        return read
    starts = _starts(tokens, read.batch).numpy()
    pairs = list(zip(read.prompts, starts, strict=True))
    if any(prompt.ids is not None and prompt.ids[0] == start[0] for prompt, start in pairs):
        return read
    prompts = tuple(
        Prompt(ids=np.concatenate([start, [] if prompt.ids is None else prompt.ids]).astype(int))
        for prompt, start in pairs
    )
    return replace(read, prompts=prompts, width=read.width + 1)


def _require_rows(name: str, found: int, batch: int) -> None:
    if found != batch:
        raise RequestError(
            message(
                f"{name} and the prompt differ in rows",
                wanted=batch,
                got=found,
                do=f"Pass one row of {name} per row of the prompt",
            )
        )
