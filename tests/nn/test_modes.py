"""Modes of torch come back however their block is left."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
import torch

from everystep.nn.modes import inference_mode, modes_kept, ordinary_mode

MODES = [inference_mode, ordinary_mode, modes_kept]


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def within(mode: Callable[[], AbstractContextManager[None]]) -> tuple[bool, bool]:
    with mode(), torch.no_grad():
        return modes()


def test_what_holds_within() -> None:
    assert within(inference_mode) == (False, True)
    assert within(ordinary_mode) == within(modes_kept) == (False, False)
    with inference_mode():
        assert within(modes_kept) == (False, True)
        assert within(ordinary_mode) == (False, False)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_any_line_leaves_them_as_they_were(
    mode: Callable[[], AbstractContextManager[None]], outer: bool
) -> None:
    """Every line, those of torch's `no_grad` included."""
    with torch.inference_mode(outer):
        before, line = modes(), 0
        while interrupted(lambda: within(mode), line):
            assert modes() == before
            line += 1
        assert modes() == before and line > 5


def interrupted(call: Callable[[], object], line: int) -> bool:
    """Whether a call was interrupted at its k-th line."""
    left = [line]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return trace

    earlier = sys.gettrace()
    gc.disable()  # what watches collections would be interrupted, and that is nobody's error
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(earlier)
        gc.enable()
    return False
