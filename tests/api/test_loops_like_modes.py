"""Loops of the caller's take what the engine's own modes take: encoders, guidance and a seed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.processors.guidance import LoopGuidance
from everystep.testing.models import tiny_llama
from tests.models.tiny import ids, ours, reference_mamba, reference_pair, sounds
from tests.parity.models import CATALOGUE, pair, subject

NAME = next(iter(CATALOGUE))
IDS = torch.tensor([[5, 6, 7, 8], [3, 9, 10, 11]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
AWAY = {
    "negative_prompt_ids": torch.tensor([[4, 12, 9], [0, 0, 30]]),
    "negative_prompt_attention_mask": torch.tensor([[1, 1, 1], [0, 0, 1]]),
}
OWN_LOOP = transformers.GenerationMixin._sample
"""The loop by which transformers itself decodes."""
FAMILIES = ("t5", "bart", "marian", "whisper")


@cache
def reference_of(family: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = {"num_decoder_layers": 2} if family == "t5" else {"decoder_layers": 2}
        return reference_pair(family, torch.float64, **layers)


def model_of(family: str, *, wrapped: bool) -> LanguageModel:
    reference = reference_of(family)
    if wrapped:
        return es.wrap(reference)
    config = GenerationConfig.from_checkpoint(reference.generation_config.to_diff_dict())
    return LanguageModel(ours(reference), config)


def read_by(family: str) -> dict[str, Any]:
    """What an encoder reads, with padding where it can be, and how a call decodes it."""
    given: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": 2, "pad_token_id": 0}
    given |= {"do_sample": False, "decoder_start_token_id": 3}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if family == "whisper":
            return given | {"input_features": sounds(2, torch.float64)}
        mask = torch.ones(2, 7, dtype=torch.int64)
        mask[0, 4:] = 0
        return given | {"input_ids": ids(2, 7) * mask, "attention_mask": mask}


def kept(loop_inputs: dict[str, Any]) -> Any:
    """A loop that keeps what it is given, and generates nothing."""

    def loop(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
        loop_inputs.update(inputs, model=model, input_ids=input_ids)
        return input_ids

    return loop


# --- encoders -------------------------------------------------------------------------------------

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"use_cache": False, "repetition_penalty": 1.4},
    {"decoder_input_ids": torch.tensor([[3, 8, 9], [3, 5, 11]]), "min_new_tokens": 4},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=("plain", "uncached", "begun"))
@pytest.mark.parametrize("wrapped", (False, True), ids=("own", "wrapped"))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_references_own_loop_decodes_beside_an_encoder(
    family: str, wrapped: bool, settings: dict[str, Any]
) -> None:
    given = {**read_by(family), **settings}
    wanted = transformers.GenerationMixin.generate(reference_of(family), **given)
    model = model_of(family, wrapped=wrapped)
    found = model.generate(**given, custom_generate=OWN_LOOP)
    if model.listens:  # a transcript is returned without what it begins with
        wanted = wanted[:, given.get("decoder_input_ids", wanted[:, :1]).shape[1] :]
    assert torch.equal(found, wanted)
    assert torch.equal(found, model.generate(**given))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loop_gets_the_encoders_states_for_every_row_where_the_prompt_stood(family: str) -> None:
    given, model, seen = read_by(family), model_of(family, wrapped=False), dict[str, Any]()
    model.generate(**given, num_beams=2, custom_generate=kept(seen))
    mask = given.get("attention_mask")
    states = reference_of(family).get_encoder()(
        given.get("input_ids", given.get("input_features")),
        **({} if mask is None else {"attention_mask": mask}),
    )[0]
    found, real = seen["encoder_outputs"].last_hidden_state, torch.ones(states.shape[:2])
    assert (mask is not None) == ("attention_mask" in seen)
    if mask is not None:
        real = mask
        assert torch.equal(seen["attention_mask"], mask.repeat_interleave(2, dim=0))
    wanted = (states * real[..., None]).repeat_interleave(2, dim=0)
    assert torch.allclose(found, wanted, atol=1e-9) and seen["encoder_outputs"][0] is found
    assert seen["input_ids"].tolist() == [[3]] * 4
    assert seen["past_key_values"].get_seq_length() == 0


def test_padded_ids_of_a_decoder_come_with_their_mask() -> None:
    given, seen = read_by("bart"), dict[str, Any]()
    given["decoder_input_ids"] = torch.tensor([[3, 8, 9], [0, 3, 11]])
    given["decoder_attention_mask"] = torch.tensor([[1, 1, 1], [0, 1, 1]])
    model_of("bart", wrapped=False).generate(**given, custom_generate=kept(seen))
    assert torch.equal(seen["decoder_attention_mask"], given["decoder_attention_mask"])


def test_states_of_the_callers_reach_a_loop() -> None:
    given, seen = read_by("t5"), dict[str, Any]()
    states = torch.randn(2, 7, 32, dtype=torch.float64)
    del given["input_ids"]
    given["encoder_outputs"] = (states,)
    model = model_of("t5", wrapped=False)
    model.generate(**given, custom_generate=kept(seen))
    real = given["attention_mask"][..., None]
    assert torch.equal(seen["encoder_outputs"][0], states * real)
    found = model.generate(**given, custom_generate=OWN_LOOP)
    assert torch.equal(found, model.generate(**given))


# --- guidance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", ({}, AWAY), ids=("last id", "prompts"))
@pytest.mark.parametrize("wrapped", (False, True), ids=("own", "wrapped"))
def test_a_loop_is_guided_as_the_engine_is(wrapped: bool, away: dict[str, Any]) -> None:
    model = es.wrap(pair(NAME).reference) if wrapped else subject(NAME)
    given = {"input_ids": IDS, "attention_mask": MASK, "guidance_scale": 1.8, "max_new_tokens": 9}
    given |= {"eos_token_id": 2, "pad_token_id": 3, "do_sample": False, **away}
    found = model.generate(**given, custom_generate=OWN_LOOP)
    assert torch.equal(found, model.generate(**given))
    plain = {name: one for name, one in given.items() if "negative" not in name}
    plain["guidance_scale"] = None
    assert not torch.equal(found, model.generate(**plain))


@pytest.mark.parametrize("away", (None, torch.tensor([[4, 12, 9], [7, 8, 30]])), ids=str)
def test_a_loop_is_guided_as_in_the_reference(away: Tensor | None) -> None:
    given: dict[str, Any] = {"input_ids": IDS, "guidance_scale": 1.8, "max_new_tokens": 9}
    given |= {"eos_token_id": 2, "pad_token_id": 3, "do_sample": False}
    given |= {} if away is None else {"negative_prompt_ids": away}
    wanted = pair(NAME).reference.generate(**given)
    assert torch.equal(subject(NAME).generate(**given, custom_generate=OWN_LOOP), wanted)


@pytest.mark.parametrize("wrapped", (False, True), ids=("own", "wrapped"))
def test_guidance_beside_an_encoder_reads_its_states(wrapped: bool) -> None:
    model = model_of("bart", wrapped=wrapped)
    given = {**read_by("bart"), "guidance_scale": 1.6}
    given["negative_prompt_ids"] = torch.tensor([[3, 20], [3, 21]])
    found = model.generate(**given, custom_generate=OWN_LOOP)
    assert torch.equal(found, model.generate(**given))


def test_guidance_follows_rows_of_recurrent_layers() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LanguageModel(ours(reference_mamba(torch.float64)))
    given: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6}
    given |= {"guidance_scale": 1.7, "eos_token_id": None, "pad_token_id": 0, **AWAY}
    found = model.generate(**given, custom_generate=OWN_LOOP)
    assert torch.equal(found, model.generate(**given))


def test_guidance_follows_a_loop_that_reorders_rows_and_takes_ids_back() -> None:
    """Each call gives what a fresh guidance gives, which has read nothing before."""
    model, fed = tiny_llama(), list[int]()

    def read(ids: Tensor, real: Tensor, past: Any) -> Any:
        fed.append(ids.shape[1])
        return model(input_ids=ids, attention_mask=real, past_key_values=past, use_cache=True)

    def fresh() -> LoopGuidance:
        away = torch.tensor([[4, 12], [9, 30]])
        return LoopGuidance(2.0, read, away, torch.ones_like(away), 2)

    grown = torch.tensor([[5, 6, 7, 8, 9], [3, 9, 10, 11, 12]])
    steps = (grown[:, :2], grown[:, :3], grown[[1, 0]][:, :4], grown[:, :3], grown[:, :4], grown)
    guidance, scores = fresh(), torch.randn(2, model.vocab_size)
    for ids_of_rows in steps:
        found = guidance(ids_of_rows, scores)
        counted = len(fed)
        assert torch.allclose(found, fresh()(ids_of_rows, scores), atol=1e-4)
        del fed[counted:]
    # A row that goes on is fed its new id alone; one that does not is read from its beginning.
    assert fed == [2, 1, 4, 3, 1, 1]


# --- seeds ----------------------------------------------------------------------------------------


def drawing(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
    """A loop that draws ids from torch's generator."""
    return torch.randint(3, 60, (len(input_ids), 20))


