"""What the engine reads of a front: its asks until it ends, and nothing that is no message."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from everystep.errors import FormatError
from everystep.server.messages import (
    MOST_BYTES,
    Ask,
    AskMessage,
    Leave,
    Quit,
    RunAsk,
    ScoreAsk,
    frame,
    front_messages,
)

SENT: list[AskMessage] = [
    Ask(1, "tiny", [3, 4], {"steer": {"0": b"\x00\xff" * 8}, "seed": 7}, owner="x"),
    ScoreAsk(2, "tiny", [[3]], None, 0, steer="polite"),
    RunAsk(3, "run", "open", {"keywords": {"steer": {"1": b"1234"}}}, owner="x"),
    Leave(1),
]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def heard(data: bytes) -> list[AskMessage]:
    async def read() -> list[AskMessage]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [one async for one in front_messages(reader)]

    return asyncio.run(read())


WHOLE = b"".join(map(frame, SENT))
ENDS = {
    "nothing more": b"",
    "the last message": frame(Quit()) + frame(Leave(2)),
    "half a message": frame(Leave(2))[:-1],
    "half a length": b"\0\0",
    "no msgpack": framed(b"\xc1") + frame(Leave(2)),
    "msgpack that is cut": framed(b"\x93\x01") + frame(Leave(2)),
    "another type": framed(msgspec.msgpack.encode({"type": "Nothing"})) + frame(Leave(2)),
    "another kind": framed(msgspec.msgpack.encode({"type": "Leave", "id": "1"})) + frame(Leave(2)),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_front_is_heard_until_its_end(end: str) -> None:
    assert heard(WHOLE + ENDS[end]) == SENT


def test_a_message_that_is_too_long_is_an_error() -> None:
    with pytest.raises(FormatError, match="too long"):
        heard(frame(Leave(1)) + (MOST_BYTES + 1).to_bytes(4, "big") + b"x")
