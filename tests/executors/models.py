"""Tiny decoders with random weights: any specification, and every kind of rope."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from everystep.executors.native import read_rows
from everystep.models import Model, build_model, named_weights
from everystep.models.config import ModelConfig
from everystep.models.decoder import assemble_decoder
from everystep.models.families import find_family
from everystep.models.loader import HeldWeights, WeightLoader
from everystep.models.parameters import Parameter, decoder_parameters
from everystep.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LearnedPositions,
    MlpSpec,
    NormSpec,
)
from everystep.nn.rotary import (
    UNSCALED,
    Dynamic,
    Interpolated,
    Llama3,
    LongRope,
    Rope,
    Scaling,
    Yarn,
)
from everystep.nn.rounding import Rounding

TRAINED = 16
CONFIG: Mapping[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SCALINGS: Mapping[str, Scaling] = {
    "unscaled": UNSCALED,
    "linear": Interpolated(2.5),
    "proportional": Interpolated(share=0.5),
    "dynamic": Dynamic(2.0, TRAINED),
    "yarn": Yarn(4.0, TRAINED, 1.2),
    "longrope": LongRope((1.0, 1.1, 1.2, 1.3), (1.5, 2.0, 3.0, 4.0), TRAINED, 1.3),
    "llama3": Llama3(4.0, 1.0, 4.0, TRAINED),
}


def rope(scaling: str = "unscaled") -> Rope:
    """A rope over heads of 8 values."""
    return Rope(8, 100.0, SCALINGS[scaling])


PLAIN = DecoderSpec(
    vocab_size=40,
    width=32,
    norm=NormSpec("rms", 1e-5),
    attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5),
    mlp=MlpSpec(48, "silu"),
    layers=(LayerSpec(rope()),) * 2,
)


EXPERTS = ExpertsSpec(count=6, chosen=2, size=40, normalised=True)


def with_attention(**changes: Any) -> DecoderSpec:
    """PLAIN with another attention."""
    return replace(PLAIN, attention=replace(PLAIN.attention, **changes))


def with_mlp(**changes: Any) -> DecoderSpec:
    """PLAIN with another MLP."""
    return replace(PLAIN, mlp=replace(PLAIN.mlp, **changes))


def with_norm(norm: NormSpec, **changes: Any) -> DecoderSpec:
    """PLAIN with other norms."""
    return replace(PLAIN, norm=norm, **changes)


def with_layers(*layers: LayerSpec) -> DecoderSpec:
    """PLAIN with other layers."""
    return replace(PLAIN, layers=layers)


SPECS: dict[str, DecoderSpec] = {
    "plain": PLAIN,
    "one head each": with_attention(kv_heads=4),
    "biases": with_attention(qkv_bias=True, out_bias=True),
    "scale": with_attention(scale=0.9),
    "capped scores": with_attention(softcap=1.5),
    "normed heads": with_attention(qk_norm="heads"),
    "plain mlp": with_mlp(gated=False, bias=True, activation="relu"),
    "layer norm": with_norm(NormSpec("layer", 1e-3, bias=True)),
    "layer norm without bias": with_norm(NormSpec("layer", 1e-3)),
    "plus one": with_norm(NormSpec("rms", 1e-5, plus_one=True), post_norms=True),
    "parallel": replace(PLAIN, parallel=True, pre_norms="shared"),
    "parallel with two norms": replace(PLAIN, parallel=True),
    "norms behind": replace(PLAIN, pre_norms="none", post_norms=True),
    "normed queries": with_attention(qk_norm="whole"),
    "learned positions": replace(
        PLAIN, layers=(LayerSpec(None),) * 2, positions=LearnedPositions(256, unused=2)
    ),
    "weaker layers": with_layers(LayerSpec(rope()), LayerSpec(rope(), factor=0.4)),
    "tied": replace(PLAIN, tied=True, embed_scale=3.3),
    "head": replace(PLAIN, head_bias=True, final_softcap=2.0),
    "experts": with_layers(LayerSpec(rope(), experts=EXPERTS), LayerSpec(rope())),
    "experts of other shares": replace(
        with_layers(
            LayerSpec(rope(), experts=ExpertsSpec(20, 5, 24, False)),
            LayerSpec(rope(), experts=ExpertsSpec(3, 1, 64, False)),
        ),
        parallel=True,
        post_norms=True,
        mlp=MlpSpec(48, "relu", gated=False),
    ),
    "window": with_layers(LayerSpec(rope(), window=3), LayerSpec(rope())),
    "mixed ropes": with_layers(LayerSpec(None), LayerSpec(rope("linear"))),
    "partial rope": with_layers(LayerSpec(Rope(4, 100.0, UNSCALED)), LayerSpec(rope())),
}
SPECS |= {name: with_mlp(activation=name) for name in ("gelu", "gelu_new", "swish")}
SPECS |= {f"rope {name}": with_layers(*[LayerSpec(rope(name))] * 2) for name in SCALINGS}


def random_model(
    spec: DecoderSpec, seed: int = 0, dtype: torch.dtype = torch.float64, *, learns: bool = False
) -> Model:
    """A model of the specification whose values are drawn widely."""
    with torch.no_grad():
        loader = _drawn(decoder_parameters(spec), seed, dtype, learns)
        network = assemble_decoder(spec, loader)
    return Model(ModelConfig({"model_type": "llama"}), spec, network, learns)


def family_model(model_type: str, **config: Any) -> Model:
    """A model of the family's own reading of CONFIG and `config`."""
    family = find_family(model_type)
    spec = family.read_spec({**family.defaults, **CONFIG, **config})
    return _of_family(model_type, spec, torch.float64)


