"""Whose turn the interpreter is, in a process that belongs to a server."""

from __future__ import annotations

import sys

_TURN = 0.0005
"""Seconds for which a thread may go on while another one waits."""


def take_short_turns() -> None:
    """Have the threads of this process hand the interpreter on after half a millisecond.

    A step gives it away at each call that lets others in, and so does an event loop. Where a long
    request is read beside them, each of these calls waits for the reader's turn to be over, which
    lasts five milliseconds by default: half a step.
    """
    sys.setswitchinterval(_TURN)
