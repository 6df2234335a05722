"""Which block type each tensor of a GGUF file gets: the mixes that files are called after.

Source: `llama_tensor_get_type_impl` of llama.cpp, for models of up to some tens of billions of
weights. Rows that are no whole blocks of 256 get blocks of 32 with at least as many bits, of those
that are held bit for bit here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from everystep.files.gguf_blocks import BlockType
from everystep.files.gguf_writer import BLOCKS
from everystep.files.strict_json import whole_number

GgufFormat = Literal["q8_0", "q6_k", "q5_k_m", "q4_k_m"]


@dataclass(frozen=True)
class Mix:
    """`most`: what matrices get; `more`: values and the last product of some layers; `fused`:
    queries, keys and values in one; `head`: the head. `number`: `general.file_type`."""

    number: int
    most: str
    more: str
    fused: str
    head: str


MIXES: Mapping[GgufFormat, Mix] = {
    "q8_0": Mix(7, *["Q8_0"] * 4),
    "q6_k": Mix(18, *["Q6_K"] * 4),
    "q5_k_m": Mix(17, "Q5_K", "Q6_K", "Q6_K", "Q6_K"),
    "q4_k_m": Mix(15, "Q4_K", "Q6_K", "Q5_K", "Q6_K"),
}
_IN_32 = {"Q4_K": "Q5_0", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}


def block_of(
    format: GgufFormat, name: str, shape: tuple[int, ...], layers: int, *, tied: bool
) -> BlockType:
    """Return the type of one tensor. `tied`: the table of embeddings is the head, too."""
    if len(shape) == 1:
        return BLOCKS["F32"]
    mix = MIXES[format]
    wanted = mix.most
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        wanted = mix.head
    elif name.endswith(".attn_qkv.weight"):
        wanted = mix.fused
    elif name.endswith((".attn_v.weight", ".ffn_down.weight")) and _gets_more(name, layers):
        wanted = mix.more
    if shape[-1] % BLOCKS[wanted].elements:
        wanted = _IN_32.get(wanted, wanted)
    return BLOCKS["F16"] if shape[-1] % BLOCKS[wanted].elements else BLOCKS[wanted]


def _gets_more(name: str, layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or every third between."""
    number = whole_number(name.split(".")[1]) or 0
    eighth = layers // 8
    return number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2
