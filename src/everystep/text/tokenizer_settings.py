"""What a tokenizer has beside its vocabulary: named special tokens, sides, limits, templates.

Files write a token as text or as an object with flags; both are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import warn

from everystep.errors import (
    FormatError,
    RequestError,
    TokenizerError,
    message,
    shown,
    with_nearest,
)
from everystep.text.batch import Side
from everystep.text.native import checked_text, id_of

# transformers' "no limit is known".
NO_LIMIT = int(1e30)

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_LISTS = ("additional_special_tokens", "extra_special_tokens")
_READ = frozenset(
    {
        *(*NAMES, *EXTRA_LISTS, "added_tokens_decoder", "add_bos_token", "add_eos_token"),
        *("add_prefix_space", "trim_offsets", "legacy", "extra_ids", "tokenizer_class", "auto_map"),
        *("padding_side", "truncation_side", "model_max_length", "max_len", "chat_template"),
    }
)
_IDLE = frozenset(
    {
        # What transformers notes of how a tokenizer came to be.
        *("name_or_path", "processor_class", "backend", "files_loaded", "init_inputs", "is_local"),
        *("local_files_only", "use_fast", "from_slow", "tokenizer_type", "verbose", "vocab_size"),
        *("trust_remote_code", "device_map", "fix_mistral_regex", "model_specific_special_tokens"),
        # Calls that pad and cut, and the names of what they return.
        *("max_length", "stride", "padding", "truncation", "truncation_strategy"),
        *("pad_to_multiple_of", "pad_token_type_id", "model_input_names", "return_token_type_ids"),
        *("return_attention_mask", "token_type_ids_pattern", "special_tokens_pattern"),
        *("token_type_ids_include_special_tokens", "tokenizer_padding", "tokenizer_truncation"),
        # How a text looks after decoding, and what is read out of an answer.
        *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors"),
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        *("response_template", "response_schema", "chat_control_tokens", "tool_parser_type"),
        # Rules of classes, which tokenizer.json holds, and samples of cuts.
        *("vocab", "merges", "unk_id", "post_processor", "sp_model_kwargs", "dropout"),
        *("do_lower_case", "do_basic_tokenize", "never_split", "tokenize_chinese_chars"),
        *("strip_accents", "remove_space", "keep_accents", "use_default_system_prompt"),
        # Languages that a class is told.
        *("language", "task", "predict_timestamps", "src_lang", "tgt_lang", "language_codes"),
        *("source_lang", "target_lang", "num_madeup_words"),
    }
)
"""Keys that transformers has, and that change neither the ids of a text nor a template."""
_UNHEARD: Mapping[str, object] = {"split_special_tokens": False}
"""Keys that would change ids and are not read, with the value that asks for nothing."""


def named_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    """Name -> text of the special tokens in the sources; a later source wins over an earlier one.

    A source that holds null for a name takes the token away.
    """
    found = {
        name: token_text(source[name], name)
        for source in sources
        for name in NAMES
        if name in source
    }
    return {name: token for name in NAMES if (token := found.get(name)) is not None}


class NamedToken:
    """A named special token as an attribute of a tokenizer: its text or, for `..._id`, its id."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removesuffix("_id")
        self._is_id = name.endswith("_id")

    def __get__(self, tokenizer: Any, owner: type | None = None) -> Any:
        if tokenizer is None:
            return self
        token = tokenizer.special.get(self._name)
        if token is None or not self._is_id:
            return token
        return tokenizer.backend.token_to_id(token)

    def __set__(self, tokenizer: Any, value: object) -> None:
        token = tokenizer.token_of(value) if self._is_id and value is not None else value
        if value is not None and (
            not isinstance(token, str) or id_of(tokenizer.backend, token) is None
        ):
            raise TokenizerError(
                f"{self._name} must be in the vocabulary", wanted="a token", got=shown(value)
            )
        tokenizer.special = named_tokens(tokenizer.special, {self._name: token})


@dataclass(frozen=True)
class Settings:
    """Everything of a tokenizer that is neither vocabulary nor splitting rule.

    `special`: name -> text of the special tokens that exist. `chat_template`: one template, or a
    mapping from names to templates.
    """

    special: Mapping[str, str] = field(default_factory=dict)
    padding_side: Side = "left"
    truncation_side: Side = "right"
    model_max_length: int = NO_LIMIT
    chat_template: str | dict[str, str] | None = None
    name_or_path: str = ""


SIDES: tuple[Side, Side] = ("left", "right")


def checked_side(value: Any, name: str) -> Side:
    """Return the side itself; RequestError if it is neither "left" nor "right"."""
    for side in SIDES:
        if isinstance(value, str) and value == side:
            return side
    raise RequestError(f"{name} is unknown", wanted="'left' or 'right'", got=shown(value))


def token_text(value: object, name: str) -> str | None:
    """Return the text of a token that a file gives as text, as an object with `content`, or as
    null."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return checked_text(value, name) if value else None
    raise TokenizerError(
        f"{name} is not a token", wanted="text or an object with content", got=shown(value)
    )


def warn_of_unknown_keys(config: Mapping[str, object], file: Path) -> None:
    """Warn once of keys of tokenizer_config.json that have no effect here and are not known to
    have none.

    Any name that ends in `_token` may be a model's own token, any in `_file` says where something
    lay, and where the folder names a class of its own, that class may read what it likes.
    """
    if "auto_map" in config:
        return
    strange = [key for key, value in config.items() if not _is_known(key, value)]
    if strange:
        what, do = f"{file} has keys without effect here", "Correct them, or delete these lines"
        warn(message(what, got=with_nearest(strange, _READ), do=do), stacklevel=4)


def _is_known(key: str, value: object) -> bool:
    if key in _UNHEARD:
        return value is None or value == _UNHEARD[key]
    token = key.endswith("_token") and isinstance(value, str | Mapping | None)
    return token or key in _READ or key in _IDLE or key[:1] == "_" or key.endswith("_file")


def config_flag(config: Mapping[str, object], key: str, default: bool) -> bool:
    """Return a switch of tokenizer_config.json; the default where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        what = f"tokenizer_config.json: {key} is wrong"
        raise FormatError(what, wanted="true or false", got=shown(value))
    return default if value is None else value


def described(tokenizer: Any, kind: str) -> str:
    """Return one line about a tokenizer: its kind, vocabulary, special ids, and whether it has a
    chat template."""
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    special = ", ".join(f"{name} {id}" for name, id in ids.items() if id is not None)
    template = "chat template" if tokenizer.chat_template is not None else "no chat template"
    parts = (type(tokenizer.backend.model).__name__, f"{len(tokenizer)} tokens", special, template)
    return f"{kind}({tokenizer.name_or_path!r}, {', '.join(filter(None, parts))})"
