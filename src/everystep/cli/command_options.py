"""Options that several commands share, declared once, and the choices they lead to.

An option that stands for a keyword of `generate()` has its type and its meaning from the table of
`requests/door.py`. Which values go together is judged by `GenerationConfig`, before any model is
loaded.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from everystep.cli.terminal import note
from everystep.cli.user_input import read_text
from everystep.config import FIELDS, GenerationConfig, merge_configs
from everystep.config.installed import HOOKS, PROCESSORS, EntryGroup
from everystep.config.named_strategies import NAMED, is_named, with_named
from everystep.errors import RequestError, shown
from everystep.requests.door import KEYWORDS

Dtype = StrEnum("Dtype", "float64 float32 bfloat16 float16")
Rounding = StrEnum("Rounding", "int8 int4")
CacheDtype = StrEnum("CacheDtype", "float32 float16 int8")
Command = TypeVar("Command", bound=Callable[..., None])

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_SHAPING = ("temperature", "top_k", "top_p", "min_p", "best_of")
_NOT_READ_YET = [[0]]
"""The ids of forced texts until a tokenizer is loaded; the options are judged before that."""


@dataclass(frozen=True)
class Option:
    """An option for a keyword of `generate()`: all that the table does not say of it.

    `panel`: where --help shows it. `metavar`: what its value is called there, None for a switch.
    `keyword`: the keyword, where the option has another name. `repeats`: it may be given several
    times. `kind`, `meaning`: in place of the table's. `short`: another name. `least`: the smallest
    value.
    """

    panel: str
    metavar: str | None
    keyword: str | None = None
    _: KW_ONLY
    repeats: bool = False
    kind: type | None = None
    meaning: str | None = None
    short: str | None = None
    least: int | None = None


_SAMPLING = "Sampling; each of temperature, top-k, top-p and min-p turns it on"
_LENGTH = "Length, search and penalties"
_DRAFTING = "Speculation: the same answer, sooner"
_FOLLOWING = "Structured output; one of these"
_MADE_WITH = KEYWORDS["strategy_options"].line
_OPTION = "What the {0} of this name is made with."
_INSTALLED = {"processor": PROCESSORS, "hook": HOOKS}
_KINDS = {"bool": bool, "int": int, "float": float}

OPTIONS = {
    "max_new_tokens": Option(_LENGTH, "N", short="-n", least=1),
    "strategy": Option(
        _LENGTH, "NAME", meaning=f"{', '.join(NAMED)}, or one from an installed package."
    ),
    "strategy_option": Option(_LENGTH, "NAME=VALUE", repeats=True, meaning=_MADE_WITH),
    **{
        noun: Option(
            _LENGTH,
            "NAME",
            group.keyword,
            repeats=True,
            meaning=f"The {noun} of this name, from an installed package.",
        )
        for noun, group in _INSTALLED.items()
    },
    **{
        f"{noun}_option": Option(
            _LENGTH, "NAME.OPTION=VALUE", repeats=True, meaning=_OPTION.format(noun)
        )
        for noun in _INSTALLED
    },
    "do_sample": Option(_SAMPLING, None),
    "temperature": Option(_SAMPLING, "T"),
    "top_k": Option(_SAMPLING, "K"),
    "top_p": Option(_SAMPLING, "P"),
    "min_p": Option(_SAMPLING, "P"),
    "seed": Option(_SAMPLING, "N"),
    "num_beams": Option(_LENGTH, "N"),
    "force_words": Option(_LENGTH, "TEXT", "force_words_ids", repeats=True),
    "best_of": Option(_LENGTH, "N"),
    "num_return_sequences": Option(_LENGTH, "N"),
    "penalty_alpha": Option(_LENGTH, "A"),
    "guidance_scale": Option(_LENGTH, "S"),
    "negative_prompt": Option(_LENGTH, "TEXT"),
    "repetition_penalty": Option(_LENGTH, "R"),
    "stop": Option(_LENGTH, "TEXT", "stop_strings", repeats=True),
    "assistant": Option(_DRAFTING, "MODEL", "assistant_model"),
    "assistant_early_exit": Option(_DRAFTING, "N"),
    "schema": Option(_FOLLOWING, "FILE", kind=Path),
    "regex": Option(_FOLLOWING, "PATTERN"),
    "grammar": Option(_FOLLOWING, "FILE", kind=Path),
    "choices": Option(_FOLLOWING, "TEXT", repeats=True),
    "record": Option("A run in your hands", "FILE", kind=Path),
}
"""The options that stand for keywords, by name."""
_RENAMED = {one.keyword: name for name, one in OPTIONS.items() if one.keyword is not None}
_FOLLOWED = tuple(name for name, one in OPTIONS.items() if one.panel == _FOLLOWING)


def takes(*names: str, **defaults: object) -> Callable[[Command], Command]:
    """Return what gives a command these options, with these defaults, None for the others.

    They stand before the parameters that it has by name alone, and arrive as its `**said`.
    """

    def given(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        alone = Parameter.KEYWORD_ONLY
        added = [
            Parameter(name, alone, default=defaults.get(name), annotation=_annotation(name))
            for name in names
        ]
        before = [p for p in own if p.kind is not alone]
        whole = [*before, *added, *(p for p in own if p.kind is alone)]
        command.__signature__ = signature.replace(parameters=whole)  # type: ignore[attr-defined]
        return command

    return given


def kind_of(name: str) -> Any:
    """Return the type of an option's values."""
    one = OPTIONS[name]
    if one.repeats:
        return list[str]
    return one.kind or _KINDS.get(KEYWORDS[keyword_of(name)].type.partition(" | ")[0], str)


