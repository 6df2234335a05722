"""Every processor gives, bit for bit, what transformers' class of that name gives: both are made
from the same arguments, and ours runs by hand and on rows that are remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as reference

import everystep
from everystep.processors.bias import PrefixConstrainedLogitsProcessor
from everystep.processors.length import ForcedBOSTokenLogitsProcessor
from everystep.processors.repetition import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.types.protocols import Processor
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
EOS = [7, 2]
ENCODER = torch.tensor([4, 1, 3, 3, 0, 5, 1, 3])
BIASES = {(3,): 2.5, (4, 1): -1.25, (0, 5, 1): 3.0, (2, 1): 0.7, (1,): -torch.inf, (9, 9, 1): 1.0}
WORDS = [[3], [7], [4, 1], [0, 5, 1], [2, 2]]


def allowed(batch_id: int, ids: Tensor) -> list[int]:
    return [batch_id, int(ids[-1]), 20 + len(ids)]


def pair(kind: str, *args: Any, **named: Any) -> tuple[str, Processor, Theirs]:
    """A name, our instance and transformers', from the same arguments."""
    # A function is said by its name: its address differs from process to process.
    said = [
        *(getattr(one, "__name__", repr(one)) for one in args),
        *(f"{name}={value}" for name, value in named.items()),
    ]
    name = f"{kind}({', '.join(said)})"[:60]
    return name, getattr(everystep, kind)(*args, **named), getattr(reference, kind)(*args, **named)


def drawn(highest: int, length: int) -> torch.Tensor:
    """(ROWS, length) ids that are the same in every process, for they name the test."""
    generator = torch.Generator().manual_seed(highest)
    return torch.randint(0, highest, (ROWS, length), generator=generator)


CASES = [
    pair("SequenceBiasLogitsProcessor", BIASES),
    pair("SequenceBiasLogitsProcessor", [[[3], 2.5], [[4, 1], -1.5]]),
    pair("NoBadWordsLogitsProcessor", WORDS),
    pair("NoBadWordsLogitsProcessor", WORDS, eos_token_id=7),
    pair("NoBadWordsLogitsProcessor", WORDS, torch.tensor(EOS)),
    pair("NoBadWordsLogitsProcessor", [[7]], 7),
    *[pair("RepetitionPenaltyLogitsProcessor", p) for p in (1.3, 0.6, 1e-3, 1e6)],
    pair("RepetitionPenaltyLogitsProcessor", 1.3, 4),
    pair("RepetitionPenaltyLogitsProcessor", 1.3, WIDTH + 1),
    pair("RepetitionPenaltyLogitsProcessor", 1.3, prompt_ignore_length=torch.arange(ROWS)),
    pair("EncoderRepetitionPenaltyLogitsProcessor", 1.7, ENCODER[None]),
    pair("EncoderRepetitionPenaltyLogitsProcessor", 0.7, drawn(9, 4)),
    *[pair("NoRepeatNGramLogitsProcessor", n) for n in (1, 2, 3, WIDTH, WIDTH + 1)],
    *[pair("EncoderNoRepeatNGramLogitsProcessor", n, ENCODER) for n in (1, 2, 3, 20)],
    pair("EncoderNoRepeatNGramLogitsProcessor", 2, drawn(5, 9)),
    *[pair("MinLengthLogitsProcessor", n, EOS) for n in (0, WIDTH, WIDTH + 1)],
    pair("MinLengthLogitsProcessor", 99, 7, device="cpu"),
    pair("MinLengthLogitsProcessor", 99, torch.tensor([7, 99])),
    *[pair("MinNewTokensLengthLogitsProcessor", 4, n, EOS) for n in (0, WIDTH - 4, WIDTH - 3)],
    pair("PrefixConstrainedLogitsProcessor", allowed, 1),
    *[pair("ForcedEOSTokenLogitsProcessor", n, EOS) for n in (WIDTH, WIDTH + 1)],
    pair("ForcedEOSTokenLogitsProcessor", WIDTH + 1, 7),
    pair("ForcedBOSTokenLogitsProcessor", 5),
    *[
        pair("ExponentialDecayLengthPenalty", (start, factor), EOS, 4)
        for start in (0, 5, 8, 9)
        for factor in (1.01, 0.5, 3.0)
    ],
    pair("ExponentialDecayLengthPenalty", (0, 1e150), EOS, 10),
    pair("SuppressTokensLogitsProcessor", [1, 36, 99]),
    *[pair("SuppressTokensAtBeginLogitsProcessor", [1, 8], n) for n in (WIDTH, 3)],
    *[pair("TemperatureLogitsWarper", t) for t in (1e-3, 0.7, 1.0, 3.0, 1e4)],
    *[
        pair("TopKLogitsWarper", k, min_tokens_to_keep=keep)
        for k in (1, 5, VOCABULARY, 1000)
        for keep in (1, 3)
    ],
    *[
        pair("TopPLogitsWarper", p, min_tokens_to_keep=keep)
        for p in (0.0, 1e-6, 0.3, 0.9, 0.999999, 1.0)
        for keep in (1, 3, 100)
    ],
    *[
        pair("MinPLogitsWarper", p, min_tokens_to_keep=keep)
        for p in (0.0, 0.05, 1.0)
        for keep in (1, 3, 100)
    ],
    *[
        pair("TypicalLogitsWarper", p, min_tokens_to_keep=keep)
        for p in (1e-6, 0.2, 0.95, 0.999999, 1 - 1e-9)  # no sum of floats reaches the last
        for keep in (1, 3, 100)
    ],
    *[
        pair("EpsilonLogitsWarper", p, min_tokens_to_keep=keep)
        for p in (1e-9, 0.01, 0.99)
        for keep in (1, 3, 100)
    ],
    *[pair(f"{name}LogitsWarper", 0.5, -7.0) for name in ("TopP", "MinP", "Typical", "Epsilon")],
    pair("TopKLogitsWarper", 2, -7.0, 3),
    pair("LogitNormalization"),
]
# transformers' classes refuse nan, and +inf becomes nan when it is normalised.
WITHOUT_INFINITY = [
    *[pair("TopHLogitsWarper", h) for h in (1e-6, 0.4, 1.0)],
    pair("TopHLogitsWarper", 0.4, -7.0),
    *[
        pair("EtaLogitsWarper", p, min_tokens_to_keep=keep)
        for p in (1e-9, 0.01, 0.6, 0.99)
        for keep in (1, 3)
    ],
]