def test_a_seed_begins_the_draws_of_a_loop_and_leaves_the_generator_alone() -> None:
    model = tiny_llama()

    def drawn(seed: int | None) -> Tensor:
        return model.generate(IDS, seed=seed, custom_generate=drawing)

    torch.manual_seed(8)
    before = torch.get_rng_state()
    first = drawn(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, drawn(4)) and not torch.equal(first, drawn(5))
    assert not torch.equal(drawn(None), drawn(None))


def test_the_references_loop_draws_from_a_seed_as_there() -> None:
    given: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK, "eos_token_id": None}
    given |= {"do_sample": True, "top_k": 9, "temperature": 0.7, "max_new_tokens": 9}
    with torch.random.fork_rng():
        torch.manual_seed(11)
        wanted = pair(NAME).reference.generate(**given)
    assert torch.equal(subject(NAME).generate(**given, seed=11, custom_generate=OWN_LOOP), wanted)


def test_a_loop_that_names_the_seed_draws_by_itself() -> None:
    seen: list[Any] = []

    def loop(model: Any, input_ids: Tensor, seed: Any = None, **_: Any) -> None:
        seen.append((seed, torch.initial_seed()))

    model, own = tiny_llama(), torch.initial_seed()
    model.generate(IDS, seed=[4, 5], custom_generate=loop)
    model.generate(IDS, custom_generate=loop)
    assert seen == [([4, 5], own), (None, own)]


