"""A grammar, compiled for a vocabulary, and where a text stands in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from everystep.errors import RequestError, UnsupportedError
from everystep.processors.grammars.source import GrammarSource
from everystep.processors.grammars.trials import trials_held
from everystep.processors.grammars.vocabulary import GrammarVocabulary, library

# What a grammar may cost: about 20 ms to begin with, 15 ms for a step, and 100 MB of states.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 60_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
SPACE = r"(?: |\n[ \t]{0,32})"
"""What may stand between the parts of a JSON text, once: so that no text is spaced without end."""
_KEPT = 64  # masks that are kept of a text


@dataclass(frozen=True, eq=False)
class Grammar:
    """A source, compiled for a vocabulary; texts in it begin with copies of one matcher, which
    share what they find out about its expressions."""

    source: GrammarSource
    vocabulary: GrammarVocabulary
    matcher: Any = field(repr=False)

    def mask(self, matcher: Any) -> np.ndarray:
        """(words,) int32: a bit per id that may follow; RequestError where that is too dear."""
        words = np.empty(self.vocabulary.words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        require_sound(matcher, self.source)
        return words


def compiled(source: GrammarSource, vocabulary: GrammarVocabulary) -> Grammar:
    """Return the grammar, compiled or remembered, after its trial where one is held; RequestError,
    which names the place, if it is none or is too dear."""
    trials = trials_held()
    if trials is not None and not trials.require(source, vocabulary):
        return compile_grammar(source, vocabulary)
    return _remembered(source, vocabulary)


def compile_grammar(source: GrammarSource, vocabulary: GrammarVocabulary) -> Grammar:
    """Compile the grammar; RequestError, which names the place, if it is none or is too dear."""
    made = library()
    limits = made.LLParserLimits(**_LIMITS)
    matcher = made.LLMatcher(vocabulary.table, _written(made, source), log_level=0, limits=limits)
    first = matcher.deep_copy()
    if matcher.is_error() or (first.compute_bitmask() and not first.is_error()):
        require_sound(matcher, source)
    if "NoExtension" in first.get_error() or "NoExtension" in first.stop_reason():
        raise RequestError(
            f"{source.kind} allows no text that this tokenizer can spell",
            wanted="a grammar with at least one text",
            got=_beginning(source.text),
        )
    require_sound(first, source)
    return Grammar(source, vocabulary, matcher)


_remembered = lru_cache(maxsize=64)(compile_grammar)


def _written(made: Any, source: GrammarSource) -> str:
    """Return the source as the library reads it."""
    matcher = made.LLMatcher
    if source.kind == "schema":
        spacing = {"whitespace_pattern": SPACE}
        return str(matcher.grammar_from_json_schema(source.text, overrides=spacing))
    if source.kind == "regex":
        return str(matcher.grammar_from_regex(source.text))
    if source.kind == "grammar":
        return str(matcher.grammar_from_lark(source.text))
    listed = (json.dumps(one, ensure_ascii=False) for one in json.loads(source.text))
    return str(matcher.grammar_from_lark("start: " + " | ".join(listed)))


def require_sound(matcher: Any, source: GrammarSource) -> None:
    """RequestError if the matcher has failed, which it stays for ever."""
    if not matcher.is_error():
        return
    told = matcher.get_error()
    if source.kind == "schema" and "oneOf constraints" in told:
        raise UnsupportedError(
            "schema has a 'oneOf' of which more than one may hold at once, for all that is known",
            wanted="schemas of different types or values, or objects (with type: object) that a "
            "property tells apart, with a const or enum of its own in each",
            do="Give each of them such a property, or use anyOf",
        )
    raise RequestError(
        f"{source.kind} cannot be followed",
        got=_beginning(told),
        do="Correct it, or ask for something simpler",
    )


def _beginning(text: str) -> str:
    """Return the beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + "..."


