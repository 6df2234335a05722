"""How fast is a mixture of experts natively, compared with transformers?

    scripts/bench experts [--formats int8,q4_0] [--cases 1x16,8x16,1x512] [--repeats 5]
                          [--without-bfloat16] [--out NAME]

Both run the first `--layers` layers of a model in the shape of Qwen3-30B-A3B with random weights
and a small vocabulary. A case 8x16 is 8 rows after prompts of 16: 32 further tokens of each; cases
from 512 positions on are the prompt alone. Ours and theirs are timed in turn, in one process;
figures are medians in milliseconds, per token of decoding or per prompt, and ratios to the faster
of transformers' types. How many experts a step reads is counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from parts.clock import medians
from parts.report import options, write
from parts.slices import SHAPES
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from everystep.api.model import LanguageModel
from everystep.executors.native import NativeExecutor
from everystep.models import Model, build_model, weight_bytes
from everystep.models.families import find_family
from everystep.models.load import complete_config
from everystep.models.loader import HeldWeights
from everystep.models.stacks import unstacked
from everystep.nn.linear import Rows
from everystep.nn.quantized import BLOCK, QuantizedWeight
from everystep.types import Verb, Work

SHAPE = {**SHAPES["qwen3-30b-a3b"].config, "vocab_size": 2048, "max_position_embeddings": 4096}
NEW, LONG = 32, 512


def their_model(layers: int) -> Any:
    """A module of transformers in float32, without an end."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(num_hidden_layers=layers, **SHAPE)
    found = Qwen3MoeForCausalLM(config).eval()
    found.generation_config.eos_token_id, found.generation_config.pad_token_id = None, 0
    return found


def q4_0(values: Tensor) -> QuantizedWeight:
    """In blocks of GGUF's Q4_0: the value farthest from zero is code -8."""
    blocks = values.view(len(values), -1, BLOCK)
    far = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = (far / -8).half()
    codes = ((blocks / scales.float()).round().clamp(-8, 7) + 8).to(torch.uint8)
    packed = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return QuantizedWeight("q4_0", packed.flatten(1), scales.squeeze(2))


def our_model(theirs: Any, format: str) -> Model:
    """The same weights in codes, in panels."""
    config, source = theirs.config.to_dict(), HeldWeights(theirs.state_dict())
    panels = partial(build_model, config, in_panels=lambda spec: True)
    if format != "q4_0":
        return panels(source, quantize=format)  # type: ignore[arg-type]
    family = find_family(config["model_type"])
    parameters = family.parameters(family.read_spec(complete_config(config)))
    own, _ = unstacked(source, None, parameters)
    weights: dict[str, Rows] = {}
    for name in own.names():
        one = own.load(name)
        weights[name] = q4_0(one) if one.dim() == 2 and "gate.weight" not in name else one
    held = HeldWeights(weights)
    return panels(held, kept=held.quantised)


def experts_read(model: Model, rows: int, length: int) -> float:
    """How many experts a layer reads, of rows that feed one token after `length` of them."""
    executor = NativeExecutor(model, ahead=False)
    rng, each = np.random.default_rng(1), np.ones(rows, np.int64)
    verbs = tuple(Verb("allocate", row) for row in range(rows))
    for start, count in ((0, length), (length, 1)):
        before = executor.experts_read()
        ids = rng.integers(2, SHAPE["vocab_size"], rows * count)
        given = verbs if start == 0 else ()
        executor.run(Work(given, np.arange(rows), start * each, count * each, each, ids))
    return (executor.experts_read() - before) / len(model.spec.layers)


def calls(
    generate: Callable[..., object], rows: int, length: int, repeats: int
) -> Iterator[Callable[[], object]]:
    """Generations of the same prompts."""
    prompt = torch.randint(
        2, SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(length)
    )
    fixed = {"max_new_tokens": 1 if length >= LONG else NEW, "do_sample": False}
    given = {"attention_mask": torch.ones_like(prompt), "eos_token_id": None, "pad_token_id": 0}
    for _ in range(repeats + 1):
        yield lambda: generate(prompt, **given, **fixed)


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """All cases."""
    theirs = their_model(args.layers)
    formats = args.formats.split(",")
    models = {format: our_model(theirs, format) for format in formats}
    sides: dict[str, Callable[..., object]] = {"transformers float32": theirs.generate}
    if not args.without_bfloat16:
        wide = theirs.config.__class__.from_dict(theirs.config.to_dict())
        narrow = Qwen3MoeForCausalLM._from_config(wide, dtype=torch.bfloat16).eval()
        narrow.load_state_dict(theirs.state_dict())
        narrow.generation_config = theirs.generation_config
        sides["transformers bfloat16"] = narrow.generate
    sides |= {format: LanguageModel(one).generate for format, one in models.items()}
    for case in args.cases.split(","):
        rows, length = map(int, case.split("x"))
        found = medians(*(calls(one, rows, length, args.repeats) for one in sides.values()))
        each = 1 if length >= LONG else NEW
        times = {name: 1e3 * one / each for name, one in zip(sides, found, strict=True)}
        best = min(time for name, time in times.items() if name not in models)
        read = experts_read(models[formats[0]], rows, length)
        ratios = {f"{format} faster by": best / times[format] for format in formats}
        yield {"rows": rows, "held": length, **times, **ratios, "experts read": read}
    for format, model in models.items():
        yield {"format": format, "bytes": weight_bytes(model)}


def main() -> None:
    parser = options(__doc__, threads=2)
    parser.add_argument("--formats", default="int8,q4_0")
    parser.add_argument("--cases", default="1x16,8x16,1x512")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-bfloat16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    with torch.inference_mode():
        for row in measure(args):
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
            print(shown, flush=True)
            rows.append(row)
    write("experts", args, {"rows": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
