"""The tokenizer of a folder that has no `tokenizer.json`, from the vocabulary it came with.

Such a vocabulary does not say how text is cut before merging and what is put around it; the
tokenizer class does, which `tokenizer_config.json` names. The classes in these tables give the
ids of transformers (5.23); any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from everystep.errors import FormatError, MissingFileError, UnsupportedError
from everystep.files.model_folder import CONFIG
from everystep.files.opening import is_there
from everystep.files.strict_json import MAX_SETTINGS_BYTES, read_json, whole_number
from everystep.text.byte_level import from_merges, from_tiktoken, is_tiktoken, read_ranks
from everystep.text.classes import (
    BYTE_LEVEL,
    CLASS_OF_MODEL,
    TIKTOKEN,
    ByteLevelClass,
    TiktokenClass,
)
from everystep.text.gguf import surrounding
from everystep.text.native import native_call
from everystep.text.sentencepiece_backend import SAVE_FIRST, like_gemma, like_llama, like_t5
from everystep.text.sentencepiece_model import read_pieces
from everystep.text.tokenizer_settings import config_flag, token_text

Config = Mapping[str, Any]
PIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
PIECES = {"LlamaTokenizer": like_llama, "GemmaTokenizer": like_gemma, "T5Tokenizer": like_t5}
FIXED_ENDS = ("TemplateProcessing", "RobertaProcessing")


@dataclass(frozen=True)
class Original:
    """A tokenizer as its vocabulary gives it, and the special tokens that nothing else names."""

    backend: tokenizers.Tokenizer
    special: Mapping[str, str] = field(default_factory=dict)


def read_original(folder: Path, config: Config) -> Original:
    """Return the tokenizer of a folder without `tokenizer.json`.

    MissingFileError: nothing to read. FormatError: a broken vocabulary. UnsupportedError: a class
    that is not known, or what cannot be followed exactly.
    """
    name = _class_name(folder, config)
    with native_call(f"The vocabulary in {folder} does not make a tokenizer", error=FormatError):
        if name in BYTE_LEVEL:
            return _byte_level(folder, BYTE_LEVEL[name], config)
        if name in TIKTOKEN and (file := _tiktoken_file(folder)):
            return _tiktoken(file, TIKTOKEN[name], config)
        if name in PIECES and (file := _first(folder, PIECE_FILES)):
            model = read_pieces(file)
            return Original(PIECES[name](model, config, file), model.special)
    known = ", ".join(sorted({*BYTE_LEVEL, *TIKTOKEN, *PIECES}))
    if name in PIECES or name in TIKTOKEN:
        raise _nothing_for(folder, name)
    raise UnsupportedError(
        f"{folder} has no tokenizer.json, and its tokenizer class is "
        + ("not known" if name else "not named"),
        wanted=f"tokenizer_class in tokenizer_config.json as one of {known}",
        got=repr(name) if name else None,
        do=SAVE_FIRST,
    )


def add_ends(backend: tokenizers.Tokenizer, config: Config, special: Mapping[str, str]) -> None:
    """Puts bos before and eos after every text where `tokenizer_config.json` wants them.

    Not where the class itself says what is put around a text. Absent is off, as in transformers.
    """

    def end(name: str) -> tuple[str, int] | None:
        token = special.get(f"{name}_token")
        id = None if token is None else backend.token_to_id(token)
        wanted = config_flag(config, f"add_{name}_token", False)
        return (token, id) if wanted and token is not None and id is not None else None

    before, after = end("bos"), end("eos")
    if (before or after) and type(backend.post_processor).__name__ not in FIXED_ENDS:
        backend.post_processor = surrounding(before, after)


def _class_name(folder: Path, config: Config) -> str | None:
    """Return the class that `tokenizer_config.json` names, or that goes with the model of
    config.json."""
    model = read_json(folder / CONFIG, most=MAX_SETTINGS_BYTES) or {}
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    if name is None:
        kind = model.get("model_type")
        return CLASS_OF_MODEL.get(kind) if isinstance(kind, str) else None
    if not isinstance(name, str):
        what = "tokenizer_config.json: tokenizer_class is wrong"
        raise FormatError(what, wanted="a name", got=type(name).__name__)
    return name.removesuffix("Fast")


def _nothing_for(folder: Path, name: str) -> MissingFileError:
    return MissingFileError(
        f"{folder} has no vocabulary that {name} reads",
        wanted=f"tokenizer.json, {', '.join(PIECE_FILES)} or a tiktoken file",
        got=", ".join(sorted(one.name for one in folder.glob("*"))[:20]) or "no file",
    )


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if is_there(folder / name)), None)


def _byte_level(folder: Path, named: ByteLevelClass, config: Config) -> Original:
    for name in ("vocab.json", "merges.txt"):
        if not is_there(folder / name):
            raise MissingFileError(
                f"{folder} has no {name}", wanted="tokenizer.json, or vocab.json and merges.txt"
            )
    return Original(from_merges(folder, named, config), named.special)


def _tiktoken(file: Path, named: TiktokenClass, config: Config) -> Original:
    ranks = read_ranks(file)
    listed = dict(enumerate(named.further, len(ranks))) or _listed(config, len(ranks))
    return Original(from_tiktoken(ranks, named.rule, listed, str(file)))


def _listed(config: Config, size: int) -> dict[int, str]:
    """Return the tokens of `added_tokens_decoder` that a vocabulary of this size does not have."""
    listed = config.get("added_tokens_decoder") or {}
    numbered = listed.items() if isinstance(listed, Mapping) else ()
    return {
        number: token_text(token, "an added token") or ""
        for id, token in numbered
        if (number := whole_number(id)) is not None and number >= size
    }


def _tiktoken_file(folder: Path) -> Path | None:
    own = [folder / "tokenizer.model", *sorted(folder.glob("*.tiktoken"))]
    return next((one for one in own if is_there(one) and is_tiktoken(one)), None)
