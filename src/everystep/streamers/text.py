"""Text as it becomes readable: whole words, whole lines, or single Chinese characters.

The division into chunks is transformers'. Where the tokenizer can be followed id by id, a chunk
costs no more in a long line than in a short one; any other tokenizer decodes the line again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from everystep.errors import RequestError, UnsupportedError, shown
from everystep.text import Detokenizer, Tokenizer

# Unicode blocks of unified and compatibility ideographs, first and last code point.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class BaseStreamer:
    """Something that gets the prompt, then every token, then the end; streamers of the caller's own
    are derived from it. Source: BaseStreamer, without `fail`.

    A subclass that defines `on_event(event)` is given every `Event` in place of the tokens; the
    prompt still comes by `put`.
    """

    def put(self, value: Tensor) -> None:
        """Take the prompt, (R, T), and then the new ids, (R,), or (1, n) if n came at once."""
        self._refuse_undefined("put")

    def end(self) -> None:
        """Learn that there is nothing to come."""
        self._refuse_undefined("end")

    def fail(self, error: BaseException) -> None:
        """Learn that generation ended by an error, in place of `end`; here that is the same."""
        self.end()

    def _refuse_undefined(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"this streamer has no {name}",
            wanted="a subclass with put(value) and end()",
            got=type(self).__name__,
            do=f"Define {name}",
        )


class TextStreamer(BaseStreamer):
    """Prints text as soon as it forms whole words, for one sequence.

    `decode_kwargs` go to `tokenizer.decode`. RequestError for more than one row. Override
    `on_finalized_text` to do something else than printing. Source: TextStreamer.
    """

    def __init__(self, tokenizer: Any, skip_prompt: bool = False, **decode_kwargs: Any) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            what, do = "a streamer of text needs a tokenizer", "Pass the one of the model"
            raise RequestError(what, wanted="a method decode", got=shown(tokenizer), do=do)
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.decode_kwargs = decode_kwargs
        self.token_cache: list[int] = []
        self.print_len = 0
        self.next_tokens_are_prompt = True
        self._follower = _follower(tokenizer, decode_kwargs)
        self._final = ""  # of the line's text: what no later id can change

    def put(self, value: Tensor) -> None:
        """Take further ids, (n,) or (1, n), and pass on the text that they complete."""
        if value.dim() > 1 and value.shape[0] > 1:
            raise RequestError(
                "a text streamer follows one sequence",
                wanted="batch size 1",
                got=f"{value.shape[0]} rows",
                do="Use es.stream, or a streamer with on_event, for several",
            )
        prompt, self.next_tokens_are_prompt = self.next_tokens_are_prompt, False
        if prompt and self.skip_prompt:
            return
        text = self._extended(value.reshape(-1).tolist())
        if text.endswith("\n"):
            ready = text[self.print_len :]
            self._start_line()
        else:
            end = len(text) if text and _is_ideograph(text[-1]) else text.rfind(" ") + 1
            ready = text[self.print_len : end]
            self.print_len += len(ready)
        self.on_finalized_text(ready)

    def end(self) -> None:
        """Pass on what was held back."""
        self.on_finalized_text(self.take_rest(), stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print; the last text ends the line."""
        sys.stdout.write(f"{text}\n" if stream_end else text)
        sys.stdout.flush()

    def take_rest(self) -> str:
        """Return what was held back; the streamer is ready for another generation."""
        rest = self._extended([])[self.print_len :] if self.token_cache else ""
        self._start_line()
        self.next_tokens_are_prompt = True
        return rest

    def _extended(self, ids: list[int]) -> str:
        """Return the text of the line with further ids, half a character as `decode` shows it."""
        self.token_cache.extend(ids)
        if self._follower is None:
            return str(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))
        self._final += self._follower.push(ids)
        return self._final + self._follower.copy().finish()

    def _start_line(self) -> None:
        self.token_cache = []
        self.print_len = 0
        self._final = ""
        if self._follower is not None:
            self._follower.finish()


def _follower(tokenizer: Any, decode_kwargs: Mapping[str, Any]) -> Detokenizer | None:
    """Return a follower of a line's ids, or None where only `decode` knows their text."""
    if not isinstance(tokenizer, Tokenizer) or not decode_kwargs.keys() <= {"skip_special_tokens"}:
        return None
    try:
        return Detokenizer(tokenizer, bool(decode_kwargs.get("skip_special_tokens", False)))
    except UnsupportedError:
        return None


def _is_ideograph(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _IDEOGRAPHS)
