"""Pictures in requests: what `es.chat` says of them, bounded, and read nowhere near a step."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

import everystep as es
from everystep.api.model import LanguageModel
from everystep.images import PictureTokenizer, ScaledImage
from everystep.images.image_arrays import read_image
from everystep.server import pictures
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.host import HostedModel
from everystep.server.link import EngineLink, ThreadMooring
from everystep.server.local import listening
from everystep.server.pictures import PictureLimits, patches_of, with_scaled
from everystep.server.settings import front_model
from tests.images.making import drawn, write_folder
from tests.server.serving import LIMITS, Served, chunks_of, joined
from tests.server.test_heavy_asks import SOME, neighbour
from tests.server.test_strangers import idle

QUIET: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
OURS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("sees") / "sees")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[LanguageModel, PictureTokenizer]:
    model, tokenizer = es.load(folder)
    assert isinstance(tokenizer, PictureTokenizer)
    return model, tokenizer


Loaded = tuple[LanguageModel, PictureTokenizer]


@pytest.fixture(scope="module")
def seeing(folder: Path, loaded: Loaded) -> Iterator[Served]:
    """A server whose front read the folder, as the command's does."""
    yield from _serving(folder, loaded, PictureLimits(pixels=250_000))


@pytest.fixture(scope="module")
def large(folder: Path, loaded: Loaded) -> Iterator[Served]:
    """The same, with the pixels that the command allows, read small."""
    yield from _serving(folder, loaded, PictureLimits(scaled=4_096))


def _serving(folder: Path, loaded: Loaded, limits: PictureLimits) -> Iterator[Served]:
    mooring = ThreadMooring(lambda: {"sees": HostedModel(*loaded, LIMITS)}, LIMITS)
    front = Front(EngineLink(mooring), {"sees": front_model(str(folder), limits, offline=True)})
    with listening(front) as port:
        one = Served(front, port)
        with one.client:
            yield one


def data_of(picture: Image.Image, form: str = "PNG", **more: Any) -> str:
    """A picture in base64."""
    file = io.BytesIO()
    picture.save(file, form, **more)
    return base64.b64encode(file.getvalue()).decode()


