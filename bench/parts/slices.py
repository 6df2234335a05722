"""Models in the shapes that people use, of two layers unless it is said, with random weights, for
every engine.

What decoding costs grows with the layers, and every layer costs the same: two of them, and the
embeddings, show how fast a shape is without its gigabytes. All forms come from one folder that
transformers wrote. GGUF files hold its values as they lie there, without the order of rows that
converters give some families: the work is the same, the text is not.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.environments import Unavailable, quantise_gguf
from parts.gguf_copy import BLOCK_CODES, encode, tensor_info
from safetensors import safe_open

import everystep
from everystep.files.sources import DEFAULT_MODEL

_ALIGNMENT = 32
_UINT32, _FLOAT32, _TEXT = 4, 6, 8  # how GGUF numbers the types of its values


@dataclass(frozen=True)
class Shape:
    """`model_type` and `config` of a folder; `architecture` and `metadata` of a GGUF file, None and
    nothing where none is written."""

    name: str
    model_type: str
    config: Mapping[str, Any]
    architecture: str | None
    metadata: Mapping[str, int | float]


_ATTENTION = {"attention.key_length": 128, "attention.value_length": 128}
_QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "mistral-7b",
            "mistral",
            {
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 32000,
                "sliding_window": None,
            },
            "llama",
            {"rope.dimension_count": 128},
        ),
        Shape(
            "qwen3-0.6b",
            "qwen3",
            _QWEN3,
            "qwen3",
            _ATTENTION,
        ),
        Shape(
            "qwen3-0.6b-whole",
            "qwen3",
            {**_QWEN3, "num_hidden_layers": 28},
            "qwen3",
            _ATTENTION,
        ),
        Shape(
            "gemma3-270m",
            "gemma3_text",
            {
                "hidden_size": 640,
                "intermediate_size": 2048,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "sliding_window": 512,
                "query_pre_attn_scalar": 256,
                "vocab_size": 262144,
                "tie_word_embeddings": True,
            },
            "gemma3",
            {
                "attention.key_length": 256,
                "attention.value_length": 256,
                "attention.sliding_window": 512,
            },
        ),
        Shape(
            "qwen3-30b-a3b",
            "qwen3_moe",
            {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "vocab_size": 151936,
            },
            "qwen3moe",
            {
                **_ATTENTION,
                "expert_count": 128,
                "expert_used_count": 8,
                "expert_feed_forward_length": 768,
            },
        ),
        Shape(
            "mamba-2.8b",
            "mamba",
            {
                "hidden_size": 2560,
                "state_size": 16,
                "vocab_size": 50280,
                "residual_in_fp32": True,
            },
            None,
            {},
        ),
    )
}
_CONTEXT = 4096
_SHARED = {
    "num_hidden_layers": 2,
    "max_position_embeddings": _CONTEXT,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


@dataclass(frozen=True)
class Slices:
    """Forms of the shapes, kept in a folder; each is made when it is asked for, whole or not."""

    folder: Path

    def floats(self, shape: Shape, dtype: str) -> Path:
        """A folder that transformers and this library read; `dtype`: bfloat16 or float32."""
        return self._made(f"{shape.name}-{dtype}", lambda to: _write_floats(shape, to, dtype))

    def rounded(self, shape: Shape, format: Any) -> Path:
        """A folder of this library's, int8 or int4."""
        source = self.floats(shape, "bfloat16")
        return self._made(
            f"{shape.name}-{format}",
            lambda to: everystep.quantize(source, to, format, offline=True),
        )

    def gguf(self, shape: Shape, kind: str) -> Path:
        """A file in the blocks of `kind` that llama.cpp reads; Unavailable if none is written."""
        if shape.architecture is None:
            raise Unavailable("no GGUF file of this shape is written here")
        source = self.floats(shape, "bfloat16")
        return self._made(
            f"{shape.name}-{kind}.gguf", lambda to: _write_gguf(shape, source, to, kind)
        )

    def quantised(self, shape: Shape, kind: str) -> Path:
        """A file that llama.cpp's quantiser made, such as Q4_K_M."""
        source = self.gguf(shape, "BF16")
        return self._made(
            f"{shape.name}-{kind}.gguf", lambda to: quantise_gguf(source, to, kind, self.folder)
        )

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        target = self.folder / "slices" / name
        if not target.exists():
            unfinished = target.with_name(f"unfinished-{name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.unlink(missing_ok=True)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            make(unfinished)
            unfinished.rename(target)
        return target


def _write_floats(shape: Shape, folder: Path, dtype: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.model_type, **{**_SHARED, **shape.config})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    _, tokenizer = everystep.load(DEFAULT_MODEL)
    tokenizer.save_pretrained(folder)


# --- GGUF files -----------------------------------------------------------------------------------

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}


