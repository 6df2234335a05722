"""Position ids of any number of axes, masks with holes, masks of pairs, and named inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError
from everystep.executors.torch_executor import TorchExecutor
from tests.executors.layout import SIDES, LayoutDecoder, axes_model, layout_model
from tests.executors.models import PLAIN, random_model
from tests.models.tiny import ours as built
from tests.models.tiny import reference_decoder, reference_t5

IDS = torch.tensor([[5, 9, 23, 41, 7, 80, 33], [60, 2, 71, 15, 44, 8, 19]])
SMALL = IDS % 37 + 1
QUIET = {"pad_token_id": 0, "eos_token_id": 96, "do_sample": False}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}


def _pair(family: str = "llama", **changes: Any) -> tuple[Any, LanguageModel]:
    torch.manual_seed(1)
    reference: Any
    if family == "t5":
        reference = reference_t5(torch.float64, **changes)
    else:
        reference = reference_decoder(family, torch.float64, **changes)
    config = es.GenerationConfig.from_model_config(reference.config)
    return reference, LanguageModel(built(reference), config)


PAIRS = {
    "llama": _pair(),
    "windows": _pair("qwen2", **WINDOW),
    "t5": _pair("t5", num_decoder_layers=2),
}
REFERENCE, MODEL = PAIRS["llama"]
TABLE = REFERENCE.get_input_embeddings()


def textbook(ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> list[int]:
    """Six greedy tokens after one row (T,), read whole and anew at each step: `positions` (n,) of
    all that is read, `mask` (1 or H, n, n).

    Without a mask transformers would take jumps of positions for several sequences in a row.
    """
    found: list[int] = []
    if mask is None:
        mask = torch.ones(1, len(positions), len(positions), dtype=torch.bool).tril()
    for _ in range(6):
        row = torch.cat([ids, torch.tensor(found, dtype=torch.long)])
        seen = mask[None, :, : len(row), : len(row)]
        low = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e300)
        given = {"attention_mask": low, "position_ids": positions[None, : len(row)]}
        with torch.no_grad():
            logits = REFERENCE(row[None], use_cache=False, **given).logits
        found.append(int(logits[0, -1].argmax()))
        if found[-1] == 96:
            break
    return found


def ended(row: Tensor) -> list[int]:
    tokens: list[int] = row.tolist()
    return tokens[: tokens.index(96) + 1] if 96 in tokens else tokens


WAYS: dict[str, dict[str, Any]] = {
    "cached": {},
    "uncached": {"use_cache": False},
    "chunked": {"prefill_chunk_size": 2},
    "static": {"cache_implementation": "static"},
    "looked up": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
}

# --- positions ------------------------------------------------------------------------------------

JUMPS = torch.tensor([[0, 3, 4, 9, 2, 5, 6], [1, 1, 2, 2, 3, 3, 4]])


@pytest.mark.parametrize("way", WAYS)
def test_positions_are_advanced_from_the_greatest(way: str) -> None:
    out = MODEL.generate(IDS, position_ids=JUMPS, max_new_tokens=6, **QUIET, **WAYS[way])
    for row, ids, positions in zip(out, IDS, JUMPS, strict=True):
        after = int(positions.max()) + 1 + torch.arange(6)
        assert ended(row[7:]) == textbook(ids, torch.cat([positions, after]))


@pytest.mark.parametrize("way", [*WAYS, "beams"])
def test_positions_may_come_from_a_function(way: str) -> None:
    asked: list[int] = []

    def every_second(places: Tensor) -> Tensor:
        asked.append(len(places))
        return 2 * places

    options = {**WAYS, "beams": {"num_beams": 3}}[way]
    given = {"max_new_tokens": 6, **QUIET, **options}
    out = MODEL.generate(IDS, position_ids=every_second, **given)
    assert asked == [13, 13]  # once for each row: all positions that may come
    if way == "beams":
        uncached = MODEL.generate(IDS, position_ids=every_second, **given, use_cache=False)
        assert torch.equal(out, uncached)
        return
    for row, ids in zip(out, IDS, strict=True):
        assert ended(row[7:]) == textbook(ids, 2 * torch.arange(20))
    told = es.generate(
        MODEL, None, {"input_ids": IDS[0], "position_ids": every_second}, max_new_tokens=6, **QUIET
    )
    assert told == ended(out[0, 7:])


def test_a_function_counts_places_after_the_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 9, 23]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    given = {"position_ids": lambda places: 3 * places, "max_new_tokens": 5, **QUIET}
    padded = MODEL.generate(ids, attention_mask=mask, **given)
    assert torch.equal(padded[:, 2:], MODEL.generate(ids[:, 2:], **given))


@pytest.mark.parametrize("shape", ["(1, L)", "(L,)", "a mapping", "one axis of a batch"])
def test_positions_of_one_row_serve_all(shape: str) -> None:
    positions = JUMPS[:1]
    expected = MODEL.generate(IDS[:1], position_ids=positions, max_new_tokens=5, **QUIET)
    if shape == "a mapping":
        for own in (positions, positions[0]):
            prompt = {"input_ids": IDS[0], "position_ids": own}
            told = es.generate(MODEL, None, prompt, max_new_tokens=5, **QUIET)
            assert told == ended(expected[0, 7:])
        return
    given = {"(1, L)": positions, "(L,)": positions[0], "one axis of a batch": positions[None]}
    out = MODEL.generate(IDS, position_ids=given[shape], max_new_tokens=5, **QUIET)
    assert torch.equal(out[:1], expected)


AXES = torch.tensor([[0, 1, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 4, 5], [0, 1, 2, 3, 2, 4, 5]])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 3}])
def test_three_axes_are_read_in_batches_and_one_by_one(options: dict[str, Any]) -> None:
    model = LanguageModel(axes_model(False), es.GenerationConfig())
    ids = SMALL
    given = {"max_new_tokens": 6, "eos_token_id": 39, "pad_token_id": 0, **options}
    axes = torch.stack([AXES, AXES.flip(-1).cummax(-1).values], dim=1)
    batch = model.generate(ids, position_ids=axes, **given)
    again = model.generate(ids, position_ids=axes, use_cache=False, **given)
    chunked = model.generate(ids, position_ids=axes, prefill_chunk_size=3, **given)
    assert torch.equal(batch, again) and torch.equal(batch, chunked)
    prompts = [{"input_ids": ids[row], "position_ids": axes[:, row]} for row in (0, 1)]
    told = es.generate(model, None, prompts, **given)
    assert [[*row, *[0] * (6 - len(row))] for row in told] == [
        [*row, *[0] * (6 - len(row))] for row in batch[:, 7:].tolist()
    ]
    flat = model.generate(ids, **given)
    assert not torch.equal(flat, batch)


def test_positions_go_on_behind_a_cache() -> None:
    positions = torch.cat([JUMPS[0], torch.tensor([20, 22, 24])])
    ids = torch.cat([IDS[0], torch.tensor([8, 44, 19])])
    expected = textbook(ids, torch.cat([positions, 25 + torch.arange(6)]))
    first = MODEL.generate(
        IDS[:1], position_ids=JUMPS[:1], max_new_tokens=1, return_dict_in_generate=True, **QUIET
    )
    legacy = first.past_key_values.to_legacy_cache()
    for new in (ids[None], ids[None, 7:]):
        out = MODEL.generate(
            new,
            position_ids=positions[None, -new.shape[1] :],
            attention_mask=torch.ones(1, 10).long(),
            past_key_values=es.DynamicCache.from_legacy_cache(legacy),
            max_new_tokens=6,
            **QUIET,
        )
        assert ended(out[0, new.shape[1] :]) == expected


# --- masks ----------------------------------------------------------------------------------------

HOLES = {
    "a hole": [[1, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "holes and padding": [[1, 0, 1, 1, 0, 0, 1], [0, 0, 1, 0, 1, 1, 1]],
}


@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("way", [*WAYS, "beams"])
def test_masked_positions_are_read_by_nobody(family: str, holes: str, way: str) -> None:
    reference, model = PAIRS[family]
    if family == "t5" and way in ("chunked", "looked up"):
        return
    beams = {"num_beams": 3} if way == "beams" else {}
    mask = torch.tensor(HOLES[holes])
    # Padding is shown as one id, whatever stands there.
    ids = IDS.masked_fill(mask.cumsum(1) == 0, 0)
    options = {"attention_mask": mask, "max_new_tokens": 6, **QUIET, **beams}
    if family == "t5":
        options["decoder_start_token_id"] = 0
    given = {**options, **WAYS.get(way, {})}
    assert torch.equal(model.generate(ids, **given), reference.generate(ids, **options))


def test_a_pad_id_inside_a_prompt_without_a_mask_is_a_hole_as_in_the_reference() -> None:
    ids = IDS.clone()
    ids[0, 3] = ids[1, 0] = 0
    given = {"max_new_tokens": 6, **QUIET}
    theirs, ours = REFERENCE.generate(ids, **given), MODEL.generate(ids, **given)
    assert torch.equal(ours, theirs)
    counted = MODEL.generate(ids, attention_mask=torch.ones_like(ids), **given)
    assert not torch.equal(counted, ours)


def test_holes_go_on_behind_a_cache_and_among_what_is_new() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 1, 0, 1, 1, 0, 1]])
    ids = torch.cat([IDS[:1], torch.tensor([[8, 44, 19]])], dim=1)
    expected = REFERENCE.generate(ids, attention_mask=mask, max_new_tokens=6, **QUIET)
    first = MODEL.generate(
        ids[:, :5], attention_mask=mask[:, :5], max_new_tokens=1, return_dict_in_generate=True,
        **QUIET,
    )  # fmt: skip
    legacy = first.past_key_values.to_legacy_cache()
    for new in (ids, ids[:, 5:]):
        past = es.DynamicCache.from_legacy_cache(legacy)
        out = MODEL.generate(
            new, attention_mask=mask, past_key_values=past, max_new_tokens=6, **QUIET
        )
        assert torch.equal(out[:, new.shape[1] :], expected[:, 10:])


def test_holes_among_many_prompts() -> None:
    mask = torch.tensor(HOLES["holes and padding"])
    batch = MODEL.generate(IDS, attention_mask=mask, max_new_tokens=6, **QUIET)
    prompts = [{"input_ids": IDS[row], "attention_mask": mask[row]} for row in (0, 1)]
    told = es.generate(MODEL, None, [*prompts, IDS[0].tolist()], max_new_tokens=6, **QUIET)
    assert told[:2] == [ended(row) for row in batch[:, 7:]]
    assert told[2] == es.generate(MODEL, None, IDS[0], max_new_tokens=6, **QUIET)


def test_a_mapping_without_a_mask_is_read_whole() -> None:
    """Pads among its ids too, which a rectangle would take for padding."""
    ids = torch.tensor([5, 0, 23, 0])
    assert QUIET["pad_token_id"] == 0
    told = es.generate(MODEL, None, {"input_ids": ids}, max_new_tokens=6, **QUIET)
    ones = torch.ones(1, 4, dtype=torch.long)
    whole = MODEL.generate(ids[None], attention_mask=ones, max_new_tokens=6, **QUIET)
    assert told == ended(whole[0, 4:])
    assert told != ended(MODEL.generate(ids[None], max_new_tokens=6, **QUIET)[0, 4:])


def test_a_row_that_is_masked_whole_is_refused() -> None:
    """transformers has no result for it: eager attention and sdpa differ there."""
    with pytest.raises(RequestError, match="row 0 of the prompt is empty"):
        MODEL.generate(IDS, attention_mask=torch.tensor([[0] * 7, [1] * 7]), **QUIET)


def square(heads: int, length: int = 7) -> Tensor:
    """(2, heads, L, L) random causal masks."""
    seen = torch.rand(2, heads, length, length, generator=torch.Generator().manual_seed(heads))
    return ((seen < 0.6) | torch.eye(length, dtype=torch.bool)).tril()


def grown(mask: Tensor, steps: int) -> Tensor:
    """(H, L, L) for `steps` tokens more, which see what the last position does, and each other."""
    heads, length = mask.shape[:2]
    whole = torch.ones(heads, length + steps, length + steps, dtype=torch.bool).tril()
    whole[:, :length, :length] = mask
    whole[:, length:, :length] = mask[:, -1:]
    return whole


@pytest.mark.parametrize("form", ["flags", "numbers", "added"])
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_pairs_says_what_each_position_sees(form: str, way: str) -> None:
    heads = {"flags": 1, "numbers": 6, "added": 1}[form]
    seen = square(heads)
    low = torch.finfo(torch.float32).min
    mask = {
        "flags": seen,
        "numbers": seen.long(),
        "added": torch.zeros(seen.shape).masked_fill(~seen, low),
    }[form]
    given = {"max_new_tokens": 6, **QUIET, **WAYS[way]}
    out = MODEL.generate(IDS, attention_mask=mask, **given)
    for row, ids, own in zip(out, IDS, seen, strict=True):
        assert ended(row[7:]) == textbook(ids, torch.arange(20), grown(own, 6))
    if way == "cached":
        told = es.generate(
            MODEL, None, {"input_ids": IDS[0], "attention_mask": mask[0]}, max_new_tokens=6, **QUIET
        )
        assert told == ended(out[0, 7:])


def test_a_mask_of_pairs_does_not_go_behind_a_cache() -> None:
    past = MODEL.generate(
        IDS[:, :4], max_new_tokens=1, return_dict_in_generate=True, **QUIET
    ).past_key_values
    with pytest.raises(RequestError, match="4-D mask of new positions alone"):
        MODEL.generate(
            IDS[:, 4:], attention_mask=torch.ones(2, 1, 3, 7).bool(), past_key_values=past, **QUIET
        )


def test_the_sides_of_an_encoder_refuse_what_has_no_meaning() -> None:
    _, model = PAIRS["t5"]
    given = {**QUIET, "decoder_start_token_id": 0}
    with pytest.raises(RequestError, match="4-D"):
        model.generate(IDS, attention_mask=torch.ones(2, 1, 7, 7), **given)
    mask = torch.tensor(HOLES["a hole"])
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model.generate(
            IDS, attention_mask=mask, output_attentions=True, return_dict_in_generate=True, **given
        )
    with pytest.raises(UnsupportedError, match="prompt inputs"):
        model.prompt_inputs = [es.PromptInput("a", len, (4,), 5)]


# --- named inputs ---------------------------------------------------------------------------------


def boxes(rows: int, length: int) -> Tensor:
    drawn = torch.Generator().manual_seed(length)
    return torch.randint(0, SIDES, (rows, length, 4), generator=drawn)


def laid_out() -> tuple[LanguageModel, LanguageModel, LayoutDecoder]:
    """A model that reads a box per token, the one inside, and the network."""
    network = layout_model().network
    assert isinstance(network, LayoutDecoder)
    config = es.GenerationConfig(eos_token_id=39, pad_token_id=0)
    plain = LanguageModel(random_model(PLAIN), config)
    return LanguageModel(layout_model(), config), plain, network


@pytest.mark.parametrize("way", [*WAYS, "beams", "quantised"])
def test_boxes_of_a_batch_are_read_at_their_positions(way: str) -> None:
    model, plain, network = laid_out()
    ids, bbox = SMALL, boxes(2, 7)
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    extra = {"beams": {"num_beams": 3}, "quantised": {"cache_implementation": "quantized"}}
    options = {"max_new_tokens": 6, **{**WAYS, **extra}[way]}
    out = model.generate(ids, attention_mask=mask, bbox=bbox, **options)
    embeds = network.embed(ids) + network.boxes(bbox.flatten(0, 1)).view(2, 7, -1)
    beams = {"num_beams": 3} if way == "beams" else {}
    if way == "quantised":
        beams = {"cache_implementation": "quantized"}
    expected = plain.generate(
        ids, inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, **beams
    )
    assert torch.equal(out, expected)


def test_boxes_of_many_prompts_and_behind_a_cache() -> None:
    model, *_ = laid_out()
    ids, bbox = SMALL, boxes(2, 7)
    batch = model.generate(ids, bbox=bbox, max_new_tokens=6)
    prompts = [{"input_ids": ids[row], "bbox": bbox[row]} for row in (0, 1)]
    told = es.generate(model, None, prompts, max_new_tokens=6)
    assert [[*row, *[0] * (6 - len(row))] for row in told] == batch[:, 7:].tolist()
    held = model.generate(
        ids[:, :4], bbox=bbox[:, :4], max_new_tokens=1, return_dict_in_generate=True
    ).past_key_values
    for own in (slice(None), slice(4, None)):
        out = model.generate(
            ids[:, own],
            bbox=bbox[:, own],
            attention_mask=torch.ones(2, 7).long(),
            past_key_values=es.DynamicCache.from_legacy_cache(held.to_legacy_cache()),
            max_new_tokens=6,
        )
        assert torch.equal(out[:, -6:], batch[:, 7:])


NAMED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "too short": ({"bbox": boxes(2, 6)}, RequestError, r"wanted \(2, 7, 4\); got \(2, 6, 4\)"),
    "of more rows": ({"bbox": boxes(3, 7)}, RequestError, r"got \(3, 7, 4\)"),
    "of fewer sides": ({"bbox": boxes(2, 7)[..., :3]}, RequestError, r"got \(2, 7, 3\)"),
    "floats": ({"bbox": boxes(2, 7).float()}, RequestError, "wanted torch.int64"),
    "meta": ({"bbox": boxes(2, 7).to("meta")}, RequestError, "no numbers"),
    "text": ({"bbox": "left"}, RequestError, "bbox is not a tensor"),
    "misspelt": ({"bbx": boxes(2, 7)}, UnknownArgumentError, "bbox instead of bbx"),
    "in a loop": ({"bbox": boxes(2, 7), "custom_generate": print}, UnsupportedError, "named"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_wrong_named_input_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, *_ = laid_out()
    given, error, said = NAMED[name]

    def computes(*_: object, **__: object) -> None:
        raise AssertionError("the call reached the model")

    monkeypatch.setattr(TorchExecutor, "run", computes)
    with pytest.raises(error, match=said):
        model.generate(SMALL, **given)


def test_a_model_without_boxes_knows_none() -> None:
    with pytest.raises(UnknownArgumentError, match="'bbox'"):
        MODEL.generate(IDS, bbox=boxes(2, 7))
    with pytest.raises(UnknownArgumentError, match="'bbox'"):
        es.generate(MODEL, None, {"input_ids": IDS[0], "bbox": boxes(1, 7)})
