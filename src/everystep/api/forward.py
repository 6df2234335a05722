"""A call of a model of this library: its arguments read, its forward, its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.adapters import read_steering_of_rows, steered
from everystep.api.subjects import OwnSubject
from everystep.cache.containers import Cache, DynamicCache, EncoderDecoderCache
from everystep.config.kinds import is_integer, is_number, require
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError, nearest, shown
from everystep.executors.positions import require_positions
from everystep.models.decoder import Decoder
from everystep.models.dense import holds_across
from everystep.models.vision.spec import VisionSpec
from everystep.nn.loss import NO_LABEL, Head, label_logprobs, label_losses
from everystep.nn.network import Heard, Network, Placed, holds_states
from everystep.nn.places import kept_places
from everystep.outputs import CausalLMOutput, Layers, Seq2SeqLMOutput, encoder_states
from everystep.requests.absent import ARGUMENTS, refuse_argument
from everystep.requests.arrays import read_adapters, read_ids, read_mask, require_known
from everystep.requests.caches import require_cache, require_room
from everystep.requests.features import PromptInput, placed_features, read_values
from everystep.requests.options import adapters_of
from everystep.requests.pictures import (
    PictureRow,
    features_of,
    picture_names,
    read_pictures,
    vision_of,
)
from everystep.requests.subject import Subject
from everystep.types import Injected, Prompt
from everystep.types.given_tensors import require_tensor

_FORMS: dict[str, tuple[str, tuple[int, ...], Literal["integers", "floats", "any"]]] = {
    "input_ids": ("a (batch, length) tensor of ids", (2,), "integers"),
    "attention_mask": ("a (batch, length) tensor of 0 and 1", (2,), "any"),
    "position_ids": ("a (batch, length) or (axes, batch, length) tensor", (1, 2, 3), "integers"),
    "inputs_embeds": ("a (batch, length, hidden) tensor", (3,), "floats"),
    "labels": ("a (batch, length) tensor of ids", (2,), "integers"),
    "decoder_input_ids": ("a (batch, length) tensor of ids", (2,), "integers"),
    "decoder_attention_mask": ("a (batch, length) tensor of 0 and 1", (2,), "any"),
    "decoder_inputs_embeds": ("a (batch, length, hidden) tensor", (3,), "floats"),
}


def forward(
    model: OwnSubject,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: object = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    decoder_input_ids: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    return_dict: bool | None = None,
    labels: Tensor | None = None,
    output_hidden_states: bool | None = None,
    output_attentions: bool | None = None,
    decoder_attention_mask: Tensor | None = None,
    encoder_outputs: object = None,
    input_features: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    output_logits: bool = True,
    label_smoothing: float = 0.0,
    output_logprobs: bool = False,
    adapter_names: object = None,
    adapters: object = None,
    steer: object = None,
    decoder_inputs_embeds: Tensor | None = None,
    cache_position: Tensor | None = None,
    **prompt_inputs: object,
) -> CausalLMOutput | Seq2SeqLMOutput | tuple[object, ...]:
    """Return logits of every position, (B, T, V), and the cache with these positions after its own.

    `input_ids` (B, T) or `inputs_embeds` (B, T, E) come after the S positions of
    `past_key_values`, a cache object that is filled in place. `attention_mask` (B, S + T).
    `position_ids` are S..S+T-1 unless given. `use_cache`: whether to begin a new cache where
    none was passed; None: as the model's configuration says. `logits_to_keep`: of how many of
    the last positions logits are given, 0 for all, or (n,) of which. `labels` (B, T): ids whose
    loss is given, each predicted from what stands before it, -100 for none: the sum divided by
    `num_items_in_batch`, by how many labels there are unless given. `label_smoothing`: how much of
    each label is spread over all ids. `output_logprobs`: whether the log-probability of each label
    is returned, (B, T). `output_logits`: whether logits are returned; without them the loss never
    holds those of all positions at once. `input_features` (B, channels, frames):
    what an encoder of sounds reads; `encoder_outputs` stand in the place of an encoder's prompt.
    With one it is `decoder_input_ids` (B, T), or `decoder_inputs_embeds` (B, T, E) in their place,
    that come after what is cached, or else what stands before each of the `labels`; keys and values
    of the encoder's states are cached beside them.
    `cache_position` (T,) says what holds anyway: S..S+T-1. `prompt_inputs`: pixels and grids,
    boxes, and what else the model's encoders read, as for `generate`; `adapter_names` and
    `adapters` name the adapters of all rows or of each, `steer` has vectors that are added after
    layers, as there.
    Differentiable after `requires_grad_`, and in adapters that learn. Returns a
    `CausalLMOutput`, with an encoder a `Seq2SeqLMOutput`, or with `return_dict=False` a tuple.
    """
    own = input_ids, attention_mask, position_ids, inputs_embeds, labels
    require_loss_settings(
        num_items_in_batch, output_logits, output_logprobs, label_smoothing, labels
    )
    require_inputs(model, *own, decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds)
    if labels is not None and decoder_input_ids is decoder_inputs_embeds is None:
        decoder_input_ids = labels_after_start(labels, model) if model.is_encoder_decoder else None
    decoded = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
    encoded = states_in_place(encoder_outputs, input_ids, inputs_embeds, input_features)
    inputs = inputs_embeds if input_ids is None else input_ids
    given = inputs if decoded is None else decoded
    kept = kept_positions(logits_to_keep, given)
    cache = cache_of_forward(model, given, past_key_values, use_cache)
    require_next(cache_position, cache, given)
    listening = listener(output_hidden_states, output_attentions)
    mixes = read_adapters(adapter_names, adapters, model.adapters)
    rows, length = (1, 0) if given is None else given.shape[:2]
    core = model.adapted_core(adapters_of(mixes, rows), length)
    if steer is not None:
        asked = read_steering_of_rows(core, steer, rows)
        core = replace(core, network=steered(cast(Decoder, core.network), asked, length))
    read = input_ids, position_ids, inputs_embeds
    seen = see_inputs(model, *read, attention_mask, cache, prompt_inputs, core.network.embed)
    whole = None if labels is None else require_labels(labels, given, kept, model.vocab_size)
    parts = decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask, encoded
    core.require_parts(seen.positions, *parts, input_features)
    if model.is_encoder_decoder and encoded is None and not holds_across(cache):
        source = seen.ids, attention_mask, seen.embeds, input_features
        encoded = core.read_source(*source, listening.encoder)
    states = core.forward(
        seen.ids,
        attention_mask,
        seen.positions,
        seen.embeds,
        decoder_input_ids=decoder_input_ids,
        decoder_inputs_embeds=decoder_inputs_embeds,
        cache=cache,
        kept=kept,
        decoder_attention_mask=decoder_attention_mask,
        encoder_states=encoded,
        heard=listening.decoder,
        declared=seen.declared,
        bare=True,
    )
    logits, loss, logprobs = None, None, None
    if output_logits:
        network = core.network.at(kept_places(states if given is None else given, kept))
        logits = network.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)
    if whole is not None:
        settings = num_items_in_batch, label_smoothing, output_logprobs
        loss, logprobs = _losses(core.network, states, whole, *settings)
        _require_learning(model, loss)
    result = listening.output(model, loss, logits, cache, encoded)
    result.logprobs = logprobs
    return result.to_tuple() if return_dict is False else result


@dataclass(frozen=True)
class Listening:
    """The layers and attentions that a call asks for, and where its stacks put them; None where
    nothing is asked of a stack."""

    layers: bool
    attentions: bool
    encoder: Heard | None
    decoder: Heard | None

    def output(
        self,
        model: OwnSubject,
        loss: Tensor | None,
        logits: Tensor | None,
        cache: Cache | None,
        encoded: Tensor | None,
    ) -> CausalLMOutput | Seq2SeqLMOutput:
        """Return the output of a model's kind, with what its stacks showed."""
        layers, weights, across = self._shown(self.decoder)
        if not model.is_encoder_decoder:
            return CausalLMOutput(loss, logits, cache, layers, weights)
        result = Seq2SeqLMOutput(loss, logits, cache, layers, weights, across, encoded)
        result.encoder_hidden_states, result.encoder_attentions, _ = self._shown(self.encoder)
        return result

    def _shown(self, heard: Heard | None) -> tuple[Layers | None, Layers | None, Layers | None]:
        """Return what a stack showed, None for nothing: of its layers, of their attentions, and of
        those over encoder states."""
        if heard is None:
            return None, None, None
        weights, across = (tuple(one) or None for one in (heard.attentions, heard.across))
        layers = tuple(heard.layers) or None if self.layers else None
        return (layers, weights, across) if self.attentions else (layers, None, None)


