"""`everystep chat`: what the model is shown turn by turn, and what Ctrl-C ends."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from everystep.cli.slash import COMMANDS
from tests.cli.fakes import Stage
from tests.cli.running import Caller, Terminal, on_terminal, program, run

LONG = "one two three four five six seven eight nine ten"


def contents(stage: Stage) -> list[list[str]]:
    """What the model was shown each time, without the roles."""
    return [[message["content"] for message in prompt] for prompt, _ in stage.streams]


# --- from a pipe ----------------------------------------------------------------------------------


def test_each_line_is_answered_on_lines_of_its_own(stage: Stage, call: Caller) -> None:
    assert call("chat", given=b"one two\nthree\n") == (0, "one two\nthree\n", "")


def test_the_model_sees_what_was_said(stage: Stage, call: Caller) -> None:
    stage.answer = "hm"
    call("chat", given=b"a\nb\n")
    assert contents(stage) == [["a"], ["a", "hm", "b"]]


def test_roles_alternate_after_the_system_message(stage: Stage, call: Caller) -> None:
    call("chat", "--system", "Be brief.", given=b"a\nb\n")
    roles = [message["role"] for message in stage.streams[1][0]]
    assert roles == ["system", "user", "assistant", "user"]


def test_empty_lines_say_nothing(stage: Stage, call: Caller) -> None:
    call("chat", given=b"\n  \na\n")
    assert contents(stage) == [["a"]]


def test_the_model_is_loaded_once(stage: Stage, call: Caller) -> None:
    call("chat", given=b"a\nb\n")
    assert len(stage.loads) == 1


def test_clear_keeps_the_system_message_only(stage: Stage, call: Caller) -> None:
    call("chat", "--system", "s", given=b"a\n/clear\nb\n")
    assert contents(stage)[1] == ["s", "b"]


def test_system_sets_the_system_message(stage: Stage, call: Caller) -> None:
    call("chat", given=b"/system Rhyme, please.\na\n")
    assert stage.streams[0][0][0] == {"role": "system", "content": "Rhyme, please."}


def test_system_alone_shows_it(stage: Stage, call: Caller) -> None:
    assert "system message: s" in call("chat", "--system", "s", given=b"/system\n").err


def test_exit_leaves_the_rest_unread(stage: Stage, call: Caller) -> None:
    assert call("chat", given=b"a\n/exit\nb\n") == (0, "a\n", "")


def test_two_slashes_are_a_message_with_one(stage: Stage, call: Caller) -> None:
    call("chat", given=b"//exit is a command\n")
    assert contents(stage) == [["/exit is a command"]]


def test_help_names_every_command(stage: Stage, call: Caller) -> None:
    told = call("chat", given=b"/help\n").err
    assert all(f"everystep: /{name} " in told for name in COMMANDS)


def test_save_writes_the_messages(stage: Stage, call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    call("chat", given=f"größer\n/save {file}\n".encode())
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "user", "content": "größer"},
        {"role": "assistant", "content": "größer"},
    ]


def test_save_may_be_repeated(stage: Stage, call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    outcome = call("chat", given=f"a\n/save {file}\nb\n/save {file}\n".encode())
    assert outcome.code == 0
    assert len(json.loads(file.read_text())) == 4


def test_save_leaves_other_files_alone(stage: Stage, call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("mine")
    outcome = call("chat", given=f"a\n/save {file}\n".encode())
    assert outcome.code == 2 and "exists already" in outcome.err
    assert file.read_text() == "mine"


def test_from_a_pipe_the_first_failure_ends_the_chat(stage: Stage, call: Caller) -> None:
    outcome = call("chat", given=b"/sytem x\na\n")
    assert outcome.code == 2
    assert outcome.err == "everystep: there is no command /sytem. Perhaps /system is meant.\n"
    assert stage.streams == []


def test_every_turn_has_draws_of_its_own(stage: Stage, call: Caller) -> None:
    call("chat", "--seed", "5", "--do-sample", given=b"a\nb\n")
    assert [options["seed"] for _, options in stage.streams] == [5, 6]


def test_an_answer_is_cut_to_what_the_context_leaves(stage: Stage, call: Caller) -> None:
    stage.context = 5
    call("chat", given=b"a b\n")
    assert stage.streams[0][1]["max_new_tokens"] == 3


def test_a_conversation_longer_than_the_context_is_refused(stage: Stage, call: Caller) -> None:
    stage.context = 5
    outcome = call("chat", given=b"a b c d e\n")
    assert outcome.code == 1
    assert "longer than the model's context" in outcome.err and "/clear" in outcome.err
    assert stage.streams == []


# --- one message ----------------------------------------------------------------------------------


def test_a_message_is_answered_and_the_chat_ends(stage: Stage, call: Caller) -> None:
    assert call("chat", "/why not", "--system", "s") == (0, "/why not\n", "")
    assert contents(stage) == [["s", "/why not"]]


def test_a_message_that_is_too_long_is_a_failure(stage: Stage, call: Caller) -> None:
    stage.context = 2
    outcome = call("chat", "a b c")
    assert outcome.code == 1 and "longer than the model's context" in outcome.err


# --- messages of several lines --------------------------------------------------------------------


def test_a_backslash_goes_on_in_the_next_line(stage: Stage, call: Caller) -> None:
    call("chat", given=b"one\\\ntwo\\\nthree\nfour\n")
    assert [prompt[-1]["content"] for prompt, _ in stage.streams] == ["one\ntwo\nthree", "four"]


def test_between_quotation_marks_all_is_one_message(stage: Stage, call: Caller) -> None:
    call("chat", given=b'"""\n/exit\n\nand\\\n"""\nb\n')
    assert [prompt[-1]["content"] for prompt, _ in stage.streams] == ["/exit\n\nand\\", "b"]


@pytest.mark.parametrize("given", [b"one\\\n", b'"""\none\n'])
def test_what_has_no_end_is_said_all_the_same(stage: Stage, call: Caller, given: bytes) -> None:
    call("chat", given=given)
    assert contents(stage)[0][0].strip() == "one"


