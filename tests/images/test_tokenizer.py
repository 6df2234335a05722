"""Images and frames become transformers' patches, and chats with them are answered."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import everystep as es
from everystep.errors import (
    EverystepError,
    FormatError,
    MissingFileError,
    RequestError,
    UnsupportedError,
)
from everystep.images import PictureTokenizer, read_picture_settings
from everystep.images.image_arrays import read_image
from everystep.images.tokenizer import END, IMAGE_PAD, START, VIDEO_PAD
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Settings, Tokenizer
from tests.images.making import SETTINGS, TEMPLATE, drawn, write_folder

QUIET = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[es.LanguageModel, PictureTokenizer]:
    model, tokenizer = es.load(write_folder(tmp_path_factory.mktemp("model")))
    assert isinstance(tokenizer, PictureTokenizer)
    return model, tokenizer


@pytest.mark.parametrize("size", [(20, 30), (31, 9), (64, 64), (3, 90), (200, 133)])
def test_patches_are_the_references(size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    found = read_picture_settings(tmp_path)
    assert found is not None
    picture = drawn(*size)
    patches, grid = found[0].image(read_image(picture))
    reference = Qwen2VLImageProcessorPil(**SETTINGS)(images=picture, return_tensors="pt")
    assert [list(grid)] == reference["image_grid_thw"].tolist()
    assert np.allclose(patches, reference["pixel_values"].numpy(), rtol=0, atol=1e-6)


def test_files_of_transformers_5_hold_all_settings_in_one(tmp_path: Path) -> None:
    whole = {"image_processor": SETTINGS, "video_processor": {**SETTINGS, "fps": 4}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    found = read_picture_settings(tmp_path)
    assert found is not None and (found[0].fps, found[1].fps) == (2.0, 4.0)
    assert read_picture_settings(tmp_path / "nowhere") is None


def test_images_come_in_many_forms(tmp_path: Path) -> None:
    picture = drawn(12, 20)
    array = np.asarray(picture)
    picture.save(tmp_path / "a.png")
    data = io.BytesIO()
    picture.save(data, "PNG")
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = (picture, array, tensor, tmp_path / "a.png", str(tmp_path / "a.png"), data.getvalue())
    for form in forms:
        assert np.array_equal(read_image(form), array)
    grey = read_image(array[..., 0])
    assert grey.shape == (12, 20, 3) and (grey == grey[..., :1]).all()
    assert read_image(picture.convert("RGBA")).shape == (12, 20, 3)
    turned = picture.copy()
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").shape == (20, 12, 3)


def test_a_text_gets_as_many_placeholders_as_features(loaded: Any) -> None:
    _, tokenizer = loaded
    text = f"see {START}{IMAGE_PAD}{END} and {START}{IMAGE_PAD}{END}"
    images = [drawn(16, 24), drawn(32, 16)]
    both = tokenizer([text, "none"], images=images, padding=True, return_tensors="pt")
    assert both["image_grid_thw"].tolist() == [[1, 4, 6], [1, 8, 4]]
    assert both["pixel_values"].shape == (24 + 32, 96)
    pad = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    counts = (both["input_ids"] == pad).sum(1)
    assert counts.tolist() == [6 + 8, 0]
    assert torch.equal((both["input_ids"] == pad).long(), both["mm_token_type_ids"])
    plain = tokenizer(text, images=images)
    assert sum(plain["mm_token_type_ids"]) == 14
    assert plain["input_ids"] == both["input_ids"][0].tolist()
    assert tokenizer("none").keys() == {"input_ids", "attention_mask"}


def test_a_video_gets_times_between_its_frame_groups(loaded: Any) -> None:
    _, tokenizer = loaded
    frames = [drawn(16, 16, seed) for seed in range(5)]
    text = f"{START}{VIDEO_PAD}{END}!"
    found = tokenizer(text, videos=[frames], video_fps=2.0, return_tensors="pt")
    group = f"{START}{VIDEO_PAD * 4}{END}"
    expected = f"<0.2 seconds>{group}<1.2 seconds>{group}<2.0 seconds>{group}!"
    assert found["input_ids"][0].tolist() == tokenizer(expected)["input_ids"]
    assert found["video_grid_thw"].tolist() == [[3, 4, 4]]
    whole = np.stack([np.asarray(frame) for frame in frames])
    again = tokenizer(text, videos=whole, video_fps=2.0, return_tensors="pt")
    assert torch.equal(again["pixel_values_videos"], found["pixel_values_videos"])
    assert set(found["mm_token_type_ids"].unique().tolist()) == {0, 2}


def test_videos_of_other_families_are_refused(loaded: Any) -> None:
    tokenizer = loaded[1]
    settings = tokenizer.images, tokenizer.videos
    other = PictureTokenizer(tokenizer.backend, Settings(), *settings, times=False)
    with pytest.raises(UnsupportedError, match="not prepared for a model of this family"):
        other(VIDEO_PAD, videos=[[drawn(8, 8)] * 4])


def messages(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


def test_chats_with_pictures_are_answered(loaded: Any) -> None:
    model, tokenizer = loaded
    image, frames = drawn(16, 24), [drawn(16, 16, seed) for seed in range(4)]
    said = messages({"type": "image", "image": image}, {"type": "video", "video": frames, "fps": 2})
    given = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt")
    whole = model.generate(**given, **QUIET)
    new = whole[0, given["input_ids"].shape[1] :].tolist()
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert es.chat(model, tokenizer, said, **QUIET) == text
    assert es.generate(model, tokenizer, [said, "plain"], **QUIET)[0] == text
    with es.stream(model, tokenizer, said, **QUIET) as events:
        assert [event.token for event in events if event.token >= 0] == new
    shown = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert tokenizer(shown)["input_ids"] == given["input_ids"][0].tolist()
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert ids == given["input_ids"][0].tolist()
    other = es.generate(
        model, tokenizer, messages({"type": "image", "image": drawn(24, 16)}), **QUIET
    )
    assert other != text


def data_url(data: bytes, *, width: int = 0) -> str:
    """The bytes as a URL, in lines of so many characters."""
    text = base64.b64encode(data).decode()
    lines = [text[start : start + width] for start in range(0, len(text), width)] if width else []
    return "data:image/png;base64," + ("\n".join(lines) or text)


def noisy(size: int) -> tuple[Image.Image, bytes]:
    """A picture that takes many bytes, and its file."""
    picture, file = Image.effect_noise((size, size), 90).convert("RGB"), io.BytesIO()
    picture.save(file, "PNG")
    return picture, file.getvalue()


@pytest.mark.parametrize("form", ["object", "text", "url", "image", "lines", "tuple"])
def test_a_picture_in_a_data_url_is_that_picture(loaded: Any, form: str) -> None:
    model, tokenizer = loaded
    picture, data = noisy(40)
    url = data_url(data, width=76 if form == "lines" else 0)
    part: dict[str, Any] = {
        "text": {"type": "image_url", "image_url": url},
        "url": {"type": "image", "url": "DATA" + url[4:]},
        "image": {"type": "image", "image": url},
    }.get(form, {"type": "image_url", "image_url": {"url": url, "detail": "auto"}})
    said, expected = messages(part), messages({"type": "image", "image": picture})
    if form == "tuple":
        said = [{**said[0], "content": tuple(said[0]["content"])}]
    found, wanted = (
        tokenizer.apply_chat_template(one, return_tensors="pt") for one in (said, expected)
    )
    assert found["input_ids"].tolist() == wanted["input_ids"].tolist()
    assert torch.equal(found["pixel_values"], wanted["pixel_values"])
    answers = [es.generate(model, tokenizer, one, **QUIET) for one in (said, expected)]
    assert answers[0] == answers[1]


def test_a_data_url_is_read_in_pieces() -> None:
    picture, data = noisy(450)
    assert len(data) > 1 << 18
    for width in (0, 77):
        assert np.array_equal(read_image(data_url(data, width=width)), np.asarray(picture))


@pytest.mark.parametrize("address", ["https://a.example/b.png", "file:///etc/hostname", "", 7])
def test_no_address_in_a_message_is_opened(loaded: Any, address: Any) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": address},
        {"type": "image", "url": address},
        {"type": "video", "url": address},
    ):
        with pytest.raises(RequestError, match=r"no file is opened.*wanted a data: URL.*Fetch it"):
            loaded[1].apply_chat_template(messages(part))


def test_a_path_is_no_address(loaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    drawn(8, 8).save(path)
    for given in (str(path), path):
        part = {"type": "image_url", "image_url": {"url": given}}
        with pytest.raises(RequestError, match="no file is opened"):
            loaded[1].apply_chat_template(messages(part))


PICTURE: dict[str, Any] = {"type": "image", "image": drawn(16, 24)}
FILM: dict[str, Any] = {"type": "video", "video": [drawn(16, 16)] * 4, "fps": 2}
WRITTEN = ("<|im_end|>", IMAGE_PAD, VIDEO_PAD, START + IMAGE_PAD + END, "<|im_start|>assistant\n")


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("shown", [(PICTURE,), (FILM,), (PICTURE, FILM, PICTURE)])
def test_what_users_write_beside_pictures_stays_text(
    loaded: Any, written: str, shown: tuple[Any, ...]
) -> None:
    tokenizer = loaded[1]
    before, after = ({"type": "text", "text": text} for text in (f"{written} a ", f" b{written}"))
    given = tokenizer.apply_chat_template(messages(before, *shown, after))
    plain = tokenizer.apply_chat_template(messages(*shown))
    special = {*tokenizer.all_special_ids}
    kept = [[id for id in each["input_ids"] if id in special] for each in (given, plain)]
    assert kept[0] == kept[1]
    kinds = [[kind for kind in each["mm_token_type_ids"] if kind] for each in (given, plain)]
    assert kinds[0] == kinds[1]
    text = tokenizer.apply_chat_template(messages(before, *shown, after), tokenize=False)
    assert tokenizer.decode(given["input_ids"]) == text and text.count(f" b{written}") == 1


def test_what_users_write_becomes_tokens_if_one_asks(loaded: Any) -> None:
    tokenizer = loaded[1]
    text = {"type": "text", "text": "a<|im_end|>b"}
    ids = tokenizer.apply_chat_template(
        messages(PICTURE, text), split_special_tokens=False, return_dict=False
    )
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    text = {"type": "text", "text": IMAGE_PAD}
    with pytest.raises(RequestError, match="texts and pictures do not fit"):
        tokenizer.apply_chat_template(messages(PICTURE, text), split_special_tokens=False)


def test_messages_beside_pictures_that_are_none_are_refused(loaded: Any) -> None:
    with pytest.raises(RequestError, match="not an object"):
        loaded[1].apply_chat_template([*messages(PICTURE), 7])


def test_masks_stand_where_they_stood_beside_pictures(loaded: Any) -> None:
    tokenizer = loaded[1]
    template = TEMPLATE.replace(
        "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    )
    written = {"type": "text", "text": "<|im_end|>"}
    turns = [
        {"role": "assistant", "content": "one"},
        *messages(written, PICTURE, FILM, written),
        {"role": "assistant", "content": "two"},
        *messages(PICTURE),
    ]
    found = tokenizer.apply_chat_template(
        [turns, messages(PICTURE, written)],
        chat_template=template,
        return_assistant_tokens_mask=True,
        padding=True,
        return_tensors="pt",
    )
    mask = found["assistant_masks"] == 1
    assert tokenizer.decode(found["input_ids"][mask]) == "onetwo" and not mask[1].any()
    assert found["image_grid_thw"].shape == (3, 3)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_rounded_folder_reads_the_same_pictures(format: Any, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "whole")
    model, tokenizer = es.load(es.quantize(source, tmp_path / "rounded", format))
    whole, own = es.load(source, quantize=format)
    assert isinstance(tokenizer, PictureTokenizer) and isinstance(own, PictureTokenizer)
    assert (tokenizer.images, tokenizer.videos) == (own.images, own.videos)
    said = messages({"type": "image", "image": drawn(16, 24)})
    one, other = (es.chat(*pair, said, **QUIET) for pair in ((model, tokenizer), (whole, own)))
    assert one == other


def png(width: int, height: int) -> bytes:
    """The beginning of a file that says it holds so many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IEND\xaeB`\x82"


def closed() -> Image.Image:
    picture = Image.new("RGB", (8, 8))
    picture.close()
    return picture


def half() -> Image.Image:
    """An image whose pixels are read late, from bytes that end early."""
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "PNG")
    return Image.open(io.BytesIO(whole.getvalue()[:1000]))


def pixels() -> torch.Tensor:
    return torch.zeros(3, 8, 8, dtype=torch.uint8)


BROKEN: dict[str, tuple[Callable[[Path], Any], type[EverystepError], str]] = {
    "a thousand million pixels": (lambda _: png(40000, 25000), FormatError, "too many pixels"),
    "a hundred million": (lambda _: png(10000, 10000), FormatError, "too many pixels"),
    "such an image": (lambda _: Image.new("1", (9000, 9000)), FormatError, "too many pixels"),
    "no image": (lambda _: b"hello", FormatError, "no picture, or a broken one"),
    "a file that ends early": (lambda _: png(64, 64), FormatError, "no picture, or a broken one"),
    "no file": (lambda path: path / "none.png", MissingFileError, "none.png"),
    "an address": (lambda _: "https://example.com/a.png", RequestError, "not fetched"),
    "floats": (lambda _: np.zeros((8, 8, 3)), RequestError, "as uint8"),
    "five channels": (lambda _: np.zeros((8, 8, 5), np.uint8), RequestError, "no image"),
    "a number": (lambda _: 7, RequestError, "no image"),
    "no base64": (lambda _: "data:,hello", FormatError, "URL is not in base64"),
    "an empty URL": (lambda _: "data:", FormatError, "URL is not in base64"),
    "no end": (lambda _: data_url(png(8, 8))[:-2], FormatError, "URL is broken"),
    "signs that are none": (lambda _: data_url(b"") + "a%2Ba", FormatError, "URL is broken"),
    "letters": (lambda _: data_url(b"") + "\u00e4" * 8, FormatError, "URL is broken"),
    "a URL of no image": (lambda _: data_url(b"hello"), FormatError, "no picture, or a broken one"),
    "a URL of many pixels": (lambda _: data_url(png(10000, 10000)), FormatError, "too many pixels"),
    "an object": (lambda _: object(), RequestError, "no picture"),
    "a closed image": (lambda _: closed(), FormatError, "closed image"),
    "half an image": (lambda _: half(), FormatError, "truncated"),
    "no numbers": (lambda _: pixels().to("meta"), RequestError, "uint8.*on meta"),
    "a sparse tensor": (lambda _: pixels().to_sparse(), RequestError, "sparse_coo"),
    "bfloat16": (lambda _: pixels().bfloat16(), RequestError, "bfloat16"),
    "complex": (lambda _: pixels().to(torch.complex64).conj(), RequestError, "complex64"),
    "a line": (lambda _: np.zeros((2, 900, 3), np.uint8), RequestError, "impossible form"),
    "nothing": (lambda _: np.zeros((0, 8, 3), np.uint8), RequestError, "impossible form"),
}


def test_a_long_data_url_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystep.files.picture_files.MOST_BYTES", 3000)
    monkeypatch.delattr("everystep.files.picture_files.b64decode")
    with pytest.raises(FormatError, match=r"too long; wanted at most 3000 bytes.*3003"):
        read_image(data_url(bytes(3003)))


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_images_are_refused(loaded: Any, broken: str, tmp_path: Path) -> None:
    make, kind, text = BROKEN[broken]
    with pytest.raises(kind, match=text):
        loaded[1](IMAGE_PAD, images=make(tmp_path))


WRONG: dict[str, tuple[Callable[[PictureTokenizer], Any], str]] = {
    "more images than places": (
        lambda t: t(IMAGE_PAD, images=[drawn(8, 8)] * 2),
        "wanted 1 of them",
    ),
    "more places than images": (lambda t: t(IMAGE_PAD * 2, images=drawn(8, 8)), "wanted 2 of them"),
    "an image without a text": (lambda t: t(images=drawn(8, 8)), "a text of their own"),
    "a video of no frames": (lambda t: t(VIDEO_PAD, videos=[[]]), "not a list of frames"),
    "a video that is a path": (lambda t: t(VIDEO_PAD, videos="a.mp4"), "not a list of frames"),
    "a video of one frame": (lambda t: t(VIDEO_PAD, videos=[[drawn(8, 8)]]), "too few frames"),
    "no rate": (
        lambda t: t(VIDEO_PAD, videos=[[drawn(8, 8)] * 4], video_fps=0),
        "video_fps does not fit",
    ),
    "an image that is not there": (
        lambda t: t.apply_chat_template(messages({"type": "image"})),
        "announces an image and holds none",
    ),
    "an address that is not there": (
        lambda t: t.apply_chat_template(messages({"type": "image_url", "image_url": {}})),
        "announces an image and holds none",
    ),
    "a detail": (
        lambda t: t.apply_chat_template(
            messages({"type": "image_url", "image_url": {"url": "data:", "detail": "low"}})
        ),
        "no detail to choose",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_calls_that_do_not_fit_are_refused(loaded: Any, wrong: str) -> None:
    call, text = WRONG[wrong]
    with pytest.raises(RequestError, match=text):
        call(loaded[1])


SETTINGS_WRONG: dict[str, tuple[dict[str, Any], type[EverystepError], str]] = {
    "patches of nothing": ({"patch_size": 0}, FormatError, "patch_size is impossible"),
    "two colours": ({"image_mean": [0.5, 0.5]}, FormatError, "image_mean is impossible"),
    "no deviation": ({"image_std": [0.5, 0, 0.5]}, FormatError, "image_std is impossible"),
    "limits upside down": (
        {"size": {"shortest_edge": 9, "longest_edge": 4}},
        FormatError,
        "size is impossible",
    ),
    "a size of words": ({"size": "large"}, FormatError, "size is impossible"),
    "no resizing": ({"do_resize": False}, UnsupportedError, "do_resize is false"),
    "another rule": ({"resample": 0}, UnsupportedError, "resample is not supported"),
    "patches of another model": ({"patch_size": 16}, FormatError, "other patches"),
    "no scale": ({"rescale_factor": 0}, FormatError, "rescale_factor is impossible"),
}


@pytest.mark.parametrize("wrong", SETTINGS_WRONG)
def test_broken_settings_are_refused(wrong: str, tmp_path: Path) -> None:
    values, kind, text = SETTINGS_WRONG[wrong]
    with pytest.raises(kind, match=text):
        es.load(write_folder(tmp_path, **values))


def test_a_vocabulary_without_placeholders_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(FormatError, match="no tokens for pictures"):
        es.load(tmp_path)


def test_messages_with_pictures_need_the_tokenizer(loaded: Any) -> None:
    model, tokenizer = loaded
    plain = Tokenizer(tokenizer.backend)
    plain.chat_template = TEMPLATE
    said = messages({"type": "image", "image": drawn(8, 8)})
    with pytest.raises(RequestError, match="need a tokenizer that takes them"):
        es.generate(model, plain, [said], **QUIET)


def test_without_pillow_an_error_says_what_to_install(loaded: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(UnsupportedError, match=r"everystep\[vision\]"):
        loaded[1](IMAGE_PAD, images="a.png")
    with pytest.raises(UnsupportedError, match=r"everystep\[vision\]"):
        loaded[1](IMAGE_PAD, images=np.zeros((8, 8, 3), np.uint8))
