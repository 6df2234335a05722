"""`everystep generate`: one prompt in, its continuation out, as text or as JSON."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import everystep as es
from everystep.cli import options as o
from everystep.cli.grammars import Choices, GrammarFile, Regex, Schema, following
from everystep.cli.loading import load
from everystep.cli.pages import Lines, Page, Reasoning, asked_page
from everystep.cli.reading import read_prompt
from everystep.cli.runs import Resume, Save, Trace, WatchedRun, refuse_prompt, resumed
from everystep.cli.terminal import (
    is_terminal,
    note,
    write,
    write_document,
    write_line,
    write_report,
)
from everystep.errors import RequestError
from everystep.files.sources import DEFAULT_MODEL

_AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document: texts, tokens, reasons, times.")
]
_AsJsonl = Annotated[
    bool, typer.Option("--jsonl", help="One JSON document per token, as it comes.")
]


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from FILE.")
    ] = None,
    system: o.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text itself, without the chat template.")
    ] = False,
    max_new_tokens: o.MaxNewTokens = 512,
    strategy: o.Strategy = None,
    strategy_option: o.StrategyOption = None,
    do_sample: o.DoSample = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    num_beams: o.NumBeams = None,
    force_words: o.ForceWords = None,
    best_of: o.BestOf = None,
    num_return_sequences: o.NumReturnSequences = None,
    repetition_penalty: o.RepetitionPenalty = None,
    stop: o.Stop = None,
    assistant: o.Assistant = None,
    assistant_early_exit: o.EarlyExit = None,
    schema: Schema = None,
    regex: Regex = None,
    grammar: GrammarFile = None,
    choices: Choices = None,
    page: Page = None,
    lines: Lines = None,
    reasoning: Reasoning = False,
    as_json: _AsJson = False,
    as_jsonl: _AsJsonl = False,
    save: Save = None,
    resume: Resume = None,
    trace: Trace = None,
    model: o.Model = DEFAULT_MODEL,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
) -> None:
    """Answer PROMPT, or with --raw continue it.

    Without PROMPT and --file the prompt is read from standard input.
    """
    form = _form(as_json, as_jsonl, several=(num_return_sequences or 1) > 1)
    _refuse_beside_raw(raw, {"--system": system, "--page": page, "--lines": lines})
    about_page = asked_page(page, lines, reasoning, system)
    if resume is not None:
        prompts = {"PROMPT": prompt, "--file": file, "--page": page}
        refuse_prompt({**prompts, "--system": system, "--raw": raw})
    decoding = o.decoding(
        strategy=strategy,
        strategy_option=strategy_option,
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        num_beams=num_beams,
        force_words_ids=o.unread(force_words),
        best_of=best_of,
        assistant_model=assistant,
        assistant_early_exit=assistant_early_exit,
        num_return_sequences=num_return_sequences,
        repetition_penalty=repetition_penalty,
        stop_strings=stop or None,
    )
    decoding |= following(schema, regex, grammar, choices)
    text = "" if resume is not None else read_prompt(prompt, file)
    started = time.perf_counter()
    how = (dtype, quantize, cache_dtype, device, offline or context.obj)
    loaded, tokenizer = load(model, *how)
    decoding |= o.forced_words(force_words, tokenizer)
    drafting = _drafting(decoding.pop("assistant_model", None), how)
    ready = time.perf_counter()
    in_hands = any(one is not None for one in (save, resume, trace))
    with o.spelled_as_typed(o.typed_fields(context.params)):
        if resume is not None:
            changes = _said(context, decoding, seed)
            begun = resumed(resume, loaded, tokenizer, drafting, changes)
        else:
            o.note_seed(loaded, decoding, seed)
            begin: Any = es.open if in_hands else es.stream
            asked = _asked(text, system, raw, loaded, tokenizer, about_page)
            begun = begin(loaded, tokenizer, asked, seed=seed, **decoding, **drafting)
    watched = WatchedRun(begun, tokenizer, save or resume, trace) if in_hands else begun
    with watched as stream:
        arrivals = _follow(stream, form)
        (results,) = stream.results()
    about = {
        "prompt_tokens": results[0].prompt_tokens,
        "model": model,
        "weights": list(loaded.weight_bytes),
        "cache_dtype": loaded.cache_dtype,
        "executor": loaded.runs_on,
        "seed": seed,
        "timings": _timings(started, ready, arrivals),
    }
    judged = (decoding.get("num_beams") or 1) > 1 or decoding.get("best_of") is not None
    scored = judged or (resume is not None and any(one.score for one in results))
    _end(results, form, about, scored=scored)
    if is_terminal(sys.stderr):
        note(_summary(sum(len(one.tokens) for one in results), about))


def _form(as_json: bool, as_jsonl: bool, *, several: bool) -> str:
    """How answers are shown."""
    if as_json and as_jsonl:
        raise typer.BadParameter("--json and --jsonl were both given; give one of them")
    return "json" if as_json else "jsonl" if as_jsonl else "texts" if several else "text"


def _refuse_beside_raw(raw: bool, said: Mapping[str, Any]) -> None:
    """BadParameter for what stands in a chat template, where there is to be none."""
    for name, value in said.items():
        if raw and value is not None:
            raise typer.BadParameter(f"{name} needs the chat template, which --raw leaves out")


def _drafting(assistant: str | None, how: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of a call for the model that drafts, loaded as the other one is; none without."""
    if assistant is None:
        return {}
    model, tokenizer = load(assistant, *how)
    return {"assistant_model": model, "assistant_tokenizer": tokenizer}