def _of_family(model_type: str, spec: DecoderSpec, dtype: torch.dtype) -> Model:
    family = find_family(model_type)
    network = family.assemble(spec, _drawn(family.parameters(spec), 0, dtype))
    return Model(ModelConfig({"model_type": model_type}), spec, network)


def _drawn(
    parameters: Iterable[Parameter], seed: int, dtype: torch.dtype, learns: bool = False
) -> WeightLoader:
    generator = torch.Generator().manual_seed(seed)
    by_key = {one.key: one for one in parameters}
    tensors = {}
    for one in by_key.values():
        spread = 2.0 * one.shape[1] ** -0.5 if len(one.shape) > 1 else 1.0
        drawn = torch.randn(one.shape, generator=generator, dtype=torch.float64)
        for part in one.parts:
            rows = drawn[part.start : part.stop] * spread
            tensors[part.name] = rows.T if part.transposed else rows
    return WeightLoader(by_key, HeldWeights(tensors), dtype, torch.device("cpu"), learns=learns)


_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    # One layer of experts, one without.
    "qwen3_moe": {
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
}


@cache
def narrow_model(
    name: str,
    rounding: Rounding | None,
    panels: bool = False,
    inner: int = 64,
    floats: torch.dtype = torch.float32,
) -> Model:
    """A tiny model of a family, of a type of floats or rounded; with or without panels."""
    config = {**CONFIG, "intermediate_size": inner}  # int4 wants whole blocks of 32
    family = find_family(name)
    config |= {"num_hidden_layers": 4} if name == "smollm3" else {}  # the fourth knows no positions
    config |= {"sliding_window": 5} if "gemma" in name else {}
    config |= {"ffn_dim": inner} if name == "opt" else {}
    config |= {"time_step_rank": 32} if name == "mamba" else {}  # likewise
    config |= _EXPERTS.get(name, {})
    reading = family.read_spec({**family.defaults, **config})
    model = _of_family(name, reading, torch.float32)
    if rounding is None and not panels:
        return model
    tied = {"tie_word_embeddings": reading.tied}
    return build_model(
        {"model_type": name, **config, **tied},
        HeldWeights(dict(named_weights(model))),
        dtype=floats,
        quantize=rounding,
        in_panels=lambda spec: read_rows if panels else None,
    )
