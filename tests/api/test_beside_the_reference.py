"""Calls that transformers answers and that are easily refused, or read wrongly, beside it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from tests.models.tiny import ours, reference_decoder

IDS = torch.tensor([[5, 6, 7]])
LONG: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 3}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, LanguageModel]:
    theirs = reference_decoder("llama", torch.float64)
    return theirs, LanguageModel(ours(theirs))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def both(pair: tuple[Any, LanguageModel], **given: Any) -> torch.Tensor:
    """What ours gives, which is what transformers gives."""
    found = pair[1].generate(IDS, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(found, pair[0].generate(IDS, **given))
    return found


# --- values that say nothing new -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0, 0.7])
def test_sampling_by_temperature_is_switched_off_by_zero(
    pair: tuple[Any, LanguageModel], temperature: float
) -> None:
    torch.manual_seed(0)
    drawn = pair[1].generate(IDS, do_sample=temperature > 0, temperature=temperature, **LONG)
    torch.manual_seed(0)
    theirs = pair[0].generate(IDS, do_sample=temperature > 0, temperature=temperature, **LONG)
    assert torch.equal(drawn, theirs)


def test_a_temperature_of_zero_alone_is_greedy(model: LanguageModel) -> None:
    greedy = model.generate(IDS, **LONG)
    assert torch.equal(model.generate(IDS, temperature=0.0, **LONG), greedy)
    assert torch.equal(model.generate(IDS, temperature=[0.0], do_sample=False, **LONG), greedy)
    config = GenerationConfig(do_sample=False, temperature=0.0)
    assert torch.equal(model.generate(IDS, config, **LONG), greedy)
    for wrong in (
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": False, "temperature": 0.5},
    ):
        with pytest.raises(RequestError, match="temperature"):
            model.generate(IDS, **wrong, **LONG)


@pytest.mark.parametrize("kept", [0, 1, None])
def test_logits_that_are_computed_anyway_may_be_asked_for(
    pair: tuple[Any, LanguageModel], kept: int | None
) -> None:
    assert torch.equal(
        pair[1].generate(IDS, logits_to_keep=kept, **LONG), pair[1].generate(IDS, **LONG)
    )


@pytest.mark.parametrize("alpha", [1.0, 1.3, 4.0])
def test_a_contrast_may_weigh_more_than_likelihood(model: LanguageModel, alpha: float) -> None:
    """Against the definition, candidate by candidate, without a cache."""
    found = model.generate(IDS, penalty_alpha=alpha, top_k=4, **LONG)
    assert found[0].tolist() == contrastive(model, IDS[0].tolist(), alpha, 4, 6)


def contrastive(model: LanguageModel, ids: list[int], alpha: float, k: int, new: int) -> list[int]:
    def states(tokens: list[int]) -> torch.Tensor:
        out = model.generate(
            torch.tensor([tokens]),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_hidden_states=True,
            eos_token_id=None,
        )
        hidden = out.hidden_states[0][-1][0].double()
        return hidden / hidden.norm(dim=-1, keepdim=True)

    for _ in range(new):
        p, tokens = model(torch.tensor([ids])).logits[0, -1].softmax(-1).topk(k)
        ratings = []
        for likely, token in zip(p.tolist(), tokens.tolist(), strict=True):
            units = states([*ids, token])
            ratings.append((1 - alpha) * likely - alpha * float((units[:-1] @ units[-1]).max()))
        ids = [*ids, int(tokens[torch.tensor(ratings).argmax()])]
    return ids


# --- ids that are no tokens ----------------------------------------------------------------------

NEEDS_ENDS: list[dict[str, Any]] = [
    {},
    {"bad_words_ids": [[8], [9, 10]]},
    {"min_new_tokens": 3},
    {"min_length": 5},
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 2},
    {"repetition_penalty": 1.3, "num_beams": 2},
]


@pytest.mark.filterwarnings("ignore:eos_token_id holds a negative number")
@pytest.mark.parametrize("extra", NEEDS_ENDS)
@pytest.mark.parametrize("ends", [-1, [-1], [11, -1]])
def test_a_negative_end_ends_nothing(
    model: LanguageModel, extra: dict[str, Any], ends: Any
) -> None:
    real = [one for one in ([ends] if isinstance(ends, int) else ends) if one >= 0] or None
    wanted = model.generate(IDS, eos_token_id=real, **extra, **LONG)
    assert torch.equal(model.generate(IDS, eos_token_id=ends, **extra, **LONG), wanted)
    own = tiny_llama()
    own.generation_config = GenerationConfig.from_checkpoint({"eos_token_id": ends})
    assert torch.equal(own.generate(IDS, **extra, **LONG), wanted)


@pytest.mark.parametrize("extra", NEEDS_ENDS)
def test_an_end_beyond_the_vocabulary_in_a_checkpoint_ends_nothing(extra: dict[str, Any]) -> None:
    own = tiny_llama()
    wanted = own.generate(IDS, eos_token_id=None, **extra, **LONG)
    own.generation_config = GenerationConfig.from_checkpoint({"eos_token_id": [1000]})
    assert torch.equal(own.generate(IDS, **extra, **LONG), wanted)


@pytest.mark.parametrize("pad", [48, 1000])
def test_a_pad_beyond_the_vocabulary_fills_up_what_is_returned(
    model: LanguageModel, pad: int
) -> None:
    """As an added pad token without a larger embedding: nothing ever reads it."""
    two = torch.tensor([[5, 6, 7], [8, 9, 10]])
    plain = model.generate(two, max_new_tokens=8, eos_token_id=None, pad_token_id=3)
    ends = int(plain[0, 4])
    wanted = model.generate(two, max_new_tokens=8, eos_token_id=ends, pad_token_id=3)
    ended = (wanted == ends).int().cumsum(1).cumsum(1) > 1
    assert ended.any()
    for extra in (
        {},
        {"logits_processor": [lambda ids, scores: scores]},
        {"return_dict_in_generate": True, "output_scores": True},
    ):
        with pytest.warns(UserWarning, match="beyond the vocabulary"):
            found = model.generate(
                two, max_new_tokens=8, eos_token_id=ends, pad_token_id=pad, **extra
            )
        found = found if isinstance(found, torch.Tensor) else found.sequences
        assert torch.equal(found, wanted.masked_fill(ended, pad))
    with pytest.warns(UserWarning, match="beyond the vocabulary"):
        many = es.generate(
            model, None, two.tolist(), max_new_tokens=8, eos_token_id=ends, pad_token_id=pad
        )
    assert [len(one) for one in many] == [int((~row[3:]).sum()) for row in ended]


def test_a_prompt_cannot_hold_such_a_pad(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        model.generate(torch.tensor([[48, 5, 6]]), pad_token_id=48, max_new_tokens=2)


# --- what transformers warns of -----------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.3},
        {"encoder_no_repeat_ngram_size": 2},
    ],
)
def test_penalties_that_cannot_see_the_prompt_say_so(
    model: LanguageModel, option: dict[str, Any]
) -> None:
    embeds = model.get_input_embeddings()(IDS)
    with pytest.warns(
        UserWarning, match=rf"{next(iter(option))}.* (given as embeddings|was not given)"
    ):
        model.generate(inputs_embeds=embeds, **option, **LONG)
    model.generate(IDS, inputs_embeds=embeds, **option, **LONG)  # here they see it
    if "encoder" in next(iter(option)):
        return  # these have nothing to look at at all, and say so to everybody
    own = tiny_llama()
    own.generation_config = GenerationConfig.from_checkpoint(option)
    own.generate(inputs_embeds=embeds, **LONG)  # and here the caller did not ask for them


def test_a_class_says_that_it_generates() -> None:
    assert es.LanguageModel.can_generate() is True


# --- processors called by hand --------------------------------------------------------------------

SCORES = torch.randn(2, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BLIND = [
    es.TemperatureLogitsWarper(2.0),
    es.TopKLogitsWarper(3),
    es.TopPLogitsWarper(0.5),
    es.MinPLogitsWarper(0.2),
    es.TypicalLogitsWarper(0.5),
    es.EpsilonLogitsWarper(0.01),
    es.EtaLogitsWarper(0.01),
    es.LogitNormalization(),
    es.InfNanRemoveLogitsProcessor(),
    es.SuppressTokensLogitsProcessor([3]),
]


@pytest.mark.parametrize("processor", BLIND, ids=lambda one: type(one).__name__)
def test_what_looks_at_no_ids_needs_none(processor: Any) -> None:
    found = processor(None, SCORES)
    assert torch.equal(found, processor(torch.tensor([[5], [6]]), SCORES))


@pytest.mark.parametrize("ids", [None, [[5], [6]], torch.tensor([5, 6])])
def test_what_looks_at_ids_says_that_it_needs_them(ids: Any) -> None:
    for processor in (es.RepetitionPenaltyLogitsProcessor(1.5), es.NoRepeatNGramLogitsProcessor(2)):
        with pytest.raises(RequestError, match=r"ids.*\(rows, length\)"):
            processor(ids, SCORES)
