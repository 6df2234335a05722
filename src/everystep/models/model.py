"""A model: a network with the configuration it was made from, and a plain forward.

A model that does not learn never changes once it is built, so any number of calls may share it. It
holds no cache: the plain forward reads rectangles of tokens, and a cache object that its caller
keeps; executors run works against rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from everystep.cache.containers import Cache
from everystep.errors import RequestError, UnsupportedError
from everystep.models.config import ModelConfig
from everystep.models.decoder import Decoder
from everystep.models.dense import dense_states, embedded, encoded_states, holds_across
from everystep.models.encoders import PromptEncoder
from everystep.models.vision.tower import VisionTower
from everystep.nn.modes import inference_mode, outside_autocast
from everystep.nn.network import Heard, Network, Placed, State
from everystep.nn.panels import Panels
from everystep.nn.places import kept_places
from everystep.types import InputSpec, Prompt

Encode = Callable[[Tensor, None, Heard | None], Tensor]
"""Embeddings (1, S, E), all of them real, -> encoder states (1, S, E): see `Network.encode`."""


def refuse_copies(holder: object, protocol: object) -> NoReturn:
    """Refuse, as `__reduce_ex__`, to pickle an object with a model in it, or to copy its weights.

    That would take gigabytes, and twice as many on the way.
    """
    raise UnsupportedError(
        f"a {type(holder).__name__} holds the weights of a model, and is not copied or pickled",
        do="Let threads share one model; in another process load it again",
    )


def recomputing(model: Model, recomputes: bool) -> Model:
    """Return the same weights as a model that keeps nothing of a layer for gradients but computes
    it once more, or does not; UnsupportedError where that is not known of its network."""
    network = model.network
    if not isinstance(network, Decoder):
        raise UnsupportedError(
            "gradient checkpointing is known of decoders alone",
            wanted="a decoder of one of the families that docs/models.md lists",
            got=type(network).__name__,
            do="Leave it out, or take smaller batches",
        )
    return replace(model, network=replace(network, recomputes=recomputes))


@dataclass(frozen=True, eq=False)
class Model:
    """`config`: the values of config.json. `spec`: what the network was built from.

    `learns`: its weights are plain float tensors, which may require gradients and change.
    `encoders`: what it embeds inputs of a prompt with, beside the network. `tower`: what makes
    features of pictures, None where it reads none.
    """

    config: ModelConfig
    spec: Any = field(repr=False)
    network: Network = field(repr=False)
    learns: bool = False
    encoders: tuple[PromptEncoder, ...] = field(default=(), repr=False)
    tower: VisionTower | None = field(default=None, repr=False)
    __reduce_ex__ = refuse_copies

    @property
    def dtype(self) -> torch.dtype:
        """The type that it computes in."""
        return self.network.dtype

    @property
    def float_type(self) -> torch.dtype:
        """The type of its matrices, as far as they are not codes."""
        table = self.network.table
        if isinstance(table, Panels):
            return table.floats
        return table.dtype if isinstance(table, Tensor) else self.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.network.device

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.network.spec.vocab_size

    @property
    def has_positions(self) -> bool:
        """True if positions are read as numbers: not as distances, not by recurrent layers."""
        stores = (one for layer in self.network.stores for one in layer)
        return not self.network.encodes and not all(isinstance(one, State) for one in stores)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that prompts may bring beside ids or embeddings."""
        if self.source is None:
            return self.network.inputs
        sounds = InputSpec(self.source, "prompt", (), self.dtype, open=True)
        return (*self.network.inputs, sounds)

    @property
    def source(self) -> str | None:
        """The name of what its encoder reads, if that is neither ids nor embeddings."""
        return self.network.source

    def sources(self, given: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return (B,) what the encoder reads of each row, of what is given by name for all of them.

        Raise RequestError unless that is of the size that it reads. As in transformers, a mask of
        sounds hides nothing: silence is heard.
        """
        name, wanted = str(self.source), self.network.source_shape
        values = given[name]
        each = list(values) if isinstance(values, Tensor | list | tuple) else []
        # One of a list may stand in a batch of one.
        each = [one[0] if tuple(getattr(one, "shape", ())) == (1, *wanted) else one for one in each]
        right = [isinstance(one, Tensor) and one.is_floating_point() for one in each]
        shapes = [tuple(getattr(one, "shape", ())) for one in each]
        if not each or not all(right) or any(shape != wanted for shape in shapes):
            raise RequestError(
                f"{name} does not fit the model",
                wanted=f"a float tensor (rows, {wanted[0]}, {wanted[1]})",
                got=shapes or type(values).__name__,
                do="Pass what the feature extractor of this model gives, padded to that length",
            )
        return [{name: one} for one in each]

    def real_states(self, mask: Tensor, length: int) -> Tensor:
        """Return (B, S) bool: which of S encoder states are real; `mask` is of the source."""
        return torch.ones(len(mask), length, dtype=torch.bool)

    def own_cache(self, passed: Any) -> Any:
        """Return what was passed as `past_key_values`: it reads no cache of other libraries."""
        return passed

    def returned_cache(self, cache: Cache, passed: Any) -> Any:
        """Return what a caller gets who passed the other: the cache itself."""
        return cache

    def forward(
        self,
        ids: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        decoder_input_ids: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        kept: slice | Tensor = slice(None),
        decoder_attention_mask: Tensor | None = None,
        encoder_states: Tensor | None = None,
        heard: Heard | None = None,
        sounds: Tensor | None = None,
        declared: Mapping[str, Placed] | None = None,
        bare: bool = False,
    ) -> Tensor:
        """Return logits (B, T, V) of ids (B, T), or of embeddings (B, T, E).

        They come after the S positions that `cache` holds, 0 without one, and are added to it.
        `attention_mask` (B, S + T) hides padding on any side. Positions are S..S+T-1 unless given,
        as (B, T) or (axes, B, T), as in transformers' `forward`. With an encoder these describe
        what it reads, which a cache may hold already, and the logits are those of
        `decoder_input_ids` (B, T), or of `decoder_inputs_embeds` (B, T, E) in their place, whose
        mask (B, S + T) is `decoder_attention_mask`.
        `encoder_states` (B, S, E) stand in the place of what an encoder would read, `sounds` (B,
        channels, frames) are what one reads that listens. Where there is neither mask nor cache,
        positions that do not go on by one begin another sequence in the same row, which sees
        nothing of the one before. `kept`: the positions whose logits are given. `heard` gets what
        the layers of the decoder show. `declared`: values of inputs that the network declares, for
        places among the B * T positions. `bare`: what the head would read is returned in place of
        logits, normalised, (B, T, E). Differentiable where the weights are plain; raise
        UnsupportedError where a gradient would have to pass through packed ones.
        """
        decoded = self.require_parts(
            position_ids,
            decoder_input_ids,
            decoder_inputs_embeds,
            decoder_attention_mask,
            encoder_states,
            sounds,
        )
        elsewhere = not self.network.encodes or holds_across(cache)
        if encoder_states is None and not elsewhere:
            encoder_states = self.read_source(ids, attention_mask, inputs_embeds, sounds)
        states = dense_states(
            self.network,
            ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            decoded,
            cache,
            kept,
            decoder_attention_mask,
            encoder_states,
            heard,
            declared,
        )
        if bare:
            return states
        network = self.network
        read = ids if inputs_embeds is None else inputs_embeds
        if decoded is None and read is not None:
            network = network.at(kept_places(read, kept))
        return network.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)

    def require_parts(
        self,
        position_ids: Tensor | None,
        decoder_input_ids: Tensor | None,
        decoder_inputs_embeds: Tensor | None,
        decoder_attention_mask: Tensor | None,
        encoder_states: Tensor | None,
        sounds: Tensor | None,
    ) -> Tensor | None:
        """Refuse inputs of `forward` that a model of this kind does not read, or lacks; return what
        a decoder beside an encoder reads."""
        decoded = decoder_input_ids
        if decoder_inputs_embeds is not None:
            if decoder_input_ids is not None or not self.network.encodes:
                what = "decoder_inputs_embeds stand for decoder_input_ids beside an encoder"
                wanted = "one of the two" if self.network.encodes else "neither, without an encoder"
                raise RequestError(what, wanted=wanted, do="Leave decoder_inputs_embeds out")
            decoded = decoder_inputs_embeds
        if self.network.encodes != (decoded is not None):
            if self.network.encodes:
                what = "a model with an encoder needs what its decoder reads"
                do = "Pass decoder_input_ids, which begin with the start token, or labels"
                raise RequestError(what, wanted="decoder_input_ids", got="none", do=do)
            what = "decoder_input_ids belong to models with an encoder, and this one has none"
            raise RequestError(what, wanted="none", do="Pass them as input_ids")
        if position_ids is not None and not self.has_positions:
            do = "Leave them out"
            raise UnsupportedError("this model knows no position_ids", do=do)
        if not self.network.encodes and not (decoder_attention_mask is encoder_states is None):
            what = "decoder_attention_mask and encoder_outputs belong to models with an encoder"
            raise RequestError(what, do="Leave them out")
        if sounds is not None:
            self._require_listener()
        return decoded

    def read_source(
        self,
        ids: Tensor | None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sounds: Tensor | None = None,
        heard: Heard | None = None,
    ) -> Tensor:
        """Return encoder states (B, S, E) of what `forward` gives an encoder to read, which may
        stand in its place there; `heard` gets what the encoder's layers show."""
        if sounds is not None:
            inputs_embeds = self._listened(sounds)
        return encoded_states(self.network, ids, attention_mask, inputs_embeds, heard)

    def embed(self, ids: Tensor) -> Tensor:
        """Return (..., E): what ids (...,) are to the encoder, or to a decoder that stands alone.

        Raise RequestError for one outside the vocabulary.
        """
        return embedded(self.network, ids, source=True)

    def encode(
        self, prompt: Prompt, heard: Heard | None = None, by: Encode | None = None
    ) -> Tensor:
        """Return encoder states (S, E) of one prompt without padding, or holes of its mask.

        `heard` gets what layers show. `by`: who encodes where there are no holes.
        """
        if not self.network.encodes:
            raise UnsupportedError("this model has no encoder")
        with inference_mode(), outside_autocast():
            if self.source is not None and self.source in prompt.whole:
                hidden = self._listened(prompt.whole[self.source][None])[0]
            elif prompt.embeds is not None:
                hidden = prompt.embeds.to(self.device, self.dtype)
            elif prompt.ids is not None:
                hidden = self.embed(torch.tensor(prompt.ids))
            else:
                raise RequestError("there is nothing to encode", wanted="ids or embeddings")
            if prompt.mask is None:
                whole = by or self.network.encode
                return whole(hidden[None], None, heard)[0]
            seen = prompt.mask[-1].to(self.device)
            return self.network.encode(hidden[None], seen[None], heard)[0, seen]

    def _listened(self, sounds: Tensor) -> Tensor:
        """Turn (B, channels, frames) into (B, S, E).

        Raise RequestError for sounds of another size.
        """
        self._require_listener()
        self.sources({str(self.source): sounds})
        return self.network.listen(sounds.to(self.device, self.dtype))

    def _require_listener(self) -> None:
        """Refuse sounds where an encoder reads none, or there is none."""
        if self.source is None:
            raise RequestError("this model reads ids and no sounds", do="Pass input_ids")
