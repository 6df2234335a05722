"""What a call says about drafts: who makes them, how long they are, and how they are judged."""

from __future__ import annotations

from typing import Any, Literal, cast

from torch import nn

from everystep.bridge.core import ForeignModel
from everystep.config import Effective
from everystep.engine import (
    Corpus,
    CorpusLookup,
    DraftModel,
    OtherDraftModel,
    PromptLookup,
    Tokenizers,
)
from everystep.errors import ModelClassError, RequestError, UnsupportedError
from everystep.models import first_layers
from everystep.requests.arrays import require
from everystep.requests.options import NO_DRAFTING, Assistant, DraftSources, Options
from everystep.requests.subject import Subject
from everystep.types import DraftVerification
from everystep.types.protocols import MATCHING, Schedule
from everystep.types.request import Drafter, Strategy

_MODEL = "assistant_model"
_CORPUS = "draft_corpus"
_EXIT, _LOOKUP = "assistant_early_exit", "prompt_lookup_num_tokens"
_COPIED, _NGRAM, _CORPUS_NGRAM = 10, 2, 16  # ids drafted from a corpus, and looked up, by default
_OF_MODELS = (
    "num_assistant_tokens",
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
)
_LOOKBEHIND = ("target_lookbehind", "assistant_lookbehind")
_OF_DRAFTS = ("num_assistant_tokens_schedule", "draft_verification", "num_drafts")
_OF_COPIES = ("max_matching_ngram_size",)
OF_DRAFTING = frozenset({*_OF_MODELS, *_LOOKBEHIND, *_OF_DRAFTS, *_OF_COPIES})
"""Fields that say how drafts are made."""


def read_sources(model: object, tokenizer: object, corpus: object) -> DraftSources:
    """Return who drafts: `assistant_model` with its tokenizer, or texts to copy from.

    ModelClassError, UnsupportedError: it is no model that can draft. RequestError: `corpus` is of
    another kind.
    """
    if model is None and tokenizer is None and corpus is None:
        return NO_DRAFTING
    if corpus is not None and not isinstance(corpus, Corpus):
        raise RequestError(
            "draft_corpus is of another kind",
            wanted="an everystep.Corpus",
            got=type(corpus).__name__,
            do="Pass everystep.Corpus(texts, tokenizer)",
        )
    return DraftSources(_assistant(model, tokenizer), corpus)


def _assistant(value: Any, tokenizer: object) -> Assistant | None:
    """Return the second model of a call, of this library or of another."""
    if value is None:
        if tokenizer is not None:
            what, do = "assistant_tokenizer is that of an assistant_model", "Pass both, or neither"
            raise RequestError(what, wanted="assistant_model with it", got="none", do=do)
        return None
    if isinstance(value, nn.Module):
        model, settings = ForeignModel(value), getattr(value, "generation_config", None)
    elif all(hasattr(value, name) for name in ("executor", "vocab_size", "generation_config")):
        model, settings = value, value.generation_config
    else:
        raise ModelClassError(
            "assistant_model is not a model",
            wanted="a model of this library, of transformers or of PEFT",
            got=type(value).__name__,
            do="Load one with everystep.load_model",
        )
    require("assistant_tokenizer", tokenizer, "encode", "decode", "get_vocab")
    return Assistant(model, settings, tokenizer=tokenizer)


def draft_notices(
    effective: Effective, drafting: DraftSources, size: int, tokenizer: object
) -> tuple[str, ...]:
    """Return what to tell a caller who sets how to draft where nothing does; `size`, `tokenizer`:
    the vocabulary of the model and what makes its tokens."""
    asked = effective.caller & OF_DRAFTING
    drafts = drafting.assistant is not None or effective[_EXIT] is not None
    copies = effective[_LOOKUP] is not None or drafting.corpus is not None
    spelt = not asked.isdisjoint(_LOOKBEHIND) and _translates(drafting, size, tokenizer)
    why = "drafts are made of the model's own tokens" if drafts else "no model drafts"
    needed = (
        (_OF_MODELS, drafts, "no model drafts", f"Pass {_MODEL}"),
        (_LOOKBEHIND, spelt, why, f"Pass an {_MODEL} with another tokenizer"),
        (_OF_DRAFTS, drafts or copies, "no model drafts", f"Pass {_MODEL}"),
        (_OF_COPIES, copies, "no drafts are copied", f"Set {_LOOKUP}"),
    )
    notices = tuple(
        f"{name} has no effect, as {why}. {do}, or leave {name} out."
        for names, met, why, do in needed
        for name in names
        if name in asked and not met
    )
    if drafts and effective.draft_verification == "rejection" and not effective.do_sample:
        notices = (
            *notices,
            "draft_verification='rejection' has no effect without sampling. Set do_sample=True, or "
            "leave draft_verification out.",
        )
    return notices


