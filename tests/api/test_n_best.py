"""N-best: more hypotheses of a search than it has beams, with their scores, and the next ones of a
search that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import audit
from everystep.errors import EverystepError, RequestError
from everystep.testing.models import tiny_llama
from tests.api.runs import engine_of, take

IDS = [5, 6, 7, 8]
# With many end tokens, hypotheses of every length are found.
ASKED: dict[str, Any] = {
    "max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": [*range(3, 100, 3)], "num_beams": 4,
}  # fmt: skip
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"early_stopping": True},
    "never": {"early_stopping": "never"},
    "long": {"length_penalty": 2.0},
    "short": {"length_penalty": -1.0, "early_stopping": True},
    "drawn": {"do_sample": True, "temperature": 2.0},
    "penalised": {"repetition_penalty": 1.3, "length_penalty": 0.0},
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=100, hidden_size=16)


def found(results: list[Any]) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and scores, without what stands where there are too few."""
    return [(one.tokens, one.score) for one in results if one.tokens]


def asked_from_the_start(model: LanguageModel, count: int, **options: Any) -> list[Any]:
    call = {**ASKED, **options, "seed": [3], "return_dict_in_generate": True}
    (results,) = es.generate(model, None, [IDS], **call, n_best=count)
    return found(results)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_next_ones_are_those_of_a_search_that_keeps_as_many(
    model: LanguageModel, search: str
) -> None:
    options = SEARCHES[search]
    run = es.open(model, None, IDS, **ASKED, **options, seed=3)
    given = found([run.result()])
    for count in (1, 4, 2):
        before = len(engine_of(run).scheduler.groups)
        more = found(run.more(count))
        every = asked_from_the_start(model, len(given) + count, **options)
        assert more == [one for one in every if one not in given][:count]
        assert more and len(engine_of(run).scheduler.groups) == before == 1
        given += more
        assert {*given} <= {*found(run.hypotheses)}
    assert len({tokens for tokens, _ in given}) == len(given) == 8
    audit(engine_of(run))


def test_a_search_goes_on_and_does_not_begin_again(model: LanguageModel, fed: list[int]) -> None:
    run = es.open(model, None, IDS, **ASKED, early_stopping=True)
    run.result()
    before = fed[-1]
    assert len(run.more(6)) == 6
    whole = fed[-1]
    again = es.open(model, None, IDS, **ASKED, early_stopping=True, n_best=7)
    again.result()
    assert before < whole == fed[-1]


def test_a_search_that_finds_no_more_says_so(model: LanguageModel) -> None:
    few = {**ASKED, "eos_token_id": None, "max_new_tokens": 4}
    run = es.open(model, None, IDS, **few)
    first = run.result()
    assert len(run.more(10)) == 3
    assert run.more(10) == []
    assert run.hypotheses[0].tokens == first.tokens
    assert len(run.result()) == 4 and run.done


def test_every_finished_hypothesis_has_its_score(model: LanguageModel) -> None:
    run = es.open(model, None, IDS, **ASKED, n_best=6)
    ended: list[tuple[int, ...]] = []
    for step in run:
        ended += [one.tokens for one in step.branches if one.finish is not None]
    every = run.hypotheses
    assert len(every) == len(ended) > 6
    assert [one.score for one in every] == sorted((one.score for one in every), reverse=True)
    assert found(run.result()) == found(every)[:6]
    # A score is the sum of log-probabilities over a power of the length.
    for one in every:
        ids = torch.tensor([[*IDS, *one.tokens]])
        logits = model(ids).logits.log_softmax(-1)[0, len(IDS) - 1 : -1]
        total = logits.gather(1, torch.tensor(one.tokens)[:, None]).sum()
        assert float(total) / len(one.tokens) == pytest.approx(one.score, abs=1e-4)


def test_n_best_of_a_rectangle(model: LanguageModel) -> None:
    out = model.generate(
        torch.tensor([IDS, IDS[::-1]]), **ASKED, n_best=5, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    assert out.sequences.shape[0] == out.sequences_scores.shape[0] == 10
    wanted = asked_from_the_start(model, 5)
    assert [tuple(one) for one in out.new_tokens[:5]] == [tokens for tokens, _ in wanted]
    assert out.sequences_scores[:5].tolist() == pytest.approx([score for _, score in wanted])
    plain = model.generate(torch.tensor([IDS]), **ASKED, num_return_sequences=3)
    kept = model.generate(torch.tensor([IDS]), **ASKED, n_best=3)
    assert plain.tolist() == kept.tolist()


def test_requests_of_any_width_share_a_batch(model: LanguageModel) -> None:
    options: list[dict[str, Any]] = [
        {"num_beams": 2},
        {"num_beams": 5, "num_return_sequences": 4},
        {"num_beams": 1},
        {"num_beams": 3, "n_best": 7},
        {"num_beams": 7, "length_penalty": 0.0},
        {"num_beams": 1, "do_sample": True, "seed": 4, "num_return_sequences": 3},
    ]
    common = {name: value for name, value in ASKED.items() if name != "num_beams"}
    prompts = [IDS[: 1 + i % 4] for i in range(len(options))]
    together = es.generate(model, None, prompts, options=options, **common)
    for prompt, own, result in zip(prompts, options, together, strict=True):
        assert es.generate(model, None, [prompt], **common, **own) == [result]


def test_a_widened_run_is_saved_forked_and_cancelled(model: LanguageModel, tmp_path: Path) -> None:
    run = es.open(model, None, IDS, **ASKED, early_stopping=True)
    given = found([run.result()])
    given += found(run.more(3))
    run.save(tmp_path / "a.run")
    again, twin = es.resume(tmp_path / "a.run", model), run.fork()
    wanted = found(run.more(3))
    assert len(wanted) == 3 and not {*wanted} & {*given}
    assert found(again.more(3)) == found(twin.more(3)) == wanted
    result = run.result()
    run.cancel()
    assert run.result() == result
    with pytest.raises(RequestError, match="cancelled"):
        run.more(1)
    twin.cancel()
    # Beams that were live when the search ended are no part of its result, however good.
    short = {**ASKED, "early_stopping": True, "length_penalty": 0.0, "num_return_sequences": 4}
    other = es.open(model, None, IDS, **short)
    before = other.result()
    assert max(one.score for one in other._group.live) > before[-1].score
    other.cancel()
    assert other.result() == before
    assert not engine_of(run).scheduler.groups
    audit(engine_of(run))


def test_a_run_that_is_cut_off_keeps_its_events(model: LanguageModel) -> None:
    run = es.open(model, None, IDS, **ASKED)
    events = [event for step in run for event in step.events]
    assert tuple(event.token for event in events) == run.result().tokens
    assert events[-1].finish == run.result().finish_reason
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    assert take(run, 1) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_best": 0}, "from 1 to"),
        ({"n_best": 3, "num_beams": 1}, "hypotheses of a search"),
        ({"n_best": 3, "num_return_sequences": 2}, "different numbers"),
    ],
)
def test_what_cannot_be_is_refused(model: LanguageModel, given: dict[str, Any], said: str) -> None:
    with pytest.raises(EverystepError, match=said):
        es.generate(model, None, [IDS], **{**ASKED, **given})


def test_more_needs_a_search(model: LanguageModel) -> None:
    run = es.open(model, None, IDS, max_new_tokens=3)
    with pytest.raises(RequestError, match="num_beams above 1"):
        run.more(3)
    with pytest.raises(RequestError, match="above 0"):
        es.open(model, None, IDS, **ASKED).more(0)
