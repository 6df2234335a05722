"""How fast does an accelerator decode, compared with transformers?

    scripts/bench accelerator [--tokens 64] [--repeats 4] [--out NAME]

Both run on the first CUDA device, in turn, on the same random weights in the shape of the default
model, because that model need not be there. Prints, and writes to bench/results/, the medians of
new tokens per second of whole `generate` calls, the prompt of 32 tokens included, and their ratio.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import product
from typing import Any

import torch
from parts.report import options, write

import everystep as es

PROMPT = 32
CASES = ((1, 1), (8, 1), (32, 1), (1, 4))  # (batch, beams)


def pair(dtype: torch.dtype) -> dict[str, Any]:
    """Both engines' models of the same weights, without an end token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    peer = LlamaForCausalLM(config).to(dtype).eval()
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = es.load_model(folder, dtype=dtype, device="cuda")
    return {"everystep": ours, "transformers": peer.cuda()}


def speed(model: Any, batch: int, beams: int, tokens: int) -> float:
    """New tokens per second of one call, in all rows together."""
    ids = torch.randint(1, 49152, (batch, PROMPT), device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=beams,
    )
    torch.cuda.synchronize()
    return found[:, PROMPT:].numel() / (time.perf_counter() - begin)


def main() -> None:
    """Runs every case for both engines in turn and writes a dated file."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here. Run this on a machine that has one.")
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        models = pair(dtype)
        for (batch, beams), name in product(CASES, models):
            speed(models[name], batch, beams, 4)  # warm up
        for batch, beams in CASES:
            found: dict[str, list[float]] = {name: [] for name in models}
            for _, name in product(range(args.repeats), models):
                found[name].append(speed(models[name], batch, beams, args.tokens))
            medians = {name: statistics.median(speeds) for name, speeds in found.items()}
            ratio = medians["everystep"] / medians["transformers"]
            case = {"dtype": str(dtype).removeprefix("torch."), "batch": batch, "beams": beams}
            rows.append({**case, **medians, "ratio": ratio})
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()})
    device = torch.cuda.get_device_name(0)
    write("accelerator", args, {"device": device, "rows": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
