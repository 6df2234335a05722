"""One prompt of the many-prompts calls: a text, messages, ids, or a mapping of a row's inputs.

A mapping holds one row of what `model.generate` takes, without the batch dimension or with one of
size 1: its content (`text`, `messages`, `input_ids`, `inputs_embeds`), `attention_mask`,
`position_ids`, and what the model declares by name. Where an encoder reads something else than ids,
that is the content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from everystep.dialogue.asked import Dialogue
from everystep.errors import RequestError, TokenizerError, UnknownArgumentError, nearest
from everystep.images.tokenizer import PictureTokenizer, has_pictures
from everystep.requests.absent import ARGUMENTS, refuse_argument
from everystep.requests.arrays import as_numbers
from everystep.requests.door import CONTENTS, IN_PROMPTS, PromptValues
from everystep.requests.options import Prefix
from everystep.requests.pictures import prompt_names
from everystep.requests.prefixes import rest_of
from everystep.requests.subject import Subject
from everystep.text.message_parts import refuse_unread_parts


class Tokenizing(Protocol):
    """A tokenizer at its least, for type checkers that shall tell it from None."""

    @property
    def encode(self) -> Callable[..., list[int]]:
        """Return what turns a text into ids."""
        ...

    @property
    def decode(self) -> Callable[..., str]:
        """Return what turns ids into a text."""
        ...


TokenizerLike = Any
"""A tokenizer of ours, or one of another library with `encode` and `decode`."""
Messages = Sequence[Mapping[str, object]]
PromptLike = str | Sequence[int] | Messages | Tensor | np.ndarray | Mapping[str, object]

_SAID = ("text", "messages")
"""Keys of a prompt that is a mapping, for what its tokenizer reads."""
_FEATURES = "Make features of samples with es.WhisperFeatureExtractor; es.read_sound reads a file"
_ONE_ROW = "Pass each prompt by itself in a list: texts, messages, or lists of ids"


def listed(prompts: object) -> tuple[Iterable[PromptLike], bool]:
    """Return the prompts, and whether it is a single one that was not in a list."""
    if isinstance(prompts, str | Mapping) or is_messages(prompts):
        return [prompts], True
    if isinstance(prompts, Tensor | np.ndarray):
        return ([prompts], True) if prompts.ndim < 2 else (list(prompts), False)
    if isinstance(prompts, (list, tuple)):
        of_ids = bool(prompts) and isinstance(prompts[0], int | float | np.integer)
        return ([prompts], True) if of_ids else (prompts, False)
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        do = "Pass a text, a list of ids or of messages, a mapping, or several of them in a list"
        raise RequestError("prompts are of no known kind", got=type(prompts).__name__, do=do)
    return prompts, False


def is_messages(prompt: object) -> TypeGuard[Messages]:
    """Return True for a conversation."""
    first = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else None
    return isinstance(first, Mapping) and "role" in first


def messages_of(prompt: object) -> Messages | None:
    """Return the conversation that a prompt is or holds, None where it is another one."""
    if isinstance(prompt, Mapping):
        if "role" in prompt:
            return (prompt,)
        prompt = next((prompt[key] for key in _SAID if prompt.get(key) is not None), None)
    return prompt if is_messages(prompt) else None


def read_prompt(
    model: Subject,
    tokenizer: TokenizerLike | None,
    prompt: object,
    *,
    starts_answer: bool,
    prefix: Prefix | None = None,
    dialogue: Dialogue | None = None,
) -> PromptValues:
    """Return what `model.generate` would be given for this prompt: a rectangle of one row.

    After a prefix a text gets no special tokens; messages are the whole conversation, which begins
    with the prefix, and only the rest of it is returned. After a prefix that knows what an encoder
    has read, a prompt says what the decoder goes on with, if anything. Without a system message a
    conversation begins with that of the model's chat defaults. `dialogue`: what it says of tools
    and thoughts.
    """
    if prefix is not None and model.is_encoder_decoder:
        return _read_rest(model, prompt)
    source, messages = model.core.source, messages_of(prompt)
    begun = None if messages is None else model.chat_defaults.begun(messages)
    if begun is not None and dialogue is not None:
        begun = dialogue.messages(begun)
    if not isinstance(prompt, Mapping) or "role" in prompt:
        if source is not None:
            raise _other_kind(source, type(prompt).__name__)
        values = _read_text(tokenizer, begun or prompt, starts_answer, prefix, dialogue)
        return _with_mask(PromptValues.of(values), source)
    _require_known(prompt, (*IN_PROMPTS, *model.inputs, *prompt_names(model)))
    _require_content(prompt, source)
    given = {name: value for name, value in prompt.items() if value is not None}
    text = next((given.pop(name) for name in _SAID if name in given), None)
    values = {name: _row(model, name, value) for name, value in given.items()}
    if text is not None:
        values |= _read_text(tokenizer, begun or text, starts_answer, prefix, dialogue)
    return _with_mask(PromptValues.of(values), source)


_REST = "decoder_input_ids"


def _read_rest(model: Subject, prompt: object) -> PromptValues:
    """Return what the decoder goes on with after a prefix; RequestError for another source."""
    known = (*IN_PROMPTS, *model.inputs, *prompt_names(model))
    got = type(prompt).__name__
    if isinstance(prompt, Mapping) and "role" not in prompt:
        _require_known(prompt, known)
        given = {name: value for name, value in prompt.items() if value is not None}
        if not given.keys() - {_REST}:
            return PromptValues.of({name: _row(model, name, one) for name, one in given.items()})
        got = ", ".join(sorted(given.keys() - {_REST}))
    raise RequestError(
        "prefix knows what the encoder has read, and the prompt brings another source",
        wanted=f"{{{_REST!r}: ids}} that the decoder goes on with, or {{}} for none",
        got=got,
        do="Leave the source out, or make a prefix of it with everystep.prefill",
    )


def read_negative(
    model: Subject, tokenizer: TokenizerLike | None, prompt: object, *, starts_answer: bool
) -> PromptValues:
    """Return what `model.generate` would be given for a prompt that is guided away from."""
    read = read_prompt(model, tokenizer, prompt, starts_answer=starts_answer)
    other = [name for name in read.passed() if name not in ("input_ids", "attention_mask")]
    if read.input_ids is None or other:
        raise RequestError(
            "negative_prompt is read as ids alone",
            wanted="a text, messages, or ids",
            got=", ".join(other) or "no ids",
            do="Describe in words what to lead away from",
        )
    return read


def _with_mask(row: PromptValues, source: str | None) -> PromptValues:
    """Return one row, all of which is read where nothing says otherwise."""
    if row.attention_mask is not None or source is not None:
        return row
    first = row.input_ids if row.inputs_embeds is None else row.inputs_embeds
    shape = np.shape(first)[:2]  # type: ignore[call-overload]
    return replace(row, attention_mask=np.ones(shape, dtype=np.int64))


def _require_known(prompt: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse a key that no prompt of the model has."""
    for name in prompt:
        if name in ARGUMENTS and name not in known:
            refuse_argument(name, prompt[name])
        elif name not in known:
            near = nearest(str(name), known)
            do = f"Perhaps you meant {near}" if near else f"Keys are {', '.join(known)}"
            raise UnknownArgumentError(f"a prompt has no {name!r}", do=do)


