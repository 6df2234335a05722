"""A tokenizer in a folder of the Hugging Face layout: reading it whole, and writing it.

`tokenizer.json` decides how text is split and what is put before and after it; `add_bos_token`
and `add_eos_token` of `tokenizer_config.json` change nothing then, as in transformers (5.23), but
the flags of its added tokens count more, and a token with a name is special. Where transformers
replaces rules of the file by those of a class, a warning says so (`text_rules.py`).
Without it the vocabulary that the folder came with is read (`original.py`). The other files add
names, sides, limits and chat templates. Nothing is fetched, and nothing in the folder is run.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from everystep.errors import FileError, FormatError, MissingFileError, shown
from everystep.files.atomic import write_atomic
from everystep.files.model_folder import CONFIG, TOKENIZER, find_tokenizer, find_vocabulary
from everystep.files.opening import is_there, read_bounded
from everystep.files.strict_json import MAX_SETTINGS_BYTES, field, read_json, whole_number
from everystep.text.classes import class_in_transformers, special_of_class
from everystep.text.native import checked_text, native_call
from everystep.text.original import Original, add_ends, read_original
from everystep.text.text_rules import warn_of_other_rules
from everystep.text.tokenizer_settings import (
    EXTRA_LISTS,
    NAMES,
    NO_LIMIT,
    Settings,
    checked_side,
    named_tokens,
    token_text,
    warn_of_unknown_keys,
)

MAX_TEMPLATE_BYTES = 1 << 20
MAX_GROWTH = 64
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
OLDER_TEMPLATE = "chat_template.json"
ADDED_TOKENS = "added_tokens.json"
FURTHER_TEMPLATES = "additional_chat_templates"
# The same vocabulary in other forms, which other programs read.
VOCABULARIES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    ADDED_TOKENS,
)


def read_folder(folder: Path, *, tells: bool = True) -> tuple[tokenizers.Tokenizer, Settings]:
    """Return the splitting rule and the settings of a folder; FileError names what is missing or
    wrong.

    With `tells`, warn where transformers has other ids, and of keys without effect.
    """
    config: dict[str, Any] = read_json(folder / TOKENIZER_CONFIG) or {}
    tokens_map = read_json(folder / SPECIAL_TOKENS) or {}
    older = read_json(folder / ADDED_TOKENS)
    if older and not config.get("added_tokens_decoder"):
        named = {*named_tokens(tokens_map, config).values(), *_extra_tokens(config)}
        config["added_tokens_decoder"] = _numbered(older, folder / ADDED_TOKENS, named)
    original = None if is_there(folder / TOKENIZER) else _read_original(folder, config)
    backend = original.backend if original else _read_backend(folder)
    _check_growth(backend, folder)
    own_flags = {} if original or not older else backend.get_added_tokens_decoder()
    _add_listed_tokens(backend, config, own_flags)
    name = None if original else _class_of(backend, folder, config)
    known = original.special if original else special_of_class(name)
    own = {name: token for name, token in known.items() if backend.token_to_id(token) is not None}
    special = named_tokens(own, tokens_map, config)
    _add_named_tokens(backend, config, tokens_map, special)
    if original:
        add_ends(backend, config, special)
    elif tells:
        warn_of_other_rules(backend, name, config, folder / TOKENIZER)
    if tells:
        warn_of_unknown_keys(config, folder / TOKENIZER_CONFIG)
    limit = config.get("model_max_length", config.get("max_len"))
    return backend, Settings(
        special=special,
        padding_side=checked_side(config.get("padding_side", "left"), "padding_side"),
        truncation_side=checked_side(config.get("truncation_side", "right"), "truncation_side"),
        model_max_length=NO_LIMIT if limit is None else _whole(limit),
        chat_template=_read_templates(folder, config),
        name_or_path=str(folder),
    )


def _whole(limit: object) -> int:
    """Read the most tokens that a model takes, which some files write as 1e30 for no limit."""
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0:
        return int(min(limit, NO_LIMIT))
    what, wanted = "tokenizer_config.json: model_max_length is impossible", "a number above 0"
    raise FormatError(what, wanted=wanted, got=shown(limit)[:200])


def write_folder(
    folder: Path, backend: tokenizers.Tokenizer, settings: Settings, origin: Path | None = None
) -> list[Path]:
    """Writes the files that `read_folder` reads and returns their paths.

    Where the folder `origin` still says the same, its own files are copied, byte for byte, and with
    them what other programs read. Templates that lie in `folder` and are not written go: they would
    be read in place of these.
    """
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file", wanted="a folder", do="Choose another place")
    files = _copied(origin, backend, settings) or _made(backend, settings)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / path, data, follows=False)
    for template in _templates_in(folder):
        if str(template) not in files:
            (folder / template).unlink()
    return [folder / path for path in files]


def _copied(
    origin: Path | None, backend: tokenizers.Tokenizer, settings: Settings
) -> dict[str, bytes]:
    """Return the files of `origin`; none where they say something else, or lack
    `tokenizer.json`."""
    if origin is None or not is_there(origin / TOKENIZER):
        return {}
    try:
        known = read_folder(origin, tells=False)
    except FileError:
        return {}
    if known[0].to_str() != backend.to_str():
        return {}
    if replace(known[1], name_or_path=settings.name_or_path) != settings:
        return {}
    own = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, *VOCABULARIES)
    paths = [*map(Path, own), *_templates_in(origin)]
    return {str(one): (origin / one).read_bytes() for one in paths if is_there(origin / one)}


def _templates_in(folder: Path) -> list[Path]:
    """Return the paths of templates in a folder, without the folder."""
    known = [Path(CHAT_TEMPLATE), Path(OLDER_TEMPLATE)]
    further = sorted(folder.glob(f"{FURTHER_TEMPLATES}/*.jinja"))
    return [one for one in known if is_there(folder / one)] + [
        one.relative_to(folder) for one in further
    ]


def _made(backend: tokenizers.Tokenizer, settings: Settings) -> dict[str, bytes]:
    named = dict(settings.special)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": settings.model_max_length,
        "padding_side": settings.padding_side,
        "truncation_side": settings.truncation_side,
        **named,
    }
    files = {
        TOKENIZER: backend.to_str(pretty=True),
        TOKENIZER_CONFIG: _json_text(config),
        SPECIAL_TOKENS: _json_text(named),
    }
    templates = settings.chat_template or {}
    sources = {"default": templates} if isinstance(templates, str) else templates
    for name, source in sources.items():
        path = f"{FURTHER_TEMPLATES}/{name}.jinja"
        files[CHAT_TEMPLATE if name == "default" else path] = source
    return {path: text.encode() for path, text in files.items()}


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _read_original(folder: Path, config: dict[str, Any]) -> Original:
    """Return the vocabulary that a folder has in place of `tokenizer.json`."""
    if find_vocabulary(folder) is None:
        raise MissingFileError(
            f"{folder} has no tokenizer",
            wanted="a file tokenizer.json",
            got=", ".join(sorted(p.name for p in folder.glob("token*"))) or "no such file",
            do="Save the tokenizer with tokenizers.Tokenizer.save, or load the model alone",
        )
    return read_original(folder, config)


def _numbered(ids: Mapping[str, object], path: Path, named: set[str]) -> dict[str, Any]:
    """Return added tokens by id, as `tokenizer_config.json` lists them, of an older file by token.

    Those that have a name elsewhere are special.
    """
    found: dict[str, Any] = {}
    for token, id in ids.items():
        if type(id) is not int or id < 0 or str(id) in found:
            what = f"{path} is wrong"
            raise FormatError(what, wanted="an id of its own for each token", got=repr(id)[:200])
        special = token in named
        found[str(id)] = {"content": token, "special": special, "normalized": not special}
    return found


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = find_tokenizer(folder / TOKENIZER)
    with native_call(f"{path} is not a tokenizer", error=FormatError):
        backend = tokenizers.Tokenizer.from_file(str(path))
    # Both would be state shared by all calls; each call pads and truncates its own rows.
    backend.no_padding()
    backend.no_truncation()
    if any(not token.content for token in backend.get_added_tokens_decoder().values()):
        raise FormatError(f"{path} has an added token without text.")
    return backend


def _class_of(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the class that transformers makes of the folder, None where it follows the file."""
    model = read_json(folder / CONFIG, most=MAX_SETTINGS_BYTES) or {}
    rules = (backend.pre_tokenizer, backend.decoder)
    letters = any(b'"ByteLevel"' in one.__getstate__() for one in rules if one is not None)
    return class_in_transformers(config, model, bytes_as_letters=letters)


