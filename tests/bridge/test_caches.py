"""Cache objects of transformers as `past_key_values`: filled by hand, taken, and given back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import everystep as es
from everystep.errors import RequestError
from tests.bridge.families import END, PAD, model_of

IDS = torch.tensor([[5, 9, 23, 31, 7, 8, 22, 30, 11], [PAD, PAD, PAD, 32, 12, 33, 6, 4, 17]])
MASK = (IDS != PAD).long()
EVEN = torch.tensor([[5, 9, 23, 31, 7, 8, 22, 30, 11], [12, 33, 6, 4, 17, 9, 9, 20, 35]])
MORE = torch.tensor([[8, 24, 19], [21, 5, 30]])
SAID: dict[str, Any] = {"max_new_tokens": 6, "suppress_tokens": [END]}
PADDED = ["llama", "mistral", "gpt2", "qwen3_moe"]
ALONE = ["gemma2", "bloom"]


def rows(name: str) -> dict[str, Tensor]:
    """A batch, padded on the left where transformers can read that in float64."""
    ids = IDS if name in PADDED else EVEN
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@torch.no_grad()
def filled(model: Any, given: dict[str, Tensor], cache: Any = None) -> Any:
    """A cache that a caller filled with all but the last position, in two forwards."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    ids, mask = given["input_ids"], given["attention_mask"]
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    for part in (slice(0, 5), slice(5, ids.shape[1] - 1)):
        own = {} if model.config.model_type == "bloom" else {"position_ids": places[:, part]}
        seen = mask[:, : part.stop]
        model(ids[:, part], attention_mask=seen, past_key_values=cache, use_cache=True, **own)
    return cache


