"""Decoding loops of the caller's, and prompts whose last token is chosen anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import everystep as es
from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.parity.models import CATALOGUE, pair, subject

NAME = next(iter(CATALOGUE))
IDS = torch.tensor([[5, 6, 7, 8], [3, 9, 10, 11]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def greedy_loop(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **inputs: Any,
) -> Tensor:
    """A plain loop without a cache, as people write it for transformers."""
    pad = generation_config._pad_token_tensor
    going = torch.ones(len(input_ids), dtype=torch.bool)
    mask = inputs["attention_mask"]
    while going.any():
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(input_ids=input_ids, attention_mask=mask, position_ids=places)
        scores = logits_processor(input_ids, out.logits[:, -1].float())
        chosen = torch.where(going, scores.argmax(-1), pad)
        input_ids = torch.cat([input_ids, chosen[:, None]], dim=-1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        going = going & ~stopping_criteria(input_ids, None)
    return input_ids


# --- loops ----------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_length": 13, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 12, "min_new_tokens": 5, "eos_token_id": [2, 9, 17, 30]},
    {"max_new_tokens": 9, "logits_processor": [lambda ids, scores: -scores]},
    {"max_new_tokens": 9, "stopping_criteria": [lambda ids, scores: ids[:, -1] % 5 == 0]},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_loop_is_given_what_the_engine_would_use(
    model: LanguageModel, settings: dict[str, Any]
) -> None:
    given = {"input_ids": IDS, "attention_mask": MASK, **settings}
    assert torch.equal(
        model.generate(**given, custom_generate=greedy_loop), model.generate(**given)
    )


def test_the_same_loop_gives_the_same_in_the_reference() -> None:
    both = pair(NAME)
    theirs, ours = both.reference, subject(NAME)
    given = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 8, "eos_token_id": 2}
    given |= {"pad_token_id": 3, "repetition_penalty": 1.5, "custom_generate": greedy_loop}
    with torch.no_grad():
        assert torch.equal(ours.generate(**given), theirs.generate(**given))


def test_a_loop_gets_what_it_alone_names_and_a_row_per_sequence(model: LanguageModel) -> None:
    seen: dict[str, Any] = {}

    def loop(model: Any, input_ids: Tensor, strength: float, tokenizer: Any, **rest: Any) -> str:
        seen.update(rest, ids=input_ids, strength=strength, tokenizer=tokenizer, model=model)
        return "done"

    tokenizer = tiny_tokenizer(320)
    answer = model.generate(
        IDS, attention_mask=MASK, num_beams=3, max_new_tokens=5, custom_generate=loop,
        strength=0.5, tokenizer=tokenizer,
    )  # fmt: skip
    assert answer == "done"
    assert seen["model"] is model and seen["strength"] == 0.5 and seen["tokenizer"] is tokenizer
    assert torch.equal(seen["ids"], IDS.repeat_interleave(3, dim=0))
    assert torch.equal(seen["attention_mask"], MASK.repeat_interleave(3, dim=0))
    config = seen["generation_config"]
    assert (config.max_length, config.num_beams, config.temperature) == (9, 3, 1.0)


def test_a_loop_gets_embeddings_and_positions_beside_left_padding(model: LanguageModel) -> None:
    seen: dict[str, Any] = {}
    right = MASK.flip(1)
    embeds = torch.arange(2 * 4 * 32.0).reshape(2, 4, 32)
    model.generate(
        inputs_embeds=embeds,
        attention_mask=right,
        position_ids=torch.arange(4)[None].repeat(2, 1) * 2,
        custom_generate=lambda model, input_ids, **rest: seen.update(rest, ids=input_ids),
    )
    assert seen["ids"].shape == (2, 0)
    assert torch.equal(seen["attention_mask"], MASK)
    assert torch.equal(seen["inputs_embeds"][1, 1:], embeds[1, :3])
    assert seen["position_ids"].tolist() == [[0, 2, 4, 6], [0, 0, 2, 4]]


def test_a_loop_may_feed_the_streamer(model: LanguageModel) -> None:
    said: list[Any] = []

    class Heard:
        def put(self, value: Tensor) -> None:
            said.append(value.tolist())

        def end(self) -> None:
            said.append("end")

    def loop(model: Any, input_ids: Tensor, streamer: Any, **_: Any) -> None:
        streamer.end()

    model.generate(IDS, streamer=Heard(), custom_generate=loop)
    assert said == [IDS.tolist(), "end"]


def cached_loop(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    past_key_values: Any,
    use_cache: bool,
    **inputs: Any,
) -> Tensor:
    """A plain loop that feeds each position once, as people write it for transformers."""
    mask = torch.ones_like(input_ids)
    mask = mask if inputs["attention_mask"] is None else inputs["attention_mask"]
    going = torch.ones(len(input_ids), dtype=torch.bool)
    fed = input_ids[:, past_key_values.get_seq_length() :]
    while going.any():
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -fed.shape[1] :]
        out = model(
            input_ids=fed, attention_mask=mask, position_ids=places,
            past_key_values=past_key_values, use_cache=use_cache,
        )  # fmt: skip
        scores = logits_processor(input_ids, out.logits[:, -1].float())
        chosen = torch.where(going, scores.argmax(-1), generation_config._pad_token_tensor)
        fed = chosen[:, None]
        input_ids = torch.cat([input_ids, fed], dim=-1)
        mask = torch.cat([mask, torch.ones_like(fed)], dim=-1)
        going = going & ~stopping_criteria(input_ids, None)
    return input_ids


CACHES: list[dict[str, Any]] = [
    {},
    {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    {"cache_implementation": "static"},
]


@pytest.mark.parametrize("settings", CACHES)
def test_a_loop_with_a_cache_gives_the_same_in_the_reference(settings: dict[str, Any]) -> None:
    both = pair(NAME)
    given = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 8, "eos_token_id": 2}
    given |= {"pad_token_id": 3, "repetition_penalty": 1.5, **settings}
    theirs, ours = both.reference, subject(NAME)
    found = ours.generate(**given, custom_generate=cached_loop)
    assert torch.equal(found, theirs.generate(**given, custom_generate=cached_loop))
    assert torch.equal(found, ours.generate(**given))


def test_a_loop_goes_on_from_a_cache(model: LanguageModel) -> None:
    given: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 6, "pad_token_id": 3}
    whole = model.generate(IDS, **given, custom_generate=cached_loop)
    cache, places = es.DynamicCache(), (MASK.cumsum(-1) - 1).clamp(min=0)[:, :3]
    model(IDS[:, :3], MASK[:, :3], places, past_key_values=cache)
    again = model.generate(IDS, **given, past_key_values=cache, custom_generate=cached_loop)
    assert torch.equal(again, whole)
    assert cache.get_seq_length() == whole.shape[1] - 1
    # The cache is the caller's and may be changed in place.
    model(input_ids=whole[:, -1:], past_key_values=cache)[0].mul_(2)


def test_new_ids_after_a_cache_come_with_the_mask_of_all(model: LanguageModel) -> None:
    seen: dict[str, Any] = {}
    cache = es.DynamicCache()
    model(input_ids=IDS, attention_mask=MASK, past_key_values=cache)
    mask = torch.cat([MASK, torch.ones(2, 1, dtype=torch.int64)], dim=1)
    model.generate(
        IDS[:, :1],
        attention_mask=mask,
        position_ids=torch.tensor([[4], [3]]),
        past_key_values=cache,
        custom_generate=lambda model, input_ids, **rest: seen.update(rest, ids=input_ids),
    )
    assert torch.equal(seen["ids"], IDS[:, :1]) and torch.equal(seen["attention_mask"], mask)
    assert seen["past_key_values"] is cache and seen["position_ids"].tolist() == [[4], [3]]


def test_without_a_cache_a_loop_gets_none(model: LanguageModel) -> None:
    seen: dict[str, Any] = {}
    model.generate(
        IDS,
        attention_mask=MASK,
        use_cache=False,
        custom_generate=lambda model, input_ids, **rest: seen.update(rest),
    )
    assert seen["use_cache"] is False and "past_key_values" not in seen


# --- healing --------------------------------------------------------------------------------------

TEXTS = ["I was i", "The a", "it  ", "th"]


def as_theirs(tokenizer: Any) -> Any:
    """The same tokenizer, in transformers' clothes."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<bos>", eos_token="<eos>",
        pad_token="<pad>", padding_side="left",
    )  # fmt: skip


