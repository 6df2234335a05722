"""Ctrl-C as a wish: remembered once, obeyed at once the second time, and given back."""

from __future__ import annotations

import signal
import threading

import pytest

from everystep.cli.user_input import Interrupts


def test_the_first_is_remembered() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.wished


def test_none_is_wished_before() -> None:
    with Interrupts() as interrupts:
        assert not interrupts.wished


def test_the_second_raises() -> None:
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_while_a_line_is_typed_the_first_raises() -> None:
    with Interrupts() as interrupts, interrupts.raised(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_new_line_forgets_the_wish() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with interrupts.raised():
            pass
        assert not interrupts.wished


def test_afterwards_it_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_can_use_it() -> None:
    seen: list[bool] = []

    def enter() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.wished)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False]