def url_of(picture: Image.Image, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64,{data_of(picture, form)}"


def messages_of(*urls: str, text: str = "what is it") -> list[dict[str, Any]]:
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_an_answer_is_that_of_the_library(
    seeing: Served, loaded: tuple[LanguageModel, PictureTokenizer], form: str
) -> None:
    two = [url_of(drawn(20, 30), form), url_of(drawn(64, 40, 1), form)]
    for urls in (two[:1], two):
        wanted = es.chat(*loaded, messages_of(*urls), **OURS)
        body = {"messages": messages_of(*urls), **QUIET}
        answer = seeing.post("/v1/chat/completions", **body).json()
        assert answer["choices"][0]["message"]["content"] == wanted
        streamed = seeing.post("/v1/chat/completions", **body, stream=True)
        assert joined(chunks_of(streamed.text)) == wanted
        tokenized = seeing.post("/tokenize", messages=messages_of(*urls)).json()
        assert tokenized["count"] == answer["usage"]["prompt_tokens"]
    blind = es.chat(*loaded, messages_of(), **OURS)
    assert blind != wanted, "the picture matters"


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_picture_of_thirty_megapixels_stops_no_neighbour(large: Served, form: str) -> None:
    url = url_of(Image.new("RGB", (6_000, 5_000), (200, 30, 90)), form)
    with neighbour(large, 30) as beside:
        before = beside.steps
        answer = large.post("/v1/chat/completions", messages=messages_of(url), max_tokens=1)
        assert answer.status_code == 200, answer.text
        assert beside.steps - before >= SOME
    assert idle(large)


def test_beams_and_several_answers_see_it(
    seeing: Served, loaded: tuple[LanguageModel, PictureTokenizer]
) -> None:
    asked = messages_of(url_of(drawn(24, 24)))
    body: Any = {"messages": asked, "max_tokens": 4, "num_beams": 3, "ignore_eos": True}
    options: Any = {"max_new_tokens": 4, "num_beams": 3, "eos_token_id": None}
    answer = seeing.post("/v1/chat/completions", **body).json()
    assert answer["choices"][0]["message"]["content"] == es.chat(*loaded, asked, **options)


def test_real_clients_send_pictures(
    seeing: Served, loaded: tuple[LanguageModel, PictureTokenizer]
) -> None:
    picture = drawn(30, 22)
    wanted = es.chat(*loaded, messages_of(url_of(picture)), **OURS)
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = client.chat.completions.create(
            model="sees",
            messages=messages_of(url_of(picture)),  # type: ignore[arg-type]
            max_tokens=6,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert chat.choices[0].message.content == wanted
    source: Any = {"type": "base64", "media_type": "image/png", "data": data_of(picture)}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what is it"}]
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as client:
        conversation: Any = [{"role": "user", "content": blocks}]
        known: Any = {"model": "sees", "messages": conversation}
        more = {"temperature": 0}
        message: Any = client.messages.create(**known, max_tokens=6, extra_body=more)
        ending: Any = {"max_new_tokens": 6, "do_sample": False}
        assert message.content[0].text == es.chat(*loaded, messages_of(url_of(picture)), **ending)
        read = message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert client.messages.count_tokens(**known).input_tokens == read


BROKEN = {
    "http": ("http://evil.example/a.png", "nothing is fetched"),
    "https": ("https://evil.example/a.png", "nothing is fetched"),
    "file": ("file:///etc/passwd", "no file is opened"),
    "path": ("/etc/passwd", "no file is opened"),
    "no picture": ("data:image/png;base64,aGVsbG8=", "no picture"),
    "no base64": ("data:image/png;base64,%%%%", "broken"),
    "no data": ("data:image/png,hello", "base64"),
    "a number": (5, "nothing is fetched"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_picture_is_refused_by_place(seeing: Served, name: str) -> None:
    url, said = BROKEN[name]
    answer = seeing.post("/v1/chat/completions", messages=messages_of(url), **QUIET)  # type: ignore[arg-type]
    assert answer.status_code == 400 and len(answer.content) < 1500
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"] == "messages[0].content[0].image_url.url"


def test_parts_are_read_to_their_last_field(seeing: Served) -> None:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url_of(drawn(16, 16))}}
    for wrong in (
        {**part, "image_url": {**part["image_url"], "detail": "high"}},
        {**part, "image_url": {**part["image_url"], "size": 3}},
        {**part, "images": []},
        {"type": "image_url"},
        {"type": "image", "image": "/etc/passwd"},
        {"type": "image"},
        {"type": "video", "video": []},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ):
        body = {"messages": [{"role": "user", "content": [wrong]}], **QUIET}
        assert seeing.post("/v1/chat/completions", **body).status_code == 400, wrong
    fine = {**part, "image_url": {**part["image_url"], "detail": "auto"}}
    body = {"messages": [{"role": "user", "content": [fine]}], **QUIET}
    assert seeing.post("/v1/chat/completions", **body).status_code == 200
    for source in ({"type": "url", "url": "http://a/b"}, {"type": "base64", "media_type": "x"}):
        block = {"type": "image", "source": source}
        message: Any = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 3}
        answer = seeing.post("/v1/messages", **message)
        assert answer.status_code == 400 and "source" in answer.json()["error"]["message"]


def test_pixels_are_counted_before_one_is_decoded(
    seeing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = url_of(Image.new("L", (600, 600)))
    decoded: list[str] = []
    load = Image.Image.load
    monkeypatch.setattr(
        Image.Image, "load", lambda self: (decoded.append(repr(self.size)), load(self))[1]
    )
    answer = seeing.post("/v1/chat/completions", messages=messages_of(large), **QUIET)
    assert answer.status_code == 400 and "too many pixels" in answer.json()["error"]["message"]
    assert decoded == []
    half = url_of(Image.new("L", (400, 400)))
    assert seeing.post("/tokenize", messages=messages_of(half)).status_code == 200
    assert seeing.post("/tokenize", messages=messages_of(half, half)).status_code == 400
    many = [url_of(Image.new("L", (8, 8)))] * 65
    answer = seeing.post("/tokenize", messages=messages_of(*many))
    assert answer.status_code == 400 and "too many pictures" in answer.json()["error"]["message"]


def test_pictures_are_read_one_after_another_and_not_where_steps_are_taken(
    seeing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is read, requests without pictures are answered."""
    threads, inside, most = set[str](), [0], [0]
    going, read = threading.Event(), pictures.read_image

    def slow(*given: Any, **more: Any) -> np.ndarray:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threads.add(threading.current_thread().name)
        going.wait(30)
        found = read(*given, **more)
        inside[0] -= 1
        return found

    monkeypatch.setattr(pictures, "read_image", slow)
    statuses: list[int] = []

    def ask() -> None:
        body = {"messages": messages_of(url_of(drawn(16, 16))), **QUIET}
        statuses.append(seeing.post("/v1/chat/completions", **body).status_code)

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for one in asking:
        one.start()
    for _ in range(5):
        plain = seeing.post("/v1/chat/completions", messages=messages_of(), **QUIET)
        assert plain.status_code == 200
    going.set()
    for one in asking:
        one.join()
    assert statuses == [200] * 8 and most == [1]
    assert not any("engine" in one or one == "MainThread" for one in threads)


def test_pictures_that_wait_are_bounded_in_bytes(
    seeing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everystep.server import application

    monkeypatch.setattr(application, "_MOST_HELD", 5000)
    body = {"messages": messages_of(url_of(drawn(32, 32))), **QUIET}
    with seeing.front.holding(4000):
        answer = seeing.post("/v1/chat/completions", **body)
        assert answer.status_code == 429 and "retry-after" in answer.headers
    assert seeing.post("/v1/chat/completions", **body).status_code == 200


def test_a_model_without_eyes_says_so(server: Served) -> None:
    for path, more in (("/v1/chat/completions", QUIET), ("/tokenize", {})):
        answer = server.post(path, messages=messages_of(url_of(drawn(16, 16))), **more)
        assert answer.status_code == 400
        assert "does not read" in answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [(20, 30), (31, 9), (3, 90), (200, 133), (64, 64)])
def test_what_is_sent_to_the_engine_becomes_the_patches_of_the_library(
    loaded: tuple[LanguageModel, PictureTokenizer], size: tuple[int, int]
) -> None:
    tokenizer, url = loaded[1], url_of(drawn(*size))
    patches, grid = tokenizer.images.image(read_image(url))
    for limits in (PictureLimits(), PictureLimits(scaled=400)):
        messages, pixels = with_scaled(messages_of(url), tokenizer, limits, sees=True)
        found = patches_of(pixels, tokenizer)
        scaled = messages[0]["content"][0]["image"]
        assert isinstance(scaled, ScaledImage)
        if limits.scaled is None:
            assert np.array_equal(np.asarray(found["pixel_values"]), patches)
            assert np.asarray(found["image_grid_thw"]).tolist() == [list(grid)]
        else:
            assert scaled.pixels.shape[0] * scaled.pixels.shape[1] <= 400
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        assert ids.count(place) == tokenizer.images.features(scaled.pixels)
    settings = replace(tokenizer.images, least=64, most=1024)
    assert PictureLimits(scaled=32).bounded(settings).least == 32


def test_the_front_of_a_folder_without_pictures_is_plain(tmp_path: Path, folder: Path) -> None:
    from everystep.testing.tokenizer import tiny_tokenizer

    tiny_tokenizer(320).save_pretrained(tmp_path)
    for settings in ("", "preprocessor_config.json"):
        if settings:
            (tmp_path / settings).write_text((folder / settings).read_text())
        front = front_model(str(tmp_path), PictureLimits(), offline=True)
        assert isinstance(front, FrontModel)
        assert not isinstance(front.tokenizer, PictureTokenizer)