def _write_gguf(shape: Shape, source: Path, target: Path, kind: str) -> None:
    with safe_open(_only_weights(source), "pt") as file, target.open("wb") as out:
        groups = dict(_stored(shape, file.keys()))
        infos, offset = [], 0
        for stored, names in groups.items():
            size = tuple(file.get_slice(names[0]).get_shape())
            form = _form(stored, size, kind)
            whole = (len(names), *size) if "_exps" in stored else size
            infos.append(tensor_info(stored, whole, BLOCK_CODES[form], offset))
            length = _bytes(form, int(np.prod(whole)))
            offset += length + -length % _ALIGNMENT
        values = dict(_metadata(shape))
        header = struct.pack("<4sIQQ", b"GGUF", 3, len(groups), len(values))
        header += b"".join(_value(key, value) for key, value in values.items()) + b"".join(infos)
        out.write(header + bytes(-len(header) % _ALIGNMENT))
        for stored, names in groups.items():
            for name in names:
                tensor = file.get_tensor(name).float().numpy()
                out.write(encode(_form(stored, tensor.shape, kind), tensor))
            out.write(bytes(-out.tell() % _ALIGNMENT))


def _only_weights(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def _stored(shape: Shape, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A GGUF file's names and those of the tensors that stand under each, experts in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=_in_order):
        found.setdefault(_renamed(shape, name), []).append(name)
    yield from found.items()


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _renamed(shape: Shape, name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, role = stem.split(".", 3)
    own = {**_LAYER_NAMES, **(_GEMMA_NAMES if "gemma" in shape.name else {})}
    if role.startswith("mlp.experts."):
        return f"blk.{index}.{_EXPERT_NAMES[role.rsplit('.', 1)[1]]}.{kind}"
    return f"blk.{index}.{own[role]}.{kind}"


def _form(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Norms and routers stay floats; a table or head has no fewer than 8 bits."""
    if len(shape) < 2 or "gate_inp" in name:
        return "F32"
    return "Q8_0" if kind == "Q4_0" and name in ("token_embd.weight", "output.weight") else kind


def _bytes(form: str, values: int) -> int:
    sizes = {"F32": 128, "BF16": 64, "Q8_0": 34, "Q4_0": 18}
    return values * sizes[form] // 32


def _metadata(shape: Shape) -> Iterator[tuple[str, int | float | str]]:
    yield "general.architecture", str(shape.architecture)
    config = shape.config
    kv_heads = config["num_key_value_heads"]
    sizes = {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": {**_SHARED, **config}["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": _CONTEXT,
        "vocab_size": config["vocab_size"],
        **shape.metadata,
    }
    for key, value in sizes.items():
        yield f"{shape.architecture}.{key}", value
    yield "tokenizer.ggml.model", "no_vocab"


def _value(key: str, value: int | float | str) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, float):
        return _text(key) + struct.pack("<If", _FLOAT32, value)
    return _text(key) + struct.pack("<II", _UINT32, value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded
