"""Processes of templates: kept for the next chat, replaced when they ended, never shared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from everystep.errors import TokenizerError
from everystep.text import ChatTemplate, TemplateLimits, cage, caged
from everystep.text.known_templates import KNOWN_TEMPLATES
from tests.text.reading import CHATML_OF_MANY

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
# A single comparison of lists, which share every item, and takes 2 ** 60 steps of Python's.
ENDLESS_COMPARISON = (
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}"
)


def processes() -> set[int]:
    """The running processes of templates."""
    return {each._process.pid for each in cage._POOL.cages if each.is_ours()}


def test_the_process_of_a_template_is_kept() -> None:
    template = ChatTemplate("{{ 'kept' ~ messages[0].content }}")
    started = processes()
    assert [template.render(CHAT).text for _ in range(3)] == ["keptHi"] * 3
    assert ChatTemplate(template.source).render(CHAT).text == "keptHi"
    assert processes() == started


@pytest.mark.skipif(os.name != "posix", reason="signals of a POSIX system")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_process_that_ended_is_replaced(name: str) -> None:
    before = processes()
    template = ChatTemplate("{{ 'ended' ~ messages[0].content ~ '" + name + "' }}")
    (process,) = processes() - before
    os.kill(process, signal.Signals[name])
    while process in processes():
        pass
    assert template.render(CHAT).text == f"endedHi{name}"


def test_what_fails_is_not_kept() -> None:
    template = ChatTemplate("{% if messages | length == 1 %}{{ 1 + [] }}{% endif %}fine")
    started = processes()
    with pytest.raises(TokenizerError, match="Line 1 of the chat template fails; got TypeError"):
        template.render(CHAT)
    assert template.render(CHAT * 2).text == "fine"
    assert not processes() >= started


def test_what_counts_no_steps_is_ended_from_outside() -> None:
    with pytest.raises(TokenizerError, match="needs more time or memory than a template gets"):
        ChatTemplate(ENDLESS_COMPARISON, TemplateLimits(seconds=0.2)).render(CHAT)


def test_threads_do_not_wait_for_each_other_or_mix() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% for i in range(999) %}{% endfor %}")
    chats = [[{"role": "user", "content": str(number)}] for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda chat: template.render(chat).text, chats))
    assert texts == [str(number) for number in range(64)]


def rendered(template: ChatTemplate, name: str) -> str:
    return template.render([{"role": "user", "content": name}]).text


def test_there_are_only_so_many_processes_whoever_asks() -> None:
    """Threads with a template each wait for a place, and those that idle make room."""
    most, names = [0], [str(number) for number in range(24)]

    def render(name: str) -> str:
        text = rendered(ChatTemplate("{{ messages[0].content }} of template " + name), name)
        most.append(len(cage._POOL.cages))
        return text

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(render, names)) == [f"{name} of template {name}" for name in names]
    assert max(most) == cage.MOST_PROCESSES
    assert len(cage._POOL.cages) == len(processes()) <= cage.MOST_PROCESSES


def test_who_waits_for_a_place_waits_no_longer_than_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = ChatTemplate("{{ 'busy' ~ messages[0].content }}")
    monkeypatch.setattr(cage, "_PATIENCE", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(cage, "MOST_PROCESSES", 0)
        # One that has the template is no further process.
        assert rendered(known, "!") == "busy!"
        with pytest.raises(TokenizerError, match=r"was free in time; got 0 at work\. Try again"):
            ChatTemplate("{{ 'none' ~ messages[0].content }}")
        cage._POOL.end()
        with pytest.raises(TokenizerError, match="was free in time"):
            rendered(known, "!")
    monkeypatch.undo()
    assert rendered(known, "?") == "busy?"


def test_a_place_that_nobody_gave_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cage, "MOST_PROCESSES", 1)
    first = cage._POOL.take("{{ 'lost' }}", TemplateLimits(), time.monotonic() + 20)
    clock = threading.Timer(0.1, lambda: None)
    clock.start()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: ChatTemplate("{{ 'found' }}").render(CHAT).text)
        clock.join()
        assert not waits.done()
        del first
        assert waits.result() == "found"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ["the clock", "the end", "its own end"])
def test_what_a_process_has_started_ends_with_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that the system keeps for nobody with rights let a process start others."""
    script = "import os, time\nif os.fork() == 0: time.sleep(600)\nprint(os.getpid(), flush=True)\n"
    script += "time.sleep(0 if %r else 600)" % (how == "its own end")
    line, pipe = [sys.executable, "-c", script], subprocess.PIPE
    made = subprocess.Popen(line, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True)
    one = cage._Cage("", TemplateLimits())
    one._process = made
    assert made.stdout is not None and made.stdout.readline()
    assert len(group(made.pid)) == 2 or how == "its own end"
    if how == "the clock":
        # The other one holds the pipe open: without its end the answer would be waited for.
        assert one._exchange(None, time.monotonic()) is None
    elif how == "its own end":
        while one.is_ours():
            pass
    one.end()
    while group(made.pid):  # until the system has taken it down
        time.sleep(0.01)


def group(number: int) -> list[str]:
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, leader = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat.parent.name] if int(leader) == number and state != "Z" else []
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork of a POSIX system")
def test_a_forked_process_has_its_own() -> None:
    template = ChatTemplate("{{ 'forked' ~ messages[0].content }}")
    child = os.fork()
    if child == 0:
        os._exit(0 if template.render(CHAT).text == "forkedHi" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert template.render(CHAT).text == "forkedHi"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork of a POSIX system")
def test_a_fork_while_another_thread_renders_begins_at_once() -> None:
    """The child ends what it has of its parent's processes, whatever that thread was at."""
    waits = ChatTemplate(ENDLESS_COMPARISON, TemplateLimits(seconds=1))
    asked = threading.Event()
    send = caged.send

    def render() -> None:
        with pytest.raises(TokenizerError, match="exceeds its limits"):
            waits.render(CHAT)

    busy = threading.Thread(target=render)

    def sent(*given: Any) -> None:
        send(*given)
        asked.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caged, "send", sent)
        busy.start()
        assert asked.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(0 if ChatTemplate("{{ 'child' }}").render(CHAT).text == "child" else 1)
        busy.join()
    # A child that hangs is ended, so that the test fails instead of waiting with it.
    clock = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    clock.start()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    clock.cancel()


def test_after_an_interrupt_the_next_chat_gets_its_own_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate("{{ 'late' ~ messages[0].content }}")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(caged, "receive", interrupted)
        template.render(CHAT)
    assert template.render([{"role": "user", "content": "Ho"}]).text == "lateHo"


def test_a_known_template_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert ChatTemplate(CHATML_OF_MANY).render(CHAT).text.startswith("<|im_start|>user\nHi")
    with pytest.raises(TokenizerError, match=r"does not start.*Pass the prompt as text"):
        ChatTemplate("{{ 'unknown' }}")
    assert len(KNOWN_TEMPLATES) >= 2


@pytest.mark.parametrize(
    "answer",
    [[], {"text": 5}, {"generations": "1"}, {"what": ["x"]}, {"other": 1}, "text", 7, None],
)
def test_what_a_broken_process_says_is_not_believed(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("{{ 'broken' }}")
    receive = caged.receive

    def broken(*given: Any) -> bytes | None:
        receive(*given)
        return caged.packed(answer)

    with monkeypatch.context() as patch, pytest.raises(TokenizerError, match="exceeds its limits"):
        patch.setattr(caged, "receive", broken)
        template.render(CHAT)
    assert template.render(CHAT).text == "broken"


def test_an_answer_nested_without_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ 'deep' }}")
    with monkeypatch.context() as patch, pytest.raises(TokenizerError, match="exceeds its limits"):
        patch.setattr(caged, "receive", lambda *_: b"[" * 100_000)
        template.render(CHAT)
    assert template.render(CHAT).text == "deep"


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", "1": "b"},
        {None: [True, False, None], 2.5: {3: {}}},
        {"\ufdd2pairs": 1, "a": "\ufdd2pairs"},
        {"\ufdd2tuple": [1], (1, ("a",)): ((), [(2,)])},
        "\ud800 \0 \u2028 \U0001f600",
        [float("inf"), -0.0, 10**300, "", [], {}],
    ],
)
def test_values_reach_the_template_as_they_are(value: object) -> None:
    assert caged.unpacked(caged.packed(value)) == value
    text = ChatTemplate("{{ messages[0].content | string }}").render(
        [{"role": "", "content": value}]
    )
    assert text.text == str(value)


def test_a_number_without_a_place_in_json_is_refused() -> None:
    with pytest.raises(TokenizerError, match="has no place in a chat template"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "", "content": 10**5000}])


POWERS = """
import importlib.util, os, socket, sys
spec = importlib.util.spec_from_file_location("caged", sys.argv[1])
caged = importlib.util.module_from_spec(spec)
spec.loader.exec_module(caged)
caged._give_powers_away()
def fails(act):
    try:
        act()
    except (OSError, MemoryError):
        return True
acts = [lambda: open("/etc/passwd"), lambda: os.open("/tmp", 0), lambda: socket.socket(),
        lambda: os.pipe(), lambda: bytearray(300 << 20)]
print(all(map(fails, acts)), len(os.environ))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits that Linux keeps")
def test_its_process_can_open_nothing() -> None:
    line = [sys.executable, "-I", "-S", "-c", POWERS, str(caged.__file__)]
    assert subprocess.run(line, capture_output=True, text=True).stdout == "True 0\n"


def test_no_thread_stays() -> None:
    template = ChatTemplate("{{ 'threads' }}")
    before = threading.active_count()
    template.render(CHAT)
    assert threading.active_count() <= before + 1  # its clock may not have noticed that it is over
