"""A tokenizer from the metadata of a GGUF file: `tokenizer.ggml.*` and the chat template.

Two kinds are built: "gpt2", byte-level merges with the splitting rule that the file names, and
"llama", SentencePiece merges, whose order is that of the scores. The metadata is a plain
mapping; every count and id in it is checked before anything is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from everystep.errors import FormatError, UnsupportedError, nearest, shown
from everystep.text.merges import check_lengths, cuts, merge_pairs
from everystep.text.native import native_call
from everystep.text.pretokenizers import splitting_rule
from everystep.text.tokenizer_settings import NO_LIMIT, Settings

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# The kinds of tokens that are added: matched whole in the text, before it is split.
MATCHED_WHOLE = (CONTROL, USER_DEFINED)

ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
# What ends a text, beside the end of texts: turns, messages, and what coding models write between
# files.
_END_KEYS = (
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
)
_MORE_ENDS = "eos_token_ids"
_READ = frozenset(
    {"model", "pre", "tokens", "token_type", "merges", "scores", _MORE_ENDS, "add_space_prefix"}
    | {"add_bos_token", "add_eos_token", *ID_KEYS.values(), *_END_KEYS}
)
_IDLE = frozenset(
    {"token_type_count", "cls_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"}
    | {"fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"}
)
"""Keys that change neither the ids of a text nor where it ends."""
_UNUSED: Mapping[str, object] = {
    "add_sep_token": False,
    "remove_extra_whitespaces": False,
    "precompiled_charsmap": [],
}
"""Keys without implementation, with the value that asks for nothing."""

# Source: the tokens that llama.cpp takes for ends by their text (`llama-vocab.cpp`).
_END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
    }
)
# Where a model has both of these, which end its turns, <|end|> ends but a part of one.
_PARTED = frozenset({"<|return|>", "<|call|>"})

T = TypeVar("T")
Metadata = Mapping[str, object]


def read_gguf(metadata: Mapping[str, object]) -> tuple[tokenizers.Tokenizer, Settings]:
    """Return the splitting rule and the settings that the metadata describe.

    FormatError: counts, ids or merges contradict each other. UnsupportedError: the model or the
    splitting rule is not one that can be followed exactly.
    """
    own = _own(metadata)
    _check_keys(own)
    model = _value(own, "model", str)
    if model not in BUILDERS:
        raise UnsupportedError(
            f"tokenizer.ggml.model is {model!r}",
            wanted=" or ".join(map(repr, BUILDERS)),
            do="Load the tokenizer from the model's original folder (Tokenizer.from_folder)",
        )
    vocabulary = Vocabulary.read(own)
    with native_call("The GGUF metadata do not make a tokenizer", error=FormatError):
        backend, bos = BUILDERS[model](own, vocabulary)
        _add_tokens(backend, vocabulary)
        _add_ends(backend, own, vocabulary, bos)
    return backend, _settings(metadata, vocabulary.special)


def ends_of_texts(metadata: Mapping[str, object]) -> list[int]:
    """Return the ids that end a text: those that keys name, and added tokens spelled as ends.

    The end of texts itself is first. FormatError: a key names no id of the vocabulary.
    """
    own = _own(metadata)
    vocabulary = Vocabulary.read(own)
    size = len(vocabulary.tokens)
    named = [_id(own, key, size) for key in _END_KEYS if key in own]
    more = _array(own, _MORE_ENDS, int) if _MORE_ENDS in own else []
    if wrong := [id for id in more if not 0 <= id < size]:
        raise _no_id(_MORE_ENDS, size, wrong[0])
    spelled = [
        id
        for token, id in vocabulary.ids.items()
        if token in _END_TOKENS and vocabulary.types[id] in MATCHED_WHOLE
    ]
    if vocabulary.ids.keys() >= _PARTED:
        spelled = [id for id in spelled if vocabulary.tokens[id] != "<|end|>"]
    return list(dict.fromkeys([*named, *more, *spelled]))


def _own(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the tokenizer's keys without their prefix."""
    return {key.removeprefix(PREFIX): metadata[key] for key in metadata if key.startswith(PREFIX)}


