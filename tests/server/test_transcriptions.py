"""Transcripts over HTTP are those of `es.transcribe`, in OpenAI's forms, through its client."""

from __future__ import annotations

import io
import re
import threading
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import everystep as es
from everystep.errors import OversizeError
from everystep.server import host
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.exchange import FrontSettings
from everystep.server.host import HostedModel
from everystep.server.link import EngineLink, QueueLimits, ThreadMooring
from everystep.server.local import listening
from everystep.server.messages import HeardPart
from everystep.server.service import ServedBeside
from everystep.server.transcriptions import subrip, webvtt
from everystep.sounds.sound_files import read_sound_bytes
from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.test_transcribe import EXTRACTOR, WORDS, heard, sound, whisper, written
from tests.server.serving import LIMITS, TOKENIZER, Served, tiny
from tests.server.test_strangers import idle

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def listener() -> Iterator[Served]:
    """A server of a model that reads, and of one that listens."""

    def hosted() -> dict[str, HostedModel]:
        words = tiny_tokenizer(WORDS)
        ears = HostedModel(whisper(), words, LIMITS, EXTRACTOR)
        return {"tiny": HostedModel(tiny(), TOKENIZER, LIMITS), "ears": ears}

    fronts = {
        "tiny": FrontModel(TOKENIZER, tiny().chat_defaults),
        "ears": FrontModel(tiny_tokenizer(WORDS), whisper().chat_defaults),
    }
    front = Front(EngineLink(ThreadMooring(hosted, LIMITS)), fronts)
    with listening(front, beside=ServedBeside(sound_seconds=4.0)) as port:
        one = Served(front, port)
        with one.client:
            yield one


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def asked(listener: Served, data: bytes | None = None, **fields: Any) -> httpx.Response:
    """The answer to a form."""
    files = {"file": ("a.wav", wav(sound(0.7)) if data is None else data)}
    return listener.client.post(PATH, files=files, data=fields)


@pytest.mark.parametrize("seconds", [0.7, 2.5])
@pytest.mark.parametrize("language", [None, "de", "german"])
def test_a_transcript_is_that_of_the_library(
    listener: Served, tmp_path: Path, seconds: float, language: str | None
) -> None:
    file = written(sound(seconds), tmp_path / "a.wav")
    options = {} if language is None else {"language": language}
    plain, timed = heard(file, **options), heard(file, timestamps=True, **options)
    with openai.OpenAI(base_url=f"{listener.url}/v1", api_key="none", max_retries=0) as client:
        made = client.audio.transcriptions
        given: Any = {"model": "ears", **options}
        with file.open("rb") as opened:
            assert made.create(file=opened, **given).text == plain.text
        text: Any = made.create(file=file, response_format="text", **given)
        assert text == f"{plain.text}\n"
        whole: Any = made.create(
            file=file,
            response_format="verbose_json",
            timestamp_granularities=["segment"],
            **given,
        )
    assert whole.text == timed.text and abs(whole.duration - seconds) < 0.01
    assert whole.language == {"de": "german", "en": "english"}[str(timed.language)]
    found = [(one.text, one.start, one.end, tuple(one.tokens)) for one in whole.segments]
    assert found == [(one.text, one.start, one.end, one.ids) for one in timed.segments]
    assert [one.id for one in whole.segments] == [*range(len(found))]
    parts = [HeardPart(one.text, one.start, one.end, []) for one in timed.segments]
    data = file.read_bytes()
    assert asked(listener, data, response_format="srt", **options).text == subrip(parts)
    answer = asked(listener, data, response_format="vtt", **options)
    assert answer.text == webvtt(parts)
    assert answer.headers["content-type"] == "text/vtt; charset=utf-8"


def test_draws_and_a_prompt_are_those_of_the_library(listener: Served, tmp_path: Path) -> None:
    import torch

    file = written(sound(0.9), tmp_path / "a.wav")
    data, given = file.read_bytes(), {"language": "en"}
    texts = set()
    for seed in range(3):
        wanted = heard(file, temperature=0.9, seed=seed, **given)
        found = asked(listener, data, temperature="0.9", seed=str(seed), **given).json()["text"]
        assert found == wanted.text
        texts.add(found)
    assert len(texts) > 1
    words = tiny_tokenizer(WORDS)
    ids = torch.tensor([326, *words.encode(" hello the", add_special_tokens=False)])
    wanted = heard(file, prompt_ids=ids, **given)
    assert asked(listener, data, prompt="hello the", **given).json()["text"] == wanted.text
    assert wanted.text != heard(file, **given).text, "the prompt matters"
    usage = asked(listener, data).json()["usage"]
    assert usage == {"type": "duration", "seconds": 0.9}


