"""Every processor gives, bit for bit, what the reference's class gives on the same rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as reference

from everystep.processors.allowed import InfNanRemove, PrefixConstrained
from everystep.processors.base import Processor
from everystep.processors.bias import NoBadWords, SequenceBias
from everystep.processors.length import (
    ExponentialDecayLength,
    ForcedBOS,
    ForcedEOS,
    MinLength,
    MinNewTokens,
    SuppressTokens,
    SuppressTokensAtBegin,
)
from everystep.processors.repetition import (
    EncoderNoRepeatNGram,
    EncoderRepetitionPenalty,
    NoRepeatNGram,
    RepetitionPenalty,
)
from everystep.processors.warpers import (
    Epsilon,
    Eta,
    LogitNormalization,
    MinP,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
)
from tests.processors.making import (
    FINITE_MAXIMUM,
    KINDS,
    VOCABULARY,
    rectangle,
    rows_of,
    same,
    some_scores,
)

Theirs = Callable[[Tensor, Tensor], Tensor]
ROWS, WIDTH = 5, 12
EOS = (7, 2)
ENCODER = (4, 1, 3, 3, 0, 5, 1, 3)
BIASES = {(3,): 2.5, (4, 1): -1.25, (0, 5, 1): 3.0, (2, 1): 0.7, (1,): -torch.inf, (9, 9, 9, 1): 1}
WORDS = ((3,), (7,), (4, 1), (0, 5, 1), (2, 2))


def allowed(batch_id: int, ids: Tensor) -> list[int]:
    return [batch_id, int(ids[-1]), 20 + len(ids)]


CASES: list[tuple[str, Processor, Theirs]] = [
    ("bias", SequenceBias(tuple(BIASES.items())),
     reference.SequenceBiasLogitsProcessor({ids: float(bias) for ids, bias in BIASES.items()})),
    ("words", NoBadWords(tuple(word for word in WORDS if word != (7,))),
     reference.NoBadWordsLogitsProcessor([list(word) for word in WORDS], [7])),
    ("repetition", RepetitionPenalty(1.3), reference.RepetitionPenaltyLogitsProcessor(1.3)),
    ("favour", RepetitionPenalty(0.6), reference.RepetitionPenaltyLogitsProcessor(0.6)),
    ("repetition from 4", RepetitionPenalty(1.3, ignored=4),
     reference.RepetitionPenaltyLogitsProcessor(1.3, 4)),
    ("encoder repetition", EncoderRepetitionPenalty(1.7, ENCODER),
     reference.EncoderRepetitionPenaltyLogitsProcessor(1.7, torch.tensor([ENCODER]))),
    *[(f"{n}-gram", NoRepeatNGram(n), reference.NoRepeatNGramLogitsProcessor(n))
      for n in (1, 2, 3, WIDTH, WIDTH + 1)],
    *[(f"encoder {n}-gram", EncoderNoRepeatNGram(n, ENCODER),
       reference.EncoderNoRepeatNGramLogitsProcessor(n, torch.tensor(ENCODER)))
      for n in (1, 2, 3, 20)],
    *[(f"min length {n}", MinLength(n, EOS), reference.MinLengthLogitsProcessor(n, list(EOS)))
      for n in (0, WIDTH, WIDTH + 1)],
    *[(f"min new {n}", MinNewTokens(n, EOS, prompt_length=4),
       reference.MinNewTokensLengthLogitsProcessor(4, n, list(EOS)))
      for n in (0, WIDTH - 4, WIDTH - 3)],
    ("prefix", PrefixConstrained(allowed),
     reference.PrefixConstrainedLogitsProcessor(allowed, 1)),
    *[(f"forced end {n}", ForcedEOS(n, EOS), reference.ForcedEOSTokenLogitsProcessor(n, list(EOS)))
      for n in (WIDTH, WIDTH + 1)],
    ("not forced begin", ForcedBOS(5), reference.ForcedBOSTokenLogitsProcessor(5)),
    *[(f"decay {start} {factor}", ExponentialDecayLength(start, factor, EOS, prompt_length=4),
       reference.ExponentialDecayLengthPenalty((start, factor), list(EOS), 4))
      for start in (0, 5, 8, 9) for factor in (1.01, 0.5, 3.0)],
    ("suppress", SuppressTokens((1, 36, 99)), reference.SuppressTokensLogitsProcessor([1, 36, 99])),
    *[(f"suppress at {n}", SuppressTokensAtBegin((1, 8), begin_index=n),
       reference.SuppressTokensAtBeginLogitsProcessor([1, 8], n)) for n in (WIDTH, 3)],
    *[(f"temperature {t}", Temperature(t), reference.TemperatureLogitsWarper(t))
      for t in (1e-3, 0.7, 1.0, 3.0, 1e4)],
    *[(f"top k {k} {keep}", TopK(k, keep),
       reference.TopKLogitsWarper(k, min_tokens_to_keep=keep))
      for k in (1, 5, VOCABULARY, 1000) for keep in (1, 3)],
    *[(f"top p {p} {keep}", TopP(p, keep),
       reference.TopPLogitsWarper(p, min_tokens_to_keep=keep))
      for p in (0.0, 1e-6, 0.3, 0.9, 0.999999, 1.0) for keep in (1, 3)],
    *[(f"min p {p} {keep}", MinP(p, keep),
       reference.MinPLogitsWarper(p, min_tokens_to_keep=keep))
      for p in (0.0, 0.05, 1.0) for keep in (1, 3, 100)],
    *[(f"typical {p} {keep}", Typical(p, keep),
       reference.TypicalLogitsWarper(p, min_tokens_to_keep=keep))
      for p in (1e-6, 0.2, 0.95, 0.999999) for keep in (1, 3)],
    *[(f"epsilon {p} {keep}", Epsilon(p, keep),
       reference.EpsilonLogitsWarper(p, min_tokens_to_keep=keep))
      for p in (1e-9, 0.01, 0.99) for keep in (1, 3, 100)],
    ("normalisation", LogitNormalization(), reference.LogitNormalization()),
]  # fmt: skip
# The reference's classes refuse nan, and +inf becomes nan when it is normalised.
WITHOUT_INFINITY: list[tuple[str, Processor, Theirs]] = [
    *[(f"top h {h}", TopH(h), reference.TopHLogitsWarper(h)) for h in (1e-6, 0.4, 1.0)],
    *[(f"eta {p} {keep}", Eta(p, keep), reference.EtaLogitsWarper(p, min_tokens_to_keep=keep))
      for p in (1e-9, 0.01, 0.6, 0.99) for keep in (1, 3)],
]  # fmt: skip


def compare(ours: Processor, theirs: Theirs, scores: Tensor) -> None:
    prefixes = rectangle(len(scores), WIDTH)
    given = scores.clone()
    result = ours(rows_of(prefixes), scores)
    assert same(result, theirs(torch.tensor(prefixes), given.clone()))
    assert same(scores, given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ours", "theirs"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_as_the_reference(ours: Processor, theirs: Theirs, kind: str) -> None:
    compare(ours, theirs, some_scores(ROWS, kind))


@pytest.mark.parametrize("kind", FINITE_MAXIMUM)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [case[1:] for case in WITHOUT_INFINITY],
    ids=[case[0] for case in WITHOUT_INFINITY],
)
def test_as_the_reference_where_it_normalises(ours: Processor, theirs: Theirs, kind: str) -> None:
    compare(ours, theirs, some_scores(ROWS, kind))


@pytest.mark.parametrize("name", ["temperature 0.7", "top p 0.3 1", "eta 0.01 1", "repetition"])
def test_as_the_reference_in_float64(name: str) -> None:
    cases = {case[0]: case[1:] for case in [*CASES, *WITHOUT_INFINITY]}
    compare(*cases[name], some_scores(ROWS).double())


def test_more_entropy_than_a_hundred_tokens_hold() -> None:
    compare(TopH(0.9), reference.TopHLogitsWarper(0.9), some_scores(ROWS, vocabulary=300))


def test_nan_and_infinities_are_replaced_as_in_the_reference() -> None:
    scores = some_scores(ROWS, "infinite")
    scores[2] = torch.nan
    compare(InfNanRemove(), reference.InfNanRemoveLogitsProcessor(), scores)


def test_a_forced_begin_is_as_in_the_reference() -> None:
    scores = some_scores(3)
    theirs = reference.ForcedBOSTokenLogitsProcessor(5)(torch.zeros(3, 1), scores.clone())
    assert same(ForcedBOS(5)(rows_of([[1], [2], [3]]), scores), theirs)


def test_pads_do_not_count_for_the_repetition_penalty() -> None:
    prefixes, pads = rectangle(4, 9), [0, 3, 1, 8]
    scores = some_scores(4)
    theirs = reference.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor(pads))
    ours = RepetitionPenalty(1.5)(rows_of(prefixes, pads=pads), scores)
    assert same(ours, theirs(torch.tensor(prefixes), scores.clone()))


@pytest.mark.parametrize("ours", [RepetitionPenalty(1.5), NoRepeatNGram(2)])
def test_ids_beyond_the_vocabulary_are_passed_over(ours: Processor) -> None:
    prefixes = [[40, 1, 40, 2, 40], [3, 50, 3, 4, 3]]
    scores = some_scores(2)
    theirs = {
        RepetitionPenalty: reference.RepetitionPenaltyLogitsProcessor(1.5),
        NoRepeatNGram: reference.NoRepeatNGramLogitsProcessor(2),
    }[type(ours)]
    assert same(ours(rows_of(prefixes), scores), theirs(torch.tensor(prefixes), scores.clone()))


def test_a_constraint_that_all_beams_miss_is_forced_as_in_the_reference() -> None:
    prefixes = rectangle(4, 6)
    scores = some_scores(4)
    scores[0:2, 20:] = scores[2, 20:] = -torch.inf
    theirs = reference.PrefixConstrainedLogitsProcessor(lambda batch_id, ids: [20, 30], 2)
    expected = theirs(torch.tensor(prefixes), scores.clone())
    for search in (0, 1):
        rows = rows_of(prefixes[2 * search : 2 * search + 2])
        rows.sequences[1].request = rows.sequences[0].request
        rows.sequences[1].index = 1
        ours = PrefixConstrained(lambda batch_id, ids: [20, 30], first=search, beams=2)
        part = slice(2 * search, 2 * search + 2)
        assert same(ours(rows, scores[part]), expected[part])
