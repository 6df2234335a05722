"""Records what the `gguf` package makes of random blocks, for test_gguf_blocks.py.

Run it where gguf 0.19.0 and numpy are installed; it writes data/gguf_blocks.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

KINDS = {"F32": 4, "F16": 2, "BF16": 2, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
BLOCKS = 8


def recorded(kind: str, nbytes: int, generator: np.random.Generator) -> dict[str, str]:
    """Random blocks and the bits of their float32 values, both as hexadecimal digits."""
    blocks = generator.integers(0, 256, (BLOCKS, nbytes), dtype=np.uint8)
    # The second byte of every float16 holds sign and exponent: not infinity, not NaN.
    for byte in {"Q4_1": (1, 3), "BF16": (1,), "F32": (3,)}.get(kind, (1,)):
        blocks[:, byte] &= 0xBB
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return {"blocks": blocks.tobytes().hex(), "values": values.astype("<f4").tobytes().hex()}


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    content = {kind: recorded(kind, nbytes, generator) for kind, nbytes in KINDS.items()}
    target = Path(__file__).parent / "data" / "gguf_blocks.json"
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
