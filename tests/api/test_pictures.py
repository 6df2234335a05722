"""Prompts with pictures give transformers' tokens, whatever way they take through the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Engine
from everystep.errors import RequestError
from everystep.models.vision.tower import VisionTower
from tests.models.pictures import (
    FILM,
    GREEDY,
    IMAGE,
    OWN,
    ROWS,
    SMALL,
    SQUARE,
    WIDE,
    Shown,
    model_of,
    prompt_of,
    reference_of,
)
from tests.models.tiny import farthest

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "returned beams": {"num_beams": 3, "num_return_sequences": 2},
}
OWN_WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"prefill_chunk_size": 3},
    "chunks of one": {"prefill_chunk_size": 1},
    "uncached": {"use_cache": False},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static"},
}


CASES = [
    *(("qwen3_vl", rows) for rows in ROWS),
    *((kind, rows) for kind in OWN for rows in ("a video", "ragged rows") if kind != "qwen3_vl"),
]


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize(("kind", "rows"), CASES)
def test_tokens_are_the_references(kind: str, rows: str, executor: Any) -> None:
    reference = reference_of(kind, torch.float32)
    model = model_of(reference, executor)
    given = prompt_of(ROWS[rows], apart=kind.startswith("qwen3"), dtype=torch.float32)
    for name, way in WAYS.items():
        expected = reference.generate(**given, **GREEDY, **way)
        assert torch.equal(model.generate(**given, **GREEDY, **way), expected), name
    first = model.generate(**given, **GREEDY)
    for name, way in OWN_WAYS.items():
        if name == "lookup" and len(ROWS[rows]) > 1:
            continue
        assert torch.equal(model.generate(**given, **GREEDY, **way), first), name


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_chunks_and_batches_change_no_bit_natively(executor: Any) -> None:
    """A picture's features depend on it alone, and so does all that is made of them."""
    model = model_of(reference_of("qwen3_vl", torch.float32), executor)
    given = prompt_of(ROWS["ragged rows"], dtype=torch.float32)
    shown = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    whole = torch.stack(model.generate(**given, **shown).logits)
    chunked = torch.stack(model.generate(**given, **shown, prefill_chunk_size=4).logits)
    alone = model.generate(
        input_ids=given["input_ids"][:1],
        attention_mask=given["attention_mask"][:1],
        pixel_values=given["pixel_values"][: SMALL.size + WIDE.size],
        image_grid_thw=given["image_grid_thw"][:2],
        **shown,
    )
    if executor == "native":
        assert torch.equal(whole, chunked)
        assert torch.equal(whole[:, :1], torch.stack(alone.logits))
    assert farthest(chunked, whole) < 1e-5 > farthest(torch.stack(alone.logits), whole[:, :1])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_of_the_text_may_be_rounded(quantize: Any) -> None:
    reference = reference_of("qwen3_vl", torch.float32)
    native, plain = (
        model_of(reference, one, dtype=None, quantize=quantize) for one in ("native", "torch")
    )
    assert isinstance(native.core.tower, VisionTower)
    given = prompt_of(ROWS["ragged rows"], dtype=torch.float32)
    assert {*native.weight_bytes} == {"float32", quantize}
    whole = model_of(reference, "torch")
    shown = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    (own,), (theirs,), (exact,) = (
        model.generate(**given, **shown).logits for model in (native, plain, whole)
    )
    gaps, lost = (own - theirs).abs().amax(-1), (theirs - exact).abs().amax(-1)
    # Inputs are rounded too: one in the middle between two codes goes either way, by the order in
    # which a processor adds, and its row is off by what a code is worth.
    assert gaps.median() < 1e-4 and gaps.max() < lost.min() / 2


def requests_of(rows: list[Any]) -> list[dict[str, Any]]:
    """Each row as a prompt of its own."""
    found = []
    for row in rows:
        given = prompt_of([row], dtype=torch.float32)
        found.append(
            {k: v[0] if k == "input_ids" else v for k, v in given.items() if "mask" not in k}
        )
    return found