@pytest.fixture(scope="module")
def talker() -> tuple[LanguageModel, Any]:
    return tiny_llama(vocab_size=320), tiny_tokenizer(320)


@pytest.mark.parametrize("text", TEXTS)
def test_a_healed_prompt_ends_in_a_token_that_continues_it(
    talker: tuple[LanguageModel, Any], text: str
) -> None:
    model, tokenizer = talker
    batch = tokenizer([text], return_tensors="pt")
    out = model.generate(**batch, token_healing=True, tokenizer=tokenizer, max_new_tokens=1)
    stripped = tokenizer.encode(text.rstrip())
    healed = out[0, :-1].tolist()
    assert healed[:-1] == stripped[:-1]
    assert tokenizer.decode(healed).startswith(text.rstrip())


@pytest.mark.parametrize("text", ["I was i", "The a", " it  ", "to th", "and i", "er it"])
def test_a_prompt_is_healed_as_by_the_reference(text: str) -> None:
    tokenizer = tiny_tokenizer(320)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(config).double()
    ours = from_weights(config.to_dict(), theirs.state_dict(), dtype=torch.float64)
    options = {"token_healing": True, "max_new_tokens": 5}
    wanted = theirs.generate(
        **as_theirs(tokenizer)([text], return_tensors="pt", return_token_type_ids=False),
        tokenizer=as_theirs(tokenizer), **options,
    )  # fmt: skip
    stripped = tokenizer([text.lstrip()], return_tensors="pt")
    found = ours.generate(**stripped, tokenizer=tokenizer, **options)
    assert found.tolist() == wanted.tolist()