def _losses(
    network: Network,
    states: Tensor,
    labels: Tensor,
    items: int | Tensor | None,
    smoothing: float,
    each_one: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of states (B, T, E) with labels (B, T), over so many items unless over all,
    and the log-probability of each label, (B, T), if asked."""
    predicted = _predicted(network, states, labels.to(states.device))
    size = network.spec.vocab_size
    found = label_losses(*predicted, size, smooths=smoothing > 0)
    loss = found.smoothed(smoothing) / (found.count if items is None else items)
    if not each_one:
        return loss, None
    each = label_logprobs(*predicted, size).view(len(labels), -1)
    # Nothing stands before the first label of a decoder.
    return loss, F.pad(each, (labels.shape[1] - each.shape[1], 0))


def _require_learning(model: OwnSubject, loss: Tensor) -> None:
    """Refuse a loss in training mode of a model of which nothing learns, before its backward
    fails."""
    wanted = model.training and torch.is_grad_enabled() and not loss.requires_grad
    if wanted and not model.anything_learns:
        raise RequestError(
            "nothing learns from this loss: no weight and no adapter requires gradients",
            wanted="a model that learns, in training mode",
            got="fixed weights",
            do="Call model.requires_grad_() or model.add_adapter(...), or else model.eval()",
        )


def labels_after_start(labels: Tensor, model: Subject) -> Tensor:
    """Return (B, T) what a decoder reads to predict its labels: each one's predecessor, after the
    start token; RequestError where the model says none."""
    own, config = model.generation_config, model.config
    found = (own.decoder_start_token_id, getattr(config, "decoder_start_token_id", None))
    start: Any = next((one for one in found if is_integer(one)), None)
    pads = (own.pad_token_id, getattr(config, "pad_token_id", None))
    pad: Any = next((one for one in pads if is_integer(one)), 0)
    if start is None:
        do = "Set model.generation_config.decoder_start_token_id, or pass decoder_input_ids"
        raise RequestError("the model says no first token of a decoder", got=shown(found), do=do)
    begin = torch.full_like(labels[:, :1], int(start))
    shifted = torch.cat([begin, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == NO_LABEL, int(pad))


def _predicted(network: Network, states: Tensor, labels: Tensor) -> tuple[Head, Tensor, Tensor]:
    """Return the head, the states (N, E) that predict, of (B, T, E), and their labels (N,), of (B,
    T): each is predicted from the position before it, or with an encoder from its own."""
    places = kept_places(labels, slice(None)).view(labels.shape).to(states.device)
    if not network.encodes:
        states, labels, places = states[:, :-1], labels[:, 1:], places[:, :-1]
    rows = places.flatten()

    def head(hidden: Tensor, among: Tensor) -> Tensor:
        return network.at(rows[among]).logits(hidden)

    return head, states.flatten(0, 1), labels.flatten()


def require_inputs(model: Subject, *given: object) -> None:
    """Refuse an input, in the order above, that is no tensor or one of another form."""
    for (name, (wanted, dims, holds)), one in zip(_FORMS.items(), given, strict=True):
        if one is None:
            continue
        found = require_tensor(one, name, wanted, dims=dims, holds=holds)
        if name == "position_ids" and not found.numel():
            raise RequestError("position_ids are empty", wanted=wanted, got=tuple(found.shape))
        if "inputs_embeds" in name and found.shape[2] != model.width:
            what, width = f"{name} has another width than the model", found.shape[2]
            wanted = f"{model.width} values per position"
            raise RequestError(what, wanted=wanted, got=width)


def require_loss_settings(
    items: object, output_logits: object, logprobs: object, smoothing: object, labels: object
) -> None:
    """Refuse settings of a loss that cannot be, or that stand where there are no labels."""
    for key, flag in (("output_logits", output_logits), ("output_logprobs", logprobs)):
        require(isinstance(flag, bool), key, "True or False", flag)
    counts = is_number(items) or (isinstance(items, Tensor) and items.numel() == 1)
    fits = items is None or (counts and float(items) > 0)  # type: ignore[arg-type]
    require(fits, "num_items_in_batch", "how many labels the whole batch has", items)
    fits = is_number(smoothing) and 0 <= smoothing < 1  # type: ignore[operator]
    require(fits, "label_smoothing", "a number of at least 0 and below 1", smoothing)
    asked = {"num_items_in_batch": items is not None, "label_smoothing": smoothing}
    asked["output_logprobs"] = logprobs
    if labels is None and any(asked.values()):
        name = next(name for name, one in asked.items() if one)
        raise RequestError(f"{name} belongs to a loss", wanted="labels", do=f"Leave {name} out")


def require_labels(
    labels: Tensor, inputs: Tensor | None, kept: slice | Tensor, vocab_size: int
) -> Tensor:
    """Return labels (B, T) as integers; RequestError unless there is one for each position of the
    inputs (B, T, ...), all of them kept, and each is an id or -100."""
    shape = None if inputs is None else tuple(inputs.shape[:2])
    whole = isinstance(kept, slice) and not kept.start
    if shape is not None and (tuple(labels.shape) != shape or not whole):
        raise RequestError(
            "labels do not fit the logits",
            wanted=f"{shape}, one per position",
            got=tuple(labels.shape),
            do="Pass a label for every position, -100 for none, and leave logits_to_keep out",
        )
    absent = (labels != NO_LABEL) & ((labels < 0) | (labels >= vocab_size))
    if absent.any():
        raise RequestError(
            "labels hold an id outside the vocabulary",
            wanted=f"0 to {vocab_size - 1}, or -100 for no label",
            got=int(labels[absent][0]),
            do="Check that tokenizer and model belong together",
        )
    return labels.long()


def require_next(places: object, cache: Cache | None, inputs: Tensor | None) -> None:
    """Refuse a `cache_position` (T,) that puts the inputs elsewhere than behind what is cached."""
    if places is None or inputs is None:
        return
    start = 0 if cache is None else int(cache.get_seq_length())
    wanted = list(range(start, start + inputs.shape[1]))
    form = "a (length,) tensor of integers"
    found = require_tensor(places, "cache_position", form, dims=(1,), holds="integers").tolist()
    if found != wanted:
        raise RequestError(
            "cache_position is not where the inputs are cached: behind what is there",
            wanted=f"{start} to {start + inputs.shape[1] - 1}",
            got=shown(found),
            do="Leave it out, and pass position_ids to say where they stand",
        )


def kept_positions(wanted: object, inputs: Tensor | None) -> slice | Tensor:
    """Return the positions of the inputs (B, T, ...) whose logits are given: the last `wanted` of
    them, all for 0, or those that a tensor (n,) names; RequestError for anything else."""
    length = inputs.shape[1] if inputs is not None and inputs.dim() > 1 else 0
    if is_integer(wanted) and wanted >= 0:  # type: ignore[operator]
        return slice(-wanted, None)  # type: ignore[operator]
    if isinstance(wanted, Tensor):
        form = "an integer, or a (n,) tensor of integers, at least one"
        require_tensor(wanted, "logits_to_keep", form, dims=(1,), holds="integers")
        inside = (wanted >= -length) & (wanted < length)
        if len(wanted) and bool(inside.all()):
            return wanted
    raise RequestError(
        "logits_to_keep names no positions of the inputs",
        wanted=f"an integer of at least 0, or a 1-D tensor of integers below {length}",
        got=shown(wanted),
        do="Leave it out for the logits of every position",
    )


def states_in_place(given: object, *read: Tensor | None) -> Tensor | None:
    """Return (B, S, E) the caller's encoder states, None without; RequestError beside what an
    encoder would read."""
    if given is None:
        return None
    if any(one is not None for one in read):
        what = "encoder_outputs and a prompt for the encoder were both given"
        raise RequestError(what, do="Leave what the encoder would read out")
    return encoder_states(given)


def listener(layers: object, attentions: object) -> Listening:
    """Return where a call's stacks put what is asked for; RequestError where a flag is none."""
    for name, flag in (("output_hidden_states", layers), ("output_attentions", attentions)):
        require(flag is None or isinstance(flag, bool), name, "True, False or None", flag)
    asked = bool(layers or attentions)
    places = (Heard(), Heard()) if asked else (None, None)
    return Listening(bool(layers), bool(attentions), *places)


def cache_of_forward(
    model: Subject, inputs: Tensor | None, passed: object, use_cache: bool | None
) -> Cache | None:
    """Return the cache that a forward of `inputs` (B, T, ...), a decoder's, adds to; None if it
    keeps nothing.

    As in transformers a passed one is filled whatever `use_cache` says, and without it the
    model's configuration decides, unless layers are computed once more for gradients.
    """
    recurrent = holds_states(model.core.network.stores)
    again = getattr(model.core.network, "recomputes", False) and torch.is_grad_enabled()
    if again and (use_cache or passed is not None):
        raise RequestError(
            "layers that are computed once more would add to a cache twice",
            wanted="no cache beside gradient checkpointing",
            got="past_key_values" if use_cache is None else f"use_cache={use_cache}",
            do="Pass use_cache=False, or compute under torch.no_grad()",
        )
    if use_cache is None:
        keeps = not recurrent and not again
        use_cache = bool(getattr(model.config, "use_cache", True)) and keeps
    if passed is None and not use_cache:
        return None
    if passed is None:
        if recurrent:
            raise UnsupportedError(
                "a model with recurrent layers keeps no cache object",
                got="use_cache=True",
                do="Leave it out and pass all input_ids each time, or call generate",
            )
        made = DynamicCache(config=list(model.windows))
        return EncoderDecoderCache(made, DynamicCache()) if model.is_encoder_decoder else made
    cache = require_cache(passed, model)
    if inputs is not None and inputs.dim() > 1:
        batch, length = inputs.shape[:2]
        if cache.batch_size not in (-1, batch):
            what, do = "past_key_values differs from the inputs in rows", "batch_select_indices"
            raise RequestError(
                what, wanted=batch, got=cache.batch_size, do=f"Choose rows with {do}"
            )
        if "grow" not in cache.abilities:
            require_room(cache, int(cache.get_seq_length()) + length)
    return cache


@dataclass(frozen=True, slots=True, eq=False)
class SeenInputs:
    """The ids (B, T) or embeddings (B, T, E) that a forward reads, their position ids, and values
    of inputs that the network declares, for places among the B * T positions."""

    ids: Tensor | None
    positions: Tensor | None
    embeds: Tensor | None
    declared: Mapping[str, Placed] | None = None


def see_inputs(
    model: Subject,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    mask: Tensor | None,
    cache: Cache | None,
    given: Mapping[str, object],
    embed: Callable[[Tensor], Tensor],
) -> SeenInputs:
    """Return the inputs with the features of what is `given` by name, pictures or others.

    `embed`: turns ids (B, T) into (B, T, E), with the adapters of the call.
    UnknownArgumentError for other names, RequestError for what does not fit.
    """
    declared = model.prompt_inputs
    names = (*picture_names(model), *(one.name for one in declared))
    unknown = [name for name in given if name not in names]
    for name in ARGUMENTS.keys() & unknown:
        refuse_argument(name, given[name])
    if unknown := [name for name in unknown if name not in ARGUMENTS]:
        near = nearest(unknown[0], names)
        do = f"Perhaps you meant {near}" if near else "See help(model)"
        raise UnknownArgumentError(f"a forward of this model knows no {unknown[0]!r}", do=do)
    if position_ids is not None:
        require_positions(position_ids)
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        return SeenInputs(input_ids, position_ids, inputs_embeds)
    if input_ids is None or inputs_embeds is not None:
        do = "Pass input_ids, or the features among inputs_embeds"
        raise RequestError("a forward finds the places of features among ids", do=do)
    vision = vision_of(model)
    if vision is None:
        return _see_features(model, declared, input_ids, position_ids, named, embed)
    seen = input_ids, position_ids, mask, cache, named
    return _see_pictures(model, vision, declared, *seen, embed)


def _see_features(
    model: Subject,
    declared: Sequence[PromptInput],
    input_ids: Tensor,
    positions: Tensor | None,
    named: Mapping[str, object],
    embed: Callable[[Tensor], Tensor],
) -> SeenInputs:
    """Return the inputs with features of encoders at their tokens, which need be no ids of the
    vocabulary."""
    ids = read_ids(input_ids, "input_ids")
    values = read_values(declared, named, len(ids))
    found = placed_features(declared, [Prompt(ids=own) for own in ids], values, model.width)
    tokens = [one.token for one in declared if one.token is not None]
    special = torch.isin(input_ids, torch.tensor(tokens, device=input_ids.device))
    embeds = embed(input_ids.masked_fill(special, 0).to(model.device))
    return SeenInputs(None, positions, *_injected(embeds, found))


def _see_pictures(
    model: Subject,
    vision: VisionSpec,
    declared: Sequence[PromptInput],
    input_ids: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    cache: Cache | None,
    named: Mapping[str, object],
    embed: Callable[[Tensor], Tensor],
) -> SeenInputs:
    """Return the inputs with the features of a tower at their places, on three axes."""
    if cache is not None and int(cache.get_seq_length()) and positions is None:
        do = "Pass position_ids too, or call generate"
        raise RequestError("pictures after cached positions stand at unknown positions", do=do)
    ids = read_ids(input_ids, "input_ids")
    require_known(ids, model.vocab_size, "input_ids")
    real = read_mask(None if mask is None else mask[:, -ids.shape[1] :], ids.shape)
    rows = [PictureRow(Prompt(ids=own), marks) for own, marks in zip(ids, real, strict=True)]
    of_tower = {name: one for name, one in named.items() if name in picture_names(model)}
    prompts, pictures = read_pictures(vision, of_tower, rows, placed=positions is not None)
    if positions is None and all(one.positions is not None for one in prompts):
        positions = torch.stack([one.positions for one in prompts], dim=1)  # type: ignore[misc]
    elif positions is None:
        length = torch.from_numpy(real).long().cumsum(-1) - 1
        plain = length.clamp(min=0).expand(3, -1, -1)
        each = [
            own if one.positions is None else one.positions
            for one, own in zip(prompts, plain.unbind(1), strict=True)
        ]
        positions = torch.stack(each, dim=1)
    embeds = embed(input_ids.to(model.device))
    found = features_of(model, prompts, pictures)
    if named.keys() != of_tower.keys():
        values = read_values(declared, named, len(ids))
        others = placed_features(declared, prompts, values, model.width)
        found = [[*own, *other] for own, other in zip(found, others, strict=True)]
    return SeenInputs(None, positions, *_injected(embeds, found))


def _injected(
    embeds: Tensor, found: list[list[Injected]]
) -> tuple[Tensor, Mapping[str, Placed] | None]:
    """Return (B, T, E) embeddings with features in their places, and what those add to layers."""
    flat, length = embeds.flatten(0, 1).clone(), embeds.shape[1]
    added: list[tuple[Tensor, Tensor]] = []
    for row, parts in enumerate(found):
        for one in parts:
            places = (torch.tensor(one.positions) + row * length).to(flat.device)
            flat = flat.index_copy(0, places, one.embeds.to(flat))
            if one.deepstack is not None:
                added.append((places, one.deepstack.to(flat)))
    if not added:
        return flat.view_as(embeds), None
    places, values = map(torch.cat, zip(*added, strict=True))
    return flat.view_as(embeds), {"deepstack": Placed(places, values)}
