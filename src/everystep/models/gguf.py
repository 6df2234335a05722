"""GGUF files as sources of models: their keys and names in the words of the families.

The format's converters renamed every tensor and, for Llama, reordered the rows of the query and key
projections, so that rotary halves became rotary pairs; both are undone here. What bytes mean is the
reader's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from everystep.errors import FormatError, RequestError, UnsupportedError, message
from everystep.models.gguf_weights import is_quantised, keeps_blocks, weight_of_blocks
from everystep.models.load import build_model
from everystep.models.model import Model
from everystep.models.slots import InPanels, never_in_panels
from everystep.nn.quantized import QuantizedWeight
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
_FREQUENCIES = "rope_freqs.weight"
_PERMUTED = ("self_attn.q_proj.", "self_attn.k_proj.")
_ARCHITECTURES = ("llama", "qwen2")
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


class GgufSource(Protocol):
    """What is asked of an open file."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Keys and values."""
        ...

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Name -> something with a `shape` and the name of its `block` format."""
        ...

    def blocks(self, name: str) -> Tensor:
        """The stored bytes of a tensor, uint8 (..., bytes of a row)."""
        ...

    def dequantise(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of a tensor."""
        ...

    def release(self, name: str) -> None:
        """The tensor was read; nothing of it need stay in memory."""
        ...


def build_gguf_model(
    file: GgufSource,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantize: Literal["auto"] | Rounding | None = "auto",
    in_panels: InPanels = never_in_panels,
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
    renamed = _Renamed.of(file, config)
    rounding = None if quantize == "auto" else quantize
    if rounding is not None:
        _check_unquantised(file, rounding)
    keeps = quantize == "auto" and dtype is None and _has_blocks(file)
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


def _has_blocks(file: GgufSource) -> bool:
    return any(keeps_blocks(tensor.block.name) for tensor in file.tensors.values())


def _check_unquantised(file: GgufSource, rounding: str) -> None:
    found = {one.block.name for one in file.tensors.values() if is_quantised(one.block.name)}
    if found:
        raise RequestError(
            message(
                f"quantize={rounding!r} asks to round weights that were rounded before, which adds"
                " a second error to the first",
                wanted="a file of F32, F16 or BF16",
                got=", ".join(sorted(found)),
                do="Leave quantize out to use the file's own blocks",
            )
        )


def gguf_config(file: GgufSource) -> dict[str, Any]:
    """The metadata in the words of a config.json."""
    keys = _Keys(file.metadata)
    architecture = keys.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            message(
                "this GGUF architecture has no implementation here",
                wanted=" or ".join(_ARCHITECTURES),
                got=repr(architecture),
                do="Load the model from a Hugging Face folder if its family is known",
            )
        )
    own = keys.under(architecture)
    _refuse_unknown(own)
    heads = own.integer("attention.head_count")
    config: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": _vocabulary(file),
        "hidden_size": own.integer("embedding_length"),
        "intermediate_size": own.integer("feed_forward_length"),
        "num_hidden_layers": own.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.integer("attention.head_count_kv", heads),
        "max_position_embeddings": own.integer("context_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": own.number("rope.freq_base", 10_000.0),
    }
    if "attention.key_length" in own:
        config["head_dim"] = own.integer("attention.key_length")
    if architecture == "llama" and "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    if "rope.dimension_count" in own:
        head_dim = config.get("head_dim", config["hidden_size"] // max(heads, 1))
        config["partial_rotary_factor"] = own.integer("rope.dimension_count") / max(head_dim, 1)
    scaling = _scaling(file, own, config["max_position_embeddings"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    for field in ("bos", "eos"):
        key = f"tokenizer.ggml.{field}_token_id"
        if key in keys:
            config[f"{field}_token_id"] = keys.integer(key)
    return config


def _refuse_unknown(own: _Keys) -> None:
    for key in _REFUSED:
        if key in own and own.values[own.prefix + key] not in (0, 1.0):
            raise UnsupportedError(
                message(
                    f"the GGUF key {own.prefix + key} has no implementation here",
                    got=own.values[own.prefix + key],
                    do="Load the model from a Hugging Face folder if its family is known",
                )
            )


def _vocabulary(file: GgufSource) -> int:
    if "token_embd.weight" not in file.tensors:
        raise FormatError(message("the GGUF file has no tensor token_embd.weight"))
    return int(file.tensors["token_embd.weight"].shape[0])


def _scaling(file: GgufSource, own: _Keys, context: int) -> dict[str, Any] | None:
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
    kind = own.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": own.number("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": own.number("rope.scaling.factor"),
            "original_max_position_embeddings": own.integer("rope.scaling.original_context_length"),
        }
    raise UnsupportedError(
        message(
            "this RoPE scaling of a GGUF file has no implementation here",
            wanted="none, linear or yarn",
            got=repr(kind),
        )
    )


@dataclass(frozen=True)
class _Renamed:
    """The tensors of a file under the families' names.

    `sources`: the families' name -> the file's; `heads`: how many heads a permuted one has.
    """

    file: GgufSource
    sources: Mapping[str, str]
    heads: Callable[[str], int | None]

    @classmethod
    def of(cls, file: GgufSource, config: Mapping[str, Any]) -> _Renamed:
        sources = {_renamed(name): name for name in file.tensors if name != _FREQUENCIES}

        def heads(name: str) -> int | None:
            if config["model_type"] != "llama" or not any(part in name for part in _PERMUTED):
                return None
            of_keys = "k_proj" in name
            return int(config["num_key_value_heads" if of_keys else "num_attention_heads"])

        return cls(file, sources, heads)

    def names(self) -> Iterable[str]:
        return self.sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.tensors[self.sources[name]].shape)

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        stored = self.sources[name]
        values = self.file.dequantise(stored, dtype or torch.float32)
        self.file.release(stored)
        heads = self.heads(name)
        return values if heads is None else _halves(values, heads)

    def quantised(self, name: str) -> QuantizedWeight | None:
        """The blocks of a matrix, None where it holds floats."""
        stored = self.sources[name]
        block = self.file.tensors[stored].block.name
        if not keeps_blocks(block):
            return None
        weight = weight_of_blocks(block, self.file.blocks(stored))
        self.file.release(stored)
        heads = self.heads(name)
        return weight if heads is None else weight.gather(_halves(torch.arange(weight.rows), heads))


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


@dataclass(frozen=True)
class _Keys:
    """Typed access to metadata, below a prefix."""

    values: Mapping[str, object]
    prefix: str = ""

    def under(self, prefix: str) -> _Keys:
        """The keys that start with `prefix.`, without it."""
        return _Keys(self.values, f"{prefix}.")

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self.values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        return value if isinstance(value, str) else self._wrong(key, "a string", value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return value if good else self._wrong(key, "a count", value)  # type: ignore[return-value]

    def number(self, key: str, default: float | None = None) -> float:
        """A float; the format stores float32, of which the shortest decimal is meant."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return self._wrong(key, "a number", value)
        return float(str(np.float32(value)))

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(self.prefix + key, default)
        return value if value is not None else self._wrong(key, "a value", None)

    def _wrong(self, key: str, wanted: str, got: object) -> Any:
        raise FormatError(
            message(f"the GGUF key {self.prefix + key} is missing or wrong", wanted=wanted, got=got)
        )
