"""Wrong command lines: each has its own cause, code and text, and none shows a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.fakes import Stage
from tests.cli.running import Caller


class Wrong(NamedTuple):
    """A command line, its exit code, and parts of what it is told."""

    line: list[str]
    code: int
    parts: tuple[str, ...]
    given: bytes = b""


WRONG = {
    "no such command": Wrong(["generat", "a"], 2, ("generat", "No such command")),
    "no such option": Wrong(["generate", "a", "--temprature", "1"], 2, ("--temprature",)),
    "an option without its value": Wrong(["generate", "a", "--model"], 2, ("--model", "argument")),
    "a word for a number": Wrong(["generate", "a", "--top-k", "many"], 2, ("--top-k", "integer")),
    "no room for an answer": Wrong(
        ["generate", "a", "--max-new-tokens", "0"], 2, ("--max-new-tokens", "1")
    ),
    "no such type": Wrong(["generate", "a", "--dtype", "int3"], 2, ("--dtype", "bfloat16")),
    "no such kind of device": Wrong(["generate", "a", "--device", "gpu"], 2, ("--device", "cuda")),
    "a device that is not here": Wrong(["generate", "a", "--device", "cuda:99"], 1, ("cuda:99",)),
    "two prompts": Wrong(["generate", "a", "--file", "b"], 2, ("PROMPT and --file",)),
    "a prompt of several words": Wrong(["generate", "Why", "is", "it"], 2, ("unexpected", "is it")),
    "an empty prompt": Wrong(["generate", ""], 2, ("prompt is empty",)),
    "a prompt file that is not there": Wrong(
        ["generate", "--file", "absent.txt"], 1, ("there is no file", "absent.txt")
    ),
    "a folder as a prompt file": Wrong(["generate", "--file", "."], 1, ("'.' is a folder",)),
    "a prompt that is no text": Wrong(
        ["generate"], 1, ("standard input", "UTF-8", "0xff at offset 2"), b"ab\xff"
    ),
    "an option that is gone": Wrong(
        ["generate", "a", "--raw"], 2, ("--raw", "continues the text itself", "--chat")
    ),
    "two forms of output": Wrong(
        ["generate", "a", "--json", "--jsonl"], 2, ("--json and --jsonl",)
    ),
    "a value nothing can have": Wrong(["generate", "a", "--top-p", "1.5"], 2, ("--top-p", "1.5")),
    "an option without effect": Wrong(
        ["generate", "a", "--no-do-sample", "--min-p", "0.1"],
        2,
        ("--min-p 0.1 with --no-do-sample",),
    ),
    "more answers than beams": Wrong(
        ["generate", "a", "--num-beams", "2", "--num-return-sequences", "3"],
        2,
        ("--num-return-sequences 3", "--num-beams 2"),
    ),
    "several answers of a greedy search": Wrong(
        ["generate", "a", "--num-return-sequences", "2"], 2, ("greedy", "--num-return-sequences 2")
    ),
    "an empty text to stop at": Wrong(["generate", "a", "--stop", ""], 2, ("--stop is not valid",)),
    "sampling without any warmth": Wrong(
        ["generate", "a", "--temperature", "0", "--do-sample"],
        2,
        ("--temperature 0.0", "set --no-do-sample"),
    ),
    "the same in a chat": Wrong(
        ["chat", "--temperature", "0", "--do-sample"],
        2,
        ("--temperature 0.0", "set --no-do-sample"),
    ),
    "what shapes draws beside greedy search": Wrong(
        ["generate", "a", "--temperature", "0", "--top-p", "0.9"],
        2,
        ("--top-p 0.9 with --temperature 0", "Leave --top-p out"),
    ),
    "a name that needs a second model": Wrong(
        ["generate", "a", "--strategy", "assisted"], 2, ("'assisted'", "--assistant with it")
    ),
    "a name that needs words": Wrong(
        ["generate", "a", "--strategy", "constrained-beam"],
        2,
        ("'constrained-beam'", "--force-words with it"),
    ),
    "words for another strategy": Wrong(
        ["generate", "a", "--strategy", "beam", "--force-words", "b"],
        2,
        ("no --force-words", "Leave one of the two out"),
    ),
    "words without beams": Wrong(
        ["generate", "a", "--force-words", "b"], 2, ("--force-words with --num-beams 1",)
    ),
    "one answer by name, several by number": Wrong(
        ["generate", "a", "--strategy", "sample", "--best-of", "3"],
        2,
        ("--best-of contradicts", "no --best-of"),
    ),
    "drafts of no layer": Wrong(
        ["generate", "a", "--assistant-early-exit", "0"], 2, ("--assistant-early-exit", "1")
    ),
    "drafts for beams": Wrong(
        ["generate", "a", "--assistant-early-exit", "1", "--num-beams", "2"],
        2,
        ("--assistant-early-exit 1 with --num-beams 2",),
    ),
    "an option of another command": Wrong(["chat", "--num-beams", "2"], 2, ("--num-beams",)),
    "an unknown model to fetch": Wrong(
        ["pull", "smollm2-135m-instuct"], 1, ("smollm2-135m-instuct", "Perhaps smollm2")
    ),
    "a path to fetch that is not there": Wrong(["pull", "./absent"], 1, ("./absent", "path")),
    "offline without the model": Wrong(["pull", "--offline"], 1, ("offline", "everystep pull")),
    "nothing to remove": Wrong(["models", "remove"], 2, ("NAME", "Missing")),
    "a model that is not known": Wrong(["models", "remove", "../x"], 2, ("../x",)),
    "a model that is not here": Wrong(
        ["models", "remove", "smollm2-135m-instruct"], 1, ("is not in",)
    ),
    "JSON of a removal": Wrong(["models", "--json", "remove", "a"], 2, ("--json", "remove")),
    "completion for no shell": Wrong(["completion"], 2, ("bash, zsh, fish",)),
    "completion for another shell": Wrong(["completion", "tcsh"], 2, ("tcsh",)),
    "an unknown command of models": Wrong(["models", "rename"], 2, ("rename",)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_command_line_is_explained(
    wrong: Wrong, stage: Stage, call: Caller, cache: Path, tmp_path: Path
) -> None:
    outcome = call(*wrong.line, given=wrong.given)
    assert outcome.code == wrong.code
    assert [part for part in wrong.parts if part not in outcome.err] == []
    assert 1 <= len(outcome.err.splitlines()) <= 2
    assert outcome.err.startswith("everystep: ") and "Traceback" not in outcome.err
    assert outcome.out == ""


def test_advice_names_no_argument_of_python(stage: Stage, call: Caller) -> None:
    names = (
        *("temperature", "do_sample", "top_p", "num_beams", "num_return_sequences"),
        *("best_of", "force_words_ids", "assistant_model", "assistant_early_exit"),
    )
    for wrong in WRONG.values():
        err = call(*wrong.line, given=wrong.given).err
        assert [name for name in names if f"{name}=" in err or ("_" in name and name in err)] == []


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_command_line_loads_nothing(
    wrong: Wrong, stage: Stage, call: Caller, cache: Path
) -> None:
    call(*wrong.line, given=wrong.given)
    assert (stage.loads, stage.streams) == ([], [])


@pytest.mark.parametrize("option", ["--chat", "--system=b"])
def test_a_message_for_a_model_without_a_template(stage: Stage, call: Caller, option: str) -> None:
    stage.chat_template = None
    outcome = call("generate", "a", option)
    said = f"{option.partition('=')[0]} needs a model with a chat template"
    assert outcome.code == 2 and said in outcome.err


def test_a_chat_with_a_model_without_a_template(stage: Stage, call: Caller) -> None:
    stage.chat_template = None
    outcome = call("chat", given=b"a\n")
    assert outcome.code == 2 and "a chat needs a model with a chat template" in outcome.err


def test_nothing_typed_as_a_prompt(stage: Stage) -> None:
    from tests.cli.running import on_terminal, program

    with on_terminal(program("generate")) as terminal:
        assert terminal.end() == 2
    assert "no prompt was given" in terminal.shown
