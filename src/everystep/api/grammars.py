"""`schema=`, `regex=`, `grammar=` and `choices=`: what the texts of a call have to follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everystep.bridge.core import ForeignModel
from everystep.engine.forced import ForcedTokens
from everystep.errors import RequestError
from everystep.processors.grammars.grammar import compiled
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.grammars.source import KINDS, read_source
from everystep.processors.grammars.vocabulary import vocabulary_of
from everystep.types.protocols import Drafter, Strategy

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel
    from everystep.api.options import Options


def read_grammar(
    given: Mapping[str, Any], tokenizer: Any, ends: tuple[int, ...], vocabulary: int
) -> GrammarMask | None:
    """What the keywords of a call ask for, compiled; None where they ask for nothing.

    RequestError or UnsupportedError where it is impossible, or cannot be done for this tokenizer.
    """
    asked = [kind for kind in KINDS if given.get(kind) is not None]
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
    source = read_source(kind, given[kind])
    return GrammarMask(compiled(source, vocabulary_of(tokenizer, vocabulary)), ends)


def with_forced(
    drafter: Drafter | None, options: Options, strategy: Strategy, model: LanguageModel
) -> Drafter | None:
    """The drafter of requests with these options: where a grammar forces tokens, those come first.

    Not where the caller's own code looks at every step, nor where rows cannot be cut back.
    """
    watched = options.processors or options.criteria
    if options.grammar is None or watched or not strategy.reads.alone:
        return drafter
    core = model.core
    if isinstance(core, ForeignModel) and "truncate" not in core.executor().abilities:
        return drafter
    return ForcedTokens(drafter)
