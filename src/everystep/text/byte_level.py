"""Byte-level vocabularies in files of their own: `vocab.json` with `merges.txt`, and tiktoken.

A tiktoken file has a token in base64 and its rank in each line; what merges first is the pair
whose union has the lowest rank, so the merges are found from the ranks.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, processors
from tokenizers.processors import RobertaProcessing

from everystep.errors import FormatError
from everystep.files.opening import read_bounded
from everystep.files.strict_json import read_json, whole_number
from everystep.text.classes import ByteLevelClass
from everystep.text.merges import check_lengths, merge_pairs, merges_by_id
from everystep.text.pieces import byte_alphabet
from everystep.text.pretokenizers import SplittingRule
from everystep.text.tokenizer_settings import config_flag, token_text

MAX_VOCABULARY_BYTES = 16 << 20
MAX_RESERVED = 1 << 16
_TIKTOKEN_LINE = re.compile(rb"\s*[A-Za-z0-9+/]+={0,2} [0-9]+\s")


def from_merges(
    folder: Path, named: ByteLevelClass, config: Mapping[str, object]
) -> tokenizers.Tokenizer:
    """Return the tokenizer of `vocab.json` and `merges.txt` in a folder, as the class cuts
    texts."""
    name = str(folder / "vocab.json")
    ids = _checked_ids(read_json(folder / "vocab.json") or {}, name)
    check_lengths(ids, name)
    merges = merge_pairs(_lines(folder / "merges.txt"), ids, str(folder / "merges.txt"))
    prefixed = config_flag(config, "add_prefix_space", False)
    backend = _backend(models.BPE(vocab=ids, merges=merges), named.rule(prefixed))
    if named.encloses:
        backend.post_processor = _enclosing(backend, named, config)
    return backend


def from_tiktoken(
    ranks: Mapping[bytes, int], rule: SplittingRule, further: Mapping[int, str], name: str
) -> tokenizers.Tokenizer:
    """Return the tokenizer of the tiktoken file `name`, split by the rule, and special tokens by
    id.

    Ids between those of the file and the special ones get reserved tokens, as in transformers.
    """
    letters = byte_alphabet()

    def spelled(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    pairs = merges_by_id(ranks, name, by_halves=True)
    model = models.BPE(
        vocab={spelled(token): rank for token, rank in ranks.items()},
        merges=[(spelled(left), spelled(right)) for left, right in pairs],
        ignore_merges=True,
    )
    backend = _backend(model, rule)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(_further_tokens(further, len(ranks), name))
    return backend


def _enclosing(
    backend: tokenizers.Tokenizer, named: ByteLevelClass, config: Mapping[str, object]
) -> RobertaProcessing:
    """Puts cls before every text and sep after it."""

    def end(name: str) -> tuple[str, int]:
        token = token_text(config.get(name), name) or named.special[name]
        if (id := backend.token_to_id(token)) is None:
            raise FormatError(f"The vocabulary has no {name}", wanted=repr(token))
        return token, id

    return RobertaProcessing(
        end("sep_token"),
        end("cls_token"),
        trim_offsets=config_flag(config, "trim_offsets", True),
        add_prefix_space=config_flag(config, "add_prefix_space", False),
    )


def is_tiktoken(path: Path) -> bool:
    """Return True for a file that begins as tiktoken's do: a token in base64, a space, its rank."""
    return _TIKTOKEN_LINE.match(read_bounded(path, MAX_VOCABULARY_BYTES)) is not None


def _backend(model: models.BPE, rule: SplittingRule) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    if rule.normalizer:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.split()
    backend.decoder = decoders.ByteLevel()
    return backend


def _checked_ids(vocabulary: Mapping[str, object], name: str) -> dict[str, int]:
    """Token -> id, once it is known that the ids are 0, 1, 2, ..., each given once."""
    ids = {token: id for token, id in vocabulary.items() if type(id) is int}
    if len(ids) < len(vocabulary) or sorted(ids.values()) != list(range(len(ids))) or not ids:
        raise FormatError(
            f"The ids of {name} are wrong",
            wanted="each of 0, 1, 2, ... once",
            got=_first_wrong(vocabulary),
        )
    return ids


def _first_wrong(vocabulary: Mapping[str, object]) -> str:
    seen: set[object] = set()
    for token, id in vocabulary.items():
        if type(id) is not int or not 0 <= id < len(vocabulary) or id in seen:
            return f"{id!r} for {token!r}"
        seen.add(id)
    return "no token"


def _lines(path: Path) -> list[str]:
    """Return the merges of a file without its comments and empty lines."""
    data = read_bounded(path, MAX_VOCABULARY_BYTES)
    try:
        lines = data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8", got=error.reason) from error
    return [line for line in lines if line and not line.startswith("#version")]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank of a tiktoken file; every byte is a token, and the ranks are 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bounded(path, MAX_VOCABULARY_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        token, rank = _read_line(line, f"Line {number} of {path}")
        if token in ranks:
            raise FormatError(f"Line {number} of {path} has a token again", got=repr(token))
        ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise FormatError(f"The ranks of {path} are wrong", wanted="each of 0, 1, 2, ... once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        what = f"{path} cannot spell every text"
        raise FormatError(what, wanted="a token for each byte", got=f"none for {missing[0]}")
    return ranks


def _read_line(line: bytes, where: str) -> tuple[bytes, int]:
    parts = line.split()
    rank = whole_number(parts[1].decode("latin-1")) if len(parts) == 2 else None
    try:
        token = base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        token = b""
    if rank is None or not token:
        raise FormatError(f"{where} is wrong", wanted="a token in base64 and its rank", got=line)
    return token, rank


def _further_tokens(names: Mapping[int, str], size: int, name: str) -> list[AddedToken]:
    """Return the tokens that follow those of a file, from its size to the last id that is named."""
    last = max(names, default=-1)
    if last >= size + MAX_RESERVED:
        what, wanted = f"An added token lies far beyond {name}", f"below {size + MAX_RESERVED}"
        raise FormatError(what, wanted=f"an id {wanted}", got=last)
    further = (names.get(id, f"<|reserved_token_{id}|>") for id in range(size, last + 1))
    return [AddedToken(token, special=True, normalized=False) for token in further]