def _translates(drafting: DraftSources, size: int, tokenizer: object) -> bool:
    """Return whether the second model of a call writes other tokens than the first."""
    other = drafting.assistant
    if other is None:
        return False
    own = cast(Any, tokenizer)
    return int(other.model.vocab_size) != size or not _alike(own, other.tokenizer)


def _alike(own: Any, other: Any) -> bool:
    """Return whether tokenizers have the same vocabulary, as they do where one is not known."""
    return own is None or other is None or bool(own.get_vocab() == other.get_vocab())


def drafts_of(
    model: Subject, options: Options, strategy: Strategy
) -> tuple[Drafter | None, DraftVerification]:
    """Return who drafts for the strategy, and how its drafts are judged.

    RequestError where several would, where the strategy cannot be drafted for, or where the
    vocabularies differ.
    """
    e = options.effective
    asked = {
        _CORPUS: options.drafting.corpus,
        _EXIT: e[_EXIT],
        _LOOKUP: e[_LOOKUP],
        _MODEL: options.drafting.assistant,
    }
    names = [name for name, value in asked.items() if value is not None]
    if not names:
        return None, MATCHING
    if len(names) > 1 and names != [_CORPUS, _LOOKUP]:
        raise RequestError(
            f"{' and '.join(names)} both draft", wanted="one of them", do="Leave one out"
        )
    if not strategy.reads.alone:
        _refuse_search(names[0], e, strategy)
    copies = options.drafting.corpus is not None or e[_LOOKUP] is not None
    verification = _verification(options, models=not copies)
    if e.num_drafts > 1:
        _require_fixed_choices(options, verification)
    if copies:
        return _copier(options, _schedule(options, None, verification)), verification
    assistant = options.drafting.assistant or _early(model, int(e[_EXIT]))
    length = (
        int(_said(options, assistant, "num_assistant_tokens")),
        _schedule(options, assistant, verification),
        float(_said(options, assistant, "assistant_confidence_threshold")),
        options.ends.eos,
    )
    tokenizers = _tokenizers(model, options, assistant)
    if tokenizers is not None and assistant.core.network.encodes:
        raise UnsupportedError(
            "an assistant_model with an encoder reads what the model's own reads, in its tokens",
            wanted="an assistant_model with the same tokenizer",
            got="another tokenizer",
            do="Choose a smaller model of the same family, or set prompt_lookup_num_tokens",
        )
    if tokenizers is None:
        return DraftModel(assistant, *length, e.num_drafts - 1), verification
    if e.num_drafts > 1:
        raise RequestError(
            "an assistant with another tokenizer makes one draft of a sequence",
            wanted="num_drafts=1",
            got=f"num_drafts={e.num_drafts}",
            do="Leave num_drafts out, or choose an assistant with the same tokenizer",
        )
    by: Literal["tokens", "text"] = "tokens" if e.do_sample else "text"
    return OtherDraftModel(assistant, tokenizers, by, *length), verification


def _copier(options: Options, schedule: Schedule) -> Drafter:
    """Return a drafter that copies from the sequence itself, from a corpus, or from both."""
    e = options.effective
    size = e.max_matching_ngram_size
    own, others = None, e.num_drafts - 1
    if e[_LOOKUP] is not None:
        own = PromptLookup(int(e[_LOOKUP]), int(size or _NGRAM), options.ends.eos, schedule, others)
    corpus = options.drafting.corpus
    if corpus is None and own is not None:
        return own
    tokens, longest = int(e[_LOOKUP] or _COPIED), int(size or _CORPUS_NGRAM)
    return CorpusLookup(
        cast(Corpus, corpus), tokens, longest, options.ends.eos, schedule, own, others
    )