def _check_growth(backend: tokenizers.Tokenizer, folder: Path) -> None:
    for name, steps in (("normalizer", backend.normalizer), ("decoder", backend.decoder)):
        grown = 1.0 if steps is None else _growth(json.loads(steps.__getstate__()))
        if grown > MAX_GROWTH:
            what, wanted = f"{folder}: the {name} makes texts longer", f"at most {MAX_GROWTH} times"
            raise FormatError(what, wanted=wanted, got=f"up to {grown:.0f} times")


def _growth(step: Mapping[str, Any]) -> float:
    """Return the factor by which the replacements of a normaliser or decoder may lengthen a
    text."""
    if step["type"] == "Sequence":
        return math.prod(map(_growth, step.get("normalizers") or step.get("decoders") or ()))
    if step["type"] == "Precompiled":
        return _longest_rule(base64.b64decode(step["precompiled_charsmap"]))
    if step["type"] != "Replace":
        return 1.0
    pattern = step["pattern"].get("String")
    # An expression may match between any two characters.
    return max(
        1.0, 1 + len(step["content"]) if not pattern else len(step["content"]) / len(pattern)
    )


def _longest_rule(rules: bytes) -> float:
    """Return the bytes of the longest replacement in compiled rules: a table, then texts that end
    in NUL.

    Its first four bytes say how many the table has.
    """
    table = int.from_bytes(rules[:4], "little")
    return float(max(map(len, rules[4 + table :].split(b"\0")), default=1) or 1)


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], kept: Container[int]
) -> None:
    """Makes every token that the configuration lists by id part of the vocabulary, with the flags
    that it has there, but for the ids that are kept as they are.
    """
    named = {text for name in NAMES if (text := token_text(config.get(name), name))}
    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise FormatError("added_tokens_decoder is wrong", wanted="an object")
    numbers = {id: whole_number(id) for id in listed}
    if None in numbers.values():
        raise FormatError(
            "tokenizer_config.json: added_tokens_decoder is wrong",
            wanted="ids as its keys",
            got=shown(next(id for id, number in numbers.items() if number is None)),
        )
    for id, token in sorted(listed.items(), key=lambda item: numbers[item[0]] or 0):
        if numbers[id] in kept:
            continue
        added = _added_token(token)
        added.special = added.special or added.content in named
        if repr(added) != repr(known.get(numbers[id] or 0)):
            backend.add_tokens([added])
            place = backend.token_to_id(added.content)
            if place != numbers[id]:
                raise FormatError(
                    f"tokenizer_config.json gives the added token {added.content!r} the id {id}",
                    wanted=f"{place}, its place in the vocabulary",
                    do="The two files belong to different tokenizers",
                )