# --- on a terminal --------------------------------------------------------------------------------


def started(terminal: Terminal, line: str) -> None:
    """The chat has begun, and its first line is typed."""
    terminal.until("> ")
    terminal.type(f"{line}\n")


def leave(terminal: Terminal) -> None:
    """Types /exit until it is obeyed: a Ctrl-C that is still on its way may swallow a line."""
    for _ in range(100):
        if terminal.process.poll() is not None:
            return
        with suppress(OSError):
            terminal.type("/exit\n")
        time.sleep(0.1)


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with on_terminal(program("chat", delay=0.3)) as terminal:
        started(terminal, LONG)
        terminal.until("one two three four five six seven eight nine ten\r\none two")
        terminal.type("\x03")
        terminal.until("stopped")
        terminal.until("> ", count=2)
        terminal.type(f"/save {file}\n/exit\n")
        assert terminal.end() == 0
    said = json.loads(file.read_text())[1]["content"]
    assert said.startswith("one two") and LONG.startswith(said) and said != LONG


def test_ctrl_c_before_the_first_word_takes_the_question_back(tmp_path: Path) -> None:
    with on_terminal(program("chat", delay=2.0)) as terminal:
        started(terminal, "why")
        terminal.until("why\r\n")
        time.sleep(0.2)  # nothing is shown between the line and the first word
        terminal.type("\x03")
        time.sleep(0.2)  # two signals at once are one
        terminal.type("\x03")
        terminal.until("> ", count=2)
        terminal.type(f"/save {tmp_path / 'a.json'}\n/exit\n")
        assert terminal.end() == 0
    assert json.loads((tmp_path / "a.json").read_text()) == []


def test_ctrl_c_at_the_prompt_says_how_to_leave() -> None:
    with on_terminal(program("chat")) as terminal:
        terminal.until("> ")
        terminal.type("half a li")
        terminal.until("half a li")
        time.sleep(
            0.2
        )  # a signal just before readline waits for a key is only seen at the next key
        terminal.type("\x03")
        terminal.until("Ctrl-D or /exit ends the chat")
        terminal.type("whole\n/exit\n")
        assert terminal.end() == 0
    assert "\nwhole\r\n" in terminal.shown


def test_ctrl_d_ends_the_chat() -> None:
    with on_terminal(program("chat")) as terminal:
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_on_a_terminal_a_failure_leaves_the_chat() -> None:
    with on_terminal(program("chat")) as terminal:
        started(terminal, "/nonsense")
        terminal.until("there is no command /nonsense")
        terminal.until("> ", count=2)
        terminal.type("still here\n")
        terminal.until("> ", count=3)
        terminal.type("/exit\n")
        assert terminal.end() == 0
    assert terminal.shown.count("still here\r\n") == 2


def test_without_a_terminal_nothing_but_answers_is_written() -> None:
    assert run(program("chat"), b"one two\n") == (0, "one two\n", "")


def test_ctrl_c_never_ends_the_chat() -> None:
    with on_terminal(program("chat", delay=0.005)) as terminal:
        terminal.until("> ")
        for turn in range(20):
            terminal.type("a b c\n")
            time.sleep(turn * 0.002)  # before, while and after it answers
            terminal.type("\x03")
            time.sleep(0.05)
        leave(terminal)
        assert terminal.end() == 0


def test_a_home_that_is_not_there_is_explained(stage: Stage, call: Caller) -> None:
    outcome = call("chat", given=b"a\n/save ~nobody-at-all/x\n")
    assert outcome.code == 2 and "there is no such home folder" in outcome.err


def test_a_person_goes_on_after_a_path_that_cannot_be() -> None:
    with on_terminal(program("chat")) as terminal:
        terminal.until("> ")
        terminal.type("/save ~nobody-at-all/x\n")
        terminal.until("no such home folder")
        terminal.until("> ", count=2)
        terminal.type("/exit\n")
        assert terminal.end() == 0