def keyword_of(name: str) -> str:
    """Return the keyword that an option stands for."""
    return OPTIONS[name].keyword or name


def option_for(keyword: str) -> str | None:
    """Return the name of the option that stands for a keyword, None where there is none."""
    return next((name for name in OPTIONS if keyword_of(name) == keyword), None)


def _annotation(name: str) -> Any:
    """Return what typer reads of an option."""
    one, typed = OPTIONS[name], f"--{name.replace('_', '-')}"
    if one.metavar is None:
        typed = f"{typed}/--no-{typed[2:]}"
    option = typer.Option(
        *(typed, one.short) if one.short else (typed,),
        metavar=one.metavar,
        min=one.least,
        help=(one.meaning or KEYWORDS[keyword_of(name)].line) + " Repeatable." * one.repeats,
        rich_help_panel=one.panel,
    )
    return Annotated[kind_of(name) | None, option]


def keywords(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was said with options as keywords of `generate()`."""
    return {keyword_of(name): one for name, one in said.items() if one is not None and one != []}


def decoding(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate()` that say how tokens are chosen, of what was said.

    What is None is left to the model's own generation config, an option of sampling turns sampling
    on, and the name of a strategy becomes its settings, or stays a name if the strategy is another
    package's. Raise RequestError if a value is impossible, in conflict with another, or without
    effect.
    """
    chosen = {name: one for name, one in said.items() if name not in ("seed", *_FOLLOWED)}
    given = keywords(chosen)
    if "force_words_ids" in given:
        given["force_words_ids"] = _NOT_READ_YET
    strategy = given.pop("strategy", None)
    own = _own_strategy(strategy, given.pop("strategy_option", None))
    with spelled_as_typed(map(keyword_of, chosen)):
        for noun, group in _INSTALLED.items():
            options = given.pop(f"{noun}_option", ())
            own |= _installed(group, given.pop(group.keyword, ()), options)
        if strategy is not None and "strategy" not in own:
            given = with_named(strategy, given)
        given = judged(given)
    return own | given


def following(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate()` that say what an answer follows, of what was said: files
    are read."""
    given = keywords({name: said[name] for name in _FOLLOWED})
    given |= {name: read_text(one) for name, one in given.items() if isinstance(one, Path)}
    if len(given) > 1:
        named = " and ".join(f"--{name}" for name in given)
        raise typer.BadParameter(f"{named} were both given; give one of them")
    return given


def judged(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same arguments of `generate()`, with sampling on where one of them shapes it.

    It is off where the temperature is 0. Raise RequestError if a value is impossible, in conflict
    with another, or without effect.
    """
    shaping = [name for name in _SHAPING if given.get(name) is not None]
    if given.get("penalty_alpha") and "top_k" in shaping:
        shaping.remove("top_k")  # then it says how many candidates are compared
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
    return [name for name in (*options, *_RENAMED) if "_" in name]


def as_typed(text: str, names: Iterable[str]) -> str:
    """Return the text with fields of these names spelled as typed: `--top-k 5` for `top_k=5`."""
    for name in sorted(names, key=len, reverse=True):
        option = f"--{_RENAMED.get(name, name).replace('_', '-')}"
        if name == "do_sample":
            text = text.replace("do_sample=True", option)
            text = text.replace("do_sample=False", "--no-do-sample")
        if name == "force_words_ids":
            text = text.replace(f"{name}={_NOT_READ_YET}", option)
        text = re.sub(rf"(?<![-\w]){name}=(\S+?)(?=[.,;]?(\s|$))", rf"{option} \1", text)
        text = re.sub(rf"(?<![-\w]){name}(?![-\w])", option, text)
    return text


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
        read = partial(_read_option, "--strategy-option")
        return {"strategy": name, "strategy_options": dict(map(read, options or ()))}
    if options:
        raise RequestError(
            "--strategy-option is for a strategy of another package",
            got="no --strategy" if name is None else f"--strategy {name}",
            do="Give what the library's own strategies read as options of the command",
        )
    return {}


def _installed(group: EntryGroup, names: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Return the argument of `generate()` for processors or hooks of installed packages; none
    without any.

    Raise UnknownArgumentError, which lists all there are, if there is none of a name, and
    RequestError for options that are spelled wrong, or that belong to none of the names.
    """
    typed = f"--{group.noun}-option"
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in options:
        name, dot, _ = text.partition("=")[0].rpartition(".")
        if not dot or name not in found:
            raise RequestError(
                f"{typed} belongs to no {group.noun} of the command",
                wanted=" or ".join(f"{one}.OPTION=VALUE" for one in found)
                or f"--{group.noun} NAME with it",
                got=text,
            )
        option, value = _read_option(typed, text.removeprefix(f"{name}."))
        found[name][option] = value
    if not names:
        return {}
    group.require_known(names)
    return {group.keyword: [{"name": name, "options": found[name]} for name in names]}


def _read_option(typed: str, text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE: a value of JSON, else the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise RequestError(f"{typed} is spelled wrong", wanted="NAME=VALUE", got=text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def note_seed(
    model: Any, decoding: Mapping[str, Any], seed: int | None, *, in_chat: bool = False
) -> None:
    """Warn a caller who gives a seed of which greedy decoding makes no use; `in_chat`: what is
    asked are messages.

    What the strategy of another package makes of it is not known.
    """
    if seed is None or "strategy" in decoding:
        return
    fields = {name: value for name, value in decoding.items() if name in FIELDS}
    chat = model.chat_defaults if in_chat else None
    if not merge_configs(fields, None, model.generation_config, chat).do_sample:
        note("--seed changes nothing: the best token is taken each time. --do-sample draws them.")


def _device_name(text: str) -> str:
    """Return the text itself if it is spelled like a device."""
    if not _DEVICE.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a device; wanted cpu, cuda, cuda:1 or the like")
    return text


_model = partial(typer.Option, rich_help_panel="Model")
_SOURCE = "A name, a folder, a .gguf file or a hub id."
_message = partial(typer.Option, rich_help_panel="A message through the model's chat template")

Offline = Annotated[bool, _model("--offline", help="Never use the network.")]
Model = Annotated[str, _model("--model", "-m", metavar="MODEL", help=_SOURCE)]
ModelArgument = Annotated[str, typer.Argument(metavar="[MODEL]", help=_SOURCE)]
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
AsMessage = Annotated[
    bool, _message("--chat", help="Send PROMPT as a message instead of continuing it.")
]
Images = Annotated[
    list[Path] | None,
    _message("--image", metavar="FILE", help="Show this picture before PROMPT; can be repeated."),
]
System = Annotated[
    str | None,
    _message("--system", metavar="TEXT", help="Instructions before the first message."),
]
