"""How answers are shown: as text while they come, as lines of JSON, or as one document."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import typer

from everystep.cli.terminal import (
    AnswerText,
    is_terminal,
    note,
    write_document,
    write_line,
    write_report,
)

Form = Literal["text", "texts", "json", "jsonl"]


def chosen_form(as_json: bool, as_jsonl: bool, *, several: bool) -> Form:
    """Return how answers are shown; raise BadParameter for two forms at once."""
    if as_json and as_jsonl:
        raise typer.BadParameter("--json and --jsonl were both given; give one of them")
    return "json" if as_json else "jsonl" if as_jsonl else "texts" if several else "text"


def show_events(stream: Any, form: Form) -> list[float]:
    """Show what can be shown at once, and return when each event came.

    Several texts would be mixed up, so they are left for the end.
    """
    arrivals = []
    with AnswerText() as answer:
        for event in stream:
            arrivals.append(time.perf_counter())
            if form == "jsonl":
                write_document(_event_document(event))
            elif form == "text" and event.text and event.index == 0:
                answer.write(event.text)
    return arrivals


def show_results(
    results: list[Any], form: Form, about: Mapping[str, Any], *, scored: bool, timed: bool = False
) -> None:
    """Show what was not shown as it came, and to a person how fast it was.

    `scored`: the answers were chosen by their scores. `timed`: what each took is asked for.
    """
    if form == "json":
        documents = [_result_document(one, scored, timed) for one in results]
        write_report({"results": documents, **about})
    elif form == "texts":
        _show_whole("\n---\n".join(one.text.rstrip("\n") for one in results))
    elif form == "text":
        if not results[0].text.endswith("\n"):
            write_line()
        # The first was written as it came; a strategy of another package may return several.
        for one in results[1:]:
            _show_whole("---\n" + one.text.rstrip("\n"))
    if timed and form != "json":
        for number, one in enumerate(results):
            note(_what_it_took(one, f"answer {number}, " if len(results) > 1 else ""))
    if is_terminal(sys.stderr):
        note(_summary(sum(len(one.tokens) for one in results), about))


def _show_whole(text: str) -> None:
    with AnswerText() as answer:
        answer.write(f"{text}\n")


def about_answers(
    results: list[Any], name: str, model: Any, seed: int | None, timings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a document says beside the answers of a model of this name."""
    return {
        "prompt_tokens": results[0].prompt_tokens,
        "model": name,
        "weights": list(model.weight_bytes),
        "cache_dtype": model.cache_dtype,
        "executor": model.runs_on,
        "seed": seed,
        "timings": timings,
    }


def timings(started: float, ready: float, arrivals: list[float]) -> dict[str, float | None]:
    """Return seconds until the model was there, and from then to the first and the last event."""
    return {
        "load_seconds": round(ready - started, 6),
        "first_token_seconds": round(arrivals[0] - ready, 6) if arrivals else None,
        "generate_seconds": round(arrivals[-1] - ready, 6) if arrivals else 0.0,
    }


def _summary(tokens: int, about: Mapping[str, Any]) -> str:
    """Return how much was answered, how fast after the first token, with which weights, by what."""
    taken = about["timings"]
    decoding = taken["generate_seconds"] - (taken["first_token_seconds"] or 0.0)
    speed = f", {(tokens - 1) / decoding:.0f} a second" if tokens > 1 and decoding > 0 else ""
    return f"{tokens} tokens{speed}; {' and '.join(about['weights'])}; {about['executor']}"


def _what_it_took(result: Any, name: str) -> str:
    """Return what one continuation took and why it ended, in a line."""
    took, count, ended = result.timings, len(result.tokens), _ended(result.finish_reason)
    matched = "" if ended["matched"] is None else f", {ended['matched']!r}"
    return (
        f"{name}prompt: {result.prompt_tokens} tokens, {result.cached_tokens} of them cached, "
        f"{took['prompt_seconds']:.3f} s; answer: {count} tokens, {took['decode_seconds']:.3f} s, "
        f"{took['tokens_per_second']:.1f} a second; ended: {ended['finish_reason']}{matched}"
    )


def _result_document(result: Any, scored: bool, timed: bool) -> dict[str, Any]:
    """Return one continuation as JSON types."""
    document = {"text": result.text, "tokens": list(result.tokens), **_ended(result.finish_reason)}
    if scored:
        document["score"] = result.score if math.isfinite(result.score) else None
    if timed:
        seconds = {name: round(one, 6) for name, one in result.timings.items()}
        document["timings"] = {**seconds, "cached_tokens": result.cached_tokens}
    return document


def _event_document(event: Any) -> dict[str, Any]:
    """Return one event as JSON types; `token` is null where an event only ends a sequence."""
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
