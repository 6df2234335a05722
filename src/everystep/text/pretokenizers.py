r"""The splitting rules that a GGUF file names in `tokenizer.ggml.pre`.

A GGUF holds tokens and merges but not how text is cut into words before merging; it holds only
the name of a rule. Guessing wrong gives plausible, wrong ids, so a name that is not in this
table is an error. The expressions are those of the original tokenizers (`tokenizer.json` of
each family); llama.cpp assigned the names (`llama-vocab.cpp`). `\p{N}` first means that every
digit stands alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from everystep.errors import UnsupportedError, nearest

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD_START = r"[^\r\n\p{L}\p{N}]?"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words of the newest families break at a lower-to-upper boundary ("camelCase").
CAMEL = (rf"{WORD_START}{UPPER}*{LOWER}+", rf"{WORD_START}{UPPER}+{LOWER}*")
CJK = "[一-龥぀-ゟ゠-ヿ]+"
ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    rf"{CONTRACTION}|{WORD_START}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)
QWEN2 = rf"{CONTRACTION}|{WORD_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = (
    rf"{CONTRACTION}|{WORD_START}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
TEKKEN = rf"{CAMEL[0]}|{CAMEL[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
GPT4O = (
    rf"{CAMEL[0]}{CONTRACTION}?|{CAMEL[1]}{CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
DEEPSEEK3 = (
    rf"{ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)


@dataclass(frozen=True)
class SplittingRule:
    """A way to cut text before merging, with what families that use it have besides.

    `whole_words`: a word that is in the vocabulary is taken whole, whatever the merges say.
    `starts_with_bos` holds where the file does not state `add_bos_token`.
    """

    split: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    whole_words: bool = False
    starts_with_bos: bool = False
    names: tuple[str, ...] = ()


def _bytes(*, use_regex: bool) -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _expressions(*patterns: str) -> Callable[[], PreTokenizer]:
    """Each expression splits what the previous one left, then text becomes bytes."""

    def build() -> PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, _bytes(use_regex=False)])

    return build


_gpt2 = partial(_bytes, use_regex=True)


def _digits_gpt2() -> PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _bytes(use_regex=True)])


def _falcon() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            _bytes(use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )


RULES = (
    SplittingRule(_digits_gpt2, names=("smollm", "starcoder", "refact", "codeshell", "minerva-7b")),
    SplittingRule(_digits_gpt2, normalizers.NFC, names=("command-r",)),
    SplittingRule(_gpt2, names=("gpt-2", "phi-2")),
    SplittingRule(_gpt2, normalizers.NFC, names=("mpt", "olmo")),
    SplittingRule(_falcon, names=("falcon",)),
    # Of no family: what llama.cpp falls back to.
    SplittingRule(
        _expressions(r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
        names=("default",),
    ),
    SplittingRule(
        _expressions(LLAMA3),
        whole_words=True,
        starts_with_bos=True,
        names=("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"),
    ),
    SplittingRule(_expressions(LLAMA3), names=("dbrx", "smaug-bpe")),
    SplittingRule(
        _expressions(QWEN2), normalizers.NFC, names=("qwen2", "deepseek-r1-qwen", "megrez")
    ),
    SplittingRule(_expressions(QWEN35), normalizers.NFC, names=("qwen35",)),
    SplittingRule(_expressions(TEKKEN), whole_words=True, starts_with_bos=True, names=("tekken",)),
    SplittingRule(_expressions(GPT4O), names=("gpt-4o", "llama4")),
    SplittingRule(_expressions(r"\p{N}{1,3}", CJK, DEEPSEEK3), names=("deepseek-v3",)),
    SplittingRule(
        _expressions(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
        names=("deepseek-coder",),
    ),
)

BY_NAME = {name: rule for rule in RULES for name in rule.names}


def splitting_rule(name: str) -> SplittingRule:
    """Return the rule that a file names; UnsupportedError if it is not in the table."""
    if name in BY_NAME:
        return BY_NAME[name]
    hint = nearest(name, BY_NAME)
    raise UnsupportedError(
        f"tokenizer.ggml.pre names the unknown splitting rule {name!r}",
        wanted=f"{hint!r} perhaps" if hint else ", ".join(sorted(BY_NAME)),
        do="Put the model's original tokenizer.json into a folder and load the tokenizer "
        "from there with Tokenizer.from_folder; guessing the rule would give wrong ids",
    )
