"""Rounds a GGUF file by llama.cpp, in its environment: quantise_gguf.py SOURCE TARGET KIND."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as ll


def main() -> None:
    """`TARGET` holds the model of `SOURCE` as `KIND`, such as Q4_K_M, says."""
    source, target, kind = sys.argv[1:]
    options = ll.llama_model_quantize_default_params()
    options.ftype = getattr(ll, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.allow_requantize = True
    if ll.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
        raise SystemExit(f"llama.cpp could not make {target}")


if __name__ == "__main__":
    main()