def test_a_seed_for_each_row_is_refused_where_a_loop_draws_for_all() -> None:
    with pytest.raises(UnsupportedError, match="has one seed"):
        tiny_llama().generate(IDS, seed=[4, 5], custom_generate=drawing)
    with pytest.raises(RequestError, match="seed does not fit"):
        tiny_llama().generate(IDS, seed="4", custom_generate=lambda model, ids, seed, **_: ids)


# --- the tensors of special ids -------------------------------------------------------------------

TWINS = ("bos", "eos", "pad", "decoder_start")
STARTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bart", {}),
    ("bart", {"decoder_start_token_id": 7}),
    ("bart", {"decoder_start_token_id": [7, 8]}),
    ("bart", {"decoder_start_token_id": None, "bos_token_id": 6}),
    (NAME, {"eos_token_id": [2, 9], "pad_token_id": 5}),
    (NAME, {"decoder_start_token_id": 4}),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "settings"), STARTS, ids=str)
def test_a_loops_configuration_has_the_tensors_of_the_reference(
    name: str, settings: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 3}
    theirs, model = pair(NAME).reference, subject(NAME)
    if name != NAME:
        theirs, model = reference_of(name), model_of(name, wrapped=False)
    one, other = dict[str, Any](), dict[str, Any]()
    theirs.generate(**given, **settings, custom_generate=kept(one))
    model.generate(**given, **settings, custom_generate=kept(other))
    for twin in TWINS:
        wanted = getattr(one["generation_config"], f"_{twin}_token_tensor")
        found = getattr(other["generation_config"], f"_{twin}_token_tensor")
        assert (found is None) == (wanted is None), twin
        assert wanted is None or (torch.equal(found, wanted) and found.device == wanted.device)


REFUSED: dict[str, dict[str, Any]] = {
    "a mask inside the prompt": {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])},
    "n_best": {"n_best": 2, "num_beams": 2},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_loop_would_not_see_is_still_refused(name: str) -> None:
    with pytest.raises(EverystepError, match=f"custom_generate does not go with {name}"):
        tiny_llama().generate(IDS, **REFUSED[name], custom_generate=drawing)