def _add_named_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    tokens_map: Mapping[str, Any],
    special: Mapping[str, str],
) -> None:
    """Makes every token that the configuration names part of the vocabulary."""
    names = [*special.values(), *_extra_tokens(tokens_map), *_extra_tokens(config)]
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    plain = [known[it] for it in special.values() if it in known and not known[it].special]
    for one in plain:
        one.special = True
    backend.add_tokens(plain)
    flagged = {
        token.get("content"): {**token, "special": True}
        for source in (tokens_map, config)
        for name in NAMES
        if isinstance(token := source.get(name), Mapping)
    }
    missing = [name for name in dict.fromkeys(names) if name not in known]
    backend.add_special_tokens([_added_token(flagged.get(name, name)) for name in missing])


def _added_token(token: Any) -> tokenizers.AddedToken:
    if isinstance(token, str):
        token = {"content": token, "special": True, "normalized": False}
    if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
        raise FormatError("An added token is wrong", wanted="content", got=shown(token))
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    content = checked_text(token["content"], "an added token")
    return tokenizers.AddedToken(
        content, **{flag: bool(token[flag]) for flag in flags if flag in token}
    )


def _extra_tokens(source: Mapping[str, Any]) -> Iterator[str]:
    for key in EXTRA_LISTS:
        listed = source.get(key) or []
        if not isinstance(listed, Mapping | list):
            what = f"tokenizer_config.json: {key} is wrong"
            raise FormatError(what, wanted="a list of tokens", got=type(listed).__name__)
        for value in listed.values() if isinstance(listed, Mapping) else listed:
            if text := token_text(value, key):
                yield text


def _read_templates(folder: Path, config: dict[str, object]) -> str | dict[str, str] | None:
    """Read the templates; those in files win over the configuration's."""
    older = folder / OLDER_TEMPLATE
    found = _named_templates(config, str(folder / TOKENIZER_CONFIG))
    found |= _named_templates(read_json(older) or {}, str(older))
    if is_there(folder / CHAT_TEMPLATE):
        found["default"] = _read_template(folder / CHAT_TEMPLATE)
    for file in sorted((folder / FURTHER_TEMPLATES).glob("*.jinja")):
        found[file.stem] = _read_template(file)
    return found["default"] if list(found) == ["default"] else found or None


def _named_templates(config: dict[str, object], name: str) -> dict[str, str]:
    """Return the templates by name that the file `name` holds; one text alone is called default."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list | None):
        what = f"{name}: the field 'chat_template' is of the wrong kind"
        raise FormatError(what, got=type(value).__name__)
    where = f"{name}: 'chat_template'"
    found = {}
    for entry in value or ():
        if not isinstance(entry, dict):
            raise FormatError(f"{where} should list objects", got=type(entry).__name__)
        found[field(entry, "name", str, where)] = field(entry, "template", str, where)
    return found


def _read_template(file: Path) -> str:
    try:
        return read_bounded(file, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{file} is not UTF-8", got=error.reason) from error