class GrammarPlace:
    """The point that a text has reached in a grammar: a memory of the ids after the prompt.

    Ids that end a text, and what follows them, are not part of it; nor is what follows an id that
    the grammar does not allow there, as guesses may.
    """

    __slots__ = ("_astray", "_beyond", "_masks", "_matched", "_matcher", "ends", "grammar", "start")

    def __init__(self, grammar: Grammar, start: int, ends: tuple[int, ...]) -> None:
        self.start = start
        self.grammar, self.ends = grammar, ends
        self._masks: dict[int, np.ndarray | None] = {}
        self._begin()

    def _begin(self) -> None:
        self._matcher = self.grammar.matcher.deep_copy()
        self._matched = 0  # ids that the matcher has taken
        self._beyond = 0  # ids after those
        self._astray = False  # whether the first of these is wrong, and ends nothing

    @property
    def length(self) -> int:
        """The number of ids that it covers, those before `start` included."""
        return self.start + self._matched + self._beyond

    def mask(self, line: np.ndarray, length: int) -> np.ndarray | None:
        """(words,) int32: a bit per id that may follow the first `length` ids of the line, which
        begins with the ids it has read; None after an id that is wrong."""
        if length in self._masks:
            return self._masks[length]
        if length < self.length:
            self.rewind(length)
        for token in line[self.length : length].tolist():
            self._take(token)
        if len(self._masks) >= _KEPT:
            self._masks.clear()
        found = self._masks[length] = self._found()
        return found

    def _take(self, token: int) -> None:
        if self._beyond:
            self._beyond += 1
        elif token in self.ends:
            self._beyond, self._astray = 1, not self._matcher.is_accepting()
        elif self._matcher.try_consume_tokens([token]) == 1:
            self._matched += 1
        else:
            require_sound(self._matcher, self.grammar.source)
            self._beyond, self._astray = 1, True

    def _found(self) -> np.ndarray | None:
        if self._beyond and self._astray:
            return None
        if self._beyond:
            words = np.zeros(self.grammar.vocabulary.words, np.int32)
            may_end = True
        else:
            words = self.grammar.mask(self._matcher)
            may_end = has(words, self.grammar.vocabulary.end)
            set_bit(words, self.grammar.vocabulary.end, False)
        for token in self.ends:
            set_bit(words, token, may_end)
        return words

    def rewind(self, length: int) -> None:
        """Cuts it back to at most the first `length` ids."""
        for late in [n for n in self._masks if n > length]:
            del self._masks[late]
        excess = self.length - max(length, self.start)
        if excess <= 0:
            return
        beyond = min(excess, self._beyond)
        self._beyond -= beyond
        excess -= beyond
        if excess and self._matcher.rollback(excess) and not self._matcher.is_error():
            self._matched -= excess
        elif excess:
            self._begin()

    def copy(self) -> GrammarPlace:
        """Return one that stands there too; what changes is not shared."""
        other = GrammarPlace.__new__(GrammarPlace)
        other.start, other.grammar, other.ends = self.start, self.grammar, self.ends
        other._matcher = self._matcher.deep_copy()
        other._matched, other._beyond, other._astray = self._matched, self._beyond, self._astray
        other._masks = dict(self._masks)
        return other


def has(words: np.ndarray, token: int) -> bool:
    """Return True if the bit of an id is set."""
    return bool(words[token >> 5] >> (token & 31) & 1)


def set_bit(words: np.ndarray, token: int, value: bool) -> None:
    """Sets the bit of an id, or takes it away."""
    view = words.view(np.uint32)
    bit = np.uint32(1 << (token & 31))
    if value:
        view[token >> 5] |= bit
    else:
        view[token >> 5] &= ~bit


def tokens_in(words: np.ndarray, most: int) -> np.ndarray | None:
    """(n,) the ids whose bits are set, in rising order; None where those may be more than
    `most`."""
    some = np.flatnonzero(words)
    if len(some) > most:
        return None
    bits = np.unpackbits(words[some].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    word, bit = np.nonzero(bits)
    return some[word] * 32 + bit if len(word) <= most else None
