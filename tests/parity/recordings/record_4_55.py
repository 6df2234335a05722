"""Records what transformers 4.55.4 answers, the last release with all four of these strategies.

It runs in an environment of its own, which the project does not need for anything else:

    python3 -m venv RECORDING
    RECORDING/bin/pip install torch==2.13.0 transformers==4.55.4 numpy==1.26.4 \
        "huggingface-hub==0.36.*" tokenizers==0.21.4
    RECORDING/bin/python tests/parity/recordings/record_4_55.py [KIND ...]

One prompt at a time and in float64: attention and norms of transformers are replaced by the same
sums without their step down to float32. A file per kind comes out, beside this script: of each
setting (see `tiny.py`) its number, the generated ids of every row, and scores: those of the
sequences under beams, and of each chosen token otherwise. A setting that transformers refuses has
the name of the exception instead.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import tiny  # beside this file
import torch
import torch.nn.functional as F
import transformers
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm

COUNT = 500
WANTED = {"transformers": "4.55.4", "numpy": "1.26.4"}


def exact_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
) -> Any:
    """Attention with the softmax in the type of the model."""
    shared = module.num_key_value_groups
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    weights = query @ key.transpose(2, 3) * scaling
    weights = weights if mask is None else weights + mask[..., : key.shape[-2]]
    weights = weights.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def exact_norm(norm: Any, x: Any) -> Any:
    """A root mean square norm in the type of the model."""
    return norm.weight * F.rms_norm(x, x.shape[-1:], eps=norm.variance_epsilon)


@cache
def model(name: str) -> Any:
    """A model of `tiny.py` in transformers."""
    config = transformers.LlamaConfig.from_dict(tiny.MODELS[name], attn_implementation="exact")
    found = transformers.LlamaForCausalLM(config).to(torch.float64)
    weights = {key: torch.from_numpy(value) for key, value in tiny.weights(name).items()}
    missing, unexpected = found.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    found.tie_weights()
    # As everywhere in transformers, logits are read in float32; group beams need it.
    found.lm_head.register_forward_hook(lambda module, given, logits: logits.float())
    found.generation_config = transformers.GenerationConfig()
    return found.eval()


def answer(kind: str, number: int) -> list[Any]:
    """The number, the new ids of every row, and the scores, rounded."""
    name, prompt, options = tiny.setting(kind, number)
    torch.manual_seed(options.pop("seed", 0))
    ids = torch.tensor([prompt])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
    try:
        output = model(name).generate(**given, return_dict_in_generate=True, output_scores=True)
    except (ValueError, RuntimeError, IndexError, KeyError, TypeError) as error:
        return [number, f"{type(error).__name__}: {error}"[:60], []]
    rows = output.sequences[:, len(prompt) :].tolist()
    if kind in tiny.BEAMS:
        scores = output.sequences_scores.tolist()
    else:
        scores = [float(s[0, t]) for s, t in zip(output.scores, rows[0], strict=True)]
    return [number, rows, [round(score, 6) for score in scores]]


def record(kind: str) -> None:
    """Writes the file of a kind."""
    lines = [json.dumps(answer(kind, n), separators=(",", ":")) for n in range(COUNT)]
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    Path(__file__).with_name(f"{kind}.json").write_text(text)


if __name__ == "__main__":
    assert transformers.__version__ == WANTED["transformers"], transformers.__version__
    assert numpy.__version__ == WANTED["numpy"], numpy.__version__
    torch.set_num_threads(1)
    transformers.AttentionInterface.register("exact", exact_attention)
    AttentionMaskInterface.register("exact", eager_mask)
    LlamaRMSNorm.forward = exact_norm
    transformers.logging.set_verbosity_error()
    for chosen in sys.argv[1:] or tiny.KINDS:
        record(chosen)
