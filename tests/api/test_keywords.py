"""The typed dicts of keywords say what calls take, and help() lists them with an example."""

from __future__ import annotations

import doctest
import inspect
import types
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

import everystep as es
from everystep.api.load import LoadOptions
from everystep.config import FIELDS, META
from everystep.config.attributes import FieldAttributes
from everystep.config.config_fields import ConfigOptions, StoredOptions
from everystep.requests import keywords
from everystep.requests.door import KEYWORDS, Keyword, listed, lists_options
from everystep.testing.models import tiny_document, tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.testing.typed_dicts import files
from tests.api.paper import drawn_page
from tests.api.test_transcribe import listener

READ = {"input_ids", "attention_mask", "inputs_embeds", "position_ids", "decoder_input_ids"}
PLAIN: tuple[Any, ...] = (True, 0, 1, 2, 5, 0.0, 0.5, 1.0, 1.5, "x")

FUNCTIONS: dict[str, tuple[Callable[..., Any], type | None]] = {
    "generate": (es.generate, keywords.TextOptions),
    "stream": (es.stream, keywords.TextOptions),
    "chat": (es.chat, keywords.TextOptions),
    "open": (es.open, keywords.TextOptions),
    "resume": (es.resume, keywords.TextOptions),
    "prefill": (es.prefill, keywords.PromptInputs),
    "AsyncEngine.stream": (es.AsyncEngine.stream, keywords.PromptOptions),
    "AsyncEngine.generate": (es.AsyncEngine.generate, keywords.PromptOptions),
    "LanguageModel.generate": (es.LanguageModel.generate, keywords.RectangleOptions),
    "score": (es.score, None),
    "load": (es.load, None),
    "load_model": (es.load_model, None),
    "quantize": (es.quantize, None),
    "export_gguf": (es.export_gguf, None),
    "wrap": (es.wrap, None),
    "transcribe": (es.transcribe, keywords.ModelOptions),
    "verify": (es.verify, LoadOptions),
    "layout_prompt": (es.layout_prompt, None),
    "read_sound": (es.read_sound, None),
    "register_activation": (es.register_activation, None),
    "set_seed": (es.set_seed, None),
    "read_rows": (es.read_rows, None),
    "read_record": (es.read_record, None),
    "read_examples": (es.read_examples, None),
    "inspect_rows": (es.inspect_rows, None),
    "pack_rows": (es.pack_rows, None),
    "default_data_collator": (es.default_data_collator, None),
    "validate_stopping_criteria": (es.validate_stopping_criteria, None),
}


def test_no_public_function_is_left_out() -> None:
    public = {name for name in es.__all__ if inspect.isfunction(getattr(es, name))}
    assert public == {name for name in FUNCTIONS if "." not in name}


def keys(options: type) -> set[str]:
    return {*options.__annotations__}


def test_the_fields_are_those_of_the_configuration() -> None:
    assert keys(StoredOptions) == {*FIELDS} == {*FieldAttributes.__annotations__}
    assert keys(ConfigOptions) == {*FIELDS} - META
    said = get_type_hints(StoredOptions)
    assert get_type_hints(FieldAttributes) == said


def names(*wanted: str) -> set[str]:
    """The keywords that belong to one of these owners, or that one of these calls takes."""

    def chosen(row: Keyword) -> bool:
        return row.owner in wanted or not {*wanted}.isdisjoint(row.calls)

    return {row.name for row in KEYWORDS.values() if chosen(row)}


@pytest.mark.parametrize("path", files(), ids=str)
def test_what_is_written_from_the_tables_is_what_they_say(path: Path) -> None:
    """`scripts/keywords --write` writes it again."""
    assert path.read_text() == files()[path]


def test_calls_about_prompts_take_what_their_type_says() -> None:
    taken = names("texts")
    assert keys(keywords.PromptOptions) == taken
    assert keys(keywords.TextOptions) == taken - {"seed"}
    open_results = {"num_return_sequences", "return_dict_in_generate", "n_best", "strategy"}
    open_results |= {"strategy_options", "generation_config"}
    assert keys(keywords.PlainTextOptions) == taken - {"seed"} - open_results