def _require_content(prompt: Mapping[str, object], source: str | None) -> None:
    """Refuse a mapping without exactly one content, or with one that no encoder here reads."""
    contents = (*CONTENTS, *([] if source is None else [source]))
    passed = {name for name in contents if prompt.get(name) is not None}
    got = ", ".join(sorted(passed)) or "none of them"
    if source is not None and passed != {source}:
        raise _other_kind(source, got)
    if len(passed) != 1 and passed != {"input_ids", "inputs_embeds"}:
        wanted = "text, messages, input_ids, inputs_embeds, or both of the latter"
        raise RequestError("a prompt needs exactly one content", wanted=wanted, got=got)


def _other_kind(source: str, got: str) -> RequestError:
    """Return the error of a prompt that the model's encoder cannot read."""
    listens, wanted = source == "input_features", f"a prompt {{{source!r}: ...}}"
    do = _FEATURES if listens else "Make it as the model's own processor does"
    what = f"this model reads {'sounds' if listens else source}, and no text"
    return RequestError(what, wanted=wanted, got=got, do=do)


def _row(model: Subject, name: str, value: object) -> object:
    """Return a value of one row in a batch of one."""
    if callable(value):
        return value
    if name not in IN_PROMPTS and name not in model.inputs:
        return value  # what an encoder reads says its own shape
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(np.asarray(value))
        except (ValueError, TypeError) as error:
            got = type(value).__name__
            raise RequestError(f"{name} is not a tensor", got=got) from error
    if name in model.inputs and model.inputs[name].open:
        return [value]  # of this one row
    if name in model.inputs:
        spec = model.inputs[name]
        rank = len(spec.shape) + (spec.per == "token")
    else:
        rank = {"inputs_embeds": 2}.get(name, 1)
    if name in ("input_ids", "inputs_embeds") and value.dim() > rank and value.shape[0] > 1:
        do = "Pass each row as a prompt of its own, in a list, or call model.generate(**prompt)"
        raise RequestError("a prompt has several rows", wanted=1, got=value.shape[0], do=do)
    if name == "position_ids" and value.dim() == 2 and value.shape[0] > 1:
        return value[:, None]  # one row of several axes
    if name == "attention_mask" and value.dim() == 2 and value.shape[0] > 1:
        return value[None, None]  # a square of what each position sees
    if name == "attention_mask" and value.dim() == 3:
        return value[None]
    return value[None] if value.dim() == rank else value


