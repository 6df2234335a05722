"""Commands of a chat: what they change, and that a wrong one changes nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from everystep.cli.conversation import Conversation
from everystep.cli.slash import obey
from everystep.config.chat_defaults import ChatDefaults
from everystep.errors import EverystepError, FormatError, RequestError
from tests.cli.fakes import Stage
from tests.cli.running import Caller
from tests.cli.test_chat import contents

TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

# --- taking back, answering again -----------------------------------------------------------------


def test_undo_takes_the_last_exchange_back(stage: Stage, call: Caller) -> None:
    outcome = call("chat", given=b"a\nb\n/undo\nc\n")
    assert contents(stage)[-1] == ["a", "a", "c"] and "taken back: b" in outcome.err


def test_retry_asks_the_same_with_other_draws(stage: Stage, call: Caller) -> None:
    call("chat", "--seed", "5", "--do-sample", given=b"a\nb\n/retry\nc\n")
    assert contents(stage)[2] == contents(stage)[1] == ["a", "a", "b"]
    assert contents(stage)[3] == ["a", "a", "b", "b", "c"]
    assert [options["seed"] for _, options in stage.streams] == [5, 6, 7, 8]


@pytest.mark.parametrize("command", ["undo", "retry"])
def test_without_a_question_there_is_nothing_to_take_back(
    stage: Stage, call: Caller, command: str
) -> None:
    outcome = call("chat", given=f"/{command}\n".encode())
    assert outcome.code == 2 and "nothing was asked yet" in outcome.err


def test_a_retry_that_fails_keeps_the_answer_there_was(stage: Stage) -> None:
    talk = Conversation(*stage.load("m", progress=None), {"max_new_tokens": 9}, None, None, [*TURN])
    stage.stream_failure = FormatError("broken.")
    with pytest.raises(FormatError):
        obey(talk, "/retry", None)
    assert talk.turns == TURN


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("temperature 0.5", "temperature", 0.5),
        ("top_p 0.9", "top_p", 0.9),
        ("top_k 5", "top_k", 5),
        ("min_p 0.1", "min_p", 0.1),
        ("seed 7", "seed", 7),
        ("max_new_tokens 3", "max_new_tokens", 3),
        ("repetition_penalty 1.5", "repetition_penalty", 1.5),
        ("do_sample true", "do_sample", True),
        ("stop END of it", "stop_strings", ["END of it"]),
        (r'stop "\n"', "stop_strings", ["\n"]),
        ('stop ["a", "b"]', "stop_strings", ["a", "b"]),
    ],
)
def test_set_changes_the_next_answers(
    stage: Stage, call: Caller, line: str, name: str, value: object
) -> None:
    outcome = call("chat", given=f"/set {line}\na\n".encode())
    assert outcome.code == 0 and stage.streams[0][1][name] == value
    assert outcome.err.startswith(f"everystep: {line.split()[0]} ")


def test_what_shapes_draws_turns_them_on_until_it_is_left_out(stage: Stage, call: Caller) -> None:
    call(
        "chat", given=b"/set temperature 0.5\na\n/set temperature 0\nb\n/set temperature none\nc\n"
    )
    assert [options.get("do_sample") for _, options in stage.streams] == [True, False, None]


def test_set_alone_shows_everything(stage: Stage, call: Caller) -> None:
    lines = call("chat", "--top-p", "0.5", given=b"/set\n").err.splitlines()
    assert "everystep: top_p 0.5" in lines and "everystep: max_new_tokens 1024" in lines
    assert "everystep: temperature as the model says" in lines and len(lines) == 9


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("temprature 1", "Perhaps temperature is meant"),
        ("nonsense 1", "There are do_sample, temperature"),
        ("temperature warm", "wanted a number"),
        ("temperature nan", "temperature"),
        ("temperature -1", "temperature"),
        ("top_k 1.5", "wanted a whole number"),
        ("top_p 2", "top_p"),
        ("max_new_tokens 0", "max_new_tokens"),
        ("do_sample maybe", "true or false"),
        ("stop []", "stop"),
        ('stop ""', "stop"),
        (f"seed {'9' * 5000}", "wanted a whole number"),
    ],
)
def test_a_wrong_value_changes_nothing(stage: Stage, line: str, part: str) -> None:
    talk = Conversation(*stage.load("m", progress=None), {"max_new_tokens": 9}, None, None)
    with pytest.raises(RequestError, match=re.escape(part)):
        obey(talk, f"/set {line}", None)
    assert (talk.said, talk.seed) == ({"max_new_tokens": 9}, None)


# --- saving and loading ---------------------------------------------------------------------------


def test_load_goes_on_with_what_save_wrote(stage: Stage, call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    call("chat", "--system", "s", given=f"a\n/save {file}\n".encode())
    outcome = call("chat", given=f"/load {file}\nb\n/save {file}\n".encode())
    assert outcome.code == 0 and "loaded 3 messages" in outcome.err
    assert contents(stage)[-1] == ["s", "a", "a", "b"]
    assert len(json.loads(file.read_text())) == 5


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("no json", "not valid JSON"),
        ("{}", "holds no list"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 80 + "]" * 80, "nested too deeply"),
        ("[1]", "message 0 is none"),
        ('[{"role": "user"}]', "message 0 is none"),
        ('[{"role": "user", "content": 1}]', "message 0 is none"),
        ('[{"role": "user", "content": "a", "more": "b"}]', "message 0 is none"),
        ('[{"role": "user", "role": "user", "content": "a"}]', "comes twice"),
        (json.dumps(TURN[:1]), "holds no conversation"),
        (json.dumps(TURN[::-1]), "holds no conversation"),
        (json.dumps([*TURN, {"role": "system", "content": "s"}]), "holds no conversation"),
        (json.dumps([*TURN, {"role": "tool\x1b[2J", "content": "s"}]), "holds no conversation"),
    ],
)
def test_a_file_that_holds_no_conversation_changes_nothing(
    stage: Stage, tmp_path: Path, text: str, part: str
) -> None:
    (tmp_path / "talk.json").write_text(text)
    talk = Conversation(*stage.load("m", progress=None), {"max_new_tokens": 9}, None, "s", [*TURN])
    with pytest.raises(FormatError, match=part) as found:
        obey(talk, f"/load {tmp_path / 'talk.json'}", None)
    assert (talk.system, talk.turns) == ("s", TURN) and "\x1b" not in str(found.value)


def test_a_file_to_load_is_regular_bounded_and_there(stage: Stage, tmp_path: Path) -> None:
    talk = Conversation(*stage.load("m", progress=None), {"max_new_tokens": 9}, None, None)
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 30)
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "large", "pipe", "", "~nobody-at-all/x"):
        with pytest.raises(EverystepError):
            obey(talk, f"/load {tmp_path / name if name.isalpha() else name}", None)


def test_a_chat_is_drawn_where_neither_the_line_nor_the_model_says(
    stage: Stage, call: Caller
) -> None:
    stage.chat_defaults = ChatDefaults("Be brief.")
    said = call("chat", given=b"a\n/set\n/set temperature 0\nb\n")
    (first, drawn), (_, greedy) = stage.streams
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    # What es.stream draws for messages is tested there: the line says nothing.
    assert "do_sample" not in drawn and "top_p" not in drawn
    assert "temperature 0.7, as in every chat\n" in said.err
    assert "seed as the model says" in said.err
    assert greedy["do_sample"] is False and "top_p" not in greedy


def test_a_system_message_of_the_line_goes_before_the_default(stage: Stage, call: Caller) -> None:
    stage.chat_defaults = ChatDefaults("Be brief.")
    call("chat", "--system", "Be kind.", given=b"a\n")
    assert stage.streams[0][0][0] == {"role": "system", "content": "Be kind."}
