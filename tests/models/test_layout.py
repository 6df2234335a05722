"""The document model: its embedders are LayoutLMv3's, and the whole is a Llama that reads them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.load import from_weights
from tests.api.document import BOX, PATCH, Document, boxes, images, padded
from tests.models.tiny import farthest

COUNTS = (2, 5, 1)
PIXELS, BBOX = images(3), boxes(COUNTS)
FIXED = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def document(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Document:
    return Document(tmp_path_factory.mktemp("document"), request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document model in float32."""
    made = tmp_path_factory.mktemp("single") / "document"
    Document(made, torch.float32)
    return made


@pytest.fixture(params=["torch", pytest.param("native", marks=pytest.mark.native)])
def model(request: Any, folder: Path) -> es.LanguageModel:
    return es.load_model(folder, executor=request.param)


def test_a_saved_model_is_the_same(model: es.LanguageModel, tmp_path: Path) -> None:
    """With its embedders, in shards too."""
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    again, held = es.load_model(tmp_path / "saved"), model.state_dict()
    found = again.state_dict()
    assert found.keys() == held.keys()
    assert all(torch.equal(one, held[name]) for name, one in found.items())


def batch(document: Document) -> dict[str, Any]:
    rows = [document.ids(count, row) for row, count in enumerate(COUNTS)]
    return {**padded(rows), "pixel_values": PIXELS, "bbox": BBOX}


def test_the_embedders_are_those_of_layoutlmv3(document: Document) -> None:
    pixels, bbox = document.model.prompt_inputs
    dtype = document.model.dtype
    corners = torch.tensor([[[0, 0, 1000, 1000], [0, 0, 0, 0], [1000, 3, 1000, 3]]])
    with torch.no_grad():
        expected = document.reference_patches(PIXELS.to(dtype))
        assert farthest(pixels.encoder(PIXELS), expected) < TOLERANCE[dtype]
        for given in (BBOX, corners, BBOX.int()):
            found = bbox.encoder(given)
            for one, other in zip(found, document.reference_boxes(given), strict=True):
                assert one.shape == other.shape and farthest(one, other) < TOLERANCE[dtype]


def test_logits_are_those_of_a_llama_that_reads_the_merged_embeddings(document: Document) -> None:
    """In the model's own type where it is called; what `generate` returns is in float32."""
    dtype, new = document.model.dtype, FIXED["max_new_tokens"]
    out = document.model.generate(
        **batch(document), **FIXED, output_logits=True, return_dict_in_generate=True
    )
    for row, count in enumerate(COUNTS):
        ids = torch.tensor([document.ids(count, row)])
        embeds = document.embeds(ids[0], PIXELS[row], BBOX[row])
        said = out.sequences[row, None, -new:-1]
        after = document.reference.get_input_embeddings()(said).detach()
        with torch.no_grad():
            expected = document.reference(inputs_embeds=torch.cat([embeds, after], dim=1)).logits
        expected = expected[0, -new:]
        found = torch.stack([step[row] for step in out.logits])
        assert farthest(found, expected) < 1e-5
        own = merged(document.model, ids, PIXELS[row], BBOX[row])
        whole = document.model(inputs_embeds=torch.cat([own, after], dim=1)).logits[0, -new:]
        assert farthest(whole, expected) < TOLERANCE[dtype]


def merged(model: es.LanguageModel, ids: Tensor, pixels: Tensor, bbox: Tensor) -> Tensor:
    """(1, T, E) what the model itself reads of a prompt."""
    patches, lines = model.prompt_inputs
    embeds = model.get_input_embeddings()(ids.masked_fill(ids >= BOX, 0)).clone()
    embeds[ids == PATCH] = patches.encoder(pixels[None])[0]
    embeds[ids == BOX] = lines.encoder(bbox[None])[0]
    return embeds


def drawn_options(number: int) -> dict[str, Any]:
    """Options that change nothing in what is read, in an order of the number's own."""
    draw = random.Random(number)
    options: dict[str, Any] = {"num_beams": draw.choice([1, 1, 2, 3])}
    if draw.random() < 0.4:
        options["repetition_penalty"] = draw.choice([0.8, 1.4])
    if draw.random() < 0.3:
        options["suppress_tokens"] = draw.sample(range(97), 20)
    if options["num_beams"] > 1 and draw.random() < 0.5:
        options["num_return_sequences"] = 2
    if draw.random() < 0.3:
        options["bad_words_ids"] = [[draw.randrange(97)], [5, 9]]
    return options


