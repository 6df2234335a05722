"""Tiny models from numpy's numbers, and random settings for them: the same on either side.

Nothing here reads torch or a library of models, so that what was recorded with one release can be
asked again with any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "two layers": BASE,
    "five layers": {**BASE, "vocab_size": 33, "num_hidden_layers": 5},
    "tied": {**BASE, "vocab_size": 26, "num_hidden_layers": 4, "tie_word_embeddings": True},
}
KINDS = ("diverse", "dola", "constrained", "contrastive")
BEAMS = ("diverse", "constrained")


def weights(name: str) -> dict[str, np.ndarray]:
    """The weights of a model by their names in a checkpoint, float64."""
    config = MODELS[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def drawn(rows: int, columns: int, gain: float) -> np.ndarray:
        return rng.standard_normal((rows, columns)) * gain / columns**0.5

    found = {"model.norm.weight": 1 + 0.2 * rng.standard_normal(hidden)}
    tied = config["tie_word_embeddings"]
    table = drawn(config["vocab_size"], hidden, 2.5 if tied else hidden**0.5)
    found["model.embed_tokens.weight"] = table
    if not tied:
        found["lm_head.weight"] = drawn(config["vocab_size"], hidden, 2.5)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{start}{norm}.weight"] = 1 + 0.2 * rng.standard_normal(hidden)
        for part, shape in shapes.items():
            found[f"{start}{part}.weight"] = drawn(*shape, 2**0.5)
    return found


def setting(kind: str, number: int) -> tuple[str, list[int], dict[str, Any]]:
    """The model, the prompt and the keywords of a setting; `seed` among them is for torch."""
    rng = np.random.default_rng([KINDS.index(kind), number])
    model = str(rng.choice(list(MODELS)))
    vocabulary = MODELS[model]["vocab_size"]

    def ids(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocabulary, count)]

    prompt = ids(int(rng.integers(1, 11)))
    options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 13)), "pad_token_id": 0}
    ends = [[1], [1], [1, 2], [3, 1, 2], []][int(rng.integers(5))]
    options["eos_token_id"] = ends or None
    options |= _processing(rng, ids, bool(ends))
    for name in _unsound(kind, options, len(prompt)):
        options.pop(name, None)
    # No word that must occur holds an end token: a text could not go on after it.
    words = ids if kind != "constrained" else lambda n: [4 + t % (vocabulary - 4) for t in ids(n)]
    options |= _OWN[kind](rng, words)
    return model, prompt, options


def _unsound(kind: str, options: dict[str, Any], length: int) -> list[str]:
    """Settings that had a defect there: of several beams only the first lost for repeating the
    prompt, where an end token was banned its score became nan as lengths grew, and a banned
    sequence was overlooked at first if it is longer than the prompt of `length` tokens."""
    found = ["encoder_repetition_penalty"] if kind in BEAMS else []
    if kind == "dola" or "min_new_tokens" in options:
        found.append("exponential_decay_length_penalty")
    if options.get("min_new_tokens", 0) > options["max_new_tokens"]:
        found.append("min_new_tokens")
    if length < 2:
        found.append("bad_words_ids")
    return found


def _processing(
    rng: np.random.Generator, ids: Callable[[int], list[int]], ends: bool
) -> dict[str, Any]:
    known: dict[str, Any] = {
        "repetition_penalty": float(rng.choice([1.3, 0.8])),
        "no_repeat_ngram_size": int(rng.integers(2, 4)),
        "bad_words_ids": [ids(1), ids(2)],
        "suppress_tokens": ids(2),
        "renormalize_logits": True,
        "encoder_repetition_penalty": 1.2,
    }
    if ends:
        known["min_new_tokens"] = int(rng.integers(1, 5))
        known["exponential_decay_length_penalty"] = [int(rng.integers(1, 4)), 1.4]
    return {name: value for name, value in known.items() if rng.random() < 0.12}


def _searching(rng: np.random.Generator, width: int) -> dict[str, Any]:
    return {
        "num_beams": width,
        "num_return_sequences": int(rng.integers(1, width + 1)),
        "length_penalty": float(rng.choice([1.0, 0.0, -0.5, 2.0])),
        "early_stopping": [False, True, "never"][int(rng.integers(3))],
    }


def _diverse(rng: np.random.Generator, ids: Callable[[int], list[int]]) -> dict[str, Any]:
    width, groups = [(2, 2), (4, 2), (4, 4), (6, 3), (6, 2)][int(rng.integers(5))]
    penalty = float(rng.choice([0.3, 1.0, 2.5]))
    return _searching(rng, width) | {"num_beam_groups": groups, "diversity_penalty": penalty}


def _constrained(rng: np.random.Generator, ids: Callable[[int], list[int]]) -> dict[str, Any]:
    words: list[Any] = []
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.6:
            words.append(ids(int(rng.integers(1, 4))))
            continue
        firsts = list(dict.fromkeys(ids(3)))
        words.append([[first, *ids(int(rng.integers(0, 3)))] for first in firsts])
    return _searching(rng, int(rng.integers(2, 6))) | {"force_words_ids": words}


def _dola(rng: np.random.Generator, ids: Callable[[int], list[int]]) -> dict[str, Any]:
    layers = ["low", "high", [0], [1], [0, 1], [1, 0, 3, 9]][int(rng.integers(6))]
    sampled = {"do_sample": True, "top_k": 8, "seed": int(rng.integers(1000))}
    return {"dola_layers": layers} | (sampled if rng.random() < 0.3 else {})


def _contrastive(rng: np.random.Generator, ids: Callable[[int], list[int]]) -> dict[str, Any]:
    alpha = float(rng.choice([0.1, 0.4, 0.6, 1.0, 1.3, 2.0]))
    return {"penalty_alpha": alpha, "top_k": int(rng.integers(2, 7))}


_OWN = {
    "diverse": _diverse,
    "constrained": _constrained,
    "dola": _dola,
    "contrastive": _contrastive,
}
