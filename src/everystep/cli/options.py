"""Options that several commands share, declared once, and the choices they lead to.

Names and meanings are those of `generate()`, with hyphens. Which values go together is judged by
`GenerationConfig`, before any model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from everystep.cli.terminal import note
from everystep.config import FIELDS, GenerationConfig
from everystep.config.named_strategies import NAMED, is_named, with_named
from everystep.errors import RequestError, shown

Dtype = StrEnum("Dtype", "float64 float32 bfloat16 float16")
Rounding = StrEnum("Rounding", "int8 int4")
CacheDtype = StrEnum("CacheDtype", "float32 float16 int8")

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "best_of")
_OPTIONS = {
    "stop_strings": "--stop",
    "force_words_ids": "--force-words",
    "assistant_model": "--assistant",
}
"""Fields whose option has another name."""


def decoding(**said: Any) -> dict[str, Any]:
    """Return the arguments of `generate()` that options stand for.

    What is None is left to the model's own generation config, an option of sampling turns sampling
    on, and the name of a strategy becomes its settings, or stays a name if the strategy is another
    package's. Raise RequestError if a value is impossible, in conflict with another, or without
    effect.
    """
    given = {name: value for name, value in said.items() if value is not None}
    strategy = given.pop("strategy", None)
    own = _own_strategy(strategy, given.pop("strategy_option", None))
    with spelled_as_typed(said):
        if strategy is not None and not own:
            given = with_named(strategy, given)
        given = judged(given)
    return own | given


def judged(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same arguments of `generate()`, with sampling on where one of them shapes it.

    It is off where the temperature is 0. Raise RequestError if a value is impossible, in conflict
    with another, or without effect.
    """
    shaping = [name for name in _SAMPLING if given.get(name) is not None]
    whole = dict(given)
    if shaping and whole.get("do_sample") is None:
        whole["do_sample"] = whole.get("temperature") != 0
        if not whole["do_sample"] and len(shaping) > 1:
            raise RequestError(
                f"{shaping[1]} has no effect, because a temperature of 0 takes the best token",
                got=f"{shaping[1]}={whole[shaping[1]]} with temperature=0",
                do=f"Leave {shaping[1]} out, or make the temperature higher",
            )
    fields = {name: value for name, value in whole.items() if name in FIELDS}
    GenerationConfig(**fields).validate(strict=True)
    return whole


@contextmanager
def spelled_as_typed(names: Iterable[str]) -> Iterator[None]:
    """Let a RequestError that is raised within name options where it names these fields."""
    try:
        yield
    except RequestError as error:
        raise type(error)(as_typed(str(error), names)) from error


def typed_fields(options: Iterable[str]) -> list[str]:
    """Return the fields that these options set, but for names that are ordinary words."""
    return [name for name in (*options, *_OPTIONS) if "_" in name]


def as_typed(text: str, names: Iterable[str]) -> str:
    """Return the text with fields of these names spelled as typed: `--top-k 5` for `top_k=5`."""
    for name in sorted(names, key=len, reverse=True):
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if name == "do_sample":
            text = text.replace("do_sample=True", option)
            text = text.replace("do_sample=False", "--no-do-sample")
        if name == "force_words_ids":
            text = text.replace(f"{name}={unread([''])}", option)
        text = re.sub(rf"(?<![-\w]){name}=(\S+?)(?=[.,;]?(\s|$))", rf"{option} \1", text)
        text = re.sub(rf"(?<![-\w]){name}(?![-\w])", option, text)
    return text


def unread(texts: Sequence[str] | None) -> list[list[int]] | None:
    """Return what stands for the ids of forced texts until a tokenizer is loaded; None without
    texts.

    So the options can be judged before that.
    """
    return [[0]] if texts else None


def forced_words(texts: Sequence[str] | None, tokenizer: Any) -> dict[str, Any]:
    """Return arguments of `generate()` for texts that have to occur in the answer; none without
    texts.

    They occur exactly as they are typed. Raise RequestError for a text without ids.
    """
    if not texts:
        return {}
    found = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    if not all(found):
        raise RequestError(
            "--force-words is empty",
            wanted="a text that has tokens",
            got=shown([*texts]),
            do="Leave the empty one out",
        )
    return {"force_words_ids": found}


def _own_strategy(name: str | None, options: Sequence[str] | None) -> dict[str, Any]:
    """Return arguments of `generate()` for another package's strategy; none for the library's own.

    Raise UnknownArgumentError, which lists all there are, if there is none of this name, and
    RequestError for options that are spelled wrong, or that nobody reads.
    """
    if name is not None and not is_named(name):
        from everystep.requests.strategies import require_known

        require_known(name)
        return {"strategy": name, "strategy_options": dict(map(_read_option, options or ()))}
    if options:
        raise RequestError(
            "--strategy-option is for a strategy of another package",
            got="no --strategy" if name is None else f"--strategy {name}",
            do="Give what the library's own strategies read as options of the command",
        )
    return {}


