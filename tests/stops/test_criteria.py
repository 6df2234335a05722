"""Criteria under transformers' names: by hand as there, and in a call as the stops they are."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from everystep.stops import ends
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import FinishReason

IDS = torch.tensor([[5, 6, 7, 2], [5, 2, 7, 8], [2, 9, 9, 9]])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


def reasons(model: LanguageModel, criteria: Any, **options: Any) -> list[FinishReason]:
    """How the rows of a call end."""
    given = {"max_new_tokens": 8, "return_dict_in_generate": True, **options}
    ids = given.pop("input_ids", torch.tensor([[5, 6, 7]]))
    return list(model.generate(ids, stopping_criteria=criteria, **given).finish_reasons)


# --- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "called"),
    [
        ("MaxLengthCriteria", {"max_length": 4}, {}),
        ("MaxLengthCriteria", {"max_length": 5}, {}),
        ("MaxTimeCriteria", {"max_time": 100.0}, {}),
        ("MaxTimeCriteria", {"max_time": 5.0, "initial_timestamp": time.time() - 6}, {}),
        ("MaxTimeCriteria", {"max_time": 50.0, "initial_timestamp": time.time() - 6}, {}),
        ("EosTokenCriteria", {"eos_token_id": 2}, {}),
        ("EosTokenCriteria", {"eos_token_id": [8, 2]}, {}),
        ("EosTokenCriteria", {"eos_token_id": torch.tensor([9])}, {}),
        ("EosTokenCriteria", {"eos_token_id": 2}, {"new_token_length": 3}),
        ("EosTokenCriteria", {"eos_token_id": 2}, {"new_token_length": 9}),
        ("EosTokenCriteria", {"eos_token_id": 2}, {"new_token_length": 0}),
    ],
)
def test_each_answers_as_the_references(
    name: str, arguments: dict[str, Any], called: dict[str, Any]
) -> None:
    ours = getattr(es, name)(**arguments)(IDS, None, **called)
    theirs = getattr(transformers, name)(**arguments)(IDS, None, **called)
    assert torch.equal(ours, theirs)
    assert ours.dtype == torch.bool


@pytest.mark.parametrize("begun", [0.0, -6.0, -11.0])
def test_a_time_counts_from_when_it_is_said_to_have_begun(
    begun: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends.MaxTime, "now", lambda: 1000.0)
    monkeypatch.setattr(ends, "moment", lambda: 50.0)
    criterion = es.MaxTimeCriteria(10.0, initial_timestamp=1000.0 + begun)
    assert criterion.stop() == ends.MaxTime(60.0 + begun)
    assert criterion(IDS, None).all() == (begun < -10)


def test_confidence_reads_the_newest_id_of_the_first_row() -> None:
    scores = (torch.zeros(3, 10), torch.arange(30.0).reshape(3, 10) / 10)
    for threshold in (0.05, 0.06, 0.07, 0.2):
        theirs = transformers.generation.ConfidenceCriteria(threshold)(IDS, scores)
        assert es.ConfidenceCriteria(threshold)(IDS, scores) == theirs
    with pytest.raises(RequestError, match="output_scores=True"):
        es.ConfidenceCriteria(0.5)(IDS, None)


def test_a_list_ends_what_any_of_it_ends() -> None:
    def first(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.arange(len(input_ids)) == kwargs["row"]

    ours = es.StoppingCriteriaList([es.EosTokenCriteria(2), first])
    theirs = transformers.StoppingCriteriaList([transformers.EosTokenCriteria(2), first])
    for row in range(3):
        assert torch.equal(ours(IDS, None, row=row), theirs(IDS, None, row=row))
    assert es.StoppingCriteriaList([])(IDS, None).tolist() == [False] * 3


def test_a_list_knows_its_first_limit() -> None:
    criteria = es.StoppingCriteriaList([es.EosTokenCriteria(2)])
    assert criteria.max_length is None
    criteria += [es.MaxLengthCriteria(7), es.MaxLengthCriteria(3)]
    assert criteria.max_length == 7


def test_beyond_the_models_context_there_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="4 ids are more than the 3"):
        es.MaxLengthCriteria(9, max_position_embeddings=3)(IDS, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        es.MaxLengthCriteria(9, max_position_embeddings=4)(IDS, None)
        es.MaxLengthCriteria(4, max_position_embeddings=3)(IDS, None)


def test_the_base_has_to_be_derived_from() -> None:
    with pytest.raises(NotImplementedError, match="Define __call__"):
        es.StoppingCriteria()(IDS, None)


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="stop_strings is not valid"):
        es.StopStringCriteria(tiny_tokenizer(), strings)


def test_stop_strings_need_a_readable_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocabulary can be read"):
        es.StopStringCriteria(object(), "stop")


STRINGS = [
    " the",
    "he i",
    ["ing", " a"],
    "\n\n",
    "日本",
    "本語",
    "é",
    ["aa", "aaa"],
    "<eos>",
    "a<eos>",
    "thing is",
    "🙂",
]
TEXTS = ["in the inning", "a the is 日本語", "café aaaa", "x\n\n\n", "that a<eos>", "hi 🙂🙂!"]


@pytest.mark.parametrize("strings", STRINGS, ids=str)
def test_strings_end_where_the_references_do(strings: str | list[str]) -> None:
    tokenizer = tiny_tokenizer()
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    ours = es.StopStringCriteria(tokenizer, strings)
    theirs = transformers.StopStringCriteria(reference, strings)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        for end in range(1, ids.shape[1] + 1):
            prefix = torch.cat([ids[:, :end], ids[:, :end].roll(1, dims=1)])
            assert torch.equal(ours(prefix, None), theirs(prefix, None)), (text, end)


def test_the_references_tokenizer_will_do(model: LanguageModel) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend)
    ids = torch.tensor([tiny_tokenizer().encode("in the")])
    assert es.StopStringCriteria(reference, " the")(ids, None).tolist() == [True]


# --- in a call -----------------------------------------------------------------------------------


def test_a_criterion_takes_the_place_of_the_configurations(model: LanguageModel) -> None:
    ids = torch.tensor([[5, 6, 7]])
    with pytest.warns(UserWarning, match="MaxLengthCriteria in stopping_criteria takes the place"):
        longer = model.generate(ids, max_new_tokens=2, stopping_criteria=[es.MaxLengthCriteria(9)])
    assert longer.shape == (1, 9)
    plain = model.generate(ids, max_new_tokens=6)
    assert torch.equal(longer, plain)


def test_two_of_a_kind_both_count(model: LanguageModel) -> None:
    limits = es.StoppingCriteriaList([es.MaxLengthCriteria(9), es.MaxLengthCriteria(5)])
    with pytest.warns(UserWarning, match="takes the place"):
        output = model.generate(torch.tensor([[5, 6, 7]]), stopping_criteria=limits)
    assert output.shape == (1, 5)


@pytest.mark.filterwarnings("ignore:The .* takes the place")
def test_each_end_is_named(model: LanguageModel) -> None:
    token = int(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)[0, -1])
    piece = str(tiny_tokenizer().decode([token]))
    late = es.MaxTimeCriteria(1.0, initial_timestamp=time.time() - 2)

    def own(input_ids: Tensor, scores: Any) -> Tensor:
        return torch.tensor([True])

    assert reasons(model, [es.EosTokenCriteria(token)]) == [FinishReason("stop", token)]
    text = [es.StopStringCriteria(tiny_tokenizer(), piece)]
    assert reasons(model, text) == [FinishReason("stop", piece)]
    assert reasons(model, [es.MaxLengthCriteria(4)]) == [FinishReason("length")]
    assert reasons(model, [late]) == [FinishReason("time")]
    assert reasons(model, [own]) == [FinishReason("criteria", own)]


def test_a_subclass_is_asked_itself(model: LanguageModel) -> None:
    class Odd(es.MaxLengthCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] == 6)

    odd = Odd(100)
    assert reasons(model, [odd]) == [FinishReason("criteria", odd)]


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_end_one_by_one(model: LanguageModel, beams: int) -> None:
    """transformers' rectangle: every row in every step, ended ones too."""
    shapes: list[tuple[int, ...]] = []

    class Even(es.StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            shapes.append(tuple(input_ids.shape))
            return input_ids[:, -1] % 2 == 0

    ids = torch.tensor([[5, 6, 7], [11, 12, 13]])
    ended = reasons(model, [Even()], input_ids=ids, num_beams=beams, max_new_tokens=12)
    assert {reason.kind for reason in ended} <= {"criteria", "length"}
    assert all(width == shapes[0][0] for width, _ in shapes)


@pytest.mark.parametrize("wrong", [es.MaxLengthCriteria(3), ["x"], [None], "x"])
def test_what_is_no_list_of_criteria_is_refused(model: LanguageModel, wrong: Any) -> None:
    with pytest.raises(RequestError, match="Put the criterion in a list"):
        reasons(model, wrong)
