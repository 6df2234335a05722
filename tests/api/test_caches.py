"""`cache_implementation`, `cache_config`, `max_cache_len`: which cache a call returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.test_past import MODELS, PADDED, PADDED_IDS, run, same
from tests.models.tiny import ours, reference_mamba

STATIC: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "roomy": {"cache_implementation": "static", "max_cache_len": 40},
    "too little room": {"cache_implementation": "static", "max_cache_len": 3},
    "old name": {"cache_implementation": "hybrid_chunked"},
    "beams": {"cache_implementation": "sliding_window", "num_beams": 3},
    "sampled": {"cache_implementation": "static", "do_sample": True, "num_return_sequences": 2},
    "padded": {"cache_implementation": "static", "inputs": PADDED_IDS, "attention_mask": PADDED},
    "chunked": {"cache_implementation": "static", "prefill_chunk_size": 2},
}
OFFLOADED = ("offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked")


def same_room(ours: Any, reference: Any, held: int, padding: int = 0) -> None:
    """Static caches of one size hold the same, but for `padding` positions of the second row."""
    for own, other in zip(ours.layers, reference.layers, strict=True):
        assert own.get_max_length() == other.get_max_length()
        assert own.keys.shape == other.keys.shape
        seen = torch.ones(own.keys.shape[0], held, dtype=torch.bool)
        seen[1, :padding] = False
        seen = seen[:, -own.keys.shape[2] :]
        for a, b in ((own.keys, other.keys), (own.values, other.values)):
            a, b = a.transpose(1, 2)[:, : seen.shape[1]], b.transpose(1, 2)[:, : seen.shape[1]]
            torch.testing.assert_close(a[seen], b[seen], rtol=0, atol=1e-10)


# Chunks are for decoders, and transformers' second half keeps the padding of the prompt.
ROOMS = [
    (family, way)
    for family in ("llama", "windows", "t5")
    for way in STATIC
    if family != "t5" or way not in ("padded", "chunked")
]


@pytest.mark.filterwarnings("ignore:Using `cache_implementation")
@pytest.mark.parametrize(("family", "way"), ROOMS)
def test_static_caches_are_the_references(family: str, way: str) -> None:
    results = []
    for model in MODELS[family]:
        # transformers remembers the largest room of earlier calls.
        model.__dict__.pop("_previous_max_cache_length", None)
        torch.manual_seed(3)
        results.append(run(model, **STATIC[way]))
    reference, ours = results
    assert torch.equal(ours.sequences, reference.sequences)
    mine, theirs = ours.past_key_values, reference.past_key_values
    if family == "t5":
        same_room(mine.cross_attention_cache, theirs.cross_attention_cache, 6)
        mine, theirs = mine.self_attention_cache, theirs.self_attention_cache
    same_room(mine, theirs, mine.get_seq_length(), 2 if way == "padded" else 0)


@pytest.mark.parametrize(("family", "way"), ROOMS)
def test_a_static_cache_changes_no_token(family: str, way: str) -> None:
    model = MODELS[family][1]
    own = ("cache_implementation", "max_cache_len")
    dynamic = {name: value for name, value in STATIC[way].items() if name not in own}
    told = []
    for options in (STATIC[way], dynamic):
        torch.manual_seed(3)
        told.append(run(model, **options).sequences)
    assert torch.equal(*told)


def test_a_dynamic_cache_is_the_usual_one() -> None:
    for kind in ("dynamic", "hybrid"):
        reference, ours = (run(model, cache_implementation=kind) for model in MODELS["windows"])
        same(ours.past_key_values, reference.past_key_values)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_cache_is_returned_and_goes_on(bits: int) -> None:
    model = MODELS["llama"][1]
    settings = {"nbits": bits, "q_group_size": 4, "residual_length": 2}
    first = run(model, cache_implementation="quantized", cache_config=settings)
    past = first.past_key_values
    assert isinstance(past, es.QuantizedCache) and past.get_seq_length() == 10
    full = run(model).past_key_values
    stored = sum(layer.stored_bytes for layer in past.layers)
    assert stored < sum(keys.nbytes + values.nbytes for keys, values in full.to_legacy_cache())
    for own, (keys, _) in zip(past.layers, full.to_legacy_cache(), strict=True):
        near = (own.whole()[0] - keys).abs().max()
        assert 0 < near < keys.abs().max() * 8 / 2**bits  # later layers read what was rounded
    whole = torch.cat([first.sequences, first.sequences[:, :3]], dim=1)
    again = run(model, whole, past_key_values=past)
    assert again.past_key_values is past and past.get_seq_length() == whole.shape[1] + 4


def test_nothing_is_copied_into_a_cache_that_is_not_returned() -> None:
    model = MODELS["llama"][1]
    wanted = run(model, cache_implementation="static")
    told = run(model, cache_implementation="static", return_dict_in_generate=False)
    assert torch.equal(told, wanted.sequences)


def test_healed_prompts_choose_a_cache_too() -> None:
    out = run(
        tiny_llama(),
        torch.tensor([[5, 9, 23]]),
        token_healing=True,
        eos_token_id=2,
        tokenizer=tiny_tokenizer(320),
        cache_implementation="static",
    )
    assert isinstance(out.past_key_values, es.StaticCache)
    assert out.past_key_values.get_seq_length() == out.sequences.shape[1] - 1


def test_a_checkpoint_chooses_silently() -> None:
    model = LanguageModel(MODELS["llama"][1].core)
    dynamic = dict.fromkeys(OFFLOADED, es.DynamicCache)
    for kind, found in {**dynamic, "sliding_window": es.StaticCache}.items():
        inherited = {"cache_implementation": kind}
        model.generation_config = es.GenerationConfig.from_checkpoint(inherited)
        assert type(run(model).past_key_values) is found
        mine = es.DynamicCache()
        assert run(model, past_key_values=mine).past_key_values is mine


STRANGE = {"nbits": 4, "bits": 2}
WRONG: dict[str, tuple[dict[str, Any], type[EverystepError], list[str]]] = {
    **{
        kind: (
            {"cache_implementation": kind},
            UnsupportedError,
            [f"'{kind}'", "rows stay where the model computes", "'quantized'"],
        )
        for kind in OFFLOADED
    },
    "paged": ({"cache_implementation": "paged"}, UnsupportedError, ["paged", "everystep.generate"]),
    "unknown": ({"cache_implementation": "statik"}, RequestError, ["'statik'", "'static'"]),
    "drafts": (
        {"cache_implementation": "static", "prompt_lookup_num_tokens": 2},
        RequestError,
        ["cache_implementation='static'", "truncated", "leave the drafts out"],
    ),
    "bits": (
        {"cache_implementation": "quantized", "cache_config": {"nbits": 3}},
        RequestError,
        ["nbits=8 or 4", "3"],
    ),
    "backend": (
        {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}},
        RequestError,
        ["backend", "'quanto'", "Leave backend out"],
    ),
    "setting": (
        {"cache_implementation": "quantized", "cache_config": STRANGE},
        RequestError,
        ["bits", "nbits, q_group_size"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_chosen_is_refused_by_name(name: str) -> None:
    options, error, parts = WRONG[name]
    with pytest.raises(error) as caught:
        run(MODELS["llama"][1], **options)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_quantised_caches_are_for_layers_without_windows() -> None:
    with pytest.raises(UnsupportedError, match="for models without sliding windows"):
        run(MODELS["windows"][1], cache_implementation="quantized")


@pytest.mark.parametrize(
    "choice", [{"cache_implementation": "static"}, {"max_cache_len": 9}, {"cache_config": {}}]
)
def test_calls_without_a_cache_to_return_refuse_a_choice(choice: dict[str, Any]) -> None:
    (name,) = choice
    with pytest.raises(UnsupportedError, match=f"{name}=.*model.generate"):
        es.generate(MODELS["llama"][1], None, [[5, 6]], **choice)


def test_every_call_refuses_quantised_keys_for_a_model_with_states() -> None:
    model = LanguageModel(ours(reference_mamba(torch.float64)))
    given: dict[str, Any] = {"max_new_tokens": 2, "cache_implementation": "quantized"}
    calls: tuple[Callable[[], Any], ...] = (
        lambda: model.generate(torch.tensor([[5, 6]]), **given),
        lambda: es.generate(model, None, [[5, 6]], **given),
        lambda: [*es.stream(model, None, [[5, 6]], **given)],
        lambda: es.open(model, None, [5, 6], **given).result(),
    )
    for call in calls:
        with pytest.raises(UnsupportedError, match="hold states, not keys and values"):
            call()