def _said(context: typer.Context, decoding: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """What the command line sets of a run that goes on: a length only if it was typed."""
    source = context.get_parameter_source("max_new_tokens")
    length = source is not None and source.name != "DEFAULT"
    said = {name: value for name, value in decoding.items() if name != "max_new_tokens" or length}
    return said if seed is None else {**said, "seed": seed}


def _asked(
    text: str, system: str | None, raw: bool, model: Any, tokenizer: Any, page: dict[str, Any]
) -> Any:
    """Messages where the model has a chat template, else, and with `raw`, the text itself; with a
    page a question about it."""
    if page:
        return es.layout_prompt(model, tokenizer, text, **page)
    templated = tokenizer.chat_template is not None
    if not templated and system is not None:
        do = "Leave --system out and put the instructions into the prompt"
        raise RequestError("--system needs a chat template", got="a model without one", do=do)
    if raw or not templated:
        return text
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": text}]


def _follow(stream: Any, form: str) -> list[float]:
    """Shows what can be shown at once, and returns when each event came.

    Several texts would be mixed up, so they are left for the end.
    """
    arrivals = []
    for event in stream:
        arrivals.append(time.perf_counter())
        if form == "jsonl":
            write_document(_event_document(event))
        elif form == "text" and event.text and event.index == 0:
            write(event.text)
    return arrivals


def _end(results: list[Any], form: str, about: Mapping[str, Any], *, scored: bool) -> None:
    """Shows what was not shown as it came; `scored`: the answers were chosen by their scores."""
    if form == "json":
        documents = [_result_document(one, scored) for one in results]
        write_report({"results": documents, **about})
    elif form == "texts":
        write_line("\n---\n".join(one.text.rstrip("\n") for one in results))
    elif form == "text":
        if not results[0].text.endswith("\n"):
            write_line()
        # The first was written as it came; a strategy of another package may return several.
        for one in results[1:]:
            write_line("---\n" + one.text.rstrip("\n"))


def _timings(started: float, ready: float, arrivals: list[float]) -> dict[str, float | None]:
    """Seconds until the model was there, and from then to the first and the last event."""
    return {
        "load_seconds": round(ready - started, 6),
        "first_token_seconds": round(arrivals[0] - ready, 6) if arrivals else None,
        "generate_seconds": round(arrivals[-1] - ready, 6) if arrivals else 0.0,
    }


def _summary(tokens: int, about: Mapping[str, Any]) -> str:
    """How much was answered, how fast after the first token, with which weights, run by what."""
    timings = about["timings"]
    decoding = timings["generate_seconds"] - (timings["first_token_seconds"] or 0.0)
    speed = f", {(tokens - 1) / decoding:.0f} a second" if tokens > 1 and decoding > 0 else ""
    return f"{tokens} tokens{speed}; {' and '.join(about['weights'])}; {about['executor']}"


def _result_document(result: Any, scored: bool) -> dict[str, Any]:
    """One continuation as JSON types."""
    document = {"text": result.text, "tokens": list(result.tokens), **_ended(result.finish_reason)}
    if scored:
        document["score"] = result.score if math.isfinite(result.score) else None
    return document


def _event_document(event: Any) -> dict[str, Any]:
    """One event as JSON types; `token` is null where an event only ends a sequence."""
    return {
        "sequence": event.index,
        "position": event.position,
        "token": event.token if event.token >= 0 else None,
        "text": event.text,
        "logprob": event.logprob,
        **({} if event.finish is None else _ended(event.finish)),
    }


def _ended(reason: Any) -> dict[str, Any]:
    matched = reason.matched
    plain = matched if isinstance(matched, str | int | None) else str(matched)
    return {"finish_reason": reason.kind, "matched": plain}