def _said(options: Options, assistant: Assistant | None, name: str) -> Any:
    """Return the caller's value, or else that of the assistant's configuration, or the default."""
    own = None if assistant is None else getattr(assistant.settings, name, None)
    return options.effective[name] if name in options.effective.caller or own is None else own


def _schedule(
    options: Options, assistant: Assistant | None, verification: DraftVerification
) -> Schedule:
    """Return how long drafts are: as was asked for, or as long as they pay.

    Draws without a seed, and drafts that are accepted by chance, depend on how long drafts are, so
    that these must not depend on a clock.
    """
    name = "num_assistant_tokens_schedule"
    own = None if assistant is None else getattr(assistant.settings, name, None)
    if name in options.effective.caller or own is not None:
        asked = _said(options, assistant, name)
        return "constant" if asked == "constant" else "heuristic"
    shared = options.effective.do_sample and options.seed is None
    return "constant" if shared or verification.reads else "costs"


def _verification(options: Options, *, models: bool) -> DraftVerification:
    """Return how drafts are judged: without a seed, those of models as in transformers."""
    e = options.effective
    asked = e.draft_verification
    if asked is None and models and options.seed is None:
        asked = "rejection"
    mixed = e.assistant_ensemble_weight if models else None
    weight = 1.0 if mixed is None else float(mixed)
    return DraftVerification(bool(e.do_sample) and asked == "rejection", weight)


def _require_fixed_choices(options: Options, verification: DraftVerification) -> None:
    """Raise RequestError where what is chosen at a place depends on the draft that it follows, so
    that taking the draft that is right for longest would change the distribution."""
    e = options.effective
    wrong = None
    if e.do_sample and options.seed is None:
        wrong, do = "sampling without a seed", "Pass seed, or leave num_drafts out"
    elif verification.rejects:
        wrong, do = "draft_verification='rejection'", "Leave one of the two out"
    elif verification.weight < 1:
        wrong, do = "assistant_ensemble_weight", "Leave one of the two out"
    if wrong is not None:
        raise RequestError(
            f"num_drafts above 1 does not go with {wrong}",
            wanted="choices that follow from the tokens before them",
            got=f"num_drafts={e.num_drafts}",
            do=do,
        )


def _early(model: Subject, layers: int) -> Assistant:
    """The model's own first layers; an error says it if there is no such part of it."""
    core = model.core
    if isinstance(core, ForeignModel):
        model.executor(layers=layers)  # says what to do instead
    else:
        first_layers(core, layers)
    return Assistant(model, model.generation_config, layers)


def _refuse_search(name: str, e: Effective, strategy: Strategy) -> None:
    """Raise RequestError: the strategy chooses among more than the tokens of one row."""
    other = type(strategy).__name__
    if (e.num_beams or 1) > 1:
        other = "num_beams > 1"
    elif e.penalty_alpha:
        other = "penalty_alpha"
    raise RequestError(
        f"{name} cannot be combined with {other}",
        wanted="greedy decoding or sampling",
        got=f"{name}={e[name]}" if name in e else name,
        do="Leave one of the two out",
    )


def _tokenizers(model: Subject, options: Options, assistant: Assistant) -> Tokenizers | None:
    """The tokenizers of both models, None where they have one; RequestError where their
    vocabularies differ and the tokenizers are not known."""
    own, other = options.tokenizer, assistant.tokenizer
    sizes = model.vocab_size, int(assistant.model.vocab_size)
    if other is None or own is None:
        if sizes[0] != sizes[1] or other is not None:
            raise RequestError(
                "tokens of assistant_model have to be translated",
                wanted="tokenizer and assistant_tokenizer with it",
                got=f"vocabularies of {sizes[0]} and {sizes[1]} ids, and no "
                f"{'assistant_tokenizer' if other is None else 'tokenizer'}",
                do="Pass both, or choose an assistant with the same tokenizer",
            )
        return None
    if sizes[0] == sizes[1] and _alike(own, other):
        return None
    looks = [int(_said(options, assistant, name)) for name in _LOOKBEHIND]
    return Tokenizers(own, other, *looks)
