"""Towers, positions and forwards of models that read pictures equal transformers', in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, FormatError, RequestError, UnsupportedError
from everystep.models import build_model, named_weights
from everystep.models.families import find_family
from everystep.models.loader import HeldWeights
from everystep.models.vision.places import Extent, kinds_of, rope_index, table_places
from tests.models.pictures import (
    END,
    FILM,
    GREEDY,
    IMAGE,
    OWN,
    ROWS,
    SMALL,
    START,
    TEXT,
    TOKENS,
    VIDEO,
    Shown,
    model_of,
    ours_of,
    prompt_of,
    reference_of,
)
from tests.models.tiny import farthest

GRIDS = [(1, 4, 6), (1, 8, 4), (3, 4, 4), (1, 2, 2), (2, 10, 14)]


@pytest.mark.parametrize("kind", OWN)
def test_a_tower_is_the_references(kind: str) -> None:
    reference = reference_of(kind)
    model, grids = ours_of(reference), torch.tensor(GRIDS)
    assert model.tower is not None
    pixels = torch.randn(int(grids.prod(-1).sum()), 96, dtype=torch.float64)
    with torch.no_grad():
        expected = reference.model.get_image_features(pixels, grids, return_dict=True)
    parts = pixels.split(grids.prod(-1).tolist())
    for index, (grid, part) in enumerate(zip(GRIDS, parts, strict=True)):
        features, deep = model.tower.encode(part, grid)
        assert farthest(features, expected.pooler_output[index]) < 1e-10
        if deep is not None:
            for tap, one in enumerate(expected.deepstack_features):
                assert farthest(deep[:, tap], one[index]) < 1e-10


def test_the_table_of_positions_is_read_between_its_entries() -> None:
    places = torch.stack([torch.zeros(4, dtype=torch.long), torch.arange(4)])
    entries, shares = table_places(places, (1, 1, 4), 48)
    assert entries[:, 0].tolist() == [0, 15, 31, 47]
    expected = torch.tensor([0, 2 / 3, 1 / 3, 0])
    assert torch.allclose(shares[:, 1], expected, atol=1e-5) and shares.sum() == 4


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", OWN)
def test_a_forward_is_the_references(kind: str, rows: str) -> None:
    reference = reference_of(kind)
    given = prompt_of(ROWS[rows], apart=kind.startswith("qwen3"))
    with torch.no_grad():
        expected = reference(**given, output_hidden_states=True, use_cache=False)
    found = model_of(reference)(**given, output_hidden_states=True)
    seen = given["attention_mask"] > 0
    assert farthest(found.logits[seen], expected.logits[seen]) < 1e-10
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert farthest(ours[seen], theirs[seen]) < 1e-10


@pytest.mark.parametrize("kind", OWN)
def test_weights_go_in_and_out_under_the_names_of_checkpoints(kind: str) -> None:
    reference = reference_of(kind)
    weights = dict(named_weights(ours_of(reference)))
    assert weights.keys() == reference.state_dict().keys()
    for name, weight in reference.state_dict().items():
        # Files hold stacks of experts turned; transformers turns them when it loads and saves.
        turned = weight.mT if ".experts." in name else weight
        assert torch.equal(weights[name], turned), name


def test_positions_of_the_worked_example() -> None:
    """Two by three features between text: what follows stands behind the longer side."""
    spec = ours_of(reference_of("qwen3_vl")).spec.vision
    ids = np.array([5, 6, START, *[IMAGE] * 6, END, 7])
    found, follows = rope_index(spec, kinds_of(spec, ids), [Extent((1, 4, 6))], [])
    assert follows == 8 and found.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize("kind", OWN)
def test_positions_are_the_references(kind: str) -> None:
    reference = reference_of(kind)
    spec, apart = ours_of(reference).spec.vision, kind.startswith("qwen3")
    for rows in ROWS.values():
        given = prompt_of(rows, apart=apart)
        if not {"image_grid_thw", "video_grid_thw"} & given.keys():
            continue
        names = ("input_ids", "mm_token_type_ids", "attention_mask")
        grids = {name: given.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        expected, deltas = reference.model.get_rope_index(**{n: given[n] for n in names}, **grids)
        images, videos = (
            iter([] if grid is None else [Extent(tuple(one)) for one in grid.tolist()])
            for grid in grids.values()
        )
        for row, (ids, mask) in enumerate(
            zip(given["input_ids"], given["attention_mask"].bool(), strict=True)
        ):
            kinds = kinds_of(spec, ids[mask].numpy())
            own = [part for part in rows[row] if not isinstance(part, int)]
            mine = [[next(images) for one in own if not one.video]]
            mine.append([next(videos) for one in own if one.video])
            found, _ = rope_index(spec, kinds, *mine)
            assert torch.equal(torch.from_numpy(found), expected[:, row, mask])
            assert found.max() + 1 - len(kinds) == deltas[row]


def test_the_older_form_of_a_configuration() -> None:
    reference = reference_of("qwen3_vl")
    config = reference.config.to_dict()
    text = dict(config["text_config"])
    rope = {**text.pop("rope_parameters")}
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    older = {**config, "text_config": text}
    older["vision_config"] = {**config["vision_config"], "model_type": "qwen3_vl"}
    model = build_model(older, HeldWeights(reference.state_dict()), dtype=torch.float64)
    given = prompt_of(ROWS["an image"])
    assert torch.equal(es.LanguageModel(model)(**given).logits, model_of(reference)(**given).logits)


@pytest.mark.parametrize("kind", OWN)
def test_what_a_configuration_leaves_out_is_the_references(kind: str) -> None:
    """Of the defaults, text and tower do not fit together in width alone."""
    text = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    width = {"text_config": text}
    config, family = OWN[kind][0](**width).to_dict(), find_family(kind)
    bare: dict[str, Any] = {"model_type": kind, **width}
    assert family.read_spec({**family.defaults, **bare}) == family.read_spec(config)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_older_names_and_a_configuration_in_one_piece(kind: str) -> None:
    reference = reference_of(kind)
    older = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): weight
        for name, weight in reference.state_dict().items()
    }
    config = reference.config.to_dict()
    text = config.pop("text_config")
    text["rope_scaling"] = {**text.pop("rope_parameters"), "type": "mrope"}
    theta = text["rope_scaling"].pop("rope_theta")
    del text["rope_scaling"]["rope_type"]
    whole = {**text, "rope_theta": theta, **config}
    model = build_model(whole, HeldWeights(older), dtype=torch.float64)
    given = prompt_of(ROWS["an image"], apart=False)
    found, expected = es.LanguageModel(model)(**given), model_of(reference)(**given)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("kind", OWN)
def test_folders_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = reference_of(kind, torch.float32)
    reference.save_pretrained(tmp_path)
    model = es.load_model(tmp_path)
    given = prompt_of(ROWS["an image"], apart=kind.startswith("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        expected = reference(**given).logits
    assert farthest(model(**given).logits, expected) < 1e-5
    assert model.context == 256 and model.depth == 3


def test_frame_groups_stand_as_far_apart_as_they_last() -> None:
    reference = reference_of("qwen2_5_vl")
    given = prompt_of([[5, FILM, 8], [9, FILM]], apart=False)
    given["second_per_grid_ts"] = torch.tensor([0.75, 2.0])
    with torch.no_grad():
        expected = reference(**given).logits
    seen = given["attention_mask"] > 0
    model = model_of(reference)
    assert farthest(model(**given).logits[seen], expected[seen]) < 1e-10
    del given["second_per_grid_ts"]
    assert farthest(model(**given).logits[seen], expected[seen]) > 1e-3
    with pytest.raises(RequestError, match="does not fit the videos"):
        model(**given, second_per_grid_ts=[1.0])


WRONG: dict[str, tuple[dict[str, Any], type[EverystepError], str]] = {
    "no object": ({"text_config": [1]}, FormatError, "text_config is impossible"),
    "no tower": ({"vision_config": 3}, FormatError, "vision_config is impossible"),
    "sections of too many pairs": (
        {"text_config": {"rope_scaling": {"mrope_section": [24, 20, 20]}}},
        FormatError,
        "16 in all",
    ),
    "two sections": (
        {"text_config": {"rope_scaling": {"mrope_section": [8, 8]}}},
        FormatError,
        "mrope_section is impossible",
    ),
    "a negative section": (
        {"text_config": {"rope_scaling": {"mrope_section": [18, -1, -1]}}},
        FormatError,
        "mrope_section is impossible",
    ),
    "columns everywhere": (
        {"text_config": {"rope_scaling": {"mrope_section": [0, 0, 16]}}},
        FormatError,
        "in a third of the pairs",
    ),
    "sections one after another": (
        {"text_config": {"rope_scaling": {"mrope_interleaved": False}}},
        UnsupportedError,
        "mrope_interleaved is false",
    ),
    "a rope of words": ({"text_config": {"rope_scaling": "long"}}, FormatError, "an object"),
    "heads that do not turn": (
        {"vision_config": {"hidden_size": 66}},
        FormatError,
        "hidden_size is impossible",
    ),
    "a table that is no square": (
        {"vision_config": {"num_position_embeddings": 17}},
        FormatError,
        "a square number",
    ),
    "taps beyond the blocks": (
        {"vision_config": {"deepstack_visual_indexes": [0, 3]}},
        FormatError,
        "below 3",
    ),
    "taps twice": (
        {"vision_config": {"deepstack_visual_indexes": [1, 1]}},
        FormatError,
        "rising numbers",
    ),
    "taps that are no list": (
        {"vision_config": {"deepstack_visual_indexes": 5}},
        FormatError,
        "deepstack_visual_indexes is impossible",
    ),
    "more taps than layers": (
        {"text_config": {"num_hidden_layers": 1}},
        FormatError,
        "deepstack_visual_indexes is impossible",
    ),
    "features of another width": (
        {"vision_config": {"out_hidden_size": 32}},
        FormatError,
        "out_hidden_size is impossible",
    ),
    "one id for both": ({"video_token_id": IMAGE}, FormatError, "video_token_id is impossible"),
    "a negative id": ({"image_token_id": -1}, FormatError, "image_token_id is impossible"),
    "patches of nothing": ({"vision_config": {"patch_size": 0}}, FormatError, "patch_size"),
    "an unknown activation": (
        {"vision_config": {"hidden_act": "softmax"}},
        UnsupportedError,
        "hidden_act is not supported",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_broken_configurations_are_refused(wrong: str) -> None:
    given, kind, text = WRONG[wrong]
    _, _, own_text, rope, own_vision = OWN["qwen3_vl"]
    parts = {
        "text_config": {**TEXT, **own_text, "rope_scaling": rope},
        "vision_config": {"depth": 3, "num_heads": 4, "patch_size": 4, **own_vision},
    }
    config: dict[str, Any] = {"model_type": "qwen3_vl", **TOKENS}
    for name, part in parts.items():
        values = given.get(name, {})
        if isinstance(values, dict):
            values = {k: {**rope, **v} if isinstance(v, dict) else v for k, v in values.items()}
        config[name] = {**part, **values} if isinstance(values, dict) else values
    config |= {name: value for name, value in given.items() if name not in parts}
    with pytest.raises(kind, match=text):
        build_model(config, HeldWeights({}))


def test_placeholders_and_grids_that_do_not_fit_are_refused() -> None:
    spec = ours_of(reference_of("qwen3_vl")).spec.vision
    for ids, images, videos in (
        ([IMAGE] * 5, [Extent((1, 4, 6))], []),
        ([IMAGE] * 6, [], []),
        ([5], [Extent((1, 4, 6))], []),
        ([VIDEO] * 8, [], [Extent((1, 4, 4))]),
    ):
        with pytest.raises(RequestError, match="placeholders of a prompt do not fit"):
            rope_index(spec, kinds_of(spec, np.array(ids)), images, videos)


@pytest.mark.slow
def test_two_layers_in_the_shape_of_the_2b() -> None:
    """Widths, heads, sections and taps of Qwen3-VL-2B; a vocabulary of 2,000."""
    text = {
        "vocab_size": 2000,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
    }
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    vision = {
        "depth": 3,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0, 2],
        "initializer_range": 0.02,
    }
    reference = reference_of("qwen3_vl", torch.float32, vision=vision, rope_parameters=rope, **text)
    shown = Shown((1, 16, 20))
    given = prompt_of([[5, shown, 6, SMALL, 8], [9, SMALL, 7]], patch=1536, dtype=torch.float32)
    model = model_of(reference)
    with torch.no_grad():
        expected = reference(**given).logits
    seen = given["attention_mask"] > 0
    assert farthest(model(**given).logits[seen], expected[seen]) < 1e-5
    for way in ({}, {"num_beams": 3}):
        tokens = reference.generate(**given, **GREEDY, **way)
        assert torch.equal(model.generate(**given, **GREEDY, **way), tokens)
    rounded = model_of(reference, dtype=None, quantize="int4").generate(**given, **GREEDY)
    assert rounded.shape[0] == 2