def test_a_call_about_a_rectangle_takes_what_its_type_says() -> None:
    taken = names("rectangle", "media", "speech") | {"inputs"}
    assert keys(keywords.RectangleOptions) | {"tokenizer"} == taken
    spelled = {*inspect.signature(es.LanguageModel.generate).parameters}
    assert keys(keywords.ModelOptions) | spelled - {"self", "kwargs"} == (
        keys(keywords.RectangleOptions) | {"tokenizer"}
    )
    assert not keys(keywords.ModelOptions) & spelled
    assert keys(keywords.PromptInputs) == READ | names("media")


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in META])
def test_a_field_has_the_type_of_its_kind(name: str) -> None:
    hint, kind = get_type_hints(StoredOptions)[name], FIELDS[name].kind
    every = (*PLAIN, *literals(hint))
    assert [one for one in every if kind.accepts(one) and not admits(hint, one)] == []
    for plain in {bool, int, float, str} & {*get_args(hint)}:
        assert any(kind.accepts(one) for one in every if type(one) is plain), plain
    assert all(kind.accepts(one) for one in literals(hint))
    assert admits(hint, None)
    assert FIELDS[name].per_row == (name in per_row_hints())


def per_row_hints() -> set[str]:
    """The fields of numbers that may be given as a list, one per row."""
    hints = get_type_hints(StoredOptions)
    lists = {Sequence[int], Sequence[float]}
    found = {name for name, hint in hints.items() if lists & {*get_args(hint)}}
    ids = {name for name in found if name.endswith(("token_id", "_tokens"))}
    ids -= {"max_new_tokens", "min_new_tokens"}
    return found - ids - {"dola_layers"}


def literals(hint: Any) -> tuple[Any, ...]:
    """The values that a type names."""
    parts = [hint] if get_origin(hint) is Literal else get_args(hint)
    return tuple(value for one in parts if get_origin(one) is Literal for value in get_args(one))


def admits(hint: Any, value: Any) -> bool:
    """Whether a plain value, or None, is of the type, as type checkers see it."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(admits(one, value) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is not None:
        return isinstance(value, origin) and not isinstance(value, str)
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(hint, type) and isinstance(value, hint)


def test_what_loads_a_model_elsewhere_takes_what_load_takes() -> None:
    taken = inspect.signature(es.load).parameters
    assert keys(LoadOptions) == {*taken} - {"path", "offline", "progress", "unknown"}


def test_every_keyword_has_a_line() -> None:
    rows = [row for row in KEYWORDS.values() if row.owner != "absent"]
    assert all(10 < len(row.line) < 160 and row.line.endswith(".") for row in rows)
    assert all(row.elsewhere is not None for row in KEYWORDS.values() if row.owner == "absent")


def test_help_lists_what_the_types_have() -> None:
    assert {row.name for row in listed("texts")} == keys(keywords.PromptOptions)
    assert {row.name for row in listed("prefill")} == keys(keywords.PromptInputs)
    assert {row.name for row in listed("rectangle")} == (
        keys(keywords.RectangleOptions) | {"tokenizer"}
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_lists_every_keyword(name: str) -> None:
    function, options = FUNCTIONS[name]
    text, parameters = inspect.getdoc(function) or "", inspect.signature(function).parameters
    own = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [one for one in own if f"`{one}" not in text] == []
    if options is not None:
        (rest,) = [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
        assert name == "generate" or rest.annotation.startswith("Unpack[")
        lines = [line for line in text.splitlines() if line.startswith("    ")]
        listed = {line.strip().partition(":")[0] for line in lines}
        assert keys(options) <= listed


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "Async" not in n])
def test_help_ends_with_an_example_that_runs(name: str, tmp_path: Path) -> None:
    text = inspect.getdoc(FUNCTIONS[name][0]) or ""
    example = text.rpartition("\nExample:\n")[2]
    assert ">>>" in example and "\n\nOptions" not in example
    model, tokenizer = tiny_llama(vocab_size=320, dtype=torch.float32), tiny_tokenizer(320)
    with wave.open(str(tmp_path / "speech.wav"), "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(3200))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    names: dict[str, Any] = {"es": es, "model": model, "tokenizer": tokenizer}
    if name == "layout_prompt":
        page, lines = drawn_page()
        names |= {"model": tiny_document(), "picture": page, "lines": lines}
    if name == "transcribe":
        names["model"] = listener()
    test = doctest.DocTestParser().get_doctest(
        example, {**names, "folder": tmp_path, "torch": torch}, name, None, None
    )
    said: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert test.examples and failed.failed == 0, "".join(said)


def test_without_docstrings_nothing_is_listed() -> None:
    def bare() -> None: ...

    assert lists_options("texts")(bare).__doc__ is None