def test_rows_are_healed_as_each_alone(talker: tuple[LanguageModel, Any]) -> None:
    model, tokenizer = talker
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 4}
    together = model.generate(**tokenizer(TEXTS, padding=True, return_tensors="pt"), **options)
    for row, text in enumerate(TEXTS):
        alone = model.generate(**tokenizer([text], return_tensors="pt"), **options)[0]
        assert together[row, -len(alone) :].tolist() == alone.tolist()


def test_special_ids_of_a_prompt_stay(talker: tuple[LanguageModel, Any]) -> None:
    model, tokenizer = talker
    ids = torch.tensor([[1, 3, *tokenizer.encode("it wa ")]])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        token_healing=True,
        tokenizer=tokenizer,
        max_new_tokens=1,
    )
    assert out[0, :2].tolist() == [1, 3]
    assert out.shape[1] == ids.shape[1]  # a space less, a new token more


def test_healing_changes_no_configuration(talker: tuple[LanguageModel, Any]) -> None:
    model, tokenizer = talker
    config = GenerationConfig(token_healing=True, max_new_tokens=2)
    before = (repr(config), repr(model.generation_config))
    batch = tokenizer(["I was i"], return_tensors="pt")
    model.generate(**batch, generation_config=config, tokenizer=tokenizer)
    assert (repr(config), repr(model.generation_config)) == before


def test_texts_are_healed_one_by_one_under_the_scheduler(
    talker: tuple[LanguageModel, Any],
) -> None:
    model, tokenizer = talker
    batch = tokenizer(["I was i"], return_tensors="pt")
    options = {"token_healing": True, "max_new_tokens": 4, "return_dict_in_generate": True}
    offline = model.generate(**batch, tokenizer=tokenizer, **options)
    (text,) = es.generate(model, tokenizer, ["I was i"], **options)
    assert list(text.tokens) == list(offline.new_tokens[0])


# --- transformers' own loop -----------------------------------------------------------------------

OWN_LOOP = transformers.GenerationMixin._sample
"""The loop by which transformers itself decodes."""


@pytest.mark.parametrize(
    "settings", [*SETTINGS[:3], {"max_new_tokens": 7, "use_cache": False}], ids=str
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_references_own_loop_runs(settings: dict[str, Any], wrapped: bool) -> None:
    both = pair(NAME)
    model = es.wrap(both.reference) if wrapped else subject(NAME)
    given = {"input_ids": IDS, "attention_mask": MASK, "eos_token_id": 2, "pad_token_id": 3}
    given |= {"do_sample": False, **settings}
    expected = both.reference.generate(**given)
    assert torch.equal(model.generate(**given, custom_generate=OWN_LOOP), expected)


def test_the_references_own_loop_draws_as_there() -> None:
    both = pair(NAME)
    given: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK, "eos_token_id": None}
    given |= {"do_sample": True, "top_k": 9, "temperature": 0.7, "max_new_tokens": 9}
    torch.manual_seed(5)
    expected = both.reference.generate(**given)
    torch.manual_seed(5)
    assert torch.equal(subject(NAME).generate(**given, custom_generate=OWN_LOOP), expected)


def test_it_goes_on_from_a_cache(model: LanguageModel) -> None:
    read = IDS + 20
    whole = model.generate(read, max_new_tokens=9, eos_token_id=None)
    cache = es.DynamicCache()
    model(read[:, :3], past_key_values=cache)
    found = model.generate(
        read, past_key_values=cache, max_new_tokens=9, eos_token_id=None, custom_generate=OWN_LOOP
    )
    assert torch.equal(found, whole)


def test_a_loop_may_add_processors(model: LanguageModel) -> None:
    def loop(model: Any, input_ids: Tensor, logits_processor: Any, **inputs: Any) -> Tensor:
        seen.append(len(logits_processor))
        logits_processor.append(lambda ids, scores: -scores)
        return greedy_loop(model, input_ids, logits_processor, **inputs)

    seen: list[int] = []
    given = {"input_ids": IDS, "max_new_tokens": 6, "eos_token_id": None}
    upside_down = [lambda ids, scores: -scores]
    expected = model.generate(**given, logits_processor=upside_down)
    assert torch.equal(model.generate(**given, custom_generate=loop), expected)
    model.generate(**given, custom_generate=loop, repetition_penalty=1.5)
    assert seen == [0, 1]
