"""How long does the tower of a vision model read a picture, compared with transformers?

    scripts/bench tower [--grids 28x28,56x42] [--repeats 9]

The tower has the shape of Qwen3-VL 2B and random weights, the same in both libraries, in float32. A
grid of 28x28 is a picture of 448 by 448 pixels. The libraries take turns; the figure is the median
over pairs of transformers' seconds divided by ours. The largest difference of the features is shown
beside it.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from parts.clock import alternated, seconds
from parts.report import options, write
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from everystep.models import Model, build_model
from everystep.models.loader import HeldWeights

PATCH = 3 * 2 * 16 * 16
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
# The text model takes no part: as many layers as there are taps and one more, narrow, of few ids.
TEXT = {
    "vocab_size": 256,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
    },
}
IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252}


def models() -> tuple[Any, Model]:
    """The same random weights in both libraries."""
    config = Qwen3VLConfig(text_config=TEXT, vision_config=VISION, **IDS, vision_end_token_id=253)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = Qwen3VLForConditionalGeneration(config).float().eval()
    weights = HeldWeights(theirs.state_dict())
    return theirs, build_model(theirs.config.to_dict(), weights, dtype=torch.float32)


def measured(theirs: Any, own: Model, grid: tuple[int, int], repeats: int) -> dict[str, Any]:
    """A row of the result."""
    tower, (height, width) = own.tower, grid
    assert tower is not None
    pixels = torch.randn(height * width, PATCH)
    place = torch.tensor([[1, height, width]])

    def ours() -> Any:
        return tower.encode(pixels, (1, height, width))

    def reference() -> Any:
        return theirs.model.visual(pixels, grid_thw=place)

    with torch.inference_mode():
        features, expected = ours()[0], reference().pooler_output
        pairs = alternated(repeats, lambda: seconds(ours), lambda: seconds(reference))
    ratios = sorted(other / one for one, other in pairs)
    quarter = len(ratios) // 4
    return {
        "grid": f"{height}x{width}",
        "seconds": statistics.median(one for one, _ in pairs),
        "seconds_of_transformers": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(ratios),
        "quarters": [ratios[quarter], ratios[-1 - quarter]],
        "difference": float((features - expected).abs().max() / expected.abs().max()),
    }


def main() -> None:
    """Times each grid and writes a dated file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--grids", default="28x28,56x42", help="patches, height by width")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    theirs, own = models()
    rows = []
    for text in args.grids.split(","):
        height, width = map(int, text.split("x"))
        rows.append(measured(theirs, own, (height, width), args.repeats))
        row = rows[-1]
        print(
            f"{text}: {row['seconds']:.2f} s, transformers {row['seconds_of_transformers']:.2f} s, "
            f"{row['ratio']:.2f} times as fast, features within {row['difference']:.0e}",
            flush=True,
        )
    write("tower", args, {"rows": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