def grown(given: dict[str, Tensor], sequences: Tensor) -> dict[str, Tensor]:
    """What was generated and more after it, as the next prompt."""
    ids = torch.cat([sequences, MORE], dim=1)
    new = ids.shape[1] - given["attention_mask"].shape[1]
    mask = torch.cat([given["attention_mask"], torch.ones(2, new, dtype=torch.int64)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


def same(one: Any, other: Any, mask: Tensor) -> None:
    """Both hold the same wherever a token stands; `mask` (B, T) of the prompt."""
    assert one.get_seq_length() == other.get_seq_length()
    seen = torch.ones(len(mask), one.get_seq_length(), dtype=torch.bool)
    seen[:, : mask.shape[1]] = mask.bool()
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert a.shape == b.shape
            shown = seen[:, -a.shape[2] :]
            a, b = a.transpose(1, 2)[shown], b.transpose(1, 2)[shown]
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", [*PADDED, *ALONE])
def test_one_that_was_filled_by_hand_is_continued(name: str, beams: int) -> None:
    model, given = model_of(name), rows(name)
    cache = filled(model, given)
    theirs_cache = copy.deepcopy(cache)
    if beams > 1:
        theirs_cache.batch_repeat_interleave(beams)
    how = {**given, **SAID, "num_beams": beams, "return_dict_in_generate": True}
    theirs = model.generate(**how, past_key_values=theirs_cache)
    ours = es.generate(model, **how, past_key_values=cache)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.past_key_values is cache
    assert ours.sequences.tolist() == model.generate(**given, **SAID, num_beams=beams).tolist()
    if beams == 1:
        same(cache, theirs.past_key_values, given["attention_mask"])


@pytest.mark.parametrize("name", [*PADDED, *ALONE])
def test_it_goes_from_one_library_to_the_other_and_back(name: str) -> None:
    model, given = model_of(name), rows(name)
    wrapped, cache = es.wrap(model), filled(model, given)
    out = wrapped.generate(**given, **SAID, past_key_values=cache)
    for library in (model, wrapped, model, wrapped):
        given = grown(given, out)
        alone = model.generate(**given, **SAID)
        out = library.generate(**given, **SAID, past_key_values=cache)
        assert out.tolist() == alone.tolist()
        assert cache.get_seq_length() == out.shape[1] - 1


def test_new_ids_alone_go_after_it() -> None:
    model, given = model_of("llama"), rows("llama")
    cache = filled(model, given)
    new = {"input_ids": given["input_ids"][:, -1:], "attention_mask": given["attention_mask"]}
    found = es.wrap(model).generate(**new, **SAID, past_key_values=cache)
    assert found[:, 1:].tolist() == model.generate(**given, **SAID)[:, 9:].tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
def test_a_call_without_one_returns_one_of_the_models_own_kind(name: str) -> None:
    model, given = model_of(name), rows("llama" if name != "t5" else name)
    how = {**SAID, "return_dict_in_generate": True}
    ours, theirs = es.wrap(model).generate(**given, **how), model.generate(**given, **how)
    assert type(ours.past_key_values) is type(theirs.past_key_values)
    if name == "t5":
        own = ours.past_key_values.self_attention_cache, theirs.past_key_values.self_attention_cache
        same(*own, torch.ones(2, 1))
        across = [one.past_key_values.cross_attention_cache for one in (ours, theirs)]
        same(across[0], across[1], given["attention_mask"])
        return
    same(ours.past_key_values, theirs.past_key_values, given["attention_mask"])
    last = ours.sequences[:, -1:]
    mask = torch.cat([given["attention_mask"], torch.ones(2, 6, dtype=torch.int64)], dim=1)
    places = mask.cumsum(-1)[:, -1:] - 1
    by_hand = [
        model(last, attention_mask=mask, position_ids=places, past_key_values=one.past_key_values)
        for one in (ours, theirs)
    ]
    torch.testing.assert_close(by_hand[0].logits, by_hand[1].logits, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_one_of_a_model_with_an_encoder(name: str, beams: int) -> None:
    model = model_of(name)
    start = model.config.decoder_start_token_id
    said = torch.cat([torch.full((2, 1), start), MORE, MORE], dim=1)
    given = {"input_ids": EVEN, "attention_mask": torch.ones_like(EVEN)}
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model(**given, decoder_input_ids=said[:, :-1], past_key_values=cache, use_cache=True)
    how = {**given, **SAID, "decoder_input_ids": said, "num_beams": beams}
    theirs = model.generate(**how)
    assert es.wrap(model).generate(**how, past_key_values=cache).tolist() == theirs.tolist()
    assert cache.get_seq_length() == theirs.shape[1] - 1
    if beams > 1:
        return
    # With such a cache transformers' own call feeds all ids again, so it is given one by hand.
    again = copy.deepcopy(cache)
    by_hand = model(**given, decoder_input_ids=theirs[:, -1:], past_key_values=again).logits
    wanted = model(**given, decoder_input_ids=theirs, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(by_hand, wanted, rtol=1e-9, atol=1e-9)
    more = {**how, "decoder_input_ids": torch.cat([theirs, MORE], dim=1)}
    for one in (cache, again):
        found = es.wrap(model).generate(**more, past_key_values=one)
        assert found.tolist() == model.generate(**more).tolist()


def test_one_without_windows_is_read_by_a_model_that_has_them() -> None:
    """What it holds beyond the windows is not wanted; afterwards it holds what the model sees."""
    model, given = model_of("mistral"), rows("mistral")
    cache = filled(model, given, DynamicCache())
    assert cache.layers[0].keys.shape[2] == 8
    found = es.wrap(model).generate(**given, **SAID, past_key_values=cache)
    assert found.tolist() == model.generate(**given, **SAID).tolist()
    assert cache.get_seq_length() == 14 and cache.layers[0].keys.shape[2] == 5
    more = grown(given, found)
    again = model.generate(**more, **SAID, past_key_values=cache)
    assert again.tolist() == model.generate(**more, **SAID).tolist()


def test_tuples_are_taken_and_returned() -> None:
    model, given = model_of("llama"), rows("llama")
    pairs = tuple((layer.keys, layer.values) for layer in filled(model, given).layers)
    how = {**given, **SAID, "return_dict_in_generate": True}
    ours = es.wrap(model).generate(**how, past_key_values=pairs, return_legacy_cache=True)
    theirs = model.generate(**how, past_key_values=DynamicCache(pairs))
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    same(DynamicCache(ours.past_key_values), theirs.past_key_values, given["attention_mask"])


def test_a_call_that_fails_leaves_it_as_it_was() -> None:
    model, given = model_of("llama"), rows("llama")
    cache = filled(model, given)
    before = copy.deepcopy(cache)

    def breaks(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 11:
            raise ZeroDivisionError
        return scores

    with pytest.raises(ZeroDivisionError):
        es.wrap(model).generate(**given, **SAID, past_key_values=cache, logits_processor=[breaks])
    same(cache, before, given["attention_mask"][:, :-1])
    found = es.wrap(model).generate(**given, **SAID, past_key_values=cache)
    assert found.tolist() == model.generate(**given, **SAID).tolist()


def test_a_loop_of_the_callers_gets_one_that_the_model_can_fill() -> None:
    model, given = model_of("llama"), rows("llama")

    def loop(model: Any, input_ids: Tensor, past_key_values: Any, **said: Any) -> Tensor:
        fed = input_ids[:, past_key_values.get_seq_length() :]
        mask = said["attention_mask"]
        places = (mask.cumsum(-1) - 1)[:, -fed.shape[1] :].clamp(min=0)
        out = model(fed, attention_mask=mask, position_ids=places, past_key_values=past_key_values)
        chosen: Tensor = out.logits[:, -1].argmax(-1)
        return chosen

    wrapped = es.wrap(model)
    wanted = model.generate(**given, max_new_tokens=1)[:, -1].tolist()
    assert wrapped.generate(**given, custom_generate=loop).tolist() == wanted
    cache = filled(model, given)
    found = wrapped.generate(**given, custom_generate=loop, past_key_values=cache)
    assert found.tolist() == wanted and cache.get_seq_length() == 9


def _static() -> Any:
    return StaticCache(model_of("llama").config, max_cache_len=20)


def _narrow() -> Any:
    """One whose windows have dropped what the model's own still show."""
    config = copy.deepcopy(model_of("mistral").config)
    config.sliding_window = 4
    return filled(model_of("mistral"), rows("mistral"), DynamicCache(config=config))


def _offloaded() -> Any:
    cache = filled(model_of("llama"), rows("llama"))
    cache.offloading = True
    return cache


def _half() -> Any:
    cache = filled(model_of("llama"), rows("llama"))
    cache.layers[1].reset()
    return cache


REFUSED: dict[str, tuple[str, Any, str]] = {
    "static": ("llama", _static, "StaticLayer.*DynamicCache"),
    "windows that are too narrow": ("mistral", _narrow, "dropped positions that layer 0"),
    "offloaded": ("llama", _offloaded, "memory of the host.*DynamicCache"),
    "half filled": ("llama", _half, "empty in layer 1"),
    "of another model": (
        "llama",
        lambda: filled(model_of("gpt2"), rows("gpt2")),
        "of another model",
    ),
    "without an encoder's half": ("t5", DynamicCache, "EncoderDecoderCache"),
    "with an encoder's half": (
        "llama",
        lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "model with an encoder",
    ),
    "of states": (
        "mamba",
        lambda: DynamicCache(config=model_of("mamba").config),
        "models of attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_before_any_forward(case: str) -> None:
    name, make, says = REFUSED[case]
    cache, wrapped = make(), es.wrap(model_of(name))
    calls: list[Any] = []
    handle = wrapped.module.register_forward_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(RequestError, match=f"(?s){says}"):
            wrapped.generate(**rows(name), **SAID, past_key_values=cache)
    finally:
        handle.remove()
    assert not calls


def test_a_model_of_this_library_says_what_it_takes() -> None:
    from tests.api.test_past import pair

    with pytest.raises(RequestError, match="not a cache of this library"):
        pair("llama")[1].generate(IDS, past_key_values=DynamicCache(), max_new_tokens=2)
