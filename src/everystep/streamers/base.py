"""What a streamer is: something that gets the prompt, then every token, then the end."""

from __future__ import annotations

from torch import Tensor

from everystep.errors import UnsupportedError, message


class BaseStreamer:
    """Derived from by streamers of the caller's own. Source: BaseStreamer, without `fail`.

    A subclass that defines `on_event(event)` is given every `Event` in place of the tokens; the
    prompt still comes by `put`.
    """

    def put(self, value: Tensor) -> None:
        """Takes the prompt, (R, T), and then the new ids, (R,), or (1, n) if n came at once."""
        raise _undefined(self, "put")

    def end(self) -> None:
        """Learns that there is nothing to come."""
        raise _undefined(self, "end")

    def fail(self, error: BaseException) -> None:
        """Learns that generation ended by an error, in place of `end`; here that is the same."""
        self.end()


def _undefined(streamer: BaseStreamer, name: str) -> UnsupportedError:
    text = message(
        f"this streamer has no {name}",
        wanted="a subclass with put(value) and end()",
        got=type(streamer).__name__,
        do=f"Define {name}",
    )
    return UnsupportedError(text)
