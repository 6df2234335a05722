"""Text streamers: chunk by chunk as transformers', in a thread, in a loop, and after an error."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Engine, audit
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Tokenizer

TEXTS = [
    "one of the things that was in it\nand a second line\n\nend",
    "日本語の文章と中文 mixed，标点。\n好",
    "naïve café 🙂🙃 ends",
    "\n\n \n  spaces   ",
    "nospaceatall",
    "한국어 문장 ひらがな",
    "",
]


class Chunks:
    """Keeps the chunks of a text streamer, ours or transformers'."""

    def __init__(self, kind: type[Any], tokenizer: Any, **options: Any) -> None:
        class Kept(kind):  # type: ignore[misc]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                kept.append((text, stream_end))

        kept: list[tuple[str, bool]] = []
        self.kept = kept
        self.streamer = Kept(tokenizer, **options)

    def run(self, puts: list[torch.Tensor]) -> list[tuple[str, bool]]:
        for value in puts:
            self.streamer.put(value)
        self.streamer.end()
        return self.kept


def sentencepiece() -> Tokenizer:
    """Byte fallback, a mark for spaces, the first space stripped: the kind of Llama 2."""
    words = ["▁the", "▁", "a", "b", "▁line", "\n", "好", "s", "<s>"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def both(tokenizer: Tokenizer, puts: list[torch.Tensor], **options: Any) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    theirs = Chunks(transformers.TextStreamer, reference, **options).run(puts)
    assert Chunks(es.TextStreamer, tokenizer, **options).run(puts) == theirs
    assert Chunks(es.TextStreamer, reference, **options).run(puts) == theirs  # by decoding alone


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("options", [{}, {"skip_prompt": True}, {"skip_special_tokens": True}])
def test_chunks_are_the_references(text: str, options: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    ids = [2, *tokenizer.encode(text), 2]
    puts = [torch.tensor([tokenizer.encode("a prompt of")]), *torch.tensor(ids)[:, None]]
    both(tokenizer, puts, **options)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_any_ids_give_the_references_chunks(kind: str) -> None:
    tokenizer = tiny_tokenizer() if kind == "byte level" else sentencepiece()
    rng = torch.Generator().manual_seed(0)
    pieces = torch.tensor([*"\n 好a".encode(), *range(250, 264)])
    for _ in range(100):
        count = int(torch.randint(1, 30, (), generator=rng))
        ids = pieces[torch.randint(len(pieces), (count,), generator=rng)]
        cuts = torch.randint(1, 4, (count,), generator=rng).cumsum(0)
        puts = [part for part in ids.tensor_split(cuts[cuts < count]) if len(part)]
        both(tokenizer, puts, skip_special_tokens=bool(count % 2))


def test_a_long_line_costs_as_much_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(Tokenizer, "decode", lambda *given, **named: pytest.fail("decoded again"))
    chunks = Chunks(es.TextStreamer, tokenizer)
    chunks.run([torch.tensor([id]) for id in tokenizer.encode("the end " * 50)])
    assert "".join(text for text, _ in chunks.kept) == "the end " * 50


def test_a_streamer_can_be_used_again() -> None:
    puts = [torch.tensor([tiny_tokenizer().encode(part)]) for part in ("a prompt", " the end")]
    chunks = Chunks(es.TextStreamer, tiny_tokenizer(), skip_prompt=True)
    assert chunks.run(puts) * 2 == chunks.run(puts)


def test_several_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="one sequence"):
        es.TextStreamer(tiny_tokenizer()).put(torch.zeros(2, 3))


def test_text_is_printed_and_the_line_ended(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = es.TextStreamer(tiny_tokenizer())
    streamer.put(torch.tensor(tiny_tokenizer().encode("all of it")))
    assert capsys.readouterr().out == "all of "
    streamer.end()
    assert capsys.readouterr().out == "it\n"


def test_the_base_has_to_be_derived_from() -> None:
    for call in (lambda: es.BaseStreamer().put(torch.zeros(1)), lambda: es.BaseStreamer().end()):
        with pytest.raises(NotImplementedError, match="Define"):
            call()


# --- iterators -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that was made."""
    made: list[Engine] = []
    start = Engine.__init__

    def init(self: Engine, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", init)
    return made


PROMPT = torch.tensor([[72, 101, 108]])


def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that fails at the fourth token."""
    if input_ids.shape[1] > 5:
        raise ArithmeticError("on purpose")
    return scores


def in_thread(model: LanguageModel, **options: Any) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(ArithmeticError):  # the reader has it
            model.generate(PROMPT, **{"max_new_tokens": 12, **options})

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_thread_writes_and_another_reads(model: LanguageModel) -> None:
    streamer = es.TextIteratorStreamer(tiny_tokenizer(), timeout=20)
    for _ in range(2):
        thread = in_thread(model, streamer=streamer)
        text = "".join(streamer)
        thread.join()
        assert text == tiny_tokenizer().decode(model.generate(PROMPT, max_new_tokens=12)[0])


def test_after_an_error_the_reader_gets_the_text_and_then_the_error(model: LanguageModel) -> None:
    streamer = es.TextIteratorStreamer(tiny_tokenizer(), timeout=20)
    thread = in_thread(model, streamer=streamer, logits_processor=[broken])
    read: list[str] = []
    with pytest.raises(ArithmeticError, match="on purpose"):
        read.extend(streamer)
    thread.join()
    assert "".join(read) == tiny_tokenizer().decode(model.generate(PROMPT, max_new_tokens=3)[0])


def test_waiting_ends_with_the_timeout() -> None:
    with pytest.raises(queue.Empty):
        next(es.TextIteratorStreamer(tiny_tokenizer(), timeout=0.01))

    async def wait() -> None:
        await anext(es.AsyncTextIteratorStreamer(tiny_tokenizer(), timeout=0.01))

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


def test_a_loop_reads(model: LanguageModel) -> None:
    async def read(**options: Any) -> str:
        streamer = es.AsyncTextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=20)
        thread = in_thread(model, streamer=streamer, **options)
        text = "".join([chunk async for chunk in streamer])
        thread.join()
        return text

    expected = tiny_tokenizer().decode(model.generate(PROMPT, max_new_tokens=12)[0, 3:])
    assert asyncio.run(read()) == expected
    with pytest.raises(ArithmeticError):
        asyncio.run(read(logits_processor=[broken]))


# --- streamers that misbehave --------------------------------------------------------------------


class Slow(es.BaseStreamer):
    """Takes its time, keeps what it gets, and fails at its n-th call, if any."""

    def __init__(self, fails_at: int = 0) -> None:
        self.heard: list[Any] = []
        self._fails_at = fails_at

    def put(self, value: torch.Tensor) -> None:
        time.sleep(0.01)
        self.heard.append(value)
        if len(self.heard) == self._fails_at:
            raise OSError("pipe closed")

    def end(self) -> None:
        self.heard.append("end")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}], ids=str)
@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_streamer_that_raises_leaves_no_row(
    model: LanguageModel, engines: list[Engine], options: dict[str, Any], fails_at: int
) -> None:
    before = model.generate(PROMPT, max_new_tokens=8, **options)
    slow = Slow(fails_at)
    with pytest.raises(OSError, match="pipe closed"):
        model.generate(PROMPT, max_new_tokens=8, streamer=slow, eos_token_id=None, **options)
    assert slow.heard[-1] == "end"
    assert not engines[-1].pending
    audit(engines[-1])
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, **options), before)


def test_what_a_streamer_keeps_can_be_used_afterwards(model: LanguageModel) -> None:
    slow = Slow()
    model.generate(PROMPT, max_new_tokens=3, streamer=slow)
    assert all(not value.is_inference() for value in slow.heard[:-1])
    assert len(slow.heard) == 5


def test_a_batch_and_a_text_streamer_do_not_go_together(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match="one sequence"):
        model.generate(PROMPT.repeat(2, 1), streamer=es.TextStreamer(tiny_tokenizer()))