def _read_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE: a value of JSON, else the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise RequestError("--strategy-option is spelled wrong", wanted="NAME=VALUE", got=text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def note_seed(model: Any, decoding: Mapping[str, Any], seed: int | None) -> None:
    """Warn a caller who gives a seed of which greedy decoding makes no use.

    What the strategy of another package makes of it is not known.
    """
    if seed is None or "strategy" in decoding:
        return
    if not decoding.get("do_sample", getattr(model.generation_config, "do_sample", None)):
        note("--seed changes nothing: the best token is taken each time. --do-sample draws them.")


def _device_name(text: str) -> str:
    """Return the text itself if it is spelled like a device."""
    if not _DEVICE.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a device; wanted cpu, cuda, cuda:1 or the like")
    return text


_sampling = partial(
    typer.Option,
    rich_help_panel="Sampling; each of temperature, top-k, top-p and min-p turns it on",
)
_search = partial(typer.Option, rich_help_panel="Length, search and penalties")
_drafting = partial(typer.Option, rich_help_panel="Speculation: the same answer, sooner")
_model = partial(typer.Option, rich_help_panel="Model")
_message = partial(typer.Option, rich_help_panel="A message through the model's chat template")

Offline = Annotated[bool, _model("--offline", help="Never use the network.")]
Model = Annotated[
    str,
    _model("--model", "-m", metavar="MODEL", help="A name, a folder, a .gguf file or a hub id."),
]
DtypeOption = Annotated[
    Dtype | None,
    _model("--dtype", metavar="DTYPE", help=f"{', '.join(Dtype)}; by default what the file says."),
]
Quantize = Annotated[
    Rounding | None,
    _model(
        "--quantize", metavar="FORMAT", help="Round floats to int8 or int4; by default they stay."
    ),
]
CacheDtypeOption = Annotated[
    CacheDtype | None,
    _model(
        "--cache-dtype",
        metavar="DTYPE",
        help=f"Keep keys and values in {', '.join(CacheDtype)}; by default in the model's type.",
    ),
]
Device = Annotated[
    str,
    _model(
        "--device", metavar="DEVICE", callback=_device_name, help="cpu, cuda, cuda:1, and so on."
    ),
]
DoSample = Annotated[
    bool | None,
    _sampling(
        "--do-sample/--no-do-sample",
        help="Sample tokens instead of taking the best; by default as the model's settings say.",
    ),
]
Temperature = Annotated[
    float | None,
    _sampling(
        "--temperature", metavar="T", help="Below 1 more predictable, above 1 less so; 0 is greedy."
    ),
]
TopK = Annotated[
    int | None,
    _sampling("--top-k", metavar="K", help="Sample from the K most probable tokens; 0 means all."),
]
TopP = Annotated[
    float | None,
    _sampling(
        "--top-p",
        metavar="P",
        help="Sample from the fewest tokens whose probabilities add up to P.",
    ),
]
MinP = Annotated[
    float | None,
    _sampling(
        "--min-p",
        metavar="P",
        help="Leave out tokens that are less than P times as probable as the best.",
    ),
]
Seed = Annotated[
    int | None, _sampling("--seed", metavar="N", help="The same N samples the same tokens again.")
]
MaxNewTokens = Annotated[
    int,
    _search("--max-new-tokens", "-n", min=1, metavar="N", help="Generate at most N tokens."),
]
Stop = Annotated[
    list[str] | None,
    _search("--stop", metavar="TEXT", help="Stop after this text. Repeatable."),
]
NumBeams = Annotated[
    int | None, _search("--num-beams", metavar="N", help="Search for the best answer with N beams.")
]
Strategy = Annotated[
    str | None,
    _search(
        "--strategy",
        metavar="NAME",
        help=f"{', '.join(NAMED)}, or one from an installed package.",
    ),
]
StrategyOption = Annotated[
    list[str] | None,
    _search(
        "--strategy-option",
        metavar="NAME=VALUE",
        help="An option for a strategy of another package. Repeatable.",
    ),
]
BestOf = Annotated[
    int | None,
    _search("--best-of", metavar="N", help="Sample N answers and return the most probable."),
]
ForceWords = Annotated[
    list[str] | None,
    _search(
        "--force-words",
        metavar="TEXT",
        help="Search for an answer that contains TEXT. Repeatable.",
    ),
]
Assistant = Annotated[
    str | None,
    _drafting("--assistant", metavar="MODEL", help="A smaller model that drafts the answer."),
]
EarlyExit = Annotated[
    int | None,
    _drafting(
        "--assistant-early-exit",
        metavar="N",
        help="Draft the answer with the first N layers of the model.",
    ),
]
NumReturnSequences = Annotated[
    int | None,
    _search(
        "--num-return-sequences", metavar="N", help="Return N answers; needs sampling or beams."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    _search(
        "--repetition-penalty",
        metavar="R",
        help="Above 1, tokens that already occurred become less probable.",
    ),
]
AsMessage = Annotated[
    bool, _message("--chat", help="Send PROMPT as a message instead of continuing it.")
]
System = Annotated[
    str | None,
    _message("--system", metavar="TEXT", help="Instructions before the first message."),
]
