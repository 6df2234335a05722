"""A model in the words of a GGUF file: the way of `gguf.py` back.

Names, the order of rotary rows and norms are those of the format's own converters. What the format
cannot say of a model is found by reading the file again: `require_same_model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from everystep.errors import UnsupportedError
from everystep.files.gguf import GgufFile
from everystep.models.families import find_family
from everystep.models.gguf import FREQUENCIES, GLOBAL, LONG, PERMUTED, SHORT, gguf_config
from everystep.models.gguf_architectures import ARCHITECTURES, Architecture
from everystep.models.load import complete_config, named_shapes, named_weights
from everystep.models.model import Model
from everystep.models.spec import DecoderSpec
from everystep.nn.rotary import Interpolated, Llama3, LongRope, Rope, Yarn, inverse_frequencies

# Families whose files go by the name of another.
_ALIASES = {"mistral": "llama"}


def architecture_of(model: Model) -> tuple[str, Architecture]:
    """Return what GGUF files call the model's family; raise UnsupportedError where they do not."""
    family = _ALIASES.get(model.config.model_type, model.config.model_type)
    for name, known in ARCHITECTURES.items():
        if known.family == family and isinstance(model.spec, DecoderSpec):
            return name, known
    raise UnsupportedError(
        "models of this family are not written as GGUF",
        wanted=", ".join(sorted({one.family for one in ARCHITECTURES.values()} | set(_ALIASES))),
        got=model.config.model_type,
        do="Quantise it to int8 or int4, which makes a folder",
    )


def gguf_metadata(model: Model, name: str) -> dict[str, object]:
    """Return every key that describes the network; those of the tokenizer stand elsewhere."""
    architecture, known = architecture_of(model)
    spec: DecoderSpec = model.spec
    config = model.config
    own: dict[str, object] = {
        "context_length": int(config["max_position_embeddings"]),
        "embedding_length": spec.width,
        "block_count": len(spec.layers),
        "feed_forward_length": spec.mlp.size,
        "attention.head_count": spec.attention.heads,
        "attention.head_count_kv": spec.attention.kv_heads,
        "attention.key_length": spec.attention.head_dim,
        "attention.value_length": spec.attention.head_dim,
        known.epsilon_key: float(spec.norm.eps),
        "vocab_size": spec.vocab_size,
    }
    if (window := _window(spec)) is not None:
        own["attention.sliding_window"] = window
    for key, cap in (
        ("attn_logit_softcapping", spec.attention.softcap),
        ("final_logit_softcapping", spec.final_softcap),
    ):
        if cap is not None:
            own[key] = float(cap)
    own |= _rope_keys(spec)
    keys = {f"{architecture}.{key}": value for key, value in own.items()}
    return {"general.architecture": architecture, "general.name": name, **keys}


def gguf_tensors(model: Model) -> Iterator[tuple[str, str, Tensor]]:
    """Yield every tensor: what a checkpoint calls it, what the file calls it, its values."""
    _, known = architecture_of(model)
    for name, factors in _rope_tensors(model.spec):
        yield name, name, factors
    permuted = PERMUTED if known.permuted else {}
    heads = {role: model.config[key] for role, key in permuted.items()}
    for name, values in named_weights(model):
        if known.one_more and name.endswith("norm.weight"):
            values = values.float() + 1
        for role, count in heads.items():
            values = _pairs(values, count) if role in name else values
        yield name, _file_name(name, known.layer), values


