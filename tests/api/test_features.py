"""Prompt features are encoded once and read in exactly the forwards that feed their positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Engine, given
from everystep.errors import RequestError, UnknownArgumentError
from everystep.models.layout.embedders import BoxEncoder, PatchEncoder
from everystep.types import Given
from tests.api.document import BOX, PATCH, Document, boxes, images, padded

QUIET = {"pad_token_id": 0, "eos_token_id": 96, "max_new_tokens": 6, "do_sample": False}
COUNTS = (2, 3)
PIXELS, BBOX = images(2), boxes(COUNTS)


@pytest.fixture(scope="module", params=["declared", "loaded"])
def document(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Document:
    """A Llama with encoders that its user declares, and a model that has its own."""
    loaded = request.param == "loaded"
    return Document(tmp_path_factory.mktemp("document") if loaded else None)


@pytest.fixture(autouse=True)
def _counted(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in document.encoders:
        one.sizes.clear()
    for kind, counted in zip((PatchEncoder, BoxEncoder), document.encoders, strict=True):
        monkeypatch.setattr(kind, "__call__", lambda self, x, c=counted: c(self, x))


def rows(document: Document) -> list[list[int]]:
    return [document.ids(count, row) for row, count in enumerate(COUNTS)]


def batch(document: Document) -> dict[str, Any]:
    return {**padded(rows(document)), "pixel_values": PIXELS, "bbox": BBOX}


def wanted(document: Document, **options: Any) -> list[list[int]]:
    """What transformers generates row by row from embeddings made by hand."""
    found = []
    for row, ids in enumerate(rows(document)):
        embeds = document.embeds(torch.tensor(ids), PIXELS[row], BBOX[row])
        # transformers knows no ids beyond the vocabulary; one more of an id changes no penalty.
        known = torch.tensor([[ids[0] if token >= BOX else token for token in ids]])
        out = document.reference.generate(known, inputs_embeds=embeds, **QUIET, **options)
        found += out[:, len(ids) :].tolist()
    return [trimmed(row) for row in found]


def trimmed(row: list[int]) -> list[int]:
    """Up to the end."""
    return row[: row.index(96)] if 96 in row else row


def new(document: Document, out: Tensor) -> list[list[int]]:
    return [trimmed(row) for row in out[:, max(map(len, rows(document))) :].tolist()]


WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "uncached": {"use_cache": False},
    "chunked": {"prefill_chunk_size": 7},
    "chunks of one": {"prefill_chunk_size": 1},
    "beams": {"num_beams": 2},
    "beams uncached": {"num_beams": 2, "use_cache": False},
    "beams static": {"num_beams": 2, "cache_implementation": "static"},
    "penalised": {"repetition_penalty": 1.7},
    "looked up": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_document_is_read_as_by_hand_and_encoded_once(document: Document, way: str) -> None:
    options = WAYS[way]
    same = {name: options[name] for name in ("num_beams", "repetition_penalty") if name in options}
    expected = wanted(document, **same)
    out = document.model.generate(**batch(document), **QUIET, **options)
    assert new(document, out) == expected
    assert (document.patches.calls, document.boxes.calls) == (1, 1)
    assert (out == PATCH).sum() == 2 * 4 and (out == BOX).sum() == sum(COUNTS)


def test_returns_share_one_encoding_and_quantised_rows_agree_in_chunks(document: Document) -> None:
    sampled = {**QUIET, "do_sample": True, "seed": 3, "num_return_sequences": 3}
    out = document.model.generate(**batch(document), **sampled)
    again = document.model.generate(**batch(document), **sampled, prefill_chunk_size=3)
    assert len(out) == 6 and torch.equal(out, again)
    quantised = {**QUIET, "cache_implementation": "quantized"}
    whole = document.model.generate(**batch(document), **quantised)
    assert torch.equal(
        whole, document.model.generate(**batch(document), **quantised, prefill_chunk_size=5)
    )
    assert document.patches.calls == document.boxes.calls == 4


def test_equal_contents_are_encoded_once(document: Document) -> None:
    ids = padded([document.ids(2, 0)] * 3)
    same = {"pixel_values": PIXELS[:1].expand(3, -1, -1, -1), "bbox": BBOX[:1].expand(3, -1, -1)}
    out = document.model.generate(**ids, **same, **QUIET)
    assert document.patches.sizes == [1] and len(set(map(tuple, out.tolist()))) == 1


def prompts(document: Document) -> list[dict[str, Any]]:
    return [
        {"input_ids": ids, "pixel_values": PIXELS[row], "bbox": BBOX[row, : COUNTS[row]]}
        for row, ids in enumerate(rows(document))
    ]


@pytest.mark.parametrize("beams", [1, 2])
def test_prompts_one_by_one_are_read_the_same(document: Document, beams: int) -> None:
    expected = wanted(document, num_beams=beams)
    found = es.generate(document.model, None, prompts(document), **QUIET, num_beams=beams)
    assert [trimmed(list(one)) for one in found] == expected
    assert (document.patches.calls, document.boxes.calls) == (2, 2)
    with es.stream(document.model, None, prompts(document), **QUIET, num_beams=beams) as events:
        told: dict[str, list[int]] = {"0": [], "1": []}
        for event in events:
            told[event.request_id] += [event.token] if event.token >= 0 else []
    assert [trimmed(row) for row in told.values()] == expected


def test_preemption_feeds_features_again(document: Document, monkeypatch: Any) -> None:
    step, count = Engine.step, iter(range(1000))

    def preempting(engine: Engine) -> Any:
        if engine.scheduler.groups and next(count) % 2:
            engine.preempt(engine.scheduler.groups[-1])
        return step(engine)

    monkeypatch.setattr(Engine, "step", preempting)
    found = es.generate(document.model, None, prompts(document), **QUIET)
    monkeypatch.undo()
    assert [trimmed(list(one)) for one in found] == wanted(document)


@pytest.mark.parametrize("whole", [True, False])
def test_a_second_image_comes_in_the_second_turn(document: Document, whole: bool) -> None:
    """`whole`: whether the second call passes all ids, or only those that are new."""
    first = document.ids(2, 0)
    turn = {"pixel_values": PIXELS[:1], "bbox": BBOX[:1, :2]}
    out = document.model.generate(
        input_ids=torch.tensor([first]), **turn, **QUIET, return_dict_in_generate=True
    )
    said, more = out.sequences[0].tolist(), document.ids(3, 7)
    ids = torch.tensor([*said, *more])
    parts = [
        document.embeds(torch.tensor(first), PIXELS[0], BBOX[0, :2]),
        document.reference.get_input_embeddings()(torch.tensor([said[len(first) :]])),
        document.embeds(torch.tensor(more), PIXELS[1], BBOX[1]),
    ]
    expected = document.reference.generate(inputs_embeds=torch.cat(parts, dim=1).detach(), **QUIET)[
        0
    ].tolist()
    past = out.past_key_values
    cached = past.get_seq_length()
    second = {"pixel_values": PIXELS[1:], "bbox": BBOX[1:]}
    found = document.model.generate(
        input_ids=ids[None] if whole else ids[None, cached:],
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        past_key_values=past,
        **second,
        **QUIET,
    )
    assert found[0, -len(expected) :].tolist() == expected


def test_a_generated_placeholder_is_an_ordinary_token() -> None:
    """The placeholder is in the vocabulary, and the model generates it."""
    document = Document()
    ids = torch.tensor([[5, 9, 23]])
    table = document.reference.get_input_embeddings()
    tokens = document.reference.generate(ids, **QUIET)[0, 3:].tolist()
    place = tokens[1]
    calls: list[int] = []

    def encoder(values: Tensor) -> Tensor:
        calls.append(len(values))
        return values[:, None]

    document.model.prompt_inputs = [
        es.PromptInput("vector", encoder, shape=(table.weight.shape[1],), token=place)
    ]
    prompt = torch.tensor([[5, place, 23]])
    vector = table(torch.tensor([9])).detach()
    for options in ({}, {"use_cache": False}, {"num_beams": 2}):
        out = document.model.generate(prompt, vector=vector, **QUIET, **options)
        plain = document.reference.generate(ids, **QUIET, **options)
        assert out[0, 3:].tolist() == plain[0, 3:].tolist()
        assert out[0, :3].tolist() == [5, place, 23]
    assert calls == [1, 1, 1] and place in plain[0, 3:].tolist()


def test_features_may_stand_at_positions_and_among_embeddings(document: Document) -> None:
    model = LanguageModel(document.model.core, document.model.generation_config)
    width = model.width
    model.prompt_inputs = [
        es.PromptInput("soft", lambda x: x, shape=(2, width), positions=(0, 3)),
    ]
    table = document.reference.get_input_embeddings()
    ids = torch.tensor([[0, 5, 9, 23, 41], [7, 8, 11, 30, 2]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    soft = table(torch.tensor([[60, 61], [62, 63]])).detach()
    embeds = table(ids).detach().clone()
    for row, first in enumerate((1, 0)):
        embeds[row, [first, first + 3]] = soft[row]
    expected = document.reference.generate(inputs_embeds=embeds, attention_mask=mask, **QUIET)
    given = {"attention_mask": mask, "soft": soft, **QUIET}
    assert torch.equal(model.generate(ids, **given)[:, 5:], expected)
    assert torch.equal(model.generate(inputs_embeds=table(ids), **given), expected)


# --- mutants: the ways in which this is done wrong ------------------------------------------------


def _at_every_step(span: Any) -> list[Given]:
    """All features, at whatever positions the feed has."""
    injected = span.prompt.injected
    count = min(span.count, len(injected.embeds)) if injected is not None else 0
    return [Given("embeds", 0, injected.embeds[:count])] if count else []


def _while_nothing_is_cached(span: Any) -> list[Given]:
    """Only in the feed that begins at 0, as a test of the cache's position does."""
    return RIGHT(span) if span.start == 0 else []


