"""`model(...)` with a cache: logits and caches are transformers', in loops that callers write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import cache_utils as theirs

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError, RequestError
from tests.api.test_past import IDS, MODELS, PADDED, PADDED_IDS, same

DECODERS = ["llama", "qwen2", "windows"]


def near(ours: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)


def loop(model: Any, ids: Tensor, past: Any, steps: int = 6) -> tuple[list[Tensor], Any]:
    """A loop as people write it: the prompt, then one token at a time; logits are changed."""
    seen, new, mask = [], ids, torch.ones_like(ids)
    for _ in range(steps):
        out = model(input_ids=new, attention_mask=mask, past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[:, -1, :]
        logits /= 0.7
        seen.append(logits)
        new = logits.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    return seen, past


def caches(kind: str, library: Any, model: Any) -> Any:
    if kind == "dynamic":
        return library.DynamicCache(config=model.config)
    return library.StaticCache(model.config, max_cache_len=14) if kind == "static" else None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_loop_by_hand_gives_the_references_logits(family: str, kind: str) -> None:
    results = [
        loop(model, IDS, caches(kind, library, model))
        for model, library in zip(MODELS[family], (theirs, es), strict=True)
    ]
    (logits, their_cache), (found, cache) = results
    near(torch.stack(found), torch.stack(logits))
    assert cache.get_seq_length() == int(their_cache.get_seq_length()) == 11
    if kind != "static":
        same(cache, their_cache)


@torch.no_grad()
@pytest.mark.parametrize("split", [1, 3, 5])
@pytest.mark.parametrize("family", DECODERS)
def test_pieces_are_the_whole_after_padding(family: str, split: int) -> None:
    reference, ours = MODELS[family]
    places = (PADDED.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": PADDED, "position_ids": places}
    expected = reference(PADDED_IDS, **given, use_cache=False).logits
    past = es.DynamicCache(config=ours.config)
    parts = []
    for part in (slice(0, split), slice(split, 6)):
        out = ours(
            PADDED_IDS[:, part],
            attention_mask=PADDED[:, : part.stop],
            position_ids=places[:, part],
            past_key_values=past,
        )
        assert out.past_key_values is past
        parts.append(out.logits)
    near(torch.cat(parts, dim=1)[PADDED.bool()], expected[PADDED.bool()])


@torch.no_grad()
def test_embeddings_and_generate_go_on_from_one_cache() -> None:
    model = MODELS["llama"][1]
    read = model(inputs_embeds=model.get_input_embeddings()(IDS))
    assert read.past_key_values.get_seq_length() == 6 and read["logits"] is read[0]
    whole = torch.cat([IDS, read.logits[:, -1:].argmax(-1)], dim=1)
    out = model.generate(
        whole, past_key_values=read.past_key_values, max_new_tokens=4, eos_token_id=96
    )
    assert torch.equal(out, model.generate(IDS, max_new_tokens=5, eos_token_id=96))
    near(
        model(out[:, -1:], past_key_values=read.past_key_values).logits[:, -1],
        model(out).logits[:, -1],
    )


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_cache_serves_a_loop(bits: int) -> None:
    model = MODELS["llama"][1]
    small = es.QuantizedCache("everystep", model.config, nbits=bits, q_group_size=2,
                              residual_length=2)  # fmt: skip
    found, past = loop(model, IDS, small)
    expected, _ = loop(model, IDS, None)
    assert past.get_seq_length() == 11
    near(found[0], expected[0])
    last = (found[1] - expected[1]).abs().max()
    assert 0 < last < {8: 0.1, 4: 4.0}[bits]


def test_caches_can_be_changed_in_place_afterwards() -> None:
    model: LanguageModel = MODELS["llama"][1]
    cache = es.StaticCache(model.config, 12)
    model.generate(IDS, past_key_values=cache, max_new_tokens=3, eos_token_id=96)
    cache.reset()
    model(IDS, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.layers[0].keys.any()


def test_without_a_cache_nothing_is_kept() -> None:
    model = MODELS["llama"][1]
    out = model(IDS, use_cache=False)
    assert out.past_key_values is None and list(out) == ["logits"] and len(out) == 1
    assert len(model(IDS).to_tuple()) == 2


@torch.no_grad()
@pytest.mark.parametrize("kept", [0, 1, 3, 9, torch.tensor([0, 4, -1]), torch.tensor([2])], ids=str)
def test_logits_of_some_positions_are_the_references(kept: Any) -> None:
    for family in DECODERS:
        reference, ours = MODELS[family]
        expected = reference(IDS, logits_to_keep=kept).logits
        near(ours(IDS, logits_to_keep=kept).logits, expected)


@torch.no_grad()
def test_a_tuple_is_returned_where_one_is_asked_for() -> None:
    reference, ours = MODELS["llama"]
    (logits,) = ours(IDS, use_cache=False, return_dict=False)
    near(logits, reference(IDS, use_cache=False, return_dict=False)[0])
    logits, past = ours(IDS, return_dict=False)
    assert isinstance(past, es.DynamicCache) and logits.shape[1] == 6
    assert isinstance(ours(IDS, return_dict=True), type(ours(IDS)))


def _small(**changes: Any) -> es.StaticCache:
    model = MODELS["llama"][1]
    cache = es.StaticCache(model.config, 7)
    model(IDS[:1] if changes.get("rows") else IDS, past_key_values=cache)
    return cache


WRONG: dict[str, tuple[dict[str, Any], type[EverystepError], str]] = {
    "kind": ({"past_key_values": ()}, RequestError, "from_legacy_cache"),
    "room": ({"past_key_values": _small()}, RequestError, "too small.*12 positions"),
    "rows": ({"past_key_values": _small(rows=1)}, RequestError, "rows"),
    "kept": ({"logits_to_keep": -1}, RequestError, "logits_to_keep"),
    "index": ({"logits_to_keep": torch.tensor([6])}, RequestError, "integers below 6"),
    "mask": ({"attention_mask": torch.ones(2, 5)}, RequestError, "cached positions included"),
    "both": ({"inputs_embeds": torch.zeros(2, 6, 48)}, RequestError, "exactly one"),
    "pair": (
        {"past_key_values": es.EncoderDecoderCache(es.DynamicCache(), es.DynamicCache())},
        RequestError,
        "self_attention_cache",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    options, error, text = WRONG[name]
    past = options.get("past_key_values")
    before = getattr(past, "get_seq_length", lambda: 0)()
    with pytest.raises(error, match=text):
        MODELS["llama"][1](IDS, **options)
    assert getattr(past, "get_seq_length", lambda: 0)() == before


TARGET = torch.tensor([[0, 7, 31, 60, 4], [0, 12, 5, 77, 3]])
SEEN = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


@torch.no_grad()
@pytest.mark.parametrize("parts", [[5], [1, 1, 1, 1, 1], [2, 3]], ids=str)
@pytest.mark.parametrize("source", ["ids", "states", "nothing again"])
def test_an_encoder_and_its_decoder_keep_a_cache_by_hand(source: str, parts: list[int]) -> None:
    reference, ours = MODELS["t5"]
    given: dict[str, Any] = {"input_ids": IDS, "attention_mask": SEEN}
    whole = reference(**given, decoder_input_ids=TARGET, use_cache=False).logits
    if source == "states":
        states = reference.get_encoder()(**given).last_hidden_state
        given = {"encoder_outputs": (states,), "attention_mask": SEEN}
    for cache in (None, es.EncoderDecoderCache(es.DynamicCache(), es.DynamicCache())):
        found, first = [], 0
        for count in parts:
            new = TARGET[:, first : first + count]
            out = ours(**given, decoder_input_ids=new, past_key_values=cache, use_cache=True)
            found.append(out.logits)
            cache, first = out.past_key_values, first + count
            if source == "nothing again":
                given = {"attention_mask": SEEN}
        assert isinstance(cache, es.EncoderDecoderCache) and cache.get_seq_length() == 5
        near(torch.cat(found, dim=1), whole)
        given = {"input_ids": IDS, "attention_mask": SEEN}


@torch.no_grad()
def test_a_cache_of_both_halves_is_kept_unless_it_is_not_wanted() -> None:
    ours = MODELS["t5"][1]
    kept = ours(IDS, decoder_input_ids=TARGET).past_key_values
    assert isinstance(kept, es.EncoderDecoderCache) and all(kept.is_updated.values())
    assert kept.cross_attention_cache.get_seq_length() == 6
    assert ours(IDS, decoder_input_ids=TARGET, use_cache=False).past_key_values is None


@torch.no_grad()
def test_loops_and_calls_take_turns_with_it() -> None:
    ours = MODELS["t5"][1]
    options = {"max_new_tokens": 4, "eos_token_id": 96}
    whole = ours.generate(IDS, **options)
    past = ours(IDS, decoder_input_ids=whole[:, :2]).past_key_values
    options["max_new_tokens"] = 2
    again = ours.generate(IDS, decoder_input_ids=whole[:, :3], past_key_values=past, **options)
    assert torch.equal(again, whole)
    last = ours(IDS, decoder_input_ids=again[:, -1:], past_key_values=past).logits
    near(last, ours(IDS, decoder_input_ids=again).logits[:, -1:])


ENCODED: dict[str, tuple[dict[str, Any], str]] = {
    "one half": ({"past_key_values": es.DynamicCache()}, "EncoderDecoderCache"),
    "rows": ({"past_key_values": "filled", "decoder_input_ids": TARGET[:1]}, "rows"),
    "mask": (
        {"past_key_values": "filled", "decoder_attention_mask": torch.ones(2, 5)},
        "cached positions included",
    ),
    "source": ({"past_key_values": "filled", "attention_mask": torch.ones(2, 4)}, "does not fit"),
}


@torch.no_grad()
@pytest.mark.parametrize("case", ENCODED)
def test_what_does_not_fit_an_encoder_and_its_decoder(case: str) -> None:
    (options, says), ours = ENCODED[case], MODELS["t5"][1]
    if options["past_key_values"] == "filled":
        past = ours(IDS, decoder_input_ids=TARGET).past_key_values
        options = {**options, "past_key_values": past}
    with pytest.raises(RequestError, match=says):
        ours(IDS, **{"decoder_input_ids": TARGET, **options})
