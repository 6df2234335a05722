"""`schema=`, `regex=`, `grammar=` and `choices=`: what the texts of a call have to follow."""

from __future__ import annotations

from collections.abc import Mapping

from everystep.bridge.core import ForeignModel
from everystep.errors import RequestError, shown
from everystep.processors.allowed import AllowedSequences
from everystep.processors.grammars.grammar import compiled
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.grammars.source import KINDS, Kind, read_source
from everystep.processors.grammars.trials import trials_held
from everystep.processors.grammars.vocabulary import vocabulary_of
from everystep.requests.subject import Subject


def read_grammar(
    given: Mapping[Kind, object], tokenizer: object, ends: tuple[int, ...], vocabulary: int
) -> GrammarMask | None:
    """Return what a call asks for by kind, compiled; None where it asks for nothing.

    RequestError or UnsupportedError where it is impossible, or cannot be done for this tokenizer.
    """
    asked = [kind for kind, value in given.items() if value is not None]
    if not asked:
        return None
    if len(asked) > 1:
        raise RequestError(
            f"a text cannot follow {' and '.join(asked)} at once",
            wanted=f"one of {', '.join(KINDS)}",
            do=f"Pass {asked[0]} alone, and None for what other options ask for",
        )
    (kind,) = asked
    if tokenizer is None:
        raise RequestError(
            f"{kind} needs a tokenizer",
            wanted="tokenizer=...",
            got="none",
            do="Pass the tokenizer that es.load returned",
        )
    if not ends:
        raise RequestError(
            f"{kind} needs a token that ends a text",
            wanted="eos_token_id",
            got="none",
            do="Set eos_token_id",
        )
    own, trials = vocabulary_of(tokenizer, vocabulary), trials_held()
    value = given[kind]
    source = read_source(kind, value) if trials is None else trials.read(kind, value, own)
    return GrammarMask(compiled(source, own), ends)


def compile_asked(given: Mapping[str, object], tokenizer: object, vocabulary: int) -> None:
    """Compile what keywords ask for by kind, so that it is there when a request is made of them."""
    asked: dict[Kind, object] = {kind: given.get(kind) for kind in KINDS}
    read_grammar(asked, tokenizer, (0,), vocabulary)


def forces(subject: Subject) -> bool:
    """Return True where tokens that a grammar forces may be drafted: rows can be cut back."""
    core = subject.core
    return not isinstance(core, ForeignModel) or "truncate" in core.executor().abilities


def read_allowed(value: object, tokenizer: object) -> tuple[AllowedSequences, ...]:
    """Return the sets of sequences in the keyword, one for all rows or one each; none without
    it."""
    if value is None:
        return ()
    if isinstance(value, AllowedSequences):
        return (value,)
    if isinstance(value, str) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0:
        raise RequestError(
            "allowed_sequences is of another kind",
            wanted="a list of texts or of lists of ids, or an AllowedSequences",
            got=shown(value),
            do="Pass a list, also for one sequence",
        )
    given = [*value]
    if given and all(isinstance(one, AllowedSequences) for one in given):
        return tuple(given)
    return (AllowedSequences(given, tokenizer),)


def allowed_in(
    sets: tuple[AllowedSequences, ...],
    ends: tuple[int, ...],
    rows: int,
    new: int,
    vocabulary: int,
) -> tuple[AllowedSequences, ...]:
    """Return the set of each of so many rows, of one set or more.

    RequestError where a row cannot answer with every sequence of its set: `new` is the most tokens
    it can have.
    """
    if len(sets) not in (1, rows):
        raise RequestError(
            "allowed_sequences does not fit the call",
            wanted=f"one set, or {rows} of them",
            got=len(sets),
            do="Pass one AllowedSequences, or one per row of the prompt",
        )
    if not ends:
        raise RequestError(
            "allowed_sequences needs an end token, with which a complete sequence ends",
            wanted="eos_token_id",
            got="none",
            do="Set eos_token_id",
        )
    for one in dict.fromkeys(sets):
        _require_within(one, ends, new, vocabulary)
    return sets * (rows // len(sets))


def _require_within(one: AllowedSequences, ends: tuple[int, ...], new: int, size: int) -> None:
    if one.largest >= size:
        raise RequestError(
            "allowed_sequences names ids beyond the vocabulary",
            wanted=f"ids below {size}",
            got=one.largest,
            do="Use ids of this model's tokenizer",
        )
    if one.goes_on_after(ends):
        raise RequestError(
            "a sequence of allowed_sequences goes on after an end token",
            wanted="end tokens at the ends of sequences, or nowhere",
            got=f"one of {', '.join(map(str, ends))} inside",
            do="Leave end tokens out",
        )
    if one.longest > new:
        raise RequestError(
            "a sequence of allowed_sequences is longer than an answer may be",
            wanted=f"at most {new} tokens",
            got=one.longest,
            do="Raise max_new_tokens, or leave it out",
        )
