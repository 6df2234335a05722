"""`everystep generate`: what reaches the library, and what comes out in each form."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.files.sources import DEFAULT_MODEL
from everystep.types import Event, FinishReason
from tests.cli.fakes import FakeEvent, FakeFinish, FakeGenerated, Stage
from tests.cli.running import Caller, on_terminal, program, run, surroundings
from tests.cli.tiny_model import write_tiny_model
from tests.reading import ROOT


def asked(stage: Stage) -> Any:
    """The one prompt that was streamed."""
    ((prompt, _),) = stage.streams
    return prompt


def options(stage: Stage) -> dict[str, Any]:
    """The options of the one stream."""
    ((_, given),) = stage.streams
    return given


def test_the_fakes_have_the_fields_of_the_real_ones() -> None:
    pairs = ((FakeEvent, Event), (FakeFinish, FinishReason))
    for fake, real in pairs:
        assert list(fake._fields) == [field.name for field in fields(real)]
    generated = [field.name for field in fields(es.Generated)]
    assert [field.name for field in fields(FakeGenerated)] == generated


# --- the prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "arguments", "said"),
    [
        (None, ["--seed", "5"], True),
        (False, ["--seed", "5"], True),
        (True, ["--seed", "5"], False),
        (None, ["--seed", "5", "--do-sample"], False),
        (None, ["--seed", "5", "--temperature", "0.5"], False),
        (True, ["--seed", "5", "--no-do-sample"], True),
        (None, [], False),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_seed_without_draws_is_said_to_have_no_use(
    stage: Stage,
    call: Caller,
    sampled: bool | None,
    arguments: list[str],
    said: bool,
    command: str,
) -> None:
    stage.do_sample = sampled
    outcome = call(command, *arguments, given=b"hi\n")
    assert outcome.code == 0 and outcome.out == "hi\n"
    assert ("--seed changes nothing" in outcome.err) is said


def test_an_argument_is_the_text_itself(stage: Stage, call: Caller) -> None:
    call("generate", "Once upon")
    assert asked(stage) == "Once upon"


def test_with_chat_an_argument_is_a_users_message(stage: Stage, call: Caller) -> None:
    call("generate", "Why?", "--chat")
    assert asked(stage) == [{"role": "user", "content": "Why?"}]


def test_a_system_message_stands_first_in_a_chat(stage: Stage, call: Caller) -> None:
    call("generate", "Why?", "--system", "Be brief.")
    system, user = asked(stage)
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "Why?"}


def test_without_a_template_the_text_is_handed_on(stage: Stage, call: Caller) -> None:
    stage.chat_template = None
    outcome = call("generate", "Once upon")
    assert asked(stage) == "Once upon" and outcome.err == ""


def test_a_model_with_nothing_to_add_is_explained(stage: Stage, call: Caller) -> None:
    stage.answer = "\n"
    assert "--chat sends it as a message" in call("generate", "Why is the sky blue?").err
    assert call("generate", "Why?", "--chat").err == ""
    stage.chat_template = None
    assert call("generate", "Why?").err == ""


def test_a_file_is_read(stage: Stage, call: Caller, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("größer\nals\n".encode())
    call("generate", "--file", str(tmp_path / "prompt.txt"))
    assert asked(stage) == "größer\nals"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input_is_read(stage: Stage, call: Caller, arguments: list[str]) -> None:
    call("generate", *arguments, given=b"from a pipe\n")
    assert asked(stage) == "from a pipe"


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_only_the_final_line_break_is_dropped(stage: Stage, call: Caller, end: str) -> None:
    call("generate", given=f" two\n\nlines \n{end}".encode() if end else b" two\n\nlines ")
    assert asked(stage) == (" two\n\nlines \n" if end else " two\n\nlines ")


# --- the options ----------------------------------------------------------------------------------


def test_without_options_all_but_the_length_is_left_to_the_model(
    stage: Stage, call: Caller
) -> None:
    call("generate", "a")
    assert options(stage) == {"max_new_tokens": 512, "seed": None}


def test_options_arrive_under_their_names(stage: Stage, call: Caller) -> None:
    line = "--max-new-tokens 5 --num-beams 4 --num-return-sequences 2 --repetition-penalty 1.5"
    call("generate", "a", *line.split(), "--stop", "x", "--stop", "y", "--seed", "7")
    assert options(stage) == {
        "max_new_tokens": 5,
        "num_beams": 4,
        "num_return_sequences": 2,
        "repetition_penalty": 1.5,
        "stop_strings": ["x", "y"],
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        ("--temperature=0.5", "temperature", 0.5),
        ("--top-k=3", "top_k", 3),
        ("--top-p=0.5", "top_p", 0.5),
        ("--min-p=0.1", "min_p", 0.1),
    ],
)
def test_an_option_of_sampling_turns_it_on(
    stage: Stage, call: Caller, option: str, name: str, value: float
) -> None:
    call("generate", "a", option)
    assert (options(stage)[name], options(stage)["do_sample"]) == (value, True)


def test_the_best_of_several_are_drawn(stage: Stage, call: Caller) -> None:
    document = json.loads(call("generate", "a", "--best-of", "3", "--json").out)
    assert (options(stage)["best_of"], options(stage)["do_sample"]) == (3, True)
    assert [result["score"] for result in document["results"]] == [-1.5]


def test_forced_words_arrive_as_ids(stage: Stage, call: Caller) -> None:
    call("generate", "a", "--num-beams", "2", "--force-words", "x y", "--force-words", "z")
    assert options(stage)["force_words_ids"] == [[100, 101], [100]]


def test_a_forced_word_without_ids_is_refused(stage: Stage, call: Caller) -> None:
    outcome = call("generate", "a", "--num-beams", "2", "--force-words", "x", "--force-words", "")
    assert outcome.code == 2 and "--force-words is empty" in outcome.err and not stage.streams


def test_an_assistant_is_loaded_like_the_model(stage: Stage, call: Caller) -> None:
    how = "--dtype bfloat16 --quantize int8 --cache-dtype float16 --offline"
    call("generate", "a", "--assistant", "org/small", *how.split())
    (first, asked_first), (second, asked_second) = stage.loads
    assert (first, second) == (DEFAULT_MODEL, "org/small") and asked_first == asked_second
    assert (asked_first["quantize"], asked_first["cache_dtype"]) == ("int8", "float16")
    given = options(stage)
    assert {"assistant_model", "assistant_tokenizer"} <= given.keys()


@pytest.mark.parametrize(
    ("strategy", "name", "value"),
    [("best-of", "best_of", 4), ("early-exit", "assistant_early_exit", 8)],
)
def test_a_name_alone_has_usual_values(
    stage: Stage, call: Caller, strategy: str, name: str, value: int
) -> None:
    call("generate", "a", "--strategy", strategy)
    assert options(stage)[name] == value


def test_guidance_arrives(stage: Stage, call: Caller) -> None:
    call("generate", "a", "--guidance-scale", "1.5", "--negative-prompt", "dull words")
    given = options(stage)
    assert (given["guidance_scale"], given["negative_prompt"]) == (1.5, "dull words")


def test_candidates_of_contrastive_search_are_not_drawn(stage: Stage, call: Caller) -> None:
    call("generate", "a", "--penalty-alpha", "0.6", "--top-k", "4")
    given = options(stage)
    assert (given["penalty_alpha"], given["top_k"], given.get("do_sample")) == (0.6, 4, None)


def test_early_exit_arrives(stage: Stage, call: Caller) -> None:
    call("generate", "a", "--assistant-early-exit", "3")
    assert options(stage)["assistant_early_exit"] == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--num-beams 2 --best-of 3", "--best-of does not go with --num-beams 2;"),
        ("--no-do-sample --best-of 3", "--best-of does not go with --no-do-sample;"),
        (
            "--assistant M --assistant-early-exit 1",
            "--assistant-early-exit and --assistant both draft;",
        ),
    ],
)
def test_what_a_model_refuses_is_told_in_options(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str
) -> None:
    write_tiny_model(tmp_path / "M")
    monkeypatch.chdir(tmp_path)
    outcome = call("generate", "a", "-m", "./M", *line.replace(" M ", " ./M ").split())
    assert outcome.code == 2 and text in outcome.err and outcome.out == ""


@pytest.mark.parametrize("sampled", [None, False, True])
def test_a_temperature_of_0_is_greedy(stage: Stage, call: Caller, sampled: bool | None) -> None:
    stage.do_sample = sampled  # what the model's own settings say changes nothing
    assert call("generate", "a", "--temperature", "0").code == 0
    assert (options(stage)["temperature"], options(stage)["do_sample"]) == (0.0, False)


@pytest.mark.parametrize(("option", "value"), [("--do-sample", True), ("--no-do-sample", False)])
def test_sampling_can_be_chosen(stage: Stage, call: Caller, option: str, value: bool) -> None:
    call("generate", "a", option)
    assert options(stage)["do_sample"] is value


def test_the_default_model_is_loaded_as_it_is(stage: Stage, call: Caller) -> None:
    call("generate", "a")
    plain = {"dtype": None, "quantize": "auto", "cache_dtype": None, "device": "cpu"}
    assert stage.loads == [(DEFAULT_MODEL, {**plain, "offline": False})]


def test_another_model_is_loaded_as_asked(stage: Stage, call: Caller) -> None:
    call("generate", "a", "-m", "org/name", "--dtype", "bfloat16", "--cache-dtype", "float16")
    name, given = stage.loads[0]
    assert (name, given["dtype"], given["cache_dtype"]) == ("org/name", torch.bfloat16, "float16")


@pytest.mark.parametrize("line", [["--offline", "generate", "a"], ["generate", "a", "--offline"]])
def test_offline_may_stand_before_and_after(stage: Stage, call: Caller, line: list[str]) -> None:
    call(*line)
    assert stage.loads[0][1]["offline"] is True


# --- the output -----------------------------------------------------------------------------------


def test_text_is_plain_and_ends_with_a_line_break(stage: Stage, call: Caller) -> None:
    assert call("generate", "one two three") == (0, "one two three\n", "")


def test_text_that_ends_its_line_gets_no_second_break(stage: Stage, call: Caller) -> None:
    stage.answer = "one two\n"
    assert call("generate", "a").out == "one two\n"


def test_several_answers_are_separated(stage: Stage, call: Caller) -> None:
    out = call("generate", "x y", "--num-beams", "2", "--num-return-sequences", "2").out
    assert out == "x y\n---\nx y\n"


def test_json_is_one_document(stage: Stage, call: Caller) -> None:
    document = json.loads(call("generate", "x ü", "--json", "--seed", "3").out)
    timings = document.pop("timings")
    assert document == {
        "results": [
            {"text": "x ü", "tokens": [100, 101], "finish_reason": "stop", "matched": 2},
        ],
        "prompt_tokens": 7,
        "model": DEFAULT_MODEL,
        "weights": ["q4_1", "q8_0"],
        "cache_dtype": "float32",
        "executor": "native (avx2)",
        "seed": 3,
    }
    assert 0 <= timings["first_token_seconds"] <= timings["generate_seconds"]
    assert timings["load_seconds"] >= 0


TOOK = "prompt: 7 tokens, 3 of them cached, 0.250 s; answer: 2 tokens, 1.250 s, 40.0 a second"


@pytest.mark.parametrize("form", [[], ["--jsonl"]])
def test_what_an_answer_took_is_told(form: list[str], stage: Stage, call: Caller) -> None:
    plain = call("generate", "x y", *form)
    outcome = call("generate", "x y", "--timings", *form)
    assert outcome.out == plain.out and outcome.code == 0
    told = [line for line in outcome.err.splitlines() if "prompt:" in line]
    assert told == [f"everystep: {TOOK}; ended: stop, 2"] and "prompt:" not in plain.err


def test_what_each_of_several_answers_took_is_told(stage: Stage, call: Caller) -> None:
    options = ["--timings", "--num-return-sequences", "2", "--do-sample"]
    told = call("generate", "x y", *options).err
    assert [f"answer {number}, {TOOK}" in told for number in (0, 1)] == [True, True]


def test_json_has_what_each_answer_took(stage: Stage, call: Caller) -> None:
    (one,) = json.loads(call("generate", "x y", "--json", "--timings").out)["results"]
    seconds = {"prompt_seconds": 0.25, "decode_seconds": 1.25, "total_seconds": 2.25}
    assert one["timings"] == {**seconds, "tokens_per_second": 40.0, "cached_tokens": 3}


def test_json_has_the_scores_of_beams(stage: Stage, call: Caller) -> None:
    document = json.loads(call("generate", "x", "--json", "--num-beams", "2").out)
    assert [result["score"] for result in document["results"]] == [-1.5]


def test_json_lines_are_events(stage: Stage, call: Caller) -> None:
    lines = [json.loads(line) for line in call("generate", "x y", "--jsonl").out.splitlines()]
    event = {"sequence": 0, "position": 0, "token": 100, "text": "x", "logprob": None}
    last = {"position": 1, "token": 101, "text": " y", "finish_reason": "stop", "matched": 2}
    assert lines == [event, {**event, **last}]


def test_a_pipe_gets_every_token_when_it_comes() -> None:
    command = program("generate", "one two three four five six", delay=0.3)
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=surroundings()) as process:
        assert process.stdout is not None
        first = process.stdout.read1(100)
        rest = process.stdout.read()
    assert first.startswith(b"one") and rest.endswith(b"six\n")


def test_a_pipe_gets_the_text_unchanged() -> None:
    assert run(program("generate", "a\x1b[31m b")).out == "a\x1b[31m b\n"


def test_a_terminal_gets_no_control_characters() -> None:
    turned = "\u202egnp.exe\u2066\u2069"
    with on_terminal(
        program("generate", f"before \x1b[31mred\x9b2J {turned} \x07after")
    ) as terminal:
        assert terminal.end() == 0
    assert "before [31mred2J gnp.exe after" in terminal.shown


def test_the_stream_is_closed(stage: Stage, call: Caller) -> None:
    call("generate", "a")
    assert stage.closed == 1


# --- fetching -------------------------------------------------------------------------------------


def test_without_a_terminal_each_stage_of_a_fetch_is_one_line(stage: Stage, call: Caller) -> None:
    total = 98_362_432
    stage.fetches = tuple((i, total, what) for what in ("downloading", "verifying") for i in (0, 9))
    outcome = call("generate", "a")
    assert outcome.err.splitlines() == [
        f"everystep: {DEFAULT_MODEL} is licensed under Apache-2.0",
        f"everystep: downloading {DEFAULT_MODEL} (98 MB)",
        f"everystep: verifying {DEFAULT_MODEL} (98 MB)",
    ]
    assert outcome.out == "a\n"


def test_a_terminal_gets_a_bar_while_something_is_fetched() -> None:
    fetches = [(done, 4_000_000, "downloading") for done in (0, 4_000_000)]
    with on_terminal(program("generate", "an answer", fetches=fetches)) as terminal:
        assert terminal.end() == 0
    assert f"downloading {DEFAULT_MODEL}" in terminal.shown
    assert "4.0/4.0 MB" in terminal.shown
    *_, answer, summary = terminal.shown.rstrip().splitlines()
    assert answer.endswith("an answer")
    assert summary.startswith("everystep: 2 tokens") and summary.endswith("; native (avx2)")
