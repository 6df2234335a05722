"""`everystep generate`: one prompt in, its continuation out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import everystep as es
from everystep.cli import options as o
from everystep.cli.loading import load
from everystep.cli.prompts import read_prompt
from everystep.cli.terminal import is_terminal, note
from everystep.cli.writers import Form, Timings, Writer, writer_for
from everystep.errors import RequestError, message
from everystep.files.sources import DEFAULT_MODEL

LONGEST_ANSWER = 512


@dataclass(frozen=True)
class Question:
    """What the user wants continued or answered."""

    text: str
    system: str | None
    raw: bool

    def as_prompt(self, tokenizer: Any) -> Any:
        """Messages where the model has a chat template, else, and with `raw`, the text itself."""
        templated = tokenizer.chat_template is not None
        if not templated and self.system is not None:
            raise RequestError(
                message(
                    "--system needs a chat template",
                    got="a model without one",
                    do="Leave --system out and put the instructions into the prompt",
                )
            )
        if self.raw or not templated:
            return self.text
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, {"role": "user", "content": self.text}]


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
    max_new_tokens: o.MaxNewTokens = LONGEST_ANSWER,
    do_sample: o.DoSample = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    num_beams: o.NumBeams = None,
    num_return_sequences: o.NumReturnSequences = None,
    repetition_penalty: o.RepetitionPenalty = None,
    stop: o.Stop = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document: texts, tokens, reasons, times.")
    ] = False,
    as_jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON document per token, as it comes.")
    ] = False,
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
    decoding = o.DecodingOptions(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        num_beams=num_beams,
        num_return_sequences=num_return_sequences,
        repetition_penalty=repetition_penalty,
        stop_strings=stop or None,
    )
    form = _form(as_json, as_jsonl)
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    decoding.check()
    question = Question(read_prompt(prompt, file), system, raw)
    offline = offline or context.obj.offline
    choice = o.ModelChoice(model, dtype, device, offline, quantize, cache_dtype)
    _answer(choice, question, decoding, seed, form)


def _form(as_json: bool, as_jsonl: bool) -> Form:
    if as_json and as_jsonl:
        raise typer.BadParameter("--json and --jsonl were both given; give one of them")
    return Form.json if as_json else Form.jsonl if as_jsonl else Form.text


def _answer(
    choice: o.ModelChoice,
    question: Question,
    decoding: o.DecodingOptions,
    seed: int | None,
    form: Form,
) -> None:
    timings = Timings()
    model, tokenizer = load(choice)
    prompt = question.as_prompt(tokenizer)
    writer = writer_for(form, decoding.num_return_sequences or 1, (decoding.num_beams or 1) > 1)
    timings.loaded()
    with es.stream(model, tokenizer, prompt, seed=seed, **decoding.arguments()) as stream:
        _follow(stream, writer, timings)
        (results,) = stream.results()
    about = {
        "prompt_tokens": results[0].prompt_tokens,
        "model": choice.source,
        "weights": list(model.weight_bytes),
        "cache_dtype": model.cache_dtype,
        "executor": model.runs_on,
        "seed": seed,
        "timings": timings.document(),
    }
    writer.end(results, about)
    if is_terminal(sys.stderr):
        note(summary(sum(len(one.tokens) for one in results), timings, about))


def summary(tokens: int, timings: Timings, about: Mapping[str, Any]) -> str:
    """How much was answered, how fast after the first token, with which weights, run by what."""
    decoding = timings.generate_seconds - (timings.first_token_seconds or 0.0)
    speed = f", {(tokens - 1) / decoding:.0f} a second" if tokens > 1 and decoding > 0 else ""
    return f"{tokens} tokens{speed}; {' and '.join(about['weights'])}; {about['executor']}"


def _follow(stream: Any, writer: Writer, timings: Timings) -> None:
    for event in stream:
        timings.event()
        writer.event(event)
