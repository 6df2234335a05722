"""What a terminal shows of a run, and that it is left as it was however the run ends."""

from __future__ import annotations

import re
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

import everystep as es
from everystep.errors import RequestError
from tests.cli.running import on_terminal
from tests.train.test_watching import DATA, made

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""What makes a terminal hide its cursor, and show it again."""


class Breaking(es.TrainerCallback):
    """Breaks at an event of a run."""

    def __init__(self, event: str, error: BaseException) -> None:
        def broken(*_: Any, **given: Any) -> None:
            raise error

        setattr(self, event, broken)


class Closed(es.TrainerCallback):
    """Counts how often it is closed."""

    def __init__(self, fails: bool = False) -> None:
        self.count, self._fails = 0, fails

    def close(self) -> None:
        self.count += 1
        if self._fails:
            raise OSError("cannot be closed")


def test_progress_is_what_the_run_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, losses and samples, in the words of the log; a second training begins at 0."""
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    given |= {"eval_dataset": DATA[:1], "sample_prompts": ["one"], "disable_tqdm": False}
    with pytest.warns(UserWarning, match="are trained on"):
        run = made(tmp_path, logging_steps=2, **given)
        run.train()
    told = capsys.readouterr().out
    losses = [one for one in run.state.log_history if "loss" in one or "eval_loss" in one]
    assert len(losses) == 4
    for one in losses:
        name = "loss" if "loss" in one else "eval_loss"
        assert f"step {one['step']}: {name} {one[name]:.4g}" in told
    assert "one → " in told and "4/4" in told and "tokens/s" in told
    # How long it took, how long it still takes, and the most memory so far.
    shown = " ".join(told.split())
    assert re.search(r"4/4 \d:\d\d:\d\d 0:00:00 [\d,]+ tokens/s, [\d.]+[kMG]B at most", shown)
    with pytest.warns(UserWarning, match="are trained on"):
        run.train()
    assert capsys.readouterr().out.count("4/4") == 1


EVENTS = ("on_train_begin", "on_step_begin", "on_save", "on_train_end")


@pytest.mark.filterwarnings("ignore:.*are trained on")
@pytest.mark.parametrize("event", EVENTS)
def test_what_a_run_holds_is_let_go_however_it_ends(event: str, tmp_path: Path) -> None:
    """The thread of the display, a writer of files, and what a callback of your own holds."""
    error = KeyboardInterrupt() if event == "on_step_begin" else ValueError("broken")
    threads = {*threading.enumerate()}
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    given |= {"eval_dataset": DATA[:1], "save_strategy": "steps", "report_to": ["tensorboard"]}
    run = made(tmp_path, disable_tqdm=False, **given)
    faulty, own = Closed(fails=True), Closed()
    for one in (Breaking(event, error), faulty, own):
        run.add_callback(one)
    with pytest.raises(OSError, match="cannot be closed") as raised:
        run.train()
    assert raised.value.__context__ is error  # what ended the run is told with it
    assert own.count == faulty.count == 1
    for one in {*threading.enumerate()} - threads:
        one.join(5)
        assert not one.is_alive()


def test_a_run_that_ended_by_an_error_may_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, disable_tqdm=False)
    broken = Breaking("on_step_end", OSError("a disk"))
    run.add_callback(broken)
    with pytest.raises(OSError, match="a disk"):
        run.train()
    run.remove_callback(broken)
    capsys.readouterr()
    assert run.train().global_step == 3
    assert "3/3" in capsys.readouterr().out


def test_an_object_that_cannot_be_closed_is_no_callback(tmp_path: Path) -> None:
    class Events:
        """Has the events alone, as callbacks of transformers have them."""

    for name in dir(es.TrainerCallback):
        if name.startswith("on_"):
            setattr(Events, name, lambda *_, **given: None)
    with pytest.raises(RequestError, match="Events without state"):
        made(tmp_path).add_callback(Events())  # type: ignore[arg-type]


RUN = """
import sys
from pathlib import Path
import everystep as es
from tests.train.runs import trainer

class Waiting(es.TrainerCallback):
    def on_step_end(self, args, state, control, **given):
        while state.global_step == 3:  # until the terminal interrupts it
            pass

trainer(Path(sys.argv[1]), max_steps=4, disable_tqdm=False, callbacks=[Waiting]).train()
"""


def test_a_terminal_is_usable_after_a_run_that_was_interrupted(tmp_path: Path) -> None:
    with on_terminal([sys.executable, "-c", RUN, str(tmp_path)]) as terminal:
        before = termios.tcgetattr(terminal.master)
        terminal.until("2/4")  # callbacks of your own are told of a step first
        terminal.until("at most", terminal.shown.count("at most") + 1)  # the whole line
        plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.shown)
        assert re.search(r"2/4 \d:\d\d:\d\d \d:\d\d:\d\d [\d,]+\s+tokens/s", plain)
        assert HIDDEN in terminal.shown and SHOWN not in terminal.shown
        terminal.type("\x03")  # Ctrl-C
        assert terminal.end() != 0
        # The cursor is there again, and the traceback is below the display.
        assert terminal.shown.count(SHOWN) == terminal.shown.count(HIDDEN) == 1
        assert terminal.shown.index(SHOWN) < terminal.shown.index("KeyboardInterrupt")
        assert termios.tcgetattr(terminal.master) == before
