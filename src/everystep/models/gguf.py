"""GGUF files as sources of models: their keys and names in the words of the families.

The format's converters renamed every tensor. For some architectures they reordered the rows of the
query and key projections, so that rotary halves became rotary pairs, or added 1 to norms; all of it
is undone here. What bytes mean is the
reader's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from everystep.errors import FormatError, RequestError, UnsupportedError, shown
from everystep.files.gguf import GgufFile
from everystep.files.strict_json import whole_number
from everystep.models.config import Fields
from everystep.models.gguf_architectures import (
    ARCHITECTURES,
    PER_LAYER,
    REPEATED,
    Architecture,
    check_keys,
)
from everystep.models.gguf_weights import FLOATS, weight_of_blocks
from everystep.models.load import InPanels, build_model
from everystep.models.model import Model
from everystep.nn.quantized import QuantizedWeight
from everystep.nn.rotary import yarn_attention_factor
from everystep.nn.rounding import Rounding

GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
FREQUENCIES = "rope_freqs.weight"
# Factors of Phi-3's rope, for short rows and for long ones.
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_OF_ROPES = (FREQUENCIES, SHORT, LONG)
# What else a configuration says after such a key.
_DERIVED = {
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "partial_rotary_factor": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "layer_types": "attention.sliding_window_pattern",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_SCALINGS = dict.fromkeys(("none", "linear", "yarn", "longrope"))
# Whose rows some architectures hold in pairs, and what the configuration calls the heads' number.
PERMUTED = {
    "self_attn.q_proj.": "num_attention_heads",
    "self_attn.k_proj.": "num_key_value_heads",
}


def build_gguf_model(
    file: GgufFile,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantize: Literal["auto"] | Rounding | None = "auto",
    in_panels: InPanels | None = None,
) -> Model:
    """Build the model in a GGUF file.

    "auto" without a `dtype` holds quantised blocks as `gguf_weights.py` says, all else in float32;
    a file of floats of 16 bits is held in its own type. With a `dtype`, or for None, weights are
    dequantised, to float32 without one. "int8" and "int4" round the matrices of a file that holds
    floats. `in_panels` as in `build_model`. Raise RequestError (quantising what is quantised),
    UnsupportedError (an architecture or RoPE scaling without implementation) and FormatError
    (missing or wrong keys; missing, unexpected or misshaped weights).
    """
    config = gguf_config(file)
    renamed = _Renamed(file, config)
    with _in_words_of_the_file(file):
        return _built(file, config, renamed, dtype, device, quantize, in_panels)


def _built(
    file: GgufFile,
    config: Mapping[str, Any],
    renamed: _Renamed,
    dtype: torch.dtype | None,
    device: torch.device | str,
    quantize: Literal["auto"] | Rounding | None,
    in_panels: InPanels | None,
) -> Model:
    blocks = {tensor.block.name for tensor in file.tensors.values()}
    rounding = None if quantize == "auto" else quantize
    rounded = ", ".join(sorted(blocks.difference(FLOATS)))
    if rounding is not None and rounded:
        raise RequestError(
            f"quantize={rounding!r} asks to round weights that were rounded before, which adds"
            " a second error to the first",
            wanted="a file of F32, F16 or BF16",
            got=rounded,
            do="Leave quantize out to use the file's own blocks",
        )
    keeps = quantize == "auto" and dtype is None and bool(rounded)
    if quantize == "auto" and dtype is None and not rounded:
        dtype = _float_type(file)
    wanted = dtype if rounding is not None or keeps else dtype or torch.float32
    return build_model(
        config,
        renamed,
        dtype=wanted,
        device=device,
        quantize=rounding,
        kept=renamed.quantised if keeps else None,
        in_panels=in_panels,
    )


@contextmanager
def _in_words_of_the_file(file: GgufFile) -> Iterator[None]:
    """Let errors of a configuration speak of the file that it was read from, and of its keys."""
    try:
        yield
    except (FormatError, UnsupportedError) as error:
        text = str(error)
        if "config.json" not in text:
            raise
        own = file.metadata["general.architecture"]
        known = ARCHITECTURES[str(own)]
        keys = {**_SIZES, **_DERIVED, known.epsilon: known.epsilon_key}
        text = re.sub(r"config\.json(, rope parameters)?", lambda _: str(file.path), text)
        names = re.compile(rf"\b({'|'.join(keys)})\b")
        raise type(error)(names.sub(lambda one: f"{own}.{keys[one[0]]}", text)) from error


def _float_type(file: GgufFile) -> torch.dtype:
    """Return the type of all matrices of a file of floats; float32 where they are of several."""
    found = {one.block.name for one in file.tensors.values() if len(one.shape) == 2}
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get("".join(found), torch.float32)


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the metadata in the words of a config.json."""
    where = str(file.path)
    architecture = Fields(file.metadata, where).text("general.architecture")
    known = _known(file, architecture)
    own = f"{architecture}."
    read = Fields(_one_for_all_layers(file.metadata, own, where), where)
    config: dict[str, Any] = {name: read.integer(own + key) for name, key in _SIZES.items()}
    config["num_hidden_layers"] = read.count(f"{own}block_count")
    heads = config["num_attention_heads"]
    config |= {
        "model_type": known.family,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": read.integer(f"{own}attention.head_count_kv", heads),
        known.epsilon: _decimal(read, f"{own}{known.epsilon_key}", 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _decimal(read, f"{own}rope.freq_base", 10_000.0),
    }
    if read.has(f"{own}attention.key_length"):
        config["head_dim"] = read.integer(f"{own}attention.key_length")
    if architecture == "llama" and "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    if read.has(f"{own}rope.dimension_count"):
        head_dim = config.get("head_dim", max(config["hidden_size"] // heads, 1))
        config["partial_rotary_factor"] = read.integer(f"{own}rope.dimension_count") / head_dim
    scaling = _scaling(file, read, own, config["max_position_embeddings"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    _check_repeated(read, own, config, known)
    if known.derived is not None:
        config |= known.derived(read, own, config)
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        if read.has(key):
            config[f"{name}_token_id"] = read.integer(key, least=0)
    return config


def _one_for_all_layers(metadata: Mapping[str, object], own: str, where: str) -> dict[str, object]:
    """Return the metadata with one number in place of an array that says it for every layer."""
    found = dict(metadata)
    layers = Fields(metadata, where).count(f"{own}block_count")
    for key in (f"{own}{key}" for key in PER_LAYER):
        value = metadata.get(key)
        if not isinstance(value, list):
            continue
        if len(value) != layers:
            raise FormatError(
                f"{where}: {key} is impossible",
                wanted=f"a number, or one for each of {layers} layers",
                got=f"{len(value)} numbers",
            )
        if any(one != value[0] for one in value):
            raise UnsupportedError(
                f"{where}: layers of different sizes have no implementation here",
                wanted=f"equal numbers in {key}",
                got=shown(value),
            )
        found[key] = value[0]
    return found


def _known(file: GgufFile, architecture: str) -> Architecture:
    do = "Load the model from a Hugging Face folder if its family is known"
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            "this GGUF architecture has no implementation here",
            wanted=" or ".join(ARCHITECTURES),
            got=shown(architecture),
            do=do,
        )
    check_keys(file.metadata, architecture)
    if "token_embd.weight" not in file.tensors:
        raise FormatError("the GGUF file has no tensor token_embd.weight")
    return ARCHITECTURES[architecture]


def _scaling(file: GgufFile, read: Fields, own: str, context: int) -> dict[str, Any] | None:
    """Return RoPE scaling, with what the format's own programs take where a key is missing.

    Llama 3's comes as one factor per frequency, which longrope can say, Phi-3's as two; a linear
    factor divides by itself beside them.
    """
    prefix = f"{own}rope.scaling."
    kind = read.choice(f"{prefix}type", _SCALINGS, "linear")
    factor = 1.0 if kind == "none" else _factor(read, own)
    trained = read.integer(f"{prefix}original_context_length", context)
    magnitude = _decimal(read, f"{prefix}attn_factor", 1.0)
    names = _factors_of_pairs(file)
    if names is not None and kind != "yarn":
        short, long = (file.dequantise(name, torch.float64) * factor for name in names)
        return {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "original_max_position_embeddings": trained,
            "attention_factor": magnitude,
        }
    if names is not None or kind == "longrope":
        beside = "with" if names else "without"
        what = f"RoPE scaling of type {kind} has no implementation {beside} factors"
        raise UnsupportedError(what, got=", ".join(names or ("no such tensors",)))
    if kind == "yarn":
        turns = {
            f"beta_{end}": _decimal(read, f"{prefix}yarn_beta_{end}")
            for end in ("fast", "slow")
            if read.has(f"{prefix}yarn_beta_{end}")
        }
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": trained,
            "attention_factor": magnitude * yarn_attention_factor(factor, None, None),
            **turns,
        }
    if magnitude != 1:
        what = f"{prefix}attn_factor has no implementation beside scaling of this type"
        raise UnsupportedError(what, wanted="1", got=f"{magnitude} and {kind}")
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _factor(read: Fields, own: str) -> float:
    """Read what positions are divided by, which has an older name; 0 is as good as none."""
    names = (f"{own}rope.scaling.factor", f"{own}rope.scale_linear")
    found = [_decimal(read, name) for name in names if read.values.get(name) not in (None, 0)]
    if found and found[0] != found[-1]:
        raise read.wrong(
            names[1], f"{names[0]} = {found[0]}, of which it is another name", found[1]
        )
    return found[0] if found else 1.0


def _factors_of_pairs(file: GgufFile) -> tuple[str, str] | None:
    """Return the tensors that divide each frequency, in short rows and in long ones."""
    if SHORT in file.tensors and LONG in file.tensors:
        return SHORT, LONG
    return (FREQUENCIES, FREQUENCIES) if FREQUENCIES in file.tensors else None


def _check_repeated(read: Fields, own: str, config: Mapping[str, Any], known: Architecture) -> None:
    """Refuse a file whose values, or layers with a window, are shaped unlike the others."""
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rotated = round(config.get("partial_rotary_factor", 1.0) * size)
    said = {"head_dim": size, "rotated": rotated, "rope_theta": config["rope_theta"]}
    for key, name in REPEATED.items():
        if known.honours(key) or not read.has(f"{own}{key}"):
            continue
        value = _decimal(read, f"{own}{key}")
        if value != said[name]:
            what = f"the GGUF key {own}{key} has no implementation with a value of its own"
            raise UnsupportedError(what, wanted=said[name], got=value)


def _decimal(read: Fields, key: str, default: float | None = None) -> float:
    """Read the shortest decimal of a number that the format stores as float32."""
    return float(str(np.float32(read.number(key, default))))


class _Renamed:
    """The tensors of a file under the families' names."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._known = ARCHITECTURES[str(file.metadata["general.architecture"])]
        names = [name for name in file.tensors if name not in _OF_ROPES]
        self._sources = {_renamed(name, self._known.layer): name for name in names}
        # How many heads the permuted ones have.
        permuted = PERMUTED if self._known.permuted else {}
        self._heads = {role: config[key] for role, key in permuted.items()}

    def names(self) -> Iterable[str]:
        return self._sources

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._sources[name]].shape

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        stored = self._sources[name]
        values = self._file.dequantise(stored, dtype or torch.float32)
        self._file.release(stored)
        if self._known.one_more and name.endswith("norm.weight"):
            return values - 1
        heads = self._heads_of(name)
        return values if heads is None else _halves(values, heads)

    def quantised(self, name: str) -> QuantizedWeight | None:
        """Return the blocks of a matrix as the model holds them, None where it holds floats."""
        stored = self._sources[name]
        weight = weight_of_blocks(self._file.tensors[stored].block, self._file.blocks(stored))
        if weight is None:
            return None
        self._file.release(stored)
        heads = self._heads_of(name)
        return weight if heads is None else weight.gather(_halves(torch.arange(weight.rows), heads))

    def _heads_of(self, name: str) -> int | None:
        return next((heads for part, heads in self._heads.items() if part in name), None)


def _renamed(name: str, layer: Mapping[str, str]) -> str:
    """Turn `blk.3.attn_q.weight` into `model.layers.3.self_attn.q_proj.weight`; keep others."""
    role, _, kind = name.rpartition(".")
    if role in GLOBAL:
        return f"{GLOBAL[role]}.{kind}"
    parts = role.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in layer:
        index = whole_number(parts[1])
        return name if index is None else f"model.layers.{index}.{layer[parts[2]]}.{kind}"
    return name


def _halves(values: Tensor, heads: int) -> Tensor:
    """Undo the converters' order of rotary rows, head by head:

    stored  [x0 y0 x1 y1 ...]  ->  [x0 x1 ... y0 y1 ...]
    """
    pairs = values.view(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