def _check_keys(own: Metadata) -> None:
    """Refuse a key that may change the ids of a text and is not read."""
    for key, value in own.items():
        if key in _READ or key in _IDLE or (key in _UNUSED and value == _UNUSED[key]):
            continue
        close = None if key in _UNUSED else nearest(key, [*_READ, *_IDLE, *_UNUSED])
        typo = f"If {PREFIX}{close} was meant, correct the key; otherwise l" if close else "L"
        raise UnsupportedError(
            f"the GGUF key {PREFIX}{key} has no implementation here",
            wanted=_UNUSED.get(key, "only keys that are known"),
            got=shown(value),
            do=f"{typo}oad the tokenizer from the model's original folder (Tokenizer.from_folder)",
        )


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file by id, with their kinds, and the special ones by name."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    special: dict[str, str]

    @classmethod
    def read(cls, own: Metadata) -> Vocabulary:
        tokens = _array(own, "tokens", str)
        # A vocabulary with scores is cut at every place of every token.
        check_lengths(tokens, "tokenizer.ggml.tokens")
        types = [NORMAL] * len(tokens)
        if "token_type" in own:
            types = _array(own, "token_type", int)
        _check_count("token_type", len(types), len(tokens))
        if wrong := {kind for kind in types if not NORMAL <= kind <= BYTE}:
            raise FormatError("token_type is unknown", wanted="1 to 6", got=min(wrong))
        ids = {token: id for id, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            first = next(id for id, token in enumerate(tokens) if ids[token] != id)
            raise FormatError(
                f"Token {tokens[first]!r} is in tokenizer.ggml.tokens twice",
                wanted="distinct tokens",
                got=f"ids {first} and {ids[tokens[first]]}",
            )
        return cls(tokens, types, ids, _special_tokens(own, tokens))

    def base_size(self) -> int:
        """Count the ids before the closing run of added tokens.

        The original tokenizers keep that run out of the merge model. It matters where words
        that are in the vocabulary are taken whole.
        """
        size = len(self.tokens)
        while size and self.types[size - 1] in MATCHED_WHOLE:
            size -= 1
        return size


def _byte_level(own: Metadata, vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    rule = splitting_rule(_rule_name(own))
    size = vocabulary.base_size()
    base = {token: id for token, id in vocabulary.ids.items() if id < size}
    merges = merge_pairs(_array(own, "merges", str), base, "tokenizer.ggml.merges")
    model = models.BPE(vocab=base, merges=merges, ignore_merges=rule.whole_words)
    backend = tokenizers.Tokenizer(model)
    if rule.normalizer:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.split()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.starts_with_bos


def _sentencepiece(own: Metadata, vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    prefix = _flag(own, "add_space_prefix", True)
    kinds = vocabulary.types
    unknown = vocabulary.tokens[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_by_score(vocabulary, _array(own, "scores", float)),
        unk_token=vocabulary.special.get("unk_token") or unknown,
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
        spaces.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(spaces)
    return backend, True


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _rule_name(own: Metadata) -> str:
    if "pre" in own:
        return _value(own, "pre", str)
    warnings.warn(
        "The GGUF file does not say how its text is split (tokenizer.ggml.pre is missing); the "
        "general rule is used, and the ids may differ from those the model was trained on.",
        stacklevel=6,
    )
    return "default"


def _merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece makes them: the best score first.

    Every way to cut a token into two tokens is a merge. Equal scores are ordered by the ids of
    the halves, as in transformers' conversion.
    """
    _check_count("scores", len(scores), len(vocabulary.tokens))
    ids = {token: id for token, id in vocabulary.ids.items() if vocabulary.types[id] == NORMAL}

    def order(pair: tuple[str, str]) -> tuple[float, int, int]:
        left, right = pair
        return -scores[ids[left + right]], ids[left], ids[right]

    return sorted(cuts(ids, "tokenizer.ggml.tokens"), key=order)


def _special_tokens(own: Metadata, tokens: list[str]) -> dict[str, str]:
    ids = {name: _id(own, key, len(tokens)) for name, key in ID_KEYS.items() if key in own}
    return {name: tokens[id] for name, id in ids.items()}


def _id(own: Metadata, key: str, size: int) -> int:
    """Read an id of a vocabulary of this size."""
    id = _value(own, key, int)
    if not 0 <= id < size:
        raise _no_id(key, size, id)
    return id


def _no_id(key: str, size: int, got: int) -> FormatError:
    what = f"tokenizer.ggml.{key} is not an id of the vocabulary"
    return FormatError(what, wanted=f"0 to {size - 1}", got=got)


def _add_ends(
    backend: tokenizers.Tokenizer, own: Metadata, vocabulary: Vocabulary, bos: bool
) -> None:
    """Adds the post-processor that puts bos before and eos after, where the file wants them."""

    def end(name: str, default: bool) -> tuple[str, int] | None:
        token = vocabulary.special.get(f"{name}_token")
        if not _flag(own, f"add_{name}_token", default and token is not None):
            return None
        if token is None:
            raise FormatError(f"add_{name}_token is true, but no {name}_token_id is given.")
        return token, vocabulary.ids[token]

    before, after = end("bos", bos), end("eos", False)
    if before or after:
        backend.post_processor = surrounding(before, after)


def surrounding(
    before: tuple[str, int] | None, after: tuple[str, int] | None
) -> TemplateProcessing:
    """A post-processor that puts tokens, given as (text, id), before and after every text.

    Source: `TokenizersBackend.update_post_processor` of transformers.
    """
    first, last = ([end[0]] if end else [] for end in (before, after))
    single = [f"{part}:0" for part in (*first, "$A", *last)]
    second = [f"{part}:1" for part in (*first, "$B", *last)]
    tokens = {end for end in (before, after) if end}
    return TemplateProcessing(single=single, pair=[*single, *second], special_tokens=sorted(tokens))


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Adds in the order of ids, so that the closing run gets the ids that the file gives it."""
    added = {}
    for id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in MATCHED_WHOLE:
            added[id] = tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
            if not token:
                raise FormatError(f"The added token {id} has no text.")
    backend.add_tokens(list(added.values()))
    for id, one in added.items():
        if backend.token_to_id(one.content) != id:
            raise FormatError(f"The added token {id} cannot keep its id.")


def _settings(metadata: Mapping[str, object], special: dict[str, str]) -> Settings:
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key.startswith("tokenizer.chat_template") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template").lstrip(".") or "default"] = value
    template = templates.get("default") if list(templates) == ["default"] else templates or None
    architecture = metadata.get("general.architecture")
    limit = metadata.get(f"{architecture}.context_length", NO_LIMIT)
    name = metadata.get("general.name", "")
    return Settings(
        special=special,
        model_max_length=int(limit) if isinstance(limit, (int, np.integer)) else NO_LIMIT,
        chat_template=template,
        name_or_path=name if isinstance(name, str) else "",
    )


def _value(own: Metadata, key: str, kind: type[T]) -> T:
    value = own.get(key)
    if kind is int and isinstance(value, np.integer):
        value = int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        _refuse_value(own, key, kind.__name__)
    return value


def _flag(own: Metadata, key: str, default: bool) -> bool:
    return _value(own, key, bool) if key in own else default


def _array(own: Metadata, key: str, kind: type[T]) -> list[T]:
    value: Any = own.get(key)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        _refuse_value(own, key, f"an array of {kind.__name__}")
    items = list(value)
    if wrong := {type(item) for item in items} - {kind}:
        raise FormatError(
            f"tokenizer.ggml.{key} has elements of the wrong type",
            wanted=kind.__name__,
            got=", ".join(sorted(each.__name__ for each in wrong)),
        )
    return items


def _refuse_value(own: Metadata, key: str, wanted: str) -> NoReturn:
    what = f"tokenizer.ggml.{key} is {'wrong' if key in own else 'missing'}"
    got = None if own.get(key) is None else type(own[key]).__name__
    raise FormatError(what, wanted=wanted, got=got)


def _check_count(key: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise FormatError(f"tokenizer.ggml.{key} does not fit tokens", wanted=wanted, got=got)