def drawn_way(number: int) -> dict[str, Any]:
    """How it is computed, which may change nothing at all."""
    draw = random.Random(-number - 1)
    ways = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    chunks = [{"prefill_chunk_size": size} for size in (1, 3, 7)]
    return draw.choice([*ways, *chunks])


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
)
def test_random_settings_give_the_tokens_of_transformers(document: Document, block: int) -> None:
    for number in range(10 * block, 10 * block + 10):
        count = 1 + number % 4
        ids = torch.tensor(document.ids(count, number))
        embeds = document.embeds(ids, PIXELS[number % 3], boxes([count])[0])
        # transformers knows no ids beyond the vocabulary; more of an id changes no penalty.
        known = torch.where(ids >= BOX, ids[0], ids)[None]
        options = drawn_options(number)
        expected = document.reference.generate(known, inputs_embeds=embeds, **FIXED, **options)
        found = document.model.generate(
            ids[None],
            pixel_values=PIXELS[number % 3],
            bbox=boxes([count])[0],
            **FIXED,
            **options,
            **drawn_way(number),
        )
        new = FIXED["max_new_tokens"]
        assert torch.equal(found[:, -new:], expected[:, -new:]), (options, drawn_way(number))


# --- on both executors ----------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "a cache": {},
    "no cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "chunks of 7": {"prefill_chunk_size": 7},
    "chunks of 1": {"prefill_chunk_size": 1},
    "beams": {"num_beams": 3},
    "several sequences": {"do_sample": True, "seed": 5, "num_return_sequences": 3},
    "drafts": {"prompt_lookup_num_tokens": 2},
}
FIRST = torch.tensor([[5, 8, *[PATCH] * 4, 11, BOX, 12, BOX, 13]])


def page(row: int, count: int) -> dict[str, Tensor]:
    return {"pixel_values": PIXELS[row : row + 1], "bbox": boxes([count])}


