"""Parts of an answer as a replica sends them: all that became of an ask since the last part.

They are msgpack, and nothing but data. Ray's costs are by part, so that tokens are gathered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import msgspec

from everystep.server.link import News
from everystep.server.messages import (
    Begun,
    Failed,
    HeardText,
    Over,
    RowNews,
    ScoredTexts,
    Tokens,
)

Told = Begun | Tokens | Over | ScoredTexts | HeardText | Failed
Part = list[Told]
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Part] = msgspec.msgpack.Decoder(Part)


def packed_part(news: Iterable[News]) -> bytes:
    """Return the bytes of a part; its tokens are one message, which stands before the end."""
    rows: list[RowNews] = []
    others: list[News] = []
    for one in news:
        if isinstance(one, RowNews):
            rows.append(one)
        else:
            others.append(one)
    begun = [one for one in others if isinstance(one, Begun)]
    ends = [one for one in others if not isinstance(one, Begun)]
    return _encoder.encode([*begun, *([Tokens(rows)] if rows else ()), *ends])


def read_part(data: bytes) -> Part:
    """Return a part; msgspec.DecodeError for what is none."""
    return _decoder.decode(data)


async def gathered(news: AsyncIterator[News], seconds: float) -> AsyncGenerator[list[News], None]:
    """Yield what comes: the first at once, and after that all that came in so many seconds."""
    found: list[News] = []
    come, over = asyncio.Event(), asyncio.Event()

    async def take() -> None:
        try:
            async for one in news:
                found.append(one)
                come.set()
        finally:
            over.set()
            come.set()

    taking = asyncio.create_task(take())
    try:
        while True:
            await come.wait()
            come.clear()
            if found:
                part = found[:]
                found.clear()
                yield part
            if over.is_set() and not found:
                await taking
                return
            try:
                await asyncio.wait_for(over.wait(), seconds)
            except TimeoutError:
                continue
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
