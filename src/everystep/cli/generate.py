"""`everystep generate`: one prompt in, its continuation out, as text or as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from everystep.cli.page_questions import Lines, Page, Reasoning, asked_page
from everystep.cli.questions import CommandPrompt
from everystep.cli.runs import NoStages, Resume, Save, Trace, WatchedRun, refuse_prompt, resumed
from everystep.cli.shown_answers import (
    about_answers,
    chosen_form,
    show_events,
    show_results,
    timings,
)
from everystep.cli.terminal import note
from everystep.cli.user_input import read_prompt
from everystep.files.atomic import require_writable
from everystep.files.sources import DEFAULT_MODEL
from everystep.records import RecordWriter

_AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document: texts, tokens, finish reasons, times."),
]
_AsJsonl = Annotated[
    bool, typer.Option("--jsonl", help="Print one JSON document per token, as it is generated.")
]
_Timings = Annotated[
    bool,
    typer.Option(
        "--timings", help="Say what each answer took, and why it ended: in errors, or in --json."
    ),
]


@o.takes(*o.OPTIONS, max_new_tokens=512)
def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from FILE.")
    ] = None,
    as_message: o.AsMessage = False,
    system: o.System = None,
    *,
    image: o.Images = None,
    page: Page = None,
    lines: Lines = None,
    reasoning: Reasoning = False,
    as_json: _AsJson = False,
    as_jsonl: _AsJsonl = False,
    show_timings: _Timings = False,
    save: Save = None,
    resume: Resume = None,
    trace: Trace = None,
    no_record_stages: NoStages = False,
    model: o.Model = DEFAULT_MODEL,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
    adapter: AdapterOption = None,
    steer_file: SteerOption = None,
    **said: Any,
) -> None:
    """Continue PROMPT, or with --chat or --image answer it.

    Without PROMPT and --file the prompt is read from standard input; beside them, text from a pipe
    or a file follows the prompt after a blank line.
    """
    record = said.pop("record")
    form = chosen_form(as_json, as_jsonl, several=(said["num_return_sequences"] or 1) > 1)
    about_page = asked_page(page, lines, reasoning, system)
    images = tuple(image or ())
    if images and about_page:
        raise typer.BadParameter("--image and --page ask different models; give one of them")
    if missing := [str(one) for one in images if not one.is_file()]:
        raise typer.BadParameter(f"there is no picture {missing[0]!r}")
    if no_record_stages and record is None:
        raise typer.BadParameter("--no-record-stages is about a record; give --record FILE")
    if resume is not None:
        prompts = {"PROMPT": prompt, "--file": file, "--page": page, "--steer": steer_file}
        refuse_prompt({**prompts, "--system": system, "--chat": as_message, "--image": images})
    kept = save or resume
    for written in (kept, trace, record):
        # A run that is not there is an error of its own.
        if written is not None and (written != resume or written.exists()):
            require_writable(written)
    decoding, seed = o.decoding(said), said["seed"]
    decoding |= o.following(said)
    adapters, steering = asked_adapters(adapter), asked_steering(steer_file)
    text = "" if resume is not None else read_prompt(prompt, file)
    asked = CommandPrompt(text, as_message, system, about_page, images)
    started = time.perf_counter()
    how = (dtype, quantize, cache_dtype, device, offline or context.obj)
    loaded, tokenizer = load(model, *how)
    decoding |= o.forced_words(said["force_words"], tokenizer)
    mix = {**with_adapters(loaded, adapters), **steering}
    drafting = _drafting(decoding.pop("assistant_model", None), how)
    if record is not None:
        drafting["record"] = RecordWriter(record, stages=not no_record_stages)
    ready = time.perf_counter()
    in_hands = any(one is not None for one in (save, resume, trace))
    begin: Any = es.open if in_hands else es.stream
    with o.spelled_as_typed(o.typed_fields(context.params)):
        if resume is not None:  # the run says which of the adapters it runs with
            changes = _said(context, decoding, seed)
            begun = resumed(resume, loaded, tokenizer, drafting, changes)
        else:
            messages = not asked.continues and not asked.page
            o.note_seed(loaded, decoding, seed, in_chat=messages)
            given = asked.for_model(loaded, tokenizer)
            begun = begin(loaded, tokenizer, given, seed=seed, **decoding, **drafting, **mix)
    watched = WatchedRun(begun, tokenizer, kept, trace) if in_hands else begun
    with watched as stream:
        arrivals = show_events(stream, form)
        (results,) = stream.results()
    judged = (decoding.get("num_beams") or 1) > 1 or decoding.get("best_of") is not None
    scored = judged or (resume is not None and any(one.score for one in results))
    about = about_answers(results, model, loaded, seed, timings(started, ready, arrivals))
    show_results(results, form, about, scored=scored, timed=show_timings)
    if resume is None and asked.continues:
        _note_silence(results, tokenizer)


def _drafting(assistant: str | None, how: tuple[Any, ...]) -> dict[str, Any]:
    """Return arguments of a call for the model that drafts, loaded like the other; none without."""
    if assistant is None:
        return {}
    model, tokenizer = load(assistant, *how)
    return {"assistant_model": model, "assistant_tokenizer": tokenizer}


def _said(context: typer.Context, decoding: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Return what the command line sets of a run that goes on: a length only if it was typed."""
    source = context.get_parameter_source("max_new_tokens")
    length = source is not None and source.name != "DEFAULT"
    said = {name: value for name, value in decoding.items() if name != "max_new_tokens" or length}
    return said if seed is None else {**said, "seed": seed}


def _note_silence(results: list[Any], tokenizer: Any) -> None:
    """Note that a model that has nothing to add to a text may have been meant to answer it."""
    if tokenizer.chat_template is not None and not any(one.text.strip() for one in results):
        note("the model ended the text at once; --chat sends it as a message instead")
