"""Text streamers to iterate over, from another thread or from an event loop.

If generation fails, iteration first gives all text that came before and then raises the error of
the generation, so that a reader never waits for a writer that is gone.
"""

from __future__ import annotations

import asyncio
from queue import Queue
from typing import Any

from everystep.streamers.text import TextStreamer


class TextIteratorStreamer(TextStreamer):
    """Chunks of text in a queue: `generate` runs in one thread, another iterates.

    `timeout`: seconds to wait for the next chunk, None for as long as it takes; `queue.Empty`
    after that. Source: TextIteratorStreamer.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.text_queue: Queue[Any] = Queue()
        self.stop_signal: Any = None
        self.timeout = timeout

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Put the chunk into the queue, and the stop signal after the last."""
        self.text_queue.put(text, timeout=self.timeout)
        if stream_end:
            self.text_queue.put(self.stop_signal, timeout=self.timeout)

    def fail(self, error: BaseException) -> None:
        """Put what was held back into the queue, and the error after it."""
        self.on_finalized_text(self.take_rest())
        self.text_queue.put(error, timeout=self.timeout)

    def __iter__(self) -> TextIteratorStreamer:
        return self

    def __next__(self) -> str:
        value = self.text_queue.get(timeout=self.timeout)
        if value == self.stop_signal:
            raise StopIteration
        return _text(value)


class AsyncTextIteratorStreamer(TextStreamer):
    """Chunks of text for `async for`: `generate` runs in a thread, the event loop iterates.

    Made inside a running event loop. `timeout`: seconds to wait for the next chunk; `TimeoutError`
    after that. Source: AsyncTextIteratorStreamer.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.text_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.stop_signal: Any = None
        self.timeout = timeout
        self.loop = asyncio.get_running_loop()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Have the loop put the chunk into the queue, and the stop signal after the last."""
        self._put(text)
        if stream_end:
            self._put(self.stop_signal)

    def fail(self, error: BaseException) -> None:
        """Have the loop put what was held back into the queue, and the error after it."""
        self.on_finalized_text(self.take_rest())
        self._put(error)

    def __aiter__(self) -> AsyncTextIteratorStreamer:
        return self

    async def __anext__(self) -> str:
        async with asyncio.timeout(self.timeout):
            value = await self.text_queue.get()
        if value == self.stop_signal:
            raise StopAsyncIteration
        return _text(value)

    def _put(self, value: Any) -> None:
        self.loop.call_soon_threadsafe(self.text_queue.put_nowait, value)


def _text(value: Any) -> str:
    if isinstance(value, BaseException):
        raise value
    return str(value)
