"""`past_key_values`: what is returned equals transformers', and a call continues from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import cache_utils as theirs

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from tests.models.tiny import ours as built
from tests.models.tiny import reference_decoder, reference_t5

IDS = torch.tensor([[5, 9, 23, 41, 7, 80], [12, 33, 60, 2, 71, 15]])
MORE = torch.tensor([[8, 44, 19], [61, 3, 50]])
PADDED_IDS = torch.tensor([[5, 9, 23, 41, 7, 80], [0, 0, 60, 2, 71, 15]])
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
QUIET = {"pad_token_id": 0, "eos_token_id": 96}


def pair(family: str, **changes: Any) -> tuple[Any, LanguageModel]:
    """A tiny model of transformers in float64, and ours with its weights."""
    torch.manual_seed(1)
    if family == "t5":
        reference = reference_t5(torch.float64, **changes)
        reference.generation_config.decoder_start_token_id = 0
    else:
        reference = reference_decoder(family, torch.float64, **changes)
    config = es.GenerationConfig.from_model_config(reference.config)
    config.decoder_start_token_id = reference.generation_config.decoder_start_token_id
    return reference, LanguageModel(built(reference), config)


MODELS = {
    "llama": pair("llama"),
    "qwen2": pair("qwen2"),
    "windows": pair("qwen2", **WINDOW),
    # transformers makes as many layers of cache as its encoder has.
    "t5": pair("t5", num_decoder_layers=2),
}


def run(model: Any, ids: Tensor = IDS, **options: Any) -> Any:
    options = {**QUIET, "max_new_tokens": 5, "return_dict_in_generate": True, **options}
    return model.generate(options.pop("inputs", ids), **options)


def same(ours: Any, reference: Any, mask: Tensor | None = None) -> None:
    """Both caches hold the same wherever a token stands; `mask` (B, T) of the prompt."""
    assert type(ours).__name__ == type(reference).__name__
    assert ours.get_seq_length() == int(reference.get_seq_length())
    for mine, other in zip(ours, reference, strict=True):
        for a, b in zip(mine, other, strict=True):
            if a is None or b is None or not a.is_floating_point():
                assert (a is None) == (b is None)
                continue
            assert a.shape == b.shape
            seen = torch.ones(a.shape[0], ours.get_seq_length(), dtype=torch.bool)
            if mask is not None:
                seen[:, : mask.shape[1]] = mask.bool()
            seen = seen[:, -a.shape[2] :]
            torch.testing.assert_close(
                a.transpose(1, 2)[seen], b.transpose(1, 2)[seen], rtol=0, atol=1e-10
            )


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "stopped": {"eos_token_id": list(range(0, 97, 3))},
    "beams stopped": {"num_beams": 3, "eos_token_id": list(range(0, 97, 3))},
    "padded": {"inputs": PADDED_IDS, "attention_mask": PADDED},
    "uncached": {"use_cache": False},
    "uncached beams": {"use_cache": False, "num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "windows", "t5"])
def test_the_returned_cache_is_the_references(family: str, way: str) -> None:
    results = []
    for model in MODELS[family]:
        torch.manual_seed(3)
        results.append(run(model, **WAYS[way]))
    reference, ours = results
    assert torch.equal(ours.sequences, reference.sequences)
    if "past_key_values" not in ours:
        assert ours.past_key_values is None and reference.past_key_values is None
        return
    theirs_past, past = reference.past_key_values, ours.past_key_values
    if family == "t5":
        same(past.self_attention_cache, theirs_past.self_attention_cache)
        past, theirs_past = past.cross_attention_cache, theirs_past.cross_attention_cache
    same(past, theirs_past, PADDED if way == "padded" else None)
    assert "past_key_values" in ours


@pytest.mark.parametrize("family", ["llama", "qwen2", "windows"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_conversation_goes_on_from_the_cache(family: str, beams: int) -> None:
    results = []
    for model, library in zip(MODELS[family], (theirs, es), strict=True):
        cache = library.DynamicCache(config=model.config) if family != "windows" else None
        if cache is None:
            cache = run(model, max_new_tokens=4).past_key_values
        out = (
            run(model, past_key_values=cache, max_new_tokens=4)
            if family != "windows"
            else run(model, max_new_tokens=4, past_key_values=None)
        )
        cache = out.past_key_values
        whole = torch.cat([out.sequences, MORE], dim=1)
        if beams > 1:
            cache.batch_repeat_interleave(beams)
        out = run(model, whole, past_key_values=cache, num_beams=beams)
        assert out.past_key_values is cache
        results.append(out)
    reference, ours = results
    assert torch.equal(ours.sequences, reference.sequences)
    same(ours.past_key_values, reference.past_key_values)


@pytest.mark.parametrize("family", ["llama", "windows"])
def test_new_ids_go_after_the_cache(family: str) -> None:
    results = []
    for model in MODELS[family]:
        first = run(model, attention_mask=PADDED)
        mask = torch.cat([PADDED, torch.ones(2, 5 - 1 + 3, dtype=torch.long)], dim=1)
        new = torch.cat([first.sequences[:, -1:], MORE], dim=1)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
        results.append(run(model, new, attention_mask=mask, past_key_values=first.past_key_values))
    reference, ours = results
    assert torch.equal(ours.sequences, reference.sequences)
    assert ours.prompt_length == 4
    same(ours.past_key_values, reference.past_key_values, PADDED)


def test_embeddings_go_on_as_ids_do() -> None:
    model = MODELS["llama"][1]
    table = model.state_dict()["model.embed_tokens.weight"]
    first = run(model)
    whole = torch.cat([first.sequences, MORE], dim=1)
    legacy = first.past_key_values.to_legacy_cache()
    wanted = run(model, whole, past_key_values=first.past_key_values).sequences[:, whole.shape[1] :]
    past = es.DynamicCache.from_legacy_cache(legacy)
    told = model.generate(
        inputs_embeds=table[whole], past_key_values=past, max_new_tokens=5, **QUIET
    )
    assert torch.equal(told, wanted)
    past = es.DynamicCache.from_legacy_cache(legacy)
    count = past.get_seq_length()
    told = model.generate(
        inputs_embeds=table[whole[:, count:]],
        attention_mask=torch.ones_like(whole),
        past_key_values=past,
        max_new_tokens=5,
        **QUIET,
    )
    assert torch.equal(told, wanted)
    assert past.get_seq_length() == whole.shape[1] + 4


def test_an_encoder_decoder_goes_on() -> None:
    results = []
    for index, model in enumerate(MODELS["t5"]):
        start = torch.tensor([[0, 7, 8], [0, 9, 30]])
        first = run(model, decoder_input_ids=start)
        whole = torch.cat([first.sequences, MORE], dim=1)
        # Without it transformers takes whole decoder prompts for new ones.
        mask = {"decoder_attention_mask": torch.ones_like(whole)} if index == 0 else {}
        past = first.past_key_values
        results.append(run(model, decoder_input_ids=whole, past_key_values=past, **mask))
    reference, ours = results
    assert torch.equal(ours.sequences, reference.sequences)
    same(ours.past_key_values.self_attention_cache, reference.past_key_values.self_attention_cache)


def test_a_static_cache_is_filled_in_place() -> None:
    results = []
    for model, library in zip(MODELS["llama"], (theirs, es), strict=True):
        cache = library.StaticCache(model.config, max_cache_len=20)
        results.append((run(model, past_key_values=cache), cache))
    (reference, their_cache), (ours, cache) = results
    assert torch.equal(ours.sequences, reference.sequences)
    for mine, other in zip(cache.layers, their_cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=1e-10)


def test_feeding_starts_after_the_past() -> None:
    model = MODELS["llama"][1]
    first = run(model)
    whole = torch.cat([first.sequences, MORE], dim=1)
    out = run(model, whole, past_key_values=first.past_key_values, output_hidden_states=True)
    assert out.hidden_states[0][0].shape[1] == whole.shape[1] - (IDS.shape[1] + 4)


def _past(**changes: Any) -> es.DynamicCache:
    return run(pair("llama", **changes)[1]).past_key_values


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no layers": ({"past_key_values": ()}, RequestError, "0 layers"),
    "half a layer": (
        {"past_key_values": [(torch.zeros(2, 2, 3, 8),)] * 3},
        RequestError,
        "2 tensors",
    ),
    "no tensors": ({"past_key_values": [(1, 2)] * 3}, RequestError, "'int'"),
    "tuples asked for without an output": (
        {"return_legacy_cache": True, "return_dict_in_generate": False},
        RequestError,
        "output object",
    ),
    "another kind": ({"past_key_values": 7}, RequestError, "not a cache"),
    "no cache": ({"past_key_values": es.DynamicCache(), "use_cache": False}, RequestError, "use_c"),
    "too short": ({}, RequestError, "does not fit the prompt"),
    "mask": ({"attention_mask": torch.ones(2, 12)}, RequestError, "does not fit the prompt"),
    "layers": ({"past_key_values": _past(num_hidden_layers=2)}, RequestError, "another model"),
    "heads": ({"past_key_values": _past(num_key_value_heads=3)}, RequestError, "another model"),
    "both": ({"cache_implementation": "dynamic"}, RequestError, "cache already"),
    "small": (
        {"past_key_values": es.StaticCache(MODELS["llama"][1].config, 8)},
        RequestError,
        "too small",
    ),
    "drafts": (
        {
            "past_key_values": es.StaticCache(MODELS["llama"][1].config, 30),
            "prompt_lookup_num_tokens": 3,
        },
        RequestError,
        "cannot be truncated",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_any_compute(name: str) -> None:
    options, error, text = WRONG[name]
    model = MODELS["llama"][1]
    past = _past()
    with pytest.raises(error, match=text):
        run(model, **{"past_key_values": past, **options})
    assert past.get_seq_length() == 10


def test_rows_and_types_must_fit() -> None:
    model = MODELS["llama"][1]
    whole = torch.cat([IDS, IDS], dim=1)
    past = _past()
    past.batch_select_indices(torch.tensor([0]))
    with pytest.raises(RequestError, match="rows"):
        run(model, whole, past_key_values=past)
    single = [tuple(x.float() for x in one) for one in _past().to_legacy_cache()]
    with pytest.raises(RequestError, match="another model"):
        run(model, whole, past_key_values=es.DynamicCache(single))


def test_right_padded_prompts_leave_the_cache_of_left_padded_ones() -> None:
    model = MODELS["windows"][1]
    right = torch.tensor([[5, 9, 23, 41, 7, 80], [60, 2, 71, 15, 0, 0]])
    left = run(model, PADDED_IDS, attention_mask=PADDED)
    other = run(model, right, attention_mask=PADDED.flip(1))
    assert torch.equal(other.sequences, left.sequences)
    same(other.past_key_values, left.past_key_values)


@pytest.mark.parametrize("apart", [False, True])
def test_padding_of_a_cache_cannot_be_called_real(apart: bool) -> None:
    model = MODELS["llama"][1]
    first = run(model, PADDED_IDS, attention_mask=PADDED)
    whole = torch.cat([first.sequences, MORE], dim=1)
    given = whole[:, 10:] if apart else whole
    with pytest.raises(RequestError, match="padding where the prompt has none in row 1"):
        run(
            model,
            given,
            attention_mask=torch.ones_like(whole),
            past_key_values=first.past_key_values,
        )


# --- round trips ----------------------------------------------------------------------------------

SAMPLED = {**QUIET, "eos_token_id": None, "do_sample": True, "return_dict_in_generate": True}
MORE_ONES = torch.ones(2, 4, dtype=torch.long)


@pytest.mark.parametrize("seed", [7, [3, 4]])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", ["whole", "new", "embeddings", "tuples", "no cache"])
def test_seeded_sampling_goes_on_with_the_draws_of_one_call(
    way: str, padded: bool, seed: Any
) -> None:
    """Draws are keyed by position, and what a cache holds counts."""
    model = MODELS["llama"][1]
    ids, mask = (PADDED_IDS, PADDED) if padded else (IDS, torch.ones_like(IDS))
    given = {"seed": seed, **SAMPLED}
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, **given).sequences
    first = model.generate(ids, attention_mask=mask, max_new_tokens=4, **given)
    whole, past = first.sequences, first.past_key_values
    given |= {"attention_mask": torch.cat([mask, MORE_ONES], dim=1), "max_new_tokens": 4}
    if way == "whole":
        found = model.generate(whole, past_key_values=past, **given)
    elif way == "new":
        found = model.generate(whole[:, -1:], past_key_values=past, **given)
    elif way == "embeddings":
        embed = model.get_input_embeddings()
        found = model.generate(inputs_embeds=embed(whole[:, -1:]), past_key_values=past, **given)
    elif way == "tuples":
        found = model.generate(whole, past_key_values=past.to_legacy_cache(), **given)
    else:
        found = model.generate(whole, **given)
    assert torch.equal(found.sequences[:, -4:], expected[:, -4:])
    pads = [0, 2] if padded else [0, 0]
    assert found.cached_tokens == [0 if way == "no cache" else 9 - pad for pad in pads]


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("beams", [1, 3])
def test_tuples_come_in_and_go_out(family: str, beams: int) -> None:
    model = MODELS[family][1]
    first = run(model)
    whole = torch.cat([first.sequences, MORE], dim=1)
    given = {"num_beams": beams, **({"decoder_input_ids": whole} if family == "t5" else {})}
    ids = IDS if family == "t5" else whole
    legacy = run(model, return_legacy_cache=True).past_key_values
    assert isinstance(legacy, tuple) and len(legacy[0]) == (4 if family == "t5" else 2)
    kind = es.EncoderDecoderCache if family == "t5" else es.DynamicCache
    again = kind.from_legacy_cache(legacy).to_legacy_cache()
    out = run(model, ids, past_key_values=first.past_key_values, **given)
    told = run(model, ids, past_key_values=legacy, return_legacy_cache=True, **given)
    assert torch.equal(told.sequences, out.sequences)
    expected = out.past_key_values.to_legacy_cache()
    for found, wanted in ((told.past_key_values, expected), (again, legacy)):
        for mine, other in zip(found, wanted, strict=True):
            assert all(map(torch.equal, mine, other))


def test_tuples_of_full_windows_are_refused() -> None:
    """They do not say how many positions the window has dropped."""
    model = MODELS["windows"][1]
    legacy = run(model).past_key_values.to_legacy_cache()
    whole = torch.cat([IDS, IDS, IDS], dim=1)
    with pytest.raises(RequestError, match="fewer than 3 positions in a layer with a window"):
        run(model, whole, past_key_values=legacy)


def test_tuples_of_a_static_cache_have_no_empty_room() -> None:
    model = MODELS["llama"][1]
    out = run(model, cache_implementation="static", max_cache_len=40, return_legacy_cache=True)
    assert {x.shape[2] for layer in out.past_key_values for x in layer} == {10}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("tuples", [False, True])
def test_a_real_token_whose_keys_are_zero_is_no_padding(apart: bool, tuples: bool) -> None:
    """Of a row whose embedding is 0, as `padding_idx` has it, all keys and values are 0."""
    reference = reference_decoder("llama", torch.float64)
    with torch.no_grad():
        reference.get_input_embeddings().weight[0] = 0
    model = LanguageModel(built(reference), MODELS["llama"][1].generation_config)
    ids = torch.tensor([[0, 9, 23, 41, 7, 80], [12, 33, 60, 2, 71, 15]])
    ones = torch.ones(2, 14, dtype=torch.long)
    first = run(model, ids, attention_mask=ones[:, :6], eos_token_id=None)
    past = first.past_key_values
    assert not past.layers[0].keys[0, :, 0].any()
    whole = torch.cat([first.sequences, MORE], dim=1)
    expected = run(model, whole, attention_mask=ones, eos_token_id=None).sequences
    given = whole[:, 10:] if apart else whole
    past = past.to_legacy_cache() if tuples else past
    found = run(model, given, attention_mask=ones, past_key_values=past, eos_token_id=None)
    assert torch.equal(found.sequences[:, -5:], expected[:, -5:])
