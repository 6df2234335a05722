"""`everystep perplexity`: how well a model predicts the text of a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import everystep as es
from everystep.cli import command_options as o
from everystep.cli.adapters import (
    AdapterOption,
    SteerOption,
    asked_adapters,
    asked_steering,
    with_adapters,
)
from everystep.cli.loading import load
from everystep.cli.models import AsJson
from everystep.cli.terminal import is_terminal, write_report, write_table
from everystep.cli.user_input import read_prompt, read_text
from everystep.files.sources import DEFAULT_MODEL

_MOST = 2048


def perplexity(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text; - reads standard input.")],
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="N", help="Tokens to read at once, at most 2048."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", metavar="N", help="Tokens from one window to the next."),
    ] = None,
    as_json: AsJson = False,
    model: o.Model = DEFAULT_MODEL,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
    adapter: AdapterOption = None,
    steer_file: SteerOption = None,
) -> None:
    """Measure how well a model predicts the text in FILE.

    The text is read in windows; each scores the tokens that the one before it did not reach.
    Figures of one model with one window and stride can be compared, others cannot.
    """
    adapters, steering = asked_adapters(adapter), asked_steering(steer_file)
    text = read_prompt("-", None) if file == "-" else read_text(Path(file))
    offline = offline or context.obj
    loaded, tokenizer = load(model, dtype, quantize, cache_dtype, device, offline)
    window = min(_MOST, loaded.context or _MOST) if window is None else window
    stride = max(1, window * 3 // 4) if stride is None else stride
    began = time.monotonic()
    found = es.score(
        loaded,
        tokenizer,
        text,
        window=window,
        stride=stride,
        progress=is_terminal(sys.stderr),
        adapter_names=with_adapters(loaded, adapters).get("adapters"),
        **steering,
    )
    figures: dict[str, Any] = {
        "tokens": len(found.tokens),
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "window": window,
        "stride": stride,
        "seconds": time.monotonic() - began,
    }
    if as_json:
        write_report({"model": model, **figures})
        return
    shown = [f"{one:.4f}" if isinstance(one, float) else str(one) for one in figures.values()]
    write_table([name.replace("_", " ") for name in figures], [shown])
