"""Allowed sequences: the trie, and the processor that follows it, beside `prefix_allowed_tokens_fn`
doing the same, by hand and in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError, RequestError
from everystep.processors.allowed import AllowedSequencesLogitsProcessor, TrieWalk
from everystep.processors.base import bare_rows
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Scores

TOKENIZER = tiny_tokenizer(320)
PROMPT = torch.tensor([[7, 8, 9], [0, 5, 6]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])
SEQUENCES = [[11, 12, 13], [11, 12], [11, 14, 15, 16], [20, 21], [20, 22, 23, 24, 25], [30]]
END = 2
QUIET: dict[str, Any] = {"eos_token_id": END, "pad_token_id": 0, "max_new_tokens": 8}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "num_return_sequences": 3, "temperature": 2.0},
    "unseeded": {"do_sample": True, "top_k": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True, "seed": 5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "guided": {"guidance_scale": 1.5},
    "best of": {"do_sample": True, "seed": 3, "best_of": 4},
    "penalised": {"repetition_penalty": 1.4, "num_beams": 2},
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320, hidden_size=16)


def function(sequences: list[list[int]], start: int, end: int = END) -> Callable[..., list[int]]:
    """The same as a caller's function: what follows in some sequence, the end where one ends."""

    def allowed(batch: int, ids: Tensor) -> list[int]:
        own = ids[start:].tolist()
        found = {
            one[len(own)] for one in sequences if one[: len(own)] == own and len(one) > len(own)
        }
        done = own in sequences or not any(one[: len(own)] == own for one in sequences)
        return sorted(found | ({end} if done else set()))

    return allowed


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_does_what_a_function_that_allows_the_same_makes_it_do(
    model: LanguageModel, name: str
) -> None:
    given = {**QUIET, **STRATEGIES[name], "input_ids": PROMPT, "attention_mask": MASK}
    scored = {"return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(1)
    wanted = model.generate(**given, **scored, prefix_allowed_tokens_fn=function(SEQUENCES, 3))
    torch.manual_seed(1)
    found = model.generate(**given, **scored, allowed_sequences=SEQUENCES)
    assert found.sequences.tolist() == wanted.sequences.tolist()
    for one, other in zip(found.scores, wanted.scores, strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(1)
    found = model.generate(**given, allowed_sequences=es.AllowedSequences(SEQUENCES))
    assert found.tolist() == wanted.sequences.tolist()
    answers = [[t for t in row[3:] if t not in (0, END)] for row in found.tolist()]
    assert all(one in SEQUENCES for one in answers if one)


def test_a_row_of_scores_keeps_what_may_follow_and_nothing_else() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        count = int(generator.integers(1, 30))
        sequences = [
            generator.integers(0, 9, generator.integers(1, 6)).tolist() for _ in range(count)
        ]
        one = AllowedSequencesLogitsProcessor(es.AllowedSequences(sequences), (3,))
        ids = torch.from_numpy(generator.integers(0, 9, (8, generator.integers(0, 5))))
        scores = torch.randn(8, 12)
        allowed = function(sequences, 0, 3)
        wanted = torch.full_like(scores, -torch.inf)
        for r in range(8):
            at = allowed(0, ids[r])
            wanted[r, at] = scores[r, at]
        assert torch.equal(one(ids, scores), wanted)
        listed = one.few(bare_rows(ids), Scores.of(scores))
        assert listed is not None and torch.equal(listed.whole().values, wanted)
        live = listed.values[:, 1:].isneginf() | (listed.tokens[:, 1:] > listed.tokens[:, :-1])
        assert bool(live.all())  # in rising order, as lists of processors are


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("how", ["a set", "a function"])
def test_what_stands_before_it_may_leave_nothing(
    model: LanguageModel, how: str, beams: int
) -> None:
    """Then all that is allowed is equal; what stands behind it leaves nothing to choose."""
    given: dict[str, Any] = {"input_ids": PROMPT, "attention_mask": MASK, "num_beams": beams}
    given |= {**QUIET, "return_dict_in_generate": True, "output_scores": True}
    if how == "a set":
        given["allowed_sequences"] = SEQUENCES
    else:
        given["prefix_allowed_tokens_fn"] = function(SEQUENCES, 3)
    found = model.generate(**given, bad_words_ids=[[11], [20], [30]])
    kept = found.scores[0].isfinite()
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[11, 20, 30]] * 2 * beams
    assert all(len({*row[at].tolist()}) == 1 for row, at in zip(found.scores[0], kept, strict=True))
    with pytest.raises(RequestError, match="no token can be"):
        model.generate(**given, suppress_tokens=[11, 20, 30])


def test_many_sequences_are_compiled_into_arrays() -> None:
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 5000, 6).tolist() for _ in range(20_000)]
    one = AllowedSequencesLogitsProcessor(es.AllowedSequences(sequences), (5000,))
    heads = torch.tensor([one[:3] for one in sequences[:4]])
    kept = one(heads, torch.zeros(4, 6000)).isfinite()
    for row, head in zip(kept, sequences[:4], strict=True):
        assert {int(t) for t in row.nonzero()[:, 0]} == {
            other[3] for other in sequences if other[:3] == head[:3]
        }
    # Too many for lists: the first step writes whole rows.
    first = one(heads[:, :0], torch.zeros(4, 6000)).isfinite()
    assert first.sum(dim=1).tolist() == [len({other[0] for other in sequences})] * 4