def _read_text(
    tokenizer: TokenizerLike | None,
    prompt: object,
    starts_answer: bool,
    prefix: Prefix | None,
    dialogue: Dialogue | None,
) -> dict[str, object]:
    """Return the ids of a text, of messages or of ids, (1, n), and the pictures of messages."""
    if is_messages(prompt):
        refuse_unread_parts(prompt)
    if not is_messages(prompt) or not has_pictures(prompt):
        return {"input_ids": _ids(tokenizer, prompt, starts_answer, prefix, dialogue)[None]}
    if not isinstance(tokenizer, PictureTokenizer) or prefix is not None:
        raise RequestError(
            "messages with pictures need a tokenizer that takes them, and no prefix",
            wanted="the tokenizer that es.load returns for a model that reads pictures",
            got=type(tokenizer).__name__ if prefix is None else "a prefix",
            do="Pass that, or a mapping with input_ids, pixel_values and image_grid_thw",
        )
    told = {} if dialogue is None else dialogue.template
    encoding = tokenizer.apply_chat_template(
        list(prompt), add_generation_prompt=starts_answer, return_tensors="pt", **told
    )
    return dict(encoding)


def _ids(
    tokenizer: TokenizerLike | None,
    prompt: object,
    starts_answer: bool,
    prefix: Prefix | None,
    dialogue: Dialogue | None,
) -> np.ndarray:
    """Return the ids of a text, of messages through the chat template, or of ids as they are."""
    messages = [*prompt] if is_messages(prompt) else None
    if messages is None and not isinstance(prompt, str):
        whole = isinstance(prompt, Tensor | np.ndarray)
        given = list(prompt) if not whole and isinstance(prompt, Iterable) else prompt
        ids = as_numbers("a prompt", given, "a text, messages or a list of ids", _ONE_ROW)
    elif tokenizer is None:
        raise RequestError(
            "text needs a tokenizer",
            wanted="a tokenizer, or prompts given as ids",
            got="no tokenizer",
            do="Pass the tokenizer that es.load returned",
        )
    elif isinstance(prompt, str):
        how = {} if prefix is None else {"add_special_tokens": False}
        ids = _returned(tokenizer.encode(prompt, **how))
    elif _cannot_chat(tokenizer):
        raise TokenizerError(
            "messages need a chat template",
            wanted="a tokenizer with one",
            got=f"a {type(tokenizer).__name__} without any (a base model's, perhaps)",
            do="Give the prompt as text, or set tokenizer.chat_template",
        )
    else:
        told = {} if dialogue is None else dialogue.template
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=starts_answer, return_dict=False, **told
        )
        ids = rest_of(_returned(rendered), prefix)
    if ids.dim() != 1 or not len(ids):
        do = "Pass a text, messages, or a list with at least one id"
        raise RequestError(
            "a prompt is empty or not a row of ids", got=f"shape {tuple(ids.shape)}", do=do
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        do = "Pass embeddings as {'inputs_embeds': ...}; sounds are read by a Whisper alone"
        raise RequestError("ids are not integers", wanted="integers", got=ids.dtype, do=do)
    found: np.ndarray = ids.detach().cpu().numpy()
    return found


def _returned(ids: object) -> Tensor:
    """Return the ids of what a tokenizer returned, which may be the caller's own."""
    do = "Pass a tokenizer that returns ids"
    return as_numbers("what the tokenizer returned", ids, "a list of ids", do)


def _cannot_chat(tokenizer: TokenizerLike) -> bool:
    """Return True where messages cannot be rendered: no template, or nothing that could use one."""
    able = callable(getattr(tokenizer, "apply_chat_template", None))
    return not able or getattr(tokenizer, "chat_template", "its own") is None