def gguf_shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what the file calls every tensor, and its shape, in the order of `gguf_tensors`."""
    _, known = architecture_of(model)
    for name, factors in _rope_tensors(model.spec):
        yield name, tuple(factors.shape)
    for name, shape in named_shapes(model):
        yield _file_name(name, known.layer), shape


def require_same_model(model: Model, file: GgufFile) -> None:
    """Raise UnsupportedError where the file says another model than this one."""
    config = gguf_config(file)
    read = find_family(config["model_type"]).read_spec(complete_config(config))
    wanted, got = (_without_ropes(spec) for spec in (model.spec, read))
    for part in wanted:
        if wanted[part] != got[part]:
            raise _unsayable(part, wanted[part], got[part])
    for number, (one, other) in enumerate(zip(model.spec.layers, read.layers, strict=True)):
        if not _turn_alike(one.rope, other.rope):
            raise _unsayable(f"rotary positions of layer {number}", one.rope, other.rope)


def _file_name(name: str, layer: Mapping[str, str]) -> str:
    """Rename `model.layers.3.self_attn.q_proj.weight` to `blk.3.attn_q.weight`."""
    role, _, kind = name.rpartition(".")
    outer = {there: here for here, there in GLOBAL.items()}
    if role in outer:
        return f"{outer[role]}.{kind}"
    inner = {there: here for here, there in layer.items()}
    number, _, own = role.removeprefix("model.layers.").partition(".")
    if own in inner and number.isdigit():
        return f"blk.{number}.{inner[own]}.{kind}"
    raise UnsupportedError("a GGUF file has no name for this weight", got=name)


def _pairs(values: Tensor, heads: int) -> Tensor:
    """Turn rotary halves into pairs, head by head:

    [x0 x1 ... y0 y1 ...]  ->  [x0 y0 x1 y1 ...]
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _window(spec: DecoderSpec) -> int | None:
    return next((one.window for one in spec.layers if one.window is not None), None)


def _ropes(spec: DecoderSpec) -> tuple[Rope | None, Rope | None]:
    """Return the first rope of layers that see everything, and of layers with a window."""
    found: dict[bool, Rope] = {}
    for one in spec.layers:
        if one.rope is not None:
            found.setdefault(one.window is not None, one.rope)
    return found.get(False) or found.get(True), found.get(True)


def _rope_keys(spec: DecoderSpec) -> dict[str, object]:
    rope, local = _ropes(spec)
    if rope is None:
        raise UnsupportedError("a GGUF file has no word for a model without rotary positions")
    keys: dict[str, object] = {
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.dim,
    }
    if local is not None and local.theta != rope.theta:
        keys["rope.freq_base_swa"] = float(local.theta)
    scaling = rope.scaling
    if isinstance(scaling, Interpolated) and scaling.factor != 1.0:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if isinstance(scaling, Yarn):
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling.factor),
            "rope.scaling.original_context_length": scaling.trained,
        }
    if isinstance(scaling, LongRope):
        keys |= {
            "rope.scaling.original_context_length": scaling.trained,
            "rope.scaling.attn_factor": float(scaling.attention_factor),
        }
    return keys


def _rope_tensors(spec: DecoderSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield what frequencies are divided by, where keys alone do not say it."""
    rope, _ = _ropes(spec)
    scaling = None if rope is None else rope.scaling
    if isinstance(scaling, LongRope):
        yield SHORT, torch.tensor(scaling.short)
        yield LONG, torch.tensor(scaling.long)
    if rope is not None and isinstance(scaling, Llama3):
        plain = inverse_frequencies(rope.dim, rope.theta)
        yield FREQUENCIES, plain / scaling.frequencies(rope.dim, rope.theta, None)


def _without_ropes(spec: DecoderSpec) -> dict[str, object]:
    layers = tuple(replace(one, rope=None) for one in spec.layers)
    return {one.name: getattr(replace(spec, layers=layers), one.name) for one in fields(spec)}


def _turn_alike(first: Rope | None, second: Rope | None) -> bool:
    """Return whether both compute the same, for short and for long rows: a file holds float32."""
    if first is None or second is None:
        return first is second
    (one, other), factors = zip(*map(_turns, (first, second)), strict=True)
    same = first.dim == second.dim and math.isclose(*factors, rel_tol=1e-6)
    return same and torch.allclose(one, other, rtol=1e-5, atol=0)


def _turns(rope: Rope) -> tuple[Tensor, float]:
    lengths = torch.tensor([1, 1 << 24])
    turns = rope.scaling.frequencies(rope.dim, rope.theta, lengths)
    return turns.expand(2, rope.dim // 2), rope.scaling.attention_factor


def _unsayable(part: str, wanted: object, got: object) -> UnsupportedError:
    return UnsupportedError(
        f"a GGUF file cannot say this of the model: {part}",
        wanted=str(wanted)[:300],
        got=str(got)[:300],
        do="Quantise it to int8 or int4, which makes a folder",
    )
