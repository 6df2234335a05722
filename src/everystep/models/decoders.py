"""The families whose network is the decoder: each maps its configuration and names to a spec.

Source of names and defaults: the reference's classes of the family's name, as `LlamaConfig` and
`LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoder import assemble_decoder
from everystep.models.families import Family
from everystep.models.parameters import decoder_parameters
from everystep.models.rope_config import read_rope
from everystep.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from everystep.nn.activations import ACTIVATIONS

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _llama(config: Mapping[str, Any]) -> DecoderSpec:
    """Llama 2 and 3, SmolLM2 and everything else that says `model_type: llama`."""
    read = Fields(config)
    layers = [(None, None)] * read.integer("num_hidden_layers")
    bias, mlp_bias = read.flag("attention_bias", False), read.flag("mlp_bias", False)
    return _gated_decoder(read, layers, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Mapping[str, Any]) -> DecoderSpec:
    """A window on every layer: a null means none, and absence 4096."""
    read = Fields({"sliding_window": 4096, **config})
    window = read.integer("sliding_window") if read.has("sliding_window") else None
    return _gated_decoder(read, [(None, window)] * read.integer("num_hidden_layers"))


def _qwen2(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen2 and Qwen2.5: biases on queries, keys and values, and windows on some layers."""
    read = Fields(config)
    layers = [
        (kind, read.integer("sliding_window") if kind == _SLIDING else None)
        for kind in _layer_types(read)
    ]
    return _gated_decoder(read, layers, qkv_bias=True)


def _gated_decoder(
    read: Fields,
    layers: Sequence[tuple[str | None, int | None]],
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> DecoderSpec:
    """A decoder with RMS norms and a gated MLP.

    `layers`: the type of each, None where ropes know no types of layers, and its window.
    """
    heads, kv_heads, head_dim = _heads(read)
    ropes = {kind: read_rope(read, head_dim, kind) for kind, _ in dict.fromkeys(layers)}
    scale = head_dim**-0.5
    return DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        width=read.integer("hidden_size"),
        norm=NormSpec("rms", read.number("rms_norm_eps")),
        attention=AttentionSpec(heads, kv_heads, head_dim, scale, qkv_bias, out_bias),
        mlp=MlpSpec(
            read.integer("intermediate_size"),
            read.choice("hidden_act", ACTIVATIONS),
            bias=mlp_bias,
        ),
        layers=tuple(LayerSpec(ropes[kind], window) for kind, window in layers),
        tied=read.flag("tie_word_embeddings"),
    )


def _heads(read: Fields) -> tuple[int, int, int]:
    """How many heads of queries and of keys there are, and their size."""
    width, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    shared = read.integer("num_key_value_heads", heads)
    if heads % shared:
        raise read.wrong("num_key_value_heads", f"a divisor of {heads} heads", shared)
    if not read.has("head_dim") and width % heads:
        raise read.wrong("num_attention_heads", f"a divisor of hidden_size = {width}", heads)
    return heads, shared, read.integer("head_dim", width // heads)


def _layer_types(read: Fields) -> list[str]:
    """Which layers look at a window only: `layer_types`, or those from `max_window_layers` on."""
    count = read.integer("num_hidden_layers")
    windowed = read.flag("use_sliding_window")
    if not read.has("layer_types"):
        first = read.integer("max_window_layers", least=0) if windowed else count
        return [_SLIDING if index >= first else _FULL for index in range(count)]
    kinds = read.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != count or {*kinds} - {_FULL, _SLIDING}:
        raise read.wrong("layer_types", f"{count} times {_FULL!r} or {_SLIDING!r}", kinds)
    # The reference keeps no window at all when the switch is off, whatever the types say.
    return list(kinds) if windowed else [_FULL] * count


def _family(read_spec: Callable[[Mapping[str, Any]], DecoderSpec], **defaults: Any) -> Family:
    return Family(
        {**_DEFAULTS, **defaults},
        read_spec,
        decoder_parameters,
        assemble_decoder,
        leftovers=("*rotary_emb.inv_freq",),
    )


FAMILIES: Mapping[str, Family] = {
    "llama": _family(
        _llama, vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048
    ),
    "mistral": _family(
        _mistral,
        vocab_size=32000,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    "qwen2": _family(
        _qwen2,
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
    ),
}