def together(prompts: list[dict[str, Any]]) -> list[list[int]]:
    """What transformers says of each."""
    reference = reference_of("qwen3_vl", torch.float32)
    found = []
    for one in prompts:
        given = {**one, "input_ids": one["input_ids"][None]}
        out = reference.generate(**given, **GREEDY)
        found.append(out[0, len(one["input_ids"]) :].tolist())
    return found


def test_prompts_one_by_one_streams_and_preemption(monkeypatch: Any) -> None:
    model = model_of(reference_of("qwen3_vl", torch.float32))
    prompts = requests_of(ROWS["ragged rows"])
    expected = together(prompts)
    assert [list(one) for one in es.generate(model, None, prompts, **GREEDY)] == expected
    with es.stream(model, None, prompts, **GREEDY) as events:
        told: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        for event in events:
            told[event.request_id] += [event.token] if event.token >= 0 else []
    assert [*told.values()] == expected
    step, count = Engine.step, iter(range(10_000))

    def preempting(engine: Engine) -> Any:
        if engine.scheduler.groups and next(count) % 2:
            engine.preempt(engine.scheduler.groups[-1])
        return step(engine)

    monkeypatch.setattr(Engine, "step", preempting)
    assert [list(one) for one in es.generate(model, None, prompts, **GREEDY)] == expected


def test_what_prompts_share_is_fed_once_and_only_where_pictures_are_equal() -> None:
    model = model_of(reference_of("qwen3_vl", torch.float32))
    large = Shown((1, 8, 12))
    first, second = requests_of([[5, large, 6, 7], [5, large, 6, 8]])
    same = {**second, "pixel_values": first["pixel_values"]}
    expected = together([first, same, second])
    asked = {**GREEDY, "return_dict_in_generate": True}
    found = [es.generate(model, None, [first, one], **asked) for one in (same, second)]
    assert [list(one.tokens) for one in found[0]] == expected[:2]
    assert [list(one.tokens) for one in found[1]] == [expected[0], expected[2]]
    assert found[0][1].cached_tokens > 16 > found[1][1].cached_tokens


def test_each_content_is_encoded_once(monkeypatch: Any) -> None:
    model = model_of(reference_of("qwen3_vl", torch.float32))
    given = prompt_of([[5, SMALL, SMALL], [SMALL, 6, SQUARE]], dtype=torch.float32)
    given["pixel_values"][: 2 * SMALL.size] = given["pixel_values"][: SMALL.size].repeat(2, 1)
    seen: list[Any] = []
    encode = VisionTower.encode

    def counted(tower: VisionTower, pixels: Any, grid: Any) -> Any:
        seen.append(grid)
        return encode(tower, pixels, grid)

    monkeypatch.setattr(VisionTower, "encode", counted)
    model.generate(**given, **GREEDY, num_beams=2)
    assert seen == [SMALL.grid, SMALL.grid, SQUARE.grid]


def test_a_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    model = model_of(reference_of("qwen3_vl", torch.float32))
    (prompt,) = requests_of([[5, SMALL, 6, FILM, 7]])
    run = es.open(model, None, prompt, **GREEDY)
    for _ in range(3):
        next(run)
    run.save(tmp_path / "run")
    other = run.fork()
    assert list(run.result().tokens) == together([prompt])[0] == list(other.result().tokens)
    assert es.resume(tmp_path / "run", model, None).result().tokens == run.result().tokens


@pytest.fixture(scope="module")
def chat() -> tuple[LanguageModel, dict[str, Any], Any]:
    """A model, a first turn with pictures, and what came of it."""
    model = model_of(reference_of("qwen3_vl", torch.float32))
    given = prompt_of([[5, SMALL, 7, WIDE, 9], [10, 11, SQUARE, 12]], dtype=torch.float32)
    first = model.generate(**given, **GREEDY, return_dict_in_generate=True)
    return model, given, first


