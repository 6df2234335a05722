"""What tokenizer classes of transformers (5.23) do around the pieces of a vocabulary.

There a class that is known brings its own rules and takes no more than vocabulary, merges and added
tokens from a `tokenizer.json`. Here that file is followed, since a model was trained with it; where
the class says otherwise a warning shows a text that becomes other ids.
"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from everystep.errors import TokenizerError
from everystep.text.classes import BYTE_LEVEL
from everystep.text.native import native_call
from everystep.text.tokenizer_settings import config_flag

SPACE = "▁"
_PROBES = (
    *("the cat", " the  cat ", "a\n\n\tb\r\nc", "it's 1234, isn't IT?", "camelCase x_y"),
    *("e\u0301 \u212b ﬁ ½", "日本語と한국어 🙂", "naïve Ångström"),
)
"""Texts in which spaces, digits, scripts and accents meet."""
_SHOWN = 12  # ids


@dataclass(frozen=True)
class TextRules:
    """The ways in which a text is changed and cut into pieces, and pieces become a text again."""

    normalizer: Normalizer | None
    pre_tokenizer: PreTokenizer | None
    decoder: Decoder | None

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TextRules:
        """Return the rules that a tokenizer has."""
        return cls(backend.normalizer, backend.pre_tokenizer, backend.decoder)

    def put_on(self, backend: tokenizers.Tokenizer) -> None:
        """Let a tokenizer have these rules."""
        backend.normalizer = self.normalizer
        backend.pre_tokenizer = self.pre_tokenizer
        backend.decoder = self.decoder


def llama_rules(config: Mapping[str, object]) -> TextRules:
    """Return the rules of LlamaTokenizer: a text begins with a space, and every other space counts.

    Where `legacy` is true, so does a text after each special token.
    """
    prefixed = config_flag(config, "add_prefix_space", True)
    further = "always" if config_flag(config, "legacy", False) else "first"
    scheme = further if prefixed else "never"
    mark = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    return TextRules(None, mark, spelled_bytes(prefixed))


def gemma_rules() -> TextRules:
    """Return the rules of GemmaTokenizer: every space counts, and none is added."""
    return TextRules(normalizers.Replace(" ", SPACE), None, spelled_bytes(False))


def t5_rules(normalizer: Normalizer | None) -> TextRules:
    """Return the rules of T5Tokenizer: words apart, and spaces count once."""
    mark = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=True)
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), mark])
    return TextRules(
        normalizer, words, decoders.Metaspace(SPACE, prepend_scheme="always", split=True)
    )


def spelled_bytes(prefixed: bool) -> Decoder:
    """Pieces to text: marks become spaces, byte pieces the bytes they name."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)


def warn_of_other_rules(
    backend: tokenizers.Tokenizer, name: str | None, config: Mapping[str, Any], path: Path
) -> None:
    """Warn where transformers puts the rules of the class `name` in the place of those of a file,
    and a text shows it.

    Only classes that this library knows are compared, and only by texts that the tokenizer can
    read.
    """
    own, others = TextRules.of(backend), _rules_of_class(name, config, backend.normalizer)
    if others is None:
        return
    special = [token.content for token in backend.get_added_tokens_decoder().values()]
    texts = [*_PROBES, *(f"a{token}b {token} c" for token in special[:1])]
    try:
        here = _read(backend, texts)
        others.put_on(backend)
        there = _read(backend, texts)
    except TokenizerError:
        return
    finally:
        own.put_on(backend)
    differing = (one for one in zip(texts, here, there, strict=True) if one[1] != one[2])
    if (first := next(differing, None)) is not None:
        text, found, other = first
        warnings.warn(
            f"{path} is followed. transformers replaces its rules by those of {name}, which is the "
            f"class of this folder: {text!r} is {_shown(found)} here and {_shown(other)} there. "
            "Name the class PreTrainedTokenizerFast in tokenizer_config.json, and it follows the "
            "file too",
            stacklevel=2,
        )


def _rules_of_class(
    name: str | None, config: Mapping[str, Any], normalizer: Normalizer | None
) -> TextRules | None:
    """Return the rules of a class, None for one that is not known."""
    if name in BYTE_LEVEL:
        rule = BYTE_LEVEL[name].rule(config_flag(config, "add_prefix_space", False))
        composing = rule.normalizer() if rule.normalizer else None
        return TextRules(composing, rule.split(), decoders.ByteLevel())
    if name == "LlamaTokenizer":
        return llama_rules(config)
    if name == "GemmaTokenizer":
        return gemma_rules()
    return t5_rules(_compiled_in(normalizer)) if name == "T5Tokenizer" else None


def _compiled_in(normalizer: Normalizer | None) -> Normalizer | None:
    """Return the compiled rules of a normalizer, which are all that T5Tokenizer takes of it."""
    if normalizer is None:
        return None
    whole = json.loads(normalizer.__getstate__())
    for step in whole.get("normalizers") or [whole]:
        if step["type"] == "Precompiled":
            return normalizers.Precompiled(base64.b64decode(step["precompiled_charsmap"]))
    return None


def _read(backend: tokenizers.Tokenizer, texts: list[str]) -> list[tuple[list[int], str]]:
    """Return the ids of each text, and the text that they are again."""
    with native_call("The text cannot be tokenized"):
        ids = [one.ids for one in backend.encode_batch(texts, add_special_tokens=False)]
        again = backend.decode_batch(ids, skip_special_tokens=False)
    return list(zip(ids, again, strict=True))


def _shown(read: tuple[list[int], str]) -> str:
    """Return ids and their text in few characters."""
    ids, text = read
    more = ", ..." if len(ids) > _SHOWN else ""
    return f"[{', '.join(map(str, ids[:_SHOWN]))}{more}] ({text!r})"