@pytest.mark.parametrize("way", WAYS)
def test_a_page_is_embedded_once_however_it_is_fed(
    model: es.LanguageModel, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for one in model.core.encoders:
        inner = type(one).__call__

        def counted(self: Any, values: Tensor, inner: Any = inner) -> Any:
            calls.append(self.name)
            return inner(self, values)

        monkeypatch.setattr(type(one), "__call__", counted)
    same = {name: x for name, x in WAYS[way].items() if name in ("num_beams", "do_sample", "seed")}
    several = {"num_return_sequences": WAYS[way].get("num_return_sequences", 1)}
    expected = model.generate(FIRST, **page(0, 2), **{**FIXED, **same, **several})
    found = model.generate(FIRST, **page(0, 2), **{**FIXED, **WAYS[way]})
    assert torch.equal(found, expected)
    assert sorted(calls) == ["bbox", "bbox", "pixel_values", "pixel_values"]
    assert FIXED["max_new_tokens"] >= 5


def test_rows_of_different_counts_are_read_as_alone(model: es.LanguageModel) -> None:
    """To the bit natively; boxes padded with -100, as a list of tensors, or as plain lists."""
    rows = [[5, *[PATCH] * 4, *[11 + row, BOX] * count, 7] for row, count in enumerate(COUNTS)]
    shown = {**FIXED, "output_logits": True, "return_dict_in_generate": True}
    plain = [one[:count] for one, count in zip(BBOX, COUNTS, strict=True)]
    forms = [BBOX, plain, [one.tolist() for one in plain]]
    together = [
        model.generate(**padded(rows), pixel_values=PIXELS, bbox=form, **shown) for form in forms
    ]
    for row, ids in enumerate(rows):
        own = {"pixel_values": PIXELS[row : row + 1], "bbox": plain[row]}
        alone = model.generate(torch.tensor([ids]), **own, **shown)
        for out in together:
            new = out.sequences[row, -FIXED["max_new_tokens"] :]
            assert torch.equal(new, alone.sequences[0, len(ids) :])
            for step, one in zip(out.logits, alone.logits, strict=True):
                if "native" in model.runs_on:
                    assert torch.equal(step[row], one[0])
    given = [
        {"input_ids": ids, "pixel_values": PIXELS[row], "bbox": plain[row]}
        for row, ids in enumerate(rows)
    ]
    alike = es.generate(model, None, given, **FIXED)
    assert [list(one) for one in alike] == together[0].sequences[:, -8:].tolist()


def test_a_second_page_comes_in_the_second_turn(model: es.LanguageModel) -> None:
    out = model.generate(FIRST, **page(0, 2), **FIXED, return_dict_in_generate=True)
    more = torch.tensor([[6, *[PATCH] * 4, 14, BOX, 15, BOX, 16, BOX, 17]])
    ids = torch.cat([out.sequences, more], dim=1)
    parts = [
        merged(model, FIRST, PIXELS[0], boxes([2])[0]),
        model.get_input_embeddings()(out.sequences[:, FIRST.shape[1] :]),
        merged(model, more, PIXELS[1], boxes([3])[0]),
    ]
    both = model.generate(inputs_embeds=torch.cat(parts, dim=1), **FIXED)
    found = model.generate(ids, **page(1, 3), past_key_values=out.past_key_values, **FIXED)
    assert torch.equal(found[:, ids.shape[1] :], both)


def test_a_saved_run_goes_on_with_its_page(model: es.LanguageModel, tmp_path: Path) -> None:
    given = {"input_ids": FIRST[0], **page(0, 2)}
    run = es.open(model, None, given, **FIXED, num_beams=2)
    for _ in range(3):
        next(run)
    run.save(tmp_path / "run")
    assert es.resume(tmp_path / "run", model, None).result().tokens == run.result().tokens
    expected = model.generate(FIRST, **page(0, 2), **FIXED, num_beams=2)
    assert list(run.result().tokens) == expected[0, FIRST.shape[1] :].tolist()


def test_a_placeholder_in_the_vocabulary_is_an_ordinary_token_once_it_is_generated(
    tmp_path: Path,
) -> None:
    document = Document(tmp_path / "usual", torch.float32)
    said = document.model.generate(FIRST, **page(0, 2), **FIXED)[0, FIRST.shape[1] :].tolist()
    place = next(token for token in said[1:-1] if token not in FIRST)
    document.write(tmp_path / "inside", spatial_position_id=place)
    inside = es.load_model(tmp_path / "inside")
    ids = torch.where(FIRST == BOX, place, FIRST)
    for options in ({}, {"use_cache": False}, {"num_beams": 1, "prefill_chunk_size": 3}):
        found = inside.generate(ids, **page(0, 2), **FIXED, **options)
        assert found[0, FIRST.shape[1] :].tolist() == said


def test_processors_and_decoding_pass_over_ids_beyond_the_vocabulary(
    model: es.LanguageModel,
) -> None:
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 9]]},
        {"encoder_repetition_penalty": 1.2},
        {"do_sample": True, "seed": 1, "top_k": 5, "typical_p": 0.9},
    ]
    for one in options:
        out = model.generate(FIRST, **page(0, 2), **{**FIXED, **one})
        assert torch.equal(out[:, : FIRST.shape[1]], FIRST) and int(out[0, -8:].max()) < 97


# --- weights --------------------------------------------------------------------------------------


def test_weights_come_out_as_they_went_in(folder: Path, model: es.LanguageModel) -> None:
    weights = model.state_dict()
    assert {name.split(".")[0] for name in weights} == {
        *("model", "lm_head", "visual_embedder", "visual_projector"),
        *("layout_embedder", "layout_projector"),
    }
    again = from_weights(model.config.to_dict(), weights)
    given = page(0, 2)
    assert torch.equal(
        again.generate(FIRST, **given, **FIXED), model.generate(FIRST, **given, **FIXED)
    )


def test_another_type_is_that_of_the_embedders_too(folder: Path) -> None:
    model = es.load_model(folder)
    model.to(torch.float64)
    features = model.prompt_inputs[0].encoder(PIXELS)
    assert features.dtype == torch.float64
    model.requires_grad_()
    named = dict(model.named_parameters())
    assert named.keys() == model.state_dict().keys()
    assert any(name.endswith("patch_embed.proj.weight") for name in named)


def test_a_quantised_text_model_keeps_the_embedders(folder: Path) -> None:
    whole = es.load_model(folder)
    rounded = es.load_model(folder, quantize="int8")
    for one, other in zip(whole.prompt_inputs, rounded.prompt_inputs, strict=True):
        given = PIXELS[:1] if one.name == "pixel_values" else BBOX[:1]
        assert torch.equal(one.encoder(given)[0], other.encoder(given)[0])
    assert "int8" in rounded.weight_bytes and "float32" in rounded.weight_bytes
    rounded.generate(FIRST, **page(0, 2), **FIXED)