def joined(given: dict[str, Any], new: dict[str, Any], first: Any) -> dict[str, Any]:
    """Both turns of a chat of two rows as one prompt."""
    ids = torch.cat([first.sequences, new["input_ids"]], dim=1)
    cuts = [SMALL.size + WIDE.size, SQUARE.size], [SMALL.size, SMALL.size]
    old, late = (x["pixel_values"].split(cut) for x, cut in zip((given, new), cuts, strict=True))
    a, b = given["image_grid_thw"], new["image_grid_thw"]
    ones = torch.ones(2, ids.shape[1] - given["input_ids"].shape[1], dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([given["attention_mask"], ones], dim=1),
        "pixel_values": torch.cat([old[0], late[0], old[1], late[1]]),
        "image_grid_thw": torch.cat([a[:2], b[:1], a[2:], b[1:]]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def test_a_second_turn_with_a_second_image(chat: tuple[LanguageModel, dict[str, Any], Any]) -> None:
    model, given, first = chat
    new = prompt_of([[3, SMALL, 4], [8, SMALL, 2]], dtype=torch.float32)
    whole = joined(given, new, first)
    reference = reference_of("qwen3_vl", torch.float32)
    expected = reference.generate(**whole, **GREEDY)
    assert torch.equal(model.generate(**whole, **GREEDY), expected)

    def cached() -> Any:
        return copy.deepcopy(first.past_key_values)

    again = model.generate(**whole, **GREEDY, past_key_values=cached())
    assert torch.equal(again, expected)
    late = {**whole, "pixel_values": new["pixel_values"]}
    assert torch.equal(model.generate(**late, **GREEDY, past_key_values=cached()), expected)
    length = first.past_key_values.get_seq_length()
    only = {
        "input_ids": whole["input_ids"][:, length:],
        "attention_mask": whole["attention_mask"],
        "pixel_values": new["pixel_values"],
        "image_grid_thw": new["image_grid_thw"],
    }
    out = model.generate(**only, **GREEDY, past_key_values=cached())
    assert torch.equal(out[:, -8:], expected[:, -8:])
    # Of what is cached the grids must be known, if its ids are passed.
    with pytest.raises(RequestError, match="placeholders of a prompt do not fit"):
        model.generate(
            **{**whole, **{n: new[n] for n in ("pixel_values", "image_grid_thw")}},
            **GREEDY,
            past_key_values=cached(),
        )


def test_text_after_cached_pictures_stands_behind_them(
    chat: tuple[LanguageModel, dict[str, Any], Any],
) -> None:
    model, given, first = chat
    ids = torch.cat([first.sequences, torch.tensor([[3, 4], [5, 6]])], dim=1)
    ones = torch.ones(2, ids.shape[1] - given["input_ids"].shape[1], dtype=torch.long)
    mask = torch.cat([given["attention_mask"], ones], dim=1)
    pictures = {n: given[n] for n in ("pixel_values", "image_grid_thw")}
    expected = model.generate(input_ids=ids, attention_mask=mask, **pictures, **GREEDY)
    for count in (1, 2):  # a third turn goes on from the cache of the second
        length = first.past_key_values.get_seq_length()
        cache = copy.deepcopy(first.past_key_values)
        shown = {**GREEDY, "return_dict_in_generate": True, "past_key_values": cache}
        out = model.generate(input_ids=ids[:, length:], attention_mask=mask, **shown)
        assert torch.equal(out.sequences[:, -8:], expected[:, -8:]), count
        first, ids = out, torch.cat([expected, torch.tensor([[7], [9]])], dim=1)
        mask = torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1)
        expected = model.generate(input_ids=ids, attention_mask=mask, **pictures, **GREEDY)


def test_a_prefix_with_a_picture() -> None:
    model = model_of(reference_of("qwen3_vl", torch.float32))
    whole, begin, text = requests_of([[5, SMALL, 6, SQUARE, 7], [5, SMALL, 6], [5, SMALL, 6, 8]])
    begin["pixel_values"] = text["pixel_values"] = whole["pixel_values"][: SMALL.size]
    prefix = es.prefill(model, None, begin)
    expected = together([whole, text])
    rest = {
        "input_ids": whole["input_ids"][len(begin["input_ids"]) :],
        "pixel_values": whole["pixel_values"][SMALL.size :],
        "image_grid_thw": whole["image_grid_thw"][1:],
    }
    found = es.generate(model, None, [rest, [8]], prefix=prefix, **GREEDY)
    assert [list(one) for one in found] == expected


def test_features_from_outside_with_positions_and_deepstack() -> None:
    """As where the tower is another's: embeddings, three axes of positions, and what is added."""
    reference = reference_of("qwen3_vl", torch.float32)
    model = model_of(reference)
    given = prompt_of(ROWS["two images"], dtype=torch.float32)
    expected = model.generate(**given, **GREEDY)
    ids = given["input_ids"]
    at = (ids == IMAGE)[0]
    embeds = model.get_input_embeddings()(ids).clone()
    deep = torch.zeros(1, ids.shape[1], 2, 64)
    parts = given["pixel_values"].split(given["image_grid_thw"].prod(-1).tolist())
    assert isinstance(model.core.tower, VisionTower)
    made = [
        model.core.tower.encode(part, tuple(grid))
        for part, grid in zip(parts, given["image_grid_thw"].tolist(), strict=True)
    ]
    embeds[0, at] = torch.cat([one for one, _ in made])
    deep[0, at] = torch.cat([one for _, one in made])
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    places, _ = reference.model.get_rope_index(**{name: given[name] for name in names})
    outside = {"inputs_embeds": embeds, "position_ids": places, "deepstack": deep}
    new = model.generate(**outside, **GREEDY)
    assert torch.equal(new, expected[:, ids.shape[1] :])
    assert torch.equal(model.generate(input_ids=ids, **outside, **GREEDY), expected)
    four = torch.cat([torch.arange(ids.shape[1])[None, None], places])
    assert torch.equal(model.generate(**{**outside, "position_ids": four}, **GREEDY), new)
    # Without what is added, and at other places, the answer is another.
    shown = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    right = model.generate(**outside, **shown).logits[0]
    for name in ("deepstack", "position_ids"):
        less = {key: value for key, value in outside.items() if key != name}
        assert farthest(model.generate(**less, **shown).logits[0], right) > 1e-3
    # Pixels beside embeddings of the same length take their places.
    plain = model.get_input_embeddings()(ids)
    both = model.generate(inputs_embeds=plain, **given, **GREEDY)
    assert torch.equal(both, expected)


def test_positions_of_the_caller_are_kept() -> None:
    reference = reference_of("qwen3_vl", torch.float32)
    model = model_of(reference)
    given = prompt_of([[5, SMALL, 8, 9]], dtype=torch.float32)
    length = given["input_ids"].shape[1]
    places = torch.stack([torch.arange(length) * step for step in (1, 2, 3)])[:, None]
    shown = {**GREEDY, "max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(**given, position_ids=places, **shown).logits[0]
    with torch.no_grad():
        expected = reference(**given, position_ids=places).logits[:, -1]
    assert farthest(found, expected) < 1e-4
    kept = model(**given, position_ids=places).logits[:, -1]
    assert farthest(kept, expected) < 1e-5


def test_a_second_kind_of_features_stands_beside_pictures() -> None:
    """What a prompt input brings adds nothing to layers, and is read all the same."""
    tiny = model_of(reference_of("qwen3_vl", torch.float32))
    given = prompt_of([[5, SMALL, 89, 9]], dtype=torch.float32)
    box = torch.randn(1, 1, 64)
    tiny.prompt_inputs = [es.PromptInput("bbox", lambda x: x, (1, 64), token=89)]
    with_box = tiny.generate(**given, bbox=box, **GREEDY)
    embeds = tiny.get_input_embeddings()(given["input_ids"]).clone()
    embeds[0, given["input_ids"][0] == 89] = box[0]
    pictures = {n: v for n, v in given.items() if n != "input_ids"}
    tiny.prompt_inputs = []
    by_hand = tiny.generate(given["input_ids"], inputs_embeds=embeds, **pictures, **GREEDY)
    assert torch.equal(with_box, by_hand)
