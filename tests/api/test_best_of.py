"""Best-of and self-consistency: which sample is the best, when that is decided, and what it
costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.runs import take

TOKENIZER = tiny_tokenizer(320)
IDS = [5, 6, 7, 8]
ASKED: dict[str, Any] = {
    "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": [*range(3, 100, 6)],
    "do_sample": True, "temperature": 1.5, "return_dict_in_generate": True,
}  # fmt: skip
SEEDS = range(6)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=100, hidden_size=16)


def samples(model: LanguageModel, seed: int, count: int = 8, **more: Any) -> list[es.Generated]:
    """All samples to their ends, in the order of their numbers."""
    call = {**ASKED, **more, "num_return_sequences": count, "logprobs": 0, "seed": [seed]}
    (results,) = es.generate(model, None, [IDS], **call)
    return results


def best(model: LanguageModel, seed: int, **more: Any) -> Any:
    (result,) = es.generate(model, None, [IDS], **{**ASKED, "best_of": 8, "seed": [seed], **more})
    return result


def mean(one: es.Generated) -> float:
    return float(one.logprobs.logprobs.mean())  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_likeliest_by_the_mean_of_its_tokens(model: LanguageModel, seed: int) -> None:
    every = sorted(samples(model, seed), key=mean, reverse=True)
    found = best(model, seed, num_return_sequences=8)
    assert [one.tokens for one in found] == [one.tokens for one in every]
    assert [one.score for one in found] == pytest.approx([mean(one) for one in every], abs=1e-5)
    assert best(model, seed).tokens == every[0].tokens
    # Under the model itself, whatever they were drawn from.
    ids = torch.tensor([[*IDS, *every[0].tokens]])
    logits = model(ids).logits.log_softmax(-1)[0, len(IDS) - 1 : -1]
    given = logits.gather(1, torch.tensor(every[0].tokens)[:, None])
    assert float(given.mean()) == pytest.approx(found[0].score, abs=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_one_that_a_function_scores_highest(model: LanguageModel, seed: int) -> None:
    asked: list[tuple[int, ...]] = []

    def score(ids: tuple[int, ...]) -> float:
        asked.append(ids)
        return float(sum(ids) % 17)

    every = samples(model, seed)
    found = best(model, seed, scorer=score)
    assert sorted(asked) == sorted(one.tokens for one in every)  # each once
    highest = max(sum(one.tokens) % 17 for one in every)
    first = next(one for one in every if sum(one.tokens) % 17 == highest)
    assert (found.tokens, found.score) == (first.tokens, highest)


def residue(ids: tuple[int, ...]) -> int:
    return sum(ids) % 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("answer", [residue, len, lambda ids: None, lambda ids: ids[-1]])
def test_a_majority_is_that_of_all_samples(
    model: LanguageModel, seed: int, answer: Callable[[Any], Any]
) -> None:
    every = samples(model, seed)
    votes = Counter(answer(one.tokens) for one in every)
    found = best(model, seed, majority=answer, num_return_sequences=8)
    winner = answer(found[0].tokens)
    assert votes[winner] == max(votes.values())
    # Nothing but the end of what no longer mattered is different.
    whole = {one.tokens for one in every}
    for one in found:
        cut = one.finish_reason.kind == "cancelled"
        assert (one.tokens in whole) or cut
        assert any(one.tokens == full[: len(one.tokens)] for full in whole)
    assert best(model, seed, majority=answer).tokens == found[0].tokens


def test_it_is_decided_as_soon_as_nothing_can_change(model: LanguageModel, fed: list[int]) -> None:
    cut = 0
    for seed in SEEDS:
        every = samples(model, seed)
        whole = fed[-1]
        found = best(model, seed, majority=lambda ids: "same", num_return_sequences=8)
        kept = [one for one in found if one.finish_reason.kind != "cancelled"]
        # Five of eight alike cannot be outvoted: all end in the step in which the fifth ends.
        fifth = sorted(len(one.tokens) for one in every)[4]
        assert {one.tokens for one in kept} == {
            one.tokens for one in every if len(one.tokens) <= fifth
        }
        assert all(len(one.tokens) == fifth for one in found if one not in kept)
        assert found[0].score == len(kept) >= 5
        assert fed[-1] <= whole
        cut += len(kept) < 8 and fed[-1] < whole
    assert cut > 2


def test_samples_without_an_answer_have_no_vote(model: LanguageModel) -> None:
    every = samples(model, 1)
    rare = every[3].tokens[-1]

    def answer(ids: tuple[int, ...]) -> int | None:
        return 1 if ids[-1] == rare else None

    found = best(model, 1, majority=answer)
    assert found.tokens[-1] == rare
    assert found.score == sum(one.tokens[-1] == rare for one in every)


@pytest.mark.parametrize("more", [{}, {"majority": residue}, {"scorer": len}])
def test_every_face_finds_the_same(model: LanguageModel, more: dict[str, Any]) -> None:
    given = {**ASKED, "best_of": 6, **more}
    wanted = best(model, 3, best_of=6, **more)
    rest = {name: one for name, one in given.items() if name != "return_dict_in_generate"}
    with es.stream(model, None, [IDS], **rest, seed=[3]) as stream:
        events = [*stream]
    assert tuple(event.token for event in events) == wanted.tokens
    assert events[-1].finish == wanted.finish_reason
    run = es.open(model, None, IDS, **rest, seed=3)
    assert run.result().tokens == wanted.tokens and run.result().score == wanted.score
    out = model.generate(torch.tensor([IDS, IDS[::-1]]), **given, seed=[3, 4])
    assert tuple(out.new_tokens[0]) == wanted.tokens
    together = es.generate(model, None, [[9], IDS, [8, 9]], **given, seed=[1, 3, 5])
    assert together[1].tokens == wanted.tokens and together[1].score == wanted.score


def test_a_run_is_saved_and_forked_in_the_middle(model: LanguageModel, tmp_path: Path) -> None:
    rest = {name: one for name, one in ASKED.items() if name != "return_dict_in_generate"}
    run = es.open(model, None, IDS, **rest, best_of=6, majority=residue, seed=5)
    take(run, 3)
    run.save(tmp_path / "a.run")
    twin = run.fork()
    again = es.resume(tmp_path / "a.run", model, majority=residue)
    assert again.result() == twin.result() == run.result()
    why = run.explain(0)
    assert why.chosen.token == run.result().tokens[0]


def test_functions_are_asked_about_texts_where_there_is_a_tokenizer() -> None:
    model = tiny_llama(vocab_size=320)
    texts: list[str] = []

    def letters(text: str) -> int:
        texts.append(text)
        return len(text)

    found = es.generate(
        model, TOKENIZER, "the tool was", do_sample=True, best_of=4, scorer=letters, seed=1,
        max_new_tokens=6,
    )  # fmt: skip
    assert len(texts) == 4 and len(found) == max(map(len, texts))


def test_an_error_of_the_function_is_that_of_its_prompt_alone(model: LanguageModel) -> None:
    def fails(ids: tuple[int, ...]) -> int:
        raise LookupError("no answer")

    options: list[dict[str, Any]] = [{"majority": fails}, {"majority": residue}]
    call = {**ASKED, "best_of": 4, "seed": [1, 2], "on_error": "return"}
    first, second = es.generate(model, None, [IDS, IDS], options=options, **call)
    assert isinstance(first.finish_reason.matched, LookupError)
    assert second.tokens == best(model, 2, best_of=4, majority=residue).tokens


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "greedy": ({"do_sample": False, "temperature": None}, "do_sample=True"),
    "beams": ({"num_beams": 2}, "num_beams"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "more results than samples": ({"num_return_sequences": 9}, "a number from 9"),
    "none": ({"best_of": 0}, "best_of is impossible"),
    "two functions": ({"majority": len, "scorer": len}, "two ways"),
    "no function": ({"scorer": "len"}, "scorer is no function"),
    "no number": ({"best_of": None, "majority": len}, "best_of does not say"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(model: LanguageModel, case: str) -> None:
    given, said = WRONG[case]
    with pytest.raises(EverystepError, match=said):
        best(model, 1, **given)
