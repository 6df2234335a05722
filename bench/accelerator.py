"""How fast does an accelerator decode, compared with transformers?

    scripts/bench accelerator [--shapes default 7b] [--cases 1x1 8x1 32x1 1x4] [--tokens 64]
                              [--repeats 3] [--compiled] [--out NAME]

All run on the first CUDA device, in turn, on the same random weights: everystep with its steps
captured as graphs, everystep with torch operators one by one (`executor="torch"`), transformers,
and with --compiled transformers with a static cache, which it compiles by itself. "default" has
the shape of the default model, in float32 and bfloat16; "7b" that of Llama 2 with 7 billion
parameters, in bfloat16. A case is rows x beams. Prints, and writes to bench/results/, the medians
of new tokens per second of whole `generate` calls, the prompt of 32 tokens included; beside them
how often a step of ours waited for the device, and how many steps were replayed.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from parts.report import options, write

from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.executors.torch_executor import TorchExecutor

PROMPT = 32
CASES = ("1x1", "8x1", "32x1", "1x4")
SHAPES: Mapping[str, Mapping[str, int]] = {
    "default": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
DTYPES = {"default": (torch.float32, torch.bfloat16), "7b": (torch.bfloat16,)}


def engines(shape: str, dtype: torch.dtype) -> dict[str, Any]:
    """The engines' models of the same weights, without an end token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=shape == "default")
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        peer = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    weights = {name: one for name, one in peer.state_dict().items() if name != "lm_head.weight"}
    if shape != "default":
        weights["lm_head.weight"] = peer.lm_head.weight.detach()
    ours = from_weights(config.to_dict(), weights, dtype=dtype, device="cuda")
    ours.generation_config.eos_token_id = None
    ours.generation_config.pad_token_id = 0
    operators = LanguageModel(ours.core, ours.generation_config, executor="torch")  # type: ignore[arg-type]
    return {"everystep": ours, "operators": operators, "transformers": peer}


def call(model: Any, batch: int, beams: int, tokens: int, **more: Any) -> float:
    """New tokens per second of one call, in all rows together."""
    ids = torch.randint(1, 32000, (batch, PROMPT), device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=beams,
        **more,
    )
    torch.cuda.synchronize()
    return found[:, PROMPT:].numel() / (time.perf_counter() - begin)


def waits(model: Any, batch: int, beams: int) -> float:
    """How often a step waited for the device, less what a call of any length does once."""
    counted = []
    for tokens in (16, 48):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            call(model, batch, beams, tokens)
            torch.cuda.set_sync_debug_mode("default")
        # The two synchronisations of `call` are asked for, and no warning tells of them.
        counted.append(sum("synchroniz" in str(one.message) for one in told))
    return (counted[1] - counted[0]) / 32


def replays(model: Any, batch: int, beams: int, tokens: int) -> dict[str, int]:
    """What became of the steps of one call."""
    opened: list[TorchExecutor] = []
    made = TorchExecutor.__init__

    def noted(self: TorchExecutor, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        opened.append(self)

    TorchExecutor.__init__ = noted  # type: ignore[method-assign]
    try:
        call(model, batch, beams, tokens)
    finally:
        TorchExecutor.__init__ = made  # type: ignore[method-assign]
    counts = opened[0].captures
    return {"replayed": counts.replayed, "captured": counts.captured, "other": counts.other}


def measured(
    models: Mapping[str, Any], batch: int, beams: int, args: Any, compiled: bool
) -> dict[str, Any]:
    """The medians of a case, each engine in turn."""
    asked = {name: {} for name in models}
    known = dict(models)
    if compiled and beams == 1:
        known["transformers, compiled"] = models["transformers"]
        asked["transformers, compiled"] = {"cache_implementation": "static"}
    for name, model in known.items():
        call(model, batch, beams, args.tokens if "," in name else 4, **asked[name])  # warm up
    speeds: dict[str, list[float]] = {name: [] for name in known}
    for _, name in product(range(args.repeats), known):
        speeds[name].append(call(known[name], batch, beams, args.tokens, **asked[name]))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    own = models["everystep"]
    return {
        **medians,
        "ratio": medians["everystep"] / medians["transformers"],
        "waits": waits(own, batch, beams),
        **replays(own, batch, beams, args.tokens),
    }


def main() -> None:
    """Runs every case for all engines in turn and writes a dated file."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="transformers' static cache too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here. Run this on a machine that has one.")
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    device = torch.cuda.get_device_name(0)
    for shape in args.shapes:
        for dtype in DTYPES[shape]:
            models = engines(shape, dtype)
            for batch, beams in (map(int, case.split("x")) for case in args.cases):
                # Compiling takes minutes: one type of it.
                compiled = args.compiled and dtype == torch.bfloat16
                found = measured(models, batch, beams, args, compiled)
                case = {"shape": shape, "dtype": str(dtype).removeprefix("torch.")}
                rows.append({**case, "batch": batch, "beams": beams, **found})
                print({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()})
                content = {"device": device, "rows": rows}
                write("accelerator", args, content, packages=("transformers",))
            del models
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
