"""Another thread runs while a long prompt is read: no call holds the interpreter's lock for long.

Steps of that other thread are counted, and not seconds: each needs the lock once and then sleeps.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from everystep.errors import TokenizerError
from everystep.images.image_arrays import read_image
from everystep.images.picture_settings import PictureSettings
from everystep.processors.grammars.grammar import compiled
from everystep.processors.grammars.source import read_source
from everystep.processors.grammars.vocabulary import vocabulary_of
from everystep.requests.arrays import as_numbers
from everystep.text import ChatTemplate, TemplateLimits, caged
from tests.text.reading import smollm2
from tests.text.test_cage import ENDLESS_COMPARISON

FEW = 10
"""Steps of a thread beside a call that holds the lock: it has some before and after that."""
WORDS = "hello world, these are 12 words. " * 30_000
ONE_WORD = "a" * 1_000_000
IDS = list(range(1_000_000))
MANY = {f"name_{number}": {"type": "string", "maxLength": number + 1} for number in range(900)}
HUGE = np.random.default_rng(0).integers(0, 255, (2000, 3000), dtype=np.uint8)
SETTINGS = PictureSettings(14, 2, 2, 56**2, 28**2 * 1280, 1 / 255, (0.5,) * 3, (0.5,) * 3)


def steps_beside(call: Callable[[], Any]) -> int:
    """How many steps another thread takes from the beginning of a call to its end."""
    steps, ready, over = 0, threading.Event(), threading.Event()

    def count() -> None:
        nonlocal steps
        ready.set()
        while not over.is_set():
            time.sleep(0.0005)
            steps += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        ready.wait()
        before = steps
        call()
        return steps - before
    finally:
        over.set()
        other.join()


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def compile_schema() -> None:
    source = read_source("schema", json.dumps({"type": "object", "properties": MANY}))
    compiled(source, VOCABULARY)


def refuse_template() -> None:
    with pytest.raises(TokenizerError):
        ChatTemplate(ENDLESS_COMPARISON, TemplateLimits(seconds=0.2)).render(chat("a"))


def as_file(kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(HUGE).save(file, kind)
    return file.getvalue()


TOKENIZER = smollm2()
VOCABULARY = vocabulary_of(TOKENIZER, len(TOKENIZER))
CALLS: dict[str, Callable[[], Any]] = {
    "a text": lambda: TOKENIZER.encode(WORDS),
    "a text of one word": lambda: TOKENIZER.encode(ONE_WORD),
    "texts with the places of tokens": lambda: TOKENIZER(WORDS, return_offsets_mapping=True),
    "a chat": lambda: TOKENIZER.apply_chat_template(chat(WORDS)),
    "a chat in which special tokens are written": lambda: TOKENIZER.apply_chat_template(
        chat(WORDS + "<|im_end|>")
    ),
    "a text in which each character could begin a special token": lambda: (
        TOKENIZER._literals.marked("<" * 8_000_000)
    ),
    "ids": lambda: as_numbers("a prompt", IDS, "a list of ids"),
    "a schema": compile_schema,
    "a picture": lambda: SETTINGS.image(read_image(np.repeat(HUGE[..., None], 3, axis=2))),
    "a grey picture": lambda: read_image(np.tile(HUGE, (5, 2))),
    "a file of a picture": partial(read_image, as_file("PNG")),
    "a template that takes all it may": refuse_template,
}


@pytest.mark.parametrize("name", CALLS)
def test_another_thread_runs_meanwhile(name: str) -> None:
    assert steps_beside(CALLS[name]) > FEW


def test_a_call_that_holds_the_lock_is_noticed() -> None:
    held = steps_beside(lambda: TOKENIZER.backend.encode(WORDS))
    assert 5 * held < steps_beside(lambda: TOKENIZER.encode(WORDS))


def test_a_long_text_crosses_to_a_template_without_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON of a text of megabytes would hold the lock; what is left of it is short."""
    lengths: list[int] = []
    dumps, loads = json.dumps, json.loads

    def written(*given: Any, **options: Any) -> str:
        text = dumps(*given, **options)
        lengths.append(len(text))
        return text

    def read(text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return loads(text, **options)

    monkeypatch.setattr(caged.json, "dumps", written)
    monkeypatch.setattr(caged.json, "loads", read)
    value = {"messages": [*chat(WORDS), *chat(ONE_WORD)], WORDS: [None, WORDS]}
    assert caged.unpacked(caged.packed(value)) == value
    assert max(lengths) < 500
