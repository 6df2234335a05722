"""What a SentencePiece model file holds: pieces with scores and kinds, and how text is prepared.

The library `sentencepiece`, which the extra of that name installs, declares the format; the file is
parsed by `protobuf`. No text is given to it: the pieces become a tokenizer of `tokenizers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep.errors import FormatError, MissingExtraError, UnsupportedError
from everystep.files.opening import impostor, read_bounded
from everystep.text.merges import check_lengths
from everystep.text.native import native_call

MAX_MODEL_BYTES = 16 << 20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, MERGES, WORDS, LETTERS = range(1, 5)
_KINDS = {UNIGRAM: "unigram", MERGES: "bpe", WORDS: "word", LETTERS: "char"}
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True)
class PieceModel:
    """A SentencePiece model: its pieces by id, and what is done to a text before it is cut.

    `kind`: "unigram" or "bpe". `rules`: the replacements of characters, compiled; empty for none.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: str
    unk_id: int
    special: Mapping[str, str]
    byte_fallback: bool
    rules: bytes
    adds_prefix: bool
    removes_spaces: bool

    @property
    def ids(self) -> dict[str, int]:
        """Piece -> id."""
        return {piece: id for id, piece in enumerate(self.pieces)}


def read_pieces(path: Path) -> PieceModel:
    """Return the model in a file; FormatError if it is broken, UnsupportedError for what tokenizers
    cannot do, and where the extra is missing."""
    proto = _parsed(path)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    kind = _KINDS.get(trainer.model_type, "unknown")
    _check_ways(proto, kind, path)
    pieces = [one.piece for one in proto.pieces]
    scores = [one.score for one in proto.pieces]
    types = [one.type for one in proto.pieces]
    _check_pieces(pieces, scores, path)
    _check_types(types, pieces, trainer.byte_fallback, path)
    return PieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        kind=kind,
        unk_id=types.index(UNKNOWN),
        special=_special(trainer, pieces, types),
        byte_fallback=trainer.byte_fallback,
        rules=normalizer.precompiled_charsmap,
        adds_prefix=normalizer.add_dummy_prefix,
        removes_spaces=normalizer.remove_extra_whitespaces,
    )


def _parsed(path: Path) -> Any:
    data = read_bounded(path, MAX_MODEL_BYTES)
    known = "empty" if not data else impostor(data[:64])
    if known is not None:
        raise FormatError(f"{path} is {known}.")
    proto = _format().ModelProto()
    with native_call(f"{path} is not a SentencePiece model", error=FormatError):
        proto.ParseFromString(data)
    if not proto.pieces:
        raise FormatError(f"{path} is not a SentencePiece model", wanted="pieces", got="none")
    return proto


def _format() -> Any:
    """Return the declaration of the format; MissingExtraError where it is not installed."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        what = "a folder without tokenizer.json"
        raise MissingExtraError.of(what, "sentencepiece with protobuf", "sentencepiece") from error
    return sentencepiece_model_pb2


def _check_ways(proto: Any, kind: str, path: Path) -> None:
    """Refuses what no tokenizer of `tokenizers` does."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if kind not in ("unigram", "bpe"):
        raise UnsupportedError(f"{path} is of another kind", wanted="unigram or bpe", got=kind)
    refused = {
        "writes spaces after words": trainer.treat_whitespace_as_suffix,
        "does not write spaces as ▁": not normalizer.escape_whitespaces,
        "replaces characters when it decodes": proto.denormalizer_spec.precompiled_charsmap,
    }
    for what, is_so in refused.items():
        if is_so:
            raise UnsupportedError(f"{path} {what}, which is not supported.")


def _check_pieces(pieces: list[Any], scores: list[float], path: Path) -> None:
    first: dict[object, int] = {}
    for id, (piece, score) in enumerate(zip(pieces, scores, strict=True)):
        # The parser leaves what is no UTF-8 as bytes.
        if not isinstance(piece, str) or not piece:
            wanted = "text in UTF-8"
            raise FormatError(f"Piece {id} of {path} has no text", wanted=wanted, got=repr(piece))
        if first.setdefault(piece, id) != id:
            what = f"Piece {piece!r} is in {path} twice"
            raise FormatError(what, wanted="distinct pieces", got=f"ids {first[piece]} and {id}")
        if not math.isfinite(score):
            raise FormatError(f"Piece {id} of {path} has no score", wanted="a number", got=score)
    check_lengths(pieces, str(path))


def _check_types(types: list[int], pieces: list[str], byte_fallback: bool, path: Path) -> None:
    if types.count(UNKNOWN) != 1:
        what = f"{path} has no single unknown piece"
        raise FormatError(what, wanted="one", got=types.count(UNKNOWN))
    if UNUSED in types:
        piece = pieces[types.index(UNUSED)]
        what = f"{path} has pieces that are not used, which is not supported"
        raise UnsupportedError(what, got=repr(piece))
    spelled = {piece for piece, kind in zip(pieces, types, strict=True) if kind == BYTE}
    if spelled != (_BYTES if byte_fallback else set()):
        wanted = "256 of them" if byte_fallback else "none, since byte_fallback is off"
        raise FormatError(f"The byte pieces of {path} are wrong", wanted=wanted, got=len(spelled))


def _special(trainer: Any, pieces: list[str], types: list[int]) -> dict[str, str]:
    """Name -> piece of the special tokens that the model was trained with."""
    found = {}
    for name in ("bos", "eos", "unk", "pad"):
        id = getattr(trainer, f"{name}_id")
        if 0 <= id < len(pieces) and types[id] in (UNKNOWN, CONTROL, USER_DEFINED):
            found[f"{name}_token"] = pieces[id]
    return found
