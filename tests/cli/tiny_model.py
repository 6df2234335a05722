"""A whole model folder of a few kilobytes: a Llama with random weights that reads bytes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """The folder holds a configuration, weights and a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(), str(folder / "model.safetensors"), {"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "pad_token": SPECIAL[0]}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (256 + len(SPECIAL), 16), "model.norm.weight": (16,)}
    for i in range(2):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{at}.{name}_proj.weight": (16, 16) for name in "qo"}
        shapes |= {f"{at}.{name}_proj.weight": (8, 16) for name in "kv"}
        shapes |= {f"{mlp}.{name}_proj.weight": (32, 16) for name in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (16, 32)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{i}.{name}.weight": (16,) for name in norms}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def _tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
