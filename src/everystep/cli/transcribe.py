"""`everystep transcribe`: what is said in sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import everystep as es
from everystep.cli import command_options as o
from everystep.cli.loading import fetch, load
from everystep.cli.models import AsJson
from everystep.cli.terminal import harmless, write_line, write_report


def transcribe(
    context: typer.Context,
    sounds: Annotated[list[Path], typer.Argument(metavar="SOUND...", help="Sound files.")],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="A folder or a hub id of Whisper.")
    ],
    language: Annotated[
        str | None,
        typer.Option("--language", metavar="NAME", help="What is spoken; else it is found out."),
    ] = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Write in English what is said.")
    ] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Show when what was said.")
    ] = False,
    as_json: AsJson = False,
    quantize: o.Quantize = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
) -> None:
    """Write down what is said in each SOUND, of any length.

    WAV files are read by themselves; other kinds need everystep[audio].
    """
    offline = offline or context.obj
    folder = fetch(model, offline)
    loaded, tokenizer = load(str(folder), None, quantize, None, device, offline=True)
    prepared = (folder / "preprocessor_config.json").is_file()
    found = es.transcribe(
        loaded,
        tokenizer,
        sounds,
        timestamps=timestamps,
        extractor=es.WhisperFeatureExtractor.from_pretrained(folder) if prepared else None,
        language=language,
        task="translate" if translate else None,
    )
    if as_json:
        each = [
            {
                "sound": str(path),
                "language": one.language,
                "text": one.text,
                "segments": [
                    {"start": part.start, "end": part.end, "text": part.text}
                    for part in one.segments
                ],
            }
            for path, one in zip(sounds, found, strict=True)
        ]
        write_report({"model": model, "sounds": each})
        return
    for path, one in zip(sounds, found, strict=True):
        if len(sounds) > 1:
            write_line(f"{harmless(str(path))}:")
        for part in one.segments:
            times = f"[{part.start:.2f} - {part.end:.2f}] " if timestamps else ""
            write_line(times + harmless(part.text))
