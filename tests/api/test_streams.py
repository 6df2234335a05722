"""A stream in several hands, interrupted, or ended by what it runs: every event comes once."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.drivers import driver as driver_file
from everystep.drivers import stream as stream_file
from everystep.engine import audit
from everystep.streamers import wording
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

PROMPTS = ["one", "two words", "three"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
TOKENIZER = tiny_tokenizer(320)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


def after_the_end(events: list[Any]) -> list[Any]:
    """Events of prompts that had their last one before."""
    over: set[str] = set()
    found = []
    for event in events:
        found += [event] if event.request_id in over else []
        over |= {event.request_id} if event.finish is not None else set()
    return found


def test_several_readers_get_every_event_once(model: LanguageModel) -> None:
    wanted = list(es.stream(model, TOKENIZER, PROMPTS, **OPTIONS))
    stream = es.stream(model, TOKENIZER, PROMPTS, **OPTIONS)
    taken: list[list[Any]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda own=own: own.extend(stream)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(repr(event) for own in taken for event in own) == sorted(map(repr, wanted))


@pytest.mark.parametrize("attempt", range(20))
def test_another_thread_may_cancel(model: LanguageModel, attempt: int) -> None:
    stream = es.stream(model, TOKENIZER, PROMPTS, max_new_tokens=200, eos_token_id=None)
    begun = threading.Event()

    def cancel() -> None:
        begun.wait(60)
        stream.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    events = []
    for event in stream:
        events.append(event)
        if len(events) > attempt:
            begun.set()
    canceller.join(60)
    last = [event.finish for event in events if event.finish is not None]
    assert last == [es.FinishReason("cancelled")] * 3
    assert after_the_end(events) == []
    shown = {
        str(i): [e.token for e in events if e.request_id == str(i) and e.token >= 0]
        for i in range(3)
    }
    assert list(shown.values()) == [list(one.tokens) for (one,) in stream.results()]
    audit(stream._session._plain.engine)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_reader_that_takes_the_lock_again_ends_too(model: LanguageModel, how: str) -> None:
    """Even one that never leaves the lock to the thread that asked."""
    stream = es.stream(model, TOKENIZER, PROMPTS, max_new_tokens=200, eos_token_id=None)
    next(stream)
    with stream._lock:
        asking = threading.Thread(target=getattr(stream, how))
        asking.start()
        while any(box.leaving is None for _, box in stream._inside):
            asking.join(0.001)
        rest = list(stream)
    asking.join(60)
    assert not asking.is_alive()
    assert sum(event.finish is not None for event in rest) == (3 if how == "cancel" else 0)
    assert [len(one.tokens) for (one,) in stream.results()] == [1, 1, 1]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_processor_may_end_its_own_stream(model: LanguageModel, how: str) -> None:
    def end(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 6:
            getattr(stream, how)()
        return scores

    prompts = [[5, 6, 7], [8, 9, 10]]
    stream = es.stream(model, None, prompts, logits_processor=[end], **OPTIONS)
    events = list(stream)
    ends = [event.finish for event in events if event.finish is not None]
    assert ends == ([es.FinishReason("cancelled")] * 2 if how == "cancel" else [])
    assert after_the_end(events) == []
    for (one,) in stream.results():
        assert one.finish_reason.kind == "cancelled"
        assert len(one.tokens) == 4
    assert list(stream) == []
    audit(stream._session._plain.engine)


def test_an_interrupt_of_the_consumer_loses_nothing(model: LanguageModel) -> None:
    wanted = list(es.stream(model, TOKENIZER, PROMPTS, **OPTIONS))
    stream = es.stream(model, TOKENIZER, PROMPTS, **OPTIONS)
    events: list[Any] = []
    while True:
        try:
            for event in stream:
                events.append(event)
                if len(events) % 2:
                    raise KeyboardInterrupt
            break
        except KeyboardInterrupt:
            continue
    assert events == wanted


FILES = {stream_file.__file__, driver_file.__file__, wording.__file__}


class Interrupting:
    """Raises at the k-th line executed in the stream's own files, once."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.raised = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and not self.raised:
            self.left -= 1
            if self.left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self


TRIMMED = {"stop_strings": ["never said"], "trim_stop_strings": True}


@pytest.mark.few(3)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, TRIMMED], ids=str)
def test_an_interrupt_at_any_line_loses_and_repeats_nothing(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    given = {"max_new_tokens": 3, "eos_token_id": None, **options}
    wanted = list(es.stream(model, TOKENIZER, PROMPTS[:2], **given))
    line = 0
    while True:
        stream = es.stream(model, TOKENIZER, PROMPTS[:2], **given)
        interrupting = Interrupting(line)
        events: list[Any] = []
        reading = True
        sys.settrace(interrupting)
        try:
            while reading:
                try:
                    for event in stream:
                        events.append(event)
                    reading = False
                except KeyboardInterrupt:
                    continue
        finally:
            sys.settrace(None)
        assert events == wanted, f"interrupted at line {line}"
        if not interrupting.raised:
            break
        line += 1
    assert line > 50


# --- finished rows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "lingers"),
    [
        ({}, False),
        ({"logits_processor": [es.MinLengthLogitsProcessor(2, 7)]}, False),
        ({"stopping_criteria": [es.EosTokenCriteria(7)]}, False),
        ({"logits_processor": [lambda ids, scores: scores]}, True),
        ({"stopping_criteria": [lambda ids, scores: False]}, True),
    ],
)
def test_only_what_the_caller_wrote_keeps_finished_rows(
    model: LanguageModel, options: dict[str, Any], lingers: bool, fed: list[int]
) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    plain = model.generate(ids, max_new_tokens=10, eos_token_id=None)
    first, second = plain[:, 3:].tolist()
    place = next(k for k, token in enumerate(first) if k and token not in (*second, *first[:k]))
    end = first[place]
    if "stopping_criteria" in options and not lingers:
        options = {"stopping_criteria": [es.EosTokenCriteria(end)], "eos_token_id": None}
    else:
        options = {**options, "eos_token_id": end, "pad_token_id": 0}
    model.generate(ids, max_new_tokens=10, **options)
    # The prompts are 6 positions; then each row feeds the token that it chose before.
    assert fed[-1] == 6 + 9 + (9 if lingers else place)
