"""A tokenizer in the words of a GGUF file: the way of `gguf.py` back.

A file says little of how text is split: a name of a rule, and for SentencePiece the scores of
tokens, in place of merges. So what is written is read again, and must be the tokenizer that was
given, part by part; where it is not, that is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from everystep.errors import UnsupportedError
from everystep.text.gguf import (
    BYTE,
    CONTROL,
    ID_KEYS,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_gguf,
)
from everystep.text.pretokenizers import RULES
from everystep.text.tokenizer import Tokenizer

_DO = "Quantise to int8 or int4, which makes a folder, or convert the model with llama.cpp's tools"


def tokenizer_metadata(tokenizer: Tokenizer, size: int) -> dict[str, object]:
    """Return the keys that describe the tokenizer of a model with `size` embeddings.

    Ids without a token get names that no text contains. UnsupportedError where the format cannot
    say how this tokenizer splits texts.
    """
    backend = tokenizer.backend
    state = json.loads(backend.to_str())
    model = state["model"]
    if model["type"] != "BPE" or len(tokenizer) > size:
        what = "this tokenizer has no form in a GGUF file"
        got = f"{model['type']}, {len(tokenizer)} tokens for {size} embeddings"
        raise UnsupportedError(what, wanted="merges (BPE)", got=got, do=_DO)
    own = _byte_level(state) if _is_byte_level(state) else _by_scores(state, size)
    own |= _tokens(backend, size) | _ends(tokenizer)
    found = {f"{PREFIX}{key}": value for key, value in own.items()} | _templates(tokenizer)
    _require_same(backend, found)
    return found


def _is_byte_level(state: Mapping[str, Any]) -> bool:
    return (state["decoder"] or {}).get("type") == "ByteLevel"


def _byte_level(state: Mapping[str, Any]) -> dict[str, object]:
    """Byte-level merges, split by a rule that has a name."""
    whole = bool(state["model"].get("ignore_merges"))
    for rule in RULES:
        normal = None if rule.normalizer is None else _state(rule.normalizer())
        if (
            whole == rule.whole_words
            and _plain(state["normalizer"]) == _plain(normal)
            and _plain(state["pre_tokenizer"]) == _plain(_state(rule.split()))
        ):
            merges = [" ".join(_pair(merge)) for merge in state["model"]["merges"]]
            return {"model": "gpt2", "pre": rule.names[0], "merges": merges}
    raise UnsupportedError(
        "the rule by which this tokenizer splits texts has no name in a GGUF file",
        wanted=", ".join(rule.names[0] for rule in RULES),
        got=json.dumps(state["pre_tokenizer"])[:300],
        do=_DO,
    )


def _by_scores(state: Mapping[str, Any], size: int) -> dict[str, object]:
    """SentencePiece merges: a token whose first merge comes earlier has the better score."""
    vocabulary = state["model"]["vocab"]
    scores = [0.0] * size
    for rank, merge in enumerate(state["model"]["merges"]):
        place = vocabulary["".join(_pair(merge))]
        scores[place] = scores[place] or -1.0 - rank
    prefix = "Prepend" in json.dumps(state["normalizer"])
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}


def _tokens(backend: Backend, size: int) -> dict[str, object]:
    """Return every token by id, with its kind."""
    vocabulary = {id: token for token, id in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    tokens, kinds = [], []
    unknown = getattr(backend.model, "unk_token", None)
    for id in range(size):
        token = vocabulary.get(id, f"[PAD{id}]")
        kind = NORMAL if id in vocabulary else UNUSED
        if id in added:
            kind = CONTROL if added[id].special else USER_DEFINED
        if token == unknown:
            kind = UNKNOWN
        elif len(token) == 6 and token.startswith("<0x") and backend.model.byte_fallback:
            kind = BYTE
        tokens.append(token)
        kinds.append(kind)
    return {"tokens": tokens, "token_type": kinds}


def _ends(tokenizer: Tokenizer) -> dict[str, object]:
    """Describe the ids that have a name, and those that stand around every text."""
    found: dict[str, object] = {}
    special = {name: token for name, token in tokenizer.special.items() if name in ID_KEYS}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    for name, id in ids.items():
        found[ID_KEYS[name]] = id
    around = tokenizer.encode("")
    for end, place in (("bos", 0), ("eos", -1)):
        id = ids.get(f"{end}_token")
        found[f"add_{end}_token"] = bool(around) and around[place] == id and id is not None
    said = [found["add_bos_token"], found["add_eos_token"]]
    if sum(map(bool, said)) != len(around):
        what = "a GGUF file cannot say what this tokenizer puts around a text"
        raise UnsupportedError(what, wanted="bos, eos, or both", got=around, do=_DO)
    return found


def _templates(tokenizer: Tokenizer) -> dict[str, object]:
    given = tokenizer.chat_template
    if given is None:
        return {}
    sources = {"default": given} if isinstance(given, str) else dict(given)
    found: dict[str, object] = {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): source
        for name, source in sources.items()
    }
    if others := [name for name in sources if name != "default"]:
        found["tokenizer.chat_templates"] = others
    return found


def _require_same(backend: Backend, metadata: Mapping[str, object]) -> None:
    """UnsupportedError where what is read again would split texts otherwise."""
    again, _ = read_gguf(metadata)
    wanted, got = (json.loads(one.to_str()) for one in (backend, again))
    parts = {
        "its merges": [[*map(_pair, one["model"]["merges"])] for one in (wanted, got)],
        "its normaliser": [_plain(one["normalizer"]) for one in (wanted, got)],
        "how it splits": [_splits(one["pre_tokenizer"]) for one in (wanted, got)],
        "whole words": [bool(one["model"].get("ignore_merges")) for one in (wanted, got)],
        "byte fallback": [bool(one["model"].get("byte_fallback")) for one in (wanted, got)],
    }
    for part, (one, other) in parts.items():
        if one != other:
            what = f"a GGUF file cannot say this of the tokenizer: {part}"
            raise UnsupportedError(what, wanted=str(one)[:200], got=str(other)[:200], do=_DO)


def _pair(merge: Any) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else list(merge)


def _splits(state: Any) -> Any:
    """Return the rule, without one that splits at spaces: where it stands, spaces are gone by
    then."""
    if state is not None and state.get("pattern") == {"String": " "}:
        return None
    return _plain(state)


def _state(part: Any) -> Any:
    """Return a normaliser or a splitting rule as it is written into tokenizer.json."""
    return json.loads(part.__getstate__())


def _plain(state: Any) -> Any:
    """Without what changes offsets alone, and a sequence of one as that one."""
    if isinstance(state, list):
        return [_plain(one) for one in state]
    if not isinstance(state, dict):
        return state
    for inner in ("normalizers", "pretokenizers"):
        if state.get("type") == "Sequence" and len(state.get(inner, ())) == 1:
            return _plain(state[inner][0])
    return {key: _plain(value) for key, value in state.items() if key != "trim_offsets"}
