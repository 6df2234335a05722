"""GGUF files as sources of models: their keys and names in the words of the families.

The format's converters renamed every tensor and, for Llama, reordered the rows of the query and key
projections, so that rotary halves became rotary pairs; both are undone here. What bytes mean is the
reader's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from everystep.errors import FormatError, RequestError, UnsupportedError
from everystep.files.gguf import GgufFile
from everystep.models.config import Fields
from everystep.models.load import InPanels, build_model
from everystep.models.model import Model
from everystep.nn.quantized import Format, QuantizedWeight
from everystep.nn.rounding import Rounding

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_FREQUENCIES = "rope_freqs.weight"
# What files call an architecture, and the family that it is.
ARCHITECTURES: Mapping[str, str] = {"llama": "llama", "qwen2": "qwen2"}
# Each changes what a model computes, and none is understood here.
_REFUSED = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.attn_factor",
)
# The blocks that become quantised weights: a float16 scale, a float16 minimum in Q4_1, the codes.
_BLOCKS: Mapping[str, tuple[Format, int]] = {
    "Q8_0": ("q8_0", 34),
    "Q4_0": ("q4_0", 18),
    "Q4_1": ("q4_1", 20),
}
_FLOATS = ("F64", "F32", "F16", "BF16")


def build_gguf_model(
    file: GgufFile,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantize: Literal["auto"] | Rounding | None = "auto",
    in_panels: InPanels | None = None,
) -> Model:
    """The model in a GGUF file.

    "auto" without a `dtype` keeps quantised blocks as they are, and everything else in float32.
    With a `dtype`, or for None, weights are dequantised, to float32 without one. "int8" and "int4"
    round the matrices of a file that holds floats. `in_panels` as in `build_model`. Raises
    RequestError (quantising what is quantised), UnsupportedError (an architecture or RoPE scaling
    without implementation) and FormatError (missing or wrong keys; missing, unexpected or misshaped
    weights).
    """
    config = gguf_config(file)
    renamed = _Renamed(file, config)
    blocks = {tensor.block.name for tensor in file.tensors.values()}
    rounding = None if quantize == "auto" else quantize
    rounded = ", ".join(sorted(blocks.difference(_FLOATS)))
    if rounding is not None and rounded:
        raise RequestError(
            f"quantize={rounding!r} asks to round weights that were rounded before, which adds"
            " a second error to the first",
            wanted="a file of F32, F16 or BF16",
            got=rounded,
            do="Leave quantize out to use the file's own blocks",
        )
    keeps = quantize == "auto" and dtype is None and not blocks.isdisjoint(_BLOCKS)
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


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The metadata in the words of a config.json."""
    read = Fields(file.metadata, str(file.path))
    architecture = read.text("general.architecture")
    _check_known(file, architecture)
    own = f"{architecture}."
    config: dict[str, Any] = {name: read.integer(own + key) for name, key in _SIZES.items()}
    heads = config["num_attention_heads"]
    config |= {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": read.integer(f"{own}attention.head_count_kv", heads),
        "rms_norm_eps": _decimal(read, f"{own}attention.layer_norm_rms_epsilon", 1e-5),
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
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        if read.has(key):
            config[f"{name}_token_id"] = read.integer(key, least=0)
    return config


def _check_known(file: GgufFile, architecture: str) -> None:
    do = "Load the model from a Hugging Face folder if its family is known"
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            "this GGUF architecture has no implementation here",
            wanted=" or ".join(ARCHITECTURES),
            got=repr(architecture),
            do=do,
        )
    for key in _REFUSED:
        value = file.metadata.get(f"{architecture}.{key}", 0)
        if value not in (0, 1.0):
            what = f"the GGUF key {architecture}.{key} has no implementation here"
            raise UnsupportedError(what, got=value, do=do)
    if "token_embd.weight" not in file.tensors:
        raise FormatError("the GGUF file has no tensor token_embd.weight")


def _scaling(file: GgufFile, read: Fields, own: str, context: int) -> dict[str, Any] | None:
    """RoPE scaling; Llama 3's comes as one factor per frequency, which longrope can say."""
    if _FREQUENCIES in file.tensors:
        factors = file.dequantise(_FREQUENCIES, torch.float64).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    kind = read.text(f"{own}rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            "this RoPE scaling of a GGUF file has no implementation here",
            wanted="none, linear or yarn",
            got=repr(kind),
        )
    found = {"rope_type": kind, "factor": _decimal(read, f"{own}rope.scaling.factor")}
    if kind == "yarn":
        trained = read.integer(f"{own}rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = trained
    return found


def _decimal(read: Fields, key: str, default: float | None = None) -> float:
    """The format stores float32, of which the shortest decimal is meant."""
    return float(str(np.float32(read.number(key, default))))


class _Renamed:
    """The tensors of a file under the families' names."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._sources = {_renamed(name): name for name in file.tensors if name != _FREQUENCIES}
        # How many heads the permuted ones have.
        self._heads = {
            "self_attn.q_proj.": config["num_attention_heads"],
            "self_attn.k_proj.": config["num_key_value_heads"],
        }
        if config["model_type"] != "llama":
            self._heads = {}

    def names(self) -> Iterable[str]:
        return self._sources

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._sources[name]].shape

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        stored = self._sources[name]
        values = self._file.dequantise(stored, dtype or torch.float32)
        self._file.release(stored)
        heads = self._heads_of(name)
        return values if heads is None else _halves(values, heads)

    def quantised(self, name: str) -> QuantizedWeight | None:
        """The blocks of a matrix, bit for bit, None where it holds floats."""
        stored = self._sources[name]
        block = self._file.tensors[stored].block.name
        if block not in _BLOCKS:
            return None
        weight = _weight_of_blocks(block, self._file.blocks(stored))
        self._file.release(stored)
        heads = self._heads_of(name)
        return weight if heads is None else weight.gather(_halves(torch.arange(weight.rows), heads))

    def _heads_of(self, name: str) -> int | None:
        return next((heads for part, heads in self._heads.items() if part in name), None)


def _weight_of_blocks(block_name: str, raw: Tensor) -> QuantizedWeight:
    """The weight that is stored as `raw`, uint8 (rows, bytes of a row), in memory of its own."""
    format, block_bytes = _BLOCKS[block_name]
    blocks = raw.view(raw.shape[0], -1, block_bytes)

    def halves(start: int) -> Tensor:
        """The float16 of each block at this byte, (rows, blocks)."""
        pairs = blocks[..., start : start + 2].clone(memory_format=torch.contiguous_format)
        return pairs.view(torch.float16).squeeze(2)

    mins = halves(2) if format == "q4_1" else None
    codes = blocks[..., 2 if mins is None else 4 :].clone(memory_format=torch.contiguous_format)
    kind = torch.int8 if format == "q8_0" else torch.uint8
    return QuantizedWeight(format, codes.flatten(1).view(kind), halves(0), mins)


def _renamed(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER:
        return f"model.layers.{int(parts[1])}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


def _halves(values: Tensor, heads: int) -> Tensor:
    """Undoes the converters' order of rotary rows, head by head:

    stored  [x0 y0 x1 y1 ...]  ->  [x0 x1 ... y0 y1 ...]
    """
    pairs = values.view(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