def test_what_is_remembered_can_be_copied_and_taken_back() -> None:
    walk = TrieWalk(4, [0, 3, 7])
    twin = walk.copy()
    twin.rewind(5)
    assert (walk.nodes, twin.nodes) == ([0, 3, 7], [0, 3])
    twin.rewind(0)
    assert twin.nodes == [0]


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 2}])
def test_texts_are_answered_with_whole_texts(model: LanguageModel, search: dict[str, Any]) -> None:
    texts = [" the tool", " the text", " a tool"]
    end = TOKENIZER.eos_token_id
    given = {"eos_token_id": end, "allowed_sequences": texts, **search}
    answers = es.generate(model, TOKENIZER, ["is it", "was it", "the tool was"], **given)
    assert {*answers} <= {*texts} and len(answers) == 3
    with es.stream(model, TOKENIZER, "is it", **given) as stream:
        assert "".join(event.text for event in stream) == answers[0]
    run = es.open(model, TOKENIZER, "is it", **given)
    result = run.result()
    assert result.text == answers[0] or "seed" in search
    assert result.finish_reason.kind == "stop"


def test_every_row_may_have_a_set_of_its_own(model: LanguageModel) -> None:
    sets = [es.AllowedSequences([[40, 41]]), es.AllowedSequences([[50], [51, 52]])]
    given = {**QUIET, "input_ids": PROMPT, "attention_mask": MASK, "num_beams": 2}
    both = model.generate(**given, allowed_sequences=sets)
    for row, one in enumerate(sets):
        alone = model.generate(**given, allowed_sequences=one)
        assert both[row].tolist()[: alone.shape[1]] == alone[row].tolist()[: both.shape[1]]
    options = [{"allowed_sequences": [[40, 41]]}, {"allowed_sequences": [[50]], "num_beams": 3}]
    found = es.generate(model, None, [[7, 8, 9], [5, 6]], options=options, eos_token_id=END)
    assert [one[:-1] for one in found] == [[40, 41], [50]]


def test_the_length_follows_from_the_longest_sequence(model: LanguageModel) -> None:
    long = [*range(30, 70)]
    found = es.generate(model, None, [[7, 8]], allowed_sequences=[long], eos_token_id=END)
    assert found == [[*long, END]]


def test_sent_ids_that_leave_the_set_only_end(model: LanguageModel) -> None:
    run = es.open(model, None, [7, 8, 9], allowed_sequences=SEQUENCES, **QUIET)
    next(run)
    run.send([99])
    assert run.result().tokens[1:] == (99, END)


def test_a_run_is_saved_with_the_set(model: LanguageModel, tmp_path: Any) -> None:
    asked = {**QUIET, "num_beams": 2, "seed": 1}
    run = es.open(model, TOKENIZER, [7, 8, 9], allowed_sequences=SEQUENCES, **asked)
    next(run)
    run.save(tmp_path / "a.run")
    assert es.resume(tmp_path / "a.run", model, TOKENIZER).result() == run.result()
    ours = es.AllowedSequences(SEQUENCES)
    run = es.open(model, TOKENIZER, [7, 8, 9], allowed_sequences=ours, **asked)
    next(run)
    run.save(tmp_path / "a.run")
    again = es.resume(tmp_path / "a.run", model, TOKENIZER, allowed_sequences=ours)
    assert again.result() == run.result()
    other = es.AllowedSequences(SEQUENCES[1:])
    with pytest.raises(RequestError, match="another request"):
        es.resume(tmp_path / "a.run", model, TOKENIZER, allowed_sequences=other)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no sequence": ([], {}, "empty"),
    "an empty one": ([[1], []], {}, "at least one id"),
    "one text": ("text", {}, "a list, also for one"),
    "no tokenizer": (["text"], {}, "tokenizer"),
    "mixed": (["text", [1]], {"tokenizer": TOKENIZER}, "mixes"),
    "floats": ([[1.5]], {}, "float"),
    "negative": ([[-1]], {}, "-1"),
    "beyond the vocabulary": ([[320]], {}, "below 320"),
    "after the end": ([[5, END, 6]], {}, "goes on after"),
    "too long": ([[5] * 9], {}, "at most 8"),
    "without an end": ([[5]], {"eos_token_id": None}, "end token"),
    "three sets for two rows": ([es.AllowedSequences([[5]])] * 3, {}, "or 2 of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(model: LanguageModel, case: str) -> None:
    value, more, said = WRONG[case]
    with pytest.raises(EverystepError, match=said):
        model.generate(PROMPT, attention_mask=MASK, allowed_sequences=value, **{**QUIET, **more})