def test_forms_of_subtitles() -> None:
    parts = [HeardPart("one", 0.0, 1.5, []), HeardPart("a --> b\n\nc", 3661.25, 3662.0004, [])]
    assert subrip(parts) == (
        "1\n00:00:00,000 --> 00:00:01,500\none\n\n2\n01:01:01,250 --> 01:01:02,000\na -> b c\n"
    )
    assert webvtt(parts).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none\n\n01:01:01.250")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"langage": "en"}, "Perhaps you meant language"),
    "format": ({"response_format": "xml"}, "response_format"),
    "temperature": ({"temperature": "hot"}, "temperature"),
    "too hot": ({"temperature": "1.5"}, "temperature"),
    "language": ({"language": "klingon"}, "language"),
    "stream": ({"stream": "true"}, "not streamed"),
    "word": (
        {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        "no times",
    ),
    "granularities": ({"timestamp_granularities[]": "segment"}, "verbose_json"),
    "include": ({"include[]": "logprobs"}, "include"),
    "chunks": ({"chunking_strategy": "auto"}, "chunking_strategy"),
    "twice": ({"language": ["en", "de"]}, "twice"),
    "seed": ({"seed": "1.5"}, "seed"),
    "no ears": ({"model": "tiny"}, "does not listen"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_that_is_asked_for_is_ignored(listener: Served, name: str) -> None:
    fields, said = WRONG[name]
    answer = asked(listener, **fields)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_bodies_that_are_no_forms_with_a_sound(listener: Served) -> None:
    assert asked(listener, model="nobody").status_code == 404
    assert listener.client.post(PATH, json={"model": "ears"}).status_code == 415
    answer = listener.client.post(PATH, files={"other": ("a", b"x")}, data={})
    assert answer.status_code == 400 and "file is missing" in answer.text
    for data, said in (
        (b"", "no WAV file"),
        (wav(sound(0.5))[:60], "file is impossible"),
        (wav(sound(0.5), 8000), "sampling rate"),
        (wav(sound(5.0)), "at most 4 seconds"),
    ):
        answer = asked(listener, data)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        assert len(answer.content) < 1000
    assert asked(listener).status_code == 200


def test_a_server_without_ears_says_so(server: Served) -> None:
    answer = asked(server)
    assert answer.status_code == 400 and "does not listen" in answer.json()["error"]["message"]


def test_a_sound_is_judged_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wav(sound(2.0))
    monkeypatch.setattr(wave.Wave_read, "readframes", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(OversizeError, match="at most 1 seconds"):
        read_sound_bytes(data, most_seconds=1.0)


def test_a_client_that_leaves_ends_the_work(
    listener: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    transcribe = host.transcribe

    def watched(*given: Any, stopping_criteria: Any, **more: Any) -> Any:
        def slow(*row: Any) -> Any:
            begun.set()
            threading.Event().wait(0.05)
            return stopping_criteria[0](*row)

        try:
            return transcribe(*given, stopping_criteria=[slow], **more)
        except es.EverystepError:
            ended.set()
            raise

    monkeypatch.setattr(host, "transcribe", watched)
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(base_url=listener.url, timeout=httpx.Timeout(60, read=0.3)) as client,
    ):
        client.post(PATH, files={"file": ("a.wav", wav(sound(3.9)))})
    assert begun.is_set() and ended.wait(30)
    assert idle(listener)
    monkeypatch.undo()
    assert asked(listener).status_code == 200


def test_sounds_that_wait_are_bounded_and_a_deadline_ends_one(
    listener: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears, goes = threading.Event(), threading.Event()
    transcribe = host.transcribe

    def held(*given: Any, **more: Any) -> Any:
        hears.set()
        goes.wait(60)
        return transcribe(*given, **more)

    monkeypatch.setattr(host, "transcribe", held)
    monkeypatch.setattr(listener.front.link, "_limits", QueueLimits(requests=1))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(asked, listener)
        assert hears.wait(60)
        second = pool.submit(asked, listener)
        while not listener.front.link.waiting:
            time.sleep(0.01)
        answer = asked(listener)
        assert answer.status_code == 429 and "retry-after" in answer.headers
        goes.set()
        assert first.result().status_code == second.result().status_code == 200
    goes.clear()
    monkeypatch.setattr(listener.front, "settings", FrontSettings(deadline=0.2))
    answer = asked(listener)
    goes.set()
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline"
    assert idle(listener)


def test_the_documents_have_the_form(listener: Served) -> None:
    described = listener.client.get("/openapi.json").json()["paths"][PATH]["post"]
    (kind,) = described["requestBody"]["content"]
    assert kind == "multipart/form-data"
    fields = described["requestBody"]["content"][kind]["schema"]["properties"]
    assert {"file", "language", "prompt", "response_format"} <= set(fields)
    assert re.search("WAV", described["summary"])
