"""Tokenizer classes whose vocabularies are byte level: how they cut texts, what they call tokens.

Sources: the classes of transformers (5.23); QWenTokenizer lies in the repositories of its models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tokenizers import Regex, normalizers, pre_tokenizers

from everystep.text.pretokenizers import LLAMA3, QWEN2, SplittingRule

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class ByteLevelClass:
    """The way in which a class cuts texts; without an expression of its own, that of GPT-2.

    `special`: the names of tokens where no file names them. `encloses`: every text stands between
    cls and sep.
    """

    special: Mapping[str, str]
    pattern: str | None = None
    composes: bool = False
    encloses: bool = False

    def rule(self, prefixed: bool) -> SplittingRule:
        """Return the rule, with or without a space before every text."""
        split = partial(_split, self.pattern, prefixed)
        return SplittingRule(split, normalizers.NFC if self.composes else None)


@dataclass(frozen=True)
class TiktokenClass:
    """The way in which a class cuts texts, and the tokens that follow those of the file."""

    pattern: str
    composes: bool = False
    further: tuple[str, ...] = ()

    @property
    def rule(self) -> SplittingRule:
        """The rule."""
        split = partial(_split, self.pattern, False)
        return SplittingRule(split, normalizers.NFC if self.composes else None)


def _split(pattern: str | None, prefixed: bool) -> pre_tokenizers.PreTokenizer:
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=pattern is None)
    if pattern is None:
        return alphabet
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, alphabet])


def _named(names: str, token: str = END_OF_TEXT) -> dict[str, str]:
    return {f"{name}_token": token for name in names.split()}


_ROBERTA = ByteLevelClass(
    {
        **_named("bos cls", "<s>"),
        **_named("eos sep", "</s>"),
        **_named("unk", "<unk>"),
        **_named("pad", "<pad>"),
        **_named("mask", "<mask>"),
    },
    encloses=True,
)
_GPT_NEOX = ByteLevelClass({**_named("unk bos eos"), **_named("pad", "<|padding|>")}, composes=True)

BYTE_LEVEL = {
    "GPT2Tokenizer": ByteLevelClass(_named("unk bos eos")),
    "CodeGenTokenizer": ByteLevelClass(_named("unk bos eos")),
    "GPTNeoXTokenizer": _GPT_NEOX,
    "Qwen2Tokenizer": ByteLevelClass(_named("unk eos pad"), QWEN2, composes=True),
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
}

# transformers takes the expression of Llama 3 for every tiktoken file.
_LLAMA3 = TiktokenClass(LLAMA3)
_QWEN = TiktokenClass(
    QWEN2,
    composes=True,
    further=(
        END_OF_TEXT,
        "<|im_start|>",
        "<|im_end|>",
        *(f"<|extra_{number}|>" for number in range(205)),
    ),
)
TIKTOKEN = {
    "LlamaTokenizer": _LLAMA3,
    "PreTrainedTokenizer": _LLAMA3,  # PreTrainedTokenizerFast
    "TokenizersBackend": _LLAMA3,
    "QWenTokenizer": _QWEN,
}

CLASS_OF_MODEL = {
    **dict.fromkeys(("gpt2", "opt", "phi"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("llama", "mistral", "mixtral"), "LlamaTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    "bart": "BartTokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "qwen": "QWenTokenizer",
}
"""The class of a folder that names none, by the `model_type` of its config.json."""

CLASS_IN_TRANSFORMERS = {
    **dict.fromkeys(("codegen", "gpt2", "gpt_neo", "gptj", "opt", "phi"), "GPT2Tokenizer"),
    "starcoder2": "GPT2Tokenizer",
    **dict.fromkeys(("falcon_mamba", "gpt_neox", "mamba", "mamba2", "olmo"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"), "GemmaTokenizer"),
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    "bart": "RobertaTokenizer",
}
"""The class that transformers takes for a folder with `tokenizer.json` that names none."""
FOLLOWED_MODELS = frozenset(
    [
        *("glm", "glm4", "gpt_bigcode", "granite", "granitemoe", "mistral", "mixtral", "nemotron"),
        *("olmo2", "olmo3", "phi3", "phimoe", "stablelm", "umt5"),
    ]
)
"""Models of which transformers follows `tokenizer.json` whatever class is named."""
CORRECTED_MODELS = frozenset(("qwen2",))
"""Models of which transformers takes its own class whatever class is named."""
SPECIAL_OF_PIECES: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {**_named("unk", "<unk>"), **_named("bos", "<s>"), **_named("eos", "</s>")},
    "GemmaTokenizer": {
        f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")
    },
    "T5Tokenizer": {**_named("unk", "<unk>"), **_named("eos", "</s>"), **_named("pad", "<pad>")},
}
"""Names of special tokens that classes of SentencePiece's vocabularies give where no file does."""


def special_of_class(name: str | None) -> Mapping[str, str]:
    """Return the special tokens that a class names where no file does."""
    if name in BYTE_LEVEL:
        return BYTE_LEVEL[name].special
    return SPECIAL_OF_PIECES.get(name or "", {})


def class_in_transformers(
    tokenizer: Mapping[str, object], model: Mapping[str, object], *, bytes_as_letters: bool
) -> str | None:
    """Return the class that transformers makes of a folder with `tokenizer.json`, None where it
    follows that file.

    `tokenizer`, `model`: what tokenizer_config.json and config.json say. `bytes_as_letters`:
    the file's rules are those of byte-level vocabularies.
    """
    given, kind = tokenizer.get("tokenizer_class") or model.get("tokenizer_class"), None
    if isinstance(model.get("model_type"), str):
        kind = str(model["model_type"])
    if "auto_map" in tokenizer or kind in FOLLOWED_MODELS:
        return None
    if kind in CORRECTED_MODELS or not isinstance(given, str):
        return CLASS_IN_TRANSFORMERS.get(kind or "")
    name = given.removesuffix("Fast")
    return None if name == "LlamaTokenizer" and bytes_as_letters else name
