"""`everystep bench`: how fast a model runs on this machine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everystep._version import __version__
from everystep.cli import command_options as o
from everystep.cli.adapters import AdapterOption, asked_adapters, with_adapters
from everystep.cli.loading import load, working
from everystep.cli.machine import threads, version_of
from everystep.cli.models import AsJson
from everystep.cli.terminal import note, write_report, write_table
from everystep.files.sources import DEFAULT_MODEL
from everystep.processor import processor_name

if TYPE_CHECKING:
    from everystep.api.speed import Speed

_USUAL = (1, 8, 32)


def bench(
    context: typer.Context,
    model: o.ModelArgument = DEFAULT_MODEL,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Length of the prompt.")
    ] = 512,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, help="Tokens to decode in each row.")
    ] = 64,
    after: Annotated[
        int, typer.Option("--after", metavar="N", min=1, help="Tokens before those of a row.")
    ] = 32,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", metavar="N", min=1, help="Rows at once. Repeatable."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option("--repeats", metavar="N", min=1, help="Runs per figure; the median is shown."),
    ] = 5,
    as_json: AsJson = False,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
    adapter: AdapterOption = None,
) -> None:
    """Measure how fast MODEL runs here: the first token of a prompt, and decoding in batches.

    Decoding is greedy, after prompts of random tokens; a run before the others is not counted.
    """
    adapters = asked_adapters(adapter)
    loaded, _ = load(model, dtype, quantize, cache_dtype, device, offline or context.obj)
    mix = with_adapters(loaded, adapters).get("adapters")
    from everystep.api.speed import measure_speed  # torch is a second of importing

    with working(f"a prompt of {prompt_tokens} tokens"):
        prompt = measure_speed(
            loaded, positions=prompt_tokens, tokens=1, repeats=repeats, adapters=mix
        )
    measured = []
    for rows in batch or _USUAL:
        with working(f"decoding {rows} rows"):
            measured.append(
                measure_speed(
                    loaded,
                    rows=rows,
                    positions=after,
                    tokens=tokens,
                    repeats=repeats,
                    adapters=mix,
                )
            )
    found = {
        "model": model,
        "device": device,
        "adapters": mix or {},
        **_surroundings(loaded),
        "repeats": repeats,
        **_figures(prompt, measured),
    }
    if as_json:
        write_report(found)
        return
    note(
        f"{model}: {' and '.join(loaded.weight_bytes)}; {loaded.runs_on}; {found['threads']}"
        f" threads; medians of {repeats} runs"
    )
    _show(found)


def _surroundings(model: Any) -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "weights": model.weight_bytes,
        "cache_dtype": model.cache_dtype,
        "executor": model.runs_on,
        "threads": threads(),
        "processor": processor_name(),
        "versions": {
            "everystep": __version__,
            "torch": version_of("torch"),
            "python": platform.python_version(),
        },
    }


def _figures(prompt: Speed, measured: list[Speed]) -> dict[str, Any]:
    """Return what was measured: of a prompt, and of decoding in batches."""
    return {
        "first_token": {
            "prompt_tokens": prompt.positions,
            "seconds": prompt.first,
            "tokens_per_second": prompt.positions / prompt.first,
        },
        "decode": [
            {
                "rows": one.rows,
                "prompt_tokens": one.positions,
                "tokens": one.tokens,
                "seconds_per_step": one.rest / one.tokens,
                "tokens_per_second": one.rows * one.tokens / one.rest,
            }
            for one in measured
        ],
    }


def _show(found: dict[str, Any]) -> None:
    """Show the figures as a table."""
    first = found["first_token"]
    rows = [
        (
            f"first token after {first['prompt_tokens']}",
            f"{first['seconds'] * 1e3:.1f}",
            f"{first['tokens_per_second']:.0f}",
        )
    ]
    for one in found["decode"]:
        name = f"a step of {one['rows']} row{'s' * (one['rows'] > 1)}"
        step, speed = one["seconds_per_step"] * 1e3, one["tokens_per_second"]
        rows.append((name, f"{step:.1f}", f"{speed:.0f}"))
    write_table(("what", "milliseconds", "tokens a second"), rows)