def compare(ours: Processor, theirs: Theirs, scores: Tensor) -> None:
    prefixes = rectangle(len(scores), WIDTH)
    given, ids = scores.clone(), torch.tensor(prefixes)
    expected = theirs(ids, given.clone())
    assert same(ours(ids, scores), expected)
    assert same(ours(rows_of(prefixes), scores), expected)
    assert same(scores, given)
    assert same(ours.overwrite(rows_of(prefixes), scores), expected)  # type: ignore[attr-defined]


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


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [case[1:] for case in [*CASES, *WITHOUT_INFINITY]],
    ids=[case[0] for case in [*CASES, *WITHOUT_INFINITY]],
)
def test_as_the_reference_in_float64(ours: Processor, theirs: Theirs) -> None:
    compare(ours, theirs, some_scores(ROWS).double())


def test_more_entropy_than_a_hundred_tokens_hold() -> None:
    compare(*pair("TopHLogitsWarper", 0.9)[1:], some_scores(ROWS, vocabulary=300))


def test_nan_and_infinities_are_replaced_as_in_the_reference() -> None:
    scores = some_scores(ROWS, "infinite")
    scores[2] = torch.nan
    compare(*pair("InfNanRemoveLogitsProcessor")[1:], scores)


def test_a_forced_begin_is_as_in_the_reference() -> None:
    scores = some_scores(3)
    theirs = reference.ForcedBOSTokenLogitsProcessor(5)(torch.zeros(3, 1), scores.clone())
    assert same(ForcedBOSTokenLogitsProcessor(5)(rows_of([[1], [2], [3]]), scores), theirs)


def test_pads_do_not_count_for_the_repetition_penalty() -> None:
    prefixes, pads = rectangle(4, 9), [0, 3, 1, 8]
    scores = some_scores(4)
    theirs = reference.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor(pads))
    ours = RepetitionPenaltyLogitsProcessor(1.5)(rows_of(prefixes, pads=pads), scores)
    assert same(ours, theirs(torch.tensor(prefixes), scores.clone()))


@pytest.mark.parametrize(
    "ours", [RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2)]
)
def test_ids_beyond_the_vocabulary_are_passed_over(ours: Processor) -> None:
    prefixes = [[40, 1, 40, 2, 40], [3, 50, 3, 4, 3]]
    scores = some_scores(2)
    theirs = {
        RepetitionPenaltyLogitsProcessor: reference.RepetitionPenaltyLogitsProcessor(1.5),
        NoRepeatNGramLogitsProcessor: reference.NoRepeatNGramLogitsProcessor(2),
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
        ours = PrefixConstrainedLogitsProcessor(lambda batch_id, ids: [20, 30], 2, first=search)
        part = slice(2 * search, 2 * search + 2)
        assert same(ours(rows, scores[part]), expected[part])
