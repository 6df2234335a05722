"""Tokenizers of `tokenizers` that cut texts as SentencePiece models do, one per class.

What a class of transformers (5.23) does around the pieces is part of its name; a file that was
trained for other ways of preparing text is refused, since its ids would be plausible and wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers
from tokenizers.processors import TemplateProcessing

from everystep.errors import FormatError, UnsupportedError
from everystep.text.merges import merges_by_id
from everystep.text.sentencepiece_model import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    PieceModel,
)
from everystep.text.text_rules import SPACE, gemma_rules, llama_rules, spelled_bytes, t5_rules
from everystep.text.tokenizer_settings import config_flag

MAX_EXTRA_IDS = 10_000
SAVE_FIRST = (
    "Save the tokenizer with the library it was made for, so that the folder has a tokenizer.json"
)


def like_llama(model: PieceModel, config: Mapping[str, object], path: Path) -> tokenizers.Tokenizer:
    """As LlamaTokenizer: a text begins with a space, and every other space counts."""
    prefixed = config_flag(config, "add_prefix_space", True)
    _check_spaces(model, path, removed=False, prefixed=prefixed)
    backend = tokenizers.Tokenizer(
        _unigram(model) if model.kind == "unigram" else _bpe(model, path)
    )
    llama_rules(config).put_on(backend)
    return _with_added(backend, model)


def like_gemma(model: PieceModel, config: Mapping[str, object], path: Path) -> tokenizers.Tokenizer:
    """As GemmaTokenizer: every space counts, and none is added."""
    _check_kind(model, "bpe", path)
    _check_spaces(model, path, removed=False, prefixed=False)
    backend = tokenizers.Tokenizer(_bpe(model, path))
    gemma_rules().put_on(backend)
    return _with_added(backend, model)


def like_t5(model: PieceModel, config: Mapping[str, object], path: Path) -> tokenizers.Tokenizer:
    """As T5Tokenizer: words apart, spaces count once, sentinels at the end of the vocabulary."""
    _check_kind(model, "unigram", path)
    _check_spaces(model, path, removed=True, prefixed=True)
    _check_words(model, path)
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(_extra_ids(config)))]
    backend = tokenizers.Tokenizer(_unigram(model, sentinels))
    t5_rules(normalizers.Precompiled(model.rules)).put_on(backend)
    if model.byte_fallback:
        backend.decoder = spelled_bytes(True)
    _with_added(backend, model)
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in sentinels]
    )
    end = "</s>"
    if (id := backend.token_to_id(end)) is None:
        raise FormatError(f"{path} has no piece {end}, with which T5Tokenizer ends every text.")
    backend.post_processor = TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, id)]
    )
    return backend


def _bpe(model: PieceModel, path: Path) -> models.BPE:
    """Merges in the order of the ids, which has to be that of the scores."""
    merged = {
        piece: id for piece, id in model.ids.items() if model.types[id] in (NORMAL, USER_DEFINED)
    }
    pairs = merges_by_id(merged, str(path))
    _check_order(model, {model.ids[left + right] for left, right in pairs}, path)
    return models.BPE(
        vocab=model.ids,
        merges=pairs,
        unk_token=model.pieces[model.unk_id],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _check_order(model: PieceModel, wholes: set[int], path: Path) -> None:
    """Of two merges that SentencePiece thinks equal it makes the one further left first."""
    ids = sorted(id for id in wholes if model.types[id] == NORMAL)
    for before, after in itertools.pairwise(ids):
        if not model.scores[after] < model.scores[before]:
            raise UnsupportedError(
                f"The scores of {path} order merges otherwise than the ids",
                wanted="scores that fall from each piece to the next",
                got=f"{model.scores[before]} for {model.pieces[before]!r} and "
                f"{model.scores[after]} for {model.pieces[after]!r}",
                do=SAVE_FIRST,
            )


def _unigram(model: PieceModel, further: Sequence[str] = ()) -> models.Unigram:
    pieces = list(zip(model.pieces, model.scores, strict=True))
    pieces += [(token, 0.0) for token in further]
    return models.Unigram(pieces, unk_id=model.unk_id, byte_fallback=model.byte_fallback)


def _with_added(backend: tokenizers.Tokenizer, model: PieceModel) -> tokenizers.Tokenizer:
    """Control pieces are special tokens; those that users defined are matched whole, too."""
    kinds = (CONTROL, USER_DEFINED)
    added = [
        AddedToken(piece, special=kind == CONTROL, normalized=False)
        for piece, kind in zip(model.pieces, model.types, strict=True)
        if kind in kinds
    ]
    backend.add_tokens(added)
    return backend


def _extra_ids(config: Mapping[str, object]) -> int:
    number = config.get("extra_ids", 100)
    if type(number) is not int or not 0 <= number <= MAX_EXTRA_IDS:
        what, wanted = "tokenizer_config.json: extra_ids is impossible", f"0 to {MAX_EXTRA_IDS}"
        raise FormatError(what, wanted=wanted, got=repr(number))
    return number


def _check_kind(model: PieceModel, kind: str, path: Path) -> None:
    if model.kind != kind:
        what = f"{path} is of another kind than its tokenizer_class"
        raise UnsupportedError(what, wanted=kind, got=model.kind, do=SAVE_FIRST)


def _check_spaces(model: PieceModel, path: Path, *, removed: bool, prefixed: bool) -> None:
    """Refuse a class that treats spaces and characters otherwise than the model was trained for."""
    if model.adds_prefix != prefixed:
        raise UnsupportedError(
            f"{path} {_adds(model.adds_prefix)} a space before a text",
            wanted=f"a model that {_adds(prefixed)} one, as its tokenizer_class says",
            do="Set add_prefix_space in tokenizer_config.json of a LlamaTokenizer as the model "
            f"has it, or: {SAVE_FIRST}",
        )
    if model.removes_spaces != removed or bool(model.rules) != removed:
        rules = "with rules for characters" if model.rules else "without rules for characters"
        spaces = "removes further spaces" if model.removes_spaces else "keeps all spaces"
        raise UnsupportedError(
            f"{path} prepares texts otherwise than its tokenizer_class",
            wanted="further spaces removed, and rules" if removed else "spaces kept, and no rules",
            got=f"a model {rules} that {spaces}",
            do=SAVE_FIRST,
        )


def _adds(prefixed: bool) -> str:
    return "adds" if prefixed else "does not add"


def _check_words(model: PieceModel, path: Path) -> None:
    """Refuse a class that cuts texts into words first: it cannot follow pieces across them."""
    for piece, kind in zip(model.pieces, model.types, strict=True):
        if kind == NORMAL and SPACE in piece[1:]:
            what = f"{path} has pieces with spaces inside, and T5Tokenizer cuts texts at spaces"
            raise UnsupportedError(what, got=repr(piece), do=SAVE_FIRST)