def _unless_one_position_is_fed(span: Any) -> list[Given]:
    return RIGHT(span) if span.count != 1 else []


def _never(span: Any) -> list[Given]:
    """As a test for an absent cache does where an empty one is passed."""
    return []


RIGHT = given.Span._injected
WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "at every step": (_at_every_step, {}),
    "while nothing is cached": (_while_nothing_is_cached, {"prefill_chunk_size": 3}),
    "unless one position is fed": (_unless_one_position_is_fed, {"prefill_chunk_size": 1}),
    "never": (_never, {}),
}


@contextlib.contextmanager
def broken(how: Callable[..., Any]) -> Iterator[None]:
    with mock.patch.object(given.Span, "_injected", how):
        yield


@pytest.mark.parametrize("name", WRONG)
def test_the_wrong_ways_are_noticed(document: Document, name: str) -> None:
    how, options = WRONG[name]
    expected = wanted(document)
    try:
        with broken(how):
            found = new(document, document.model.generate(**batch(document), **QUIET, **options))
    except Exception:
        return  # an id beyond the vocabulary reached the table
    assert found != expected


# --- what is refused before the first forward -----------------------------------------------------


def wrong(document: Document, **changes: Any) -> dict[str, Any]:
    return {**batch(document), **changes}


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fewer boxes": ({"bbox": BBOX[:, :2]}, ["row 1", "bbox", "wanted 3", "got 2"]),
    "more boxes": ({"bbox": [BBOX[0, :2], BBOX[1].repeat(2, 1)]}, ["row 1", "wanted 3", "got 6"]),
    "no boxes": ({"bbox": None}, ["row 0", "bbox", "wanted 2", "got 0"]),
    "no image in a row": ({"pixel_values": [PIXELS[0], None]}, ["row 1", "wanted 4", "got 0"]),
    "images of more rows": ({"pixel_values": images(3)}, ["pixel_values", "rows", "got 3"]),
    "images of another shape": (
        {"pixel_values": torch.rand(2, 3, 16, 16)},
        ["pixel_values", "(3, 32, 32)", "(3, 16, 16)"],
    ),
    "text as an image": ({"pixel_values": "photo.png"}, ["pixel_values", "not a tensor", "str"]),
    "a meta image": ({"pixel_values": PIXELS.to("meta")}, ["pixel_values", "no numbers", "meta"]),
    "nested boxes": (
        {"bbox": [[[1, 2, 3, 4]], [[1, 2], [3, 4]]]},
        ["bbox", "row 1", "(any, 4)", "(2, 2)"],
    ),
    "ragged boxes": ({"bbox": [[[1, 2, 3], [4]], [[5]]]}, ["bbox", "not a tensor"]),
    "healed": ({"token_healing": True}, ["token_healing"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_row(
    document: Document, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, parts = REFUSED[name]

    def computes(*_: object, **__: object) -> None:
        raise AssertionError("the call reached the model")

    monkeypatch.setattr(LanguageModel, "executor", computes)
    with pytest.raises(RequestError) as caught:
        document.model.generate(**wrong(document, **changes), **QUIET)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_misspelt_input_is_answered_with_the_nearest(document: Document) -> None:
    with pytest.raises(UnknownArgumentError, match="pixel_values instead of pixel_value"):
        document.model.generate(torch.tensor([[5]]), pixel_value=PIXELS, **QUIET)
    with pytest.raises(UnknownArgumentError, match="you meant bbox"):
        es.generate(document.model, None, {"input_ids": [5], "bbx": BBOX}, **QUIET)


ENCODERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "narrow": (lambda x: torch.zeros(len(x), 4, 3), "project them"),
    "flat": (lambda x: torch.zeros(4 * len(x), 32), "returned something else"),
    "integers": (lambda x: torch.zeros(len(x), 4, 32).long(), "returned something else"),
    "nothing": (lambda x: None, "got NoneType"),
    "too few": (lambda x: [torch.zeros(4, 32)], "2 tensors"),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_that_returns_something_else_is_named(document: Document, name: str) -> None:
    encoder, said = ENCODERS[name]
    model = LanguageModel(document.model.core, document.model.generation_config)
    model.prompt_inputs = [es.PromptInput("image", encoder, shape=(3, 32, 32), token=PATCH)]
    ids = torch.tensor([[5, *[PATCH] * 4, 6]] * 2)
    with pytest.raises(RequestError, match="(?i)" + said):
        model.generate(ids, image=PIXELS, **QUIET)


DECLARED: dict[str, tuple[Callable[[], Any], str]] = {
    "no place": (lambda: es.PromptInput("a", len, (4,)), "either token or positions; got none"),
    "both places": (lambda: es.PromptInput("a", len, (4,), 5, (1,)), "got both"),
    "no keyword": (lambda: es.PromptInput("a b", len, (4,), 5), "a keyword"),
    "no encoder": (lambda: es.PromptInput("a", None, (4,), 5), "a function"),  # type: ignore[arg-type]
    "negative": (lambda: es.PromptInput("a", len, (4,), -5), "an id from 0 on"),
    "falling": (lambda: es.PromptInput("a", len, (4,), None, (3, 1)), "rising numbers"),
    "taken": (lambda: [es.PromptInput("input_ids", len, (4,), 5)], "'input_ids' is taken"),
    "an option": (lambda: [es.PromptInput("top_k", len, (4,), 5)], "'top_k' is taken"),
    "twice": (lambda: [es.PromptInput("a", len, (4,), n) for n in (5, 6)], "'a' is taken"),
    "one token": (lambda: [es.PromptInput(n, len, (4,), 5) for n in "ab"], "one token"),
    "a stranger": (lambda: [len], "not prompt inputs"),
    "no test": (lambda: es.PromptInput("a", len, (4,), 5, misfits=7), "misfits"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", DECLARED)
def test_a_declaration_is_checked(document: Document, name: str) -> None:
    make, said = DECLARED[name]
    model = LanguageModel(document.model.core, document.model.generation_config)
    before = model.prompt_inputs
    with pytest.raises(RequestError, match=said):
        model.prompt_inputs = make()
    assert model.prompt_inputs == before


def test_ids_beyond_the_vocabulary_are_impossible_to_predict(document: Document) -> None:
    out = document.model.generate(
        **batch(document), **QUIET, return_dict_in_generate=True, prompt_logprobs=2
    )
    known = out.prompt_logprobs[0]
    beyond = known.tokens >= BOX
    assert torch.isneginf(known.logprobs[beyond]).all() and beyond.any()
    assert torch.isfinite(known.logprobs[~beyond]).all()
