"""Forms of examples, and the rows that they become: text, prompt and completion, messages, pairs of
answers, ids.

The trained tokens of messages are found from the template itself: what it writes for the messages
before an answer and what it writes with it differ by that answer, if it writes nothing else anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from everystep.api.model import LanguageModel
from everystep.config.kinds import is_integer, require
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError, nearest, shown
from everystep.files.strict_json import parse_list
from everystep.images.tokenizer import PictureTokenizer, has_pictures
from everystep.nn.loss import NO_LABEL
from everystep.requests.prompts import Messages, TokenizerLike, is_messages
from everystep.text.message_parts import refuse_unread_parts
from everystep.train.data_files import DataLike, Examples, read_examples
from everystep.train.row import PER_POSITION, length_of, naming, read_row

Kind: TypeAlias = Literal["ids", "preference", "messages", "prompt_completion", "text"]
"""Forms of examples; of a preference there are two rows."""
Example: TypeAlias = Mapping[str, object]

_ANSWERS = ("assistant", "model")
"""Roles of messages that the model is to write."""
_OF_TEMPLATE = ("tools", "chat_template_kwargs", "images")
_MASKS = ("completion_mask", "assistant_masks")
"""Keys of rows of ids that say what is learned, in the place of labels."""
_KEYS: Mapping[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("prompt", "chosen", "rejected"), _OF_TEMPLATE),
    "messages": (("messages",), _OF_TEMPLATE),
    "prompt_completion": (("prompt", "completion"), _OF_TEMPLATE),
}
"""Form -> the keys that it has, and those that it may have."""
_FORMS = "text, prompt and completion, messages, prompt with chosen and rejected, or input_ids"
_OTHERS = {
    "conversations": "Write it as {'messages': [{'role': 'user', 'content': ...}, ...]}",
    "instruction": "Write it as {'prompt': ..., 'completion': ...}",
    "question": "Write it as {'prompt': ..., 'completion': ...}",
    "content": "Name the key: DataForm(dataset_text_field='content')",
}
"""Keys of forms that are not read -> how to write them."""


@dataclass(frozen=True)
class DataForm:
    """The way from examples to rows, under TRL's names.

    `max_length`: the longest row, None for any; longer ones lose their end ("keep_start") or their
    beginning ("keep_end"), as `truncation_mode` says. `completion_only_loss`: of a prompt and its
    completion only the latter is learned; None: yes. `assistant_only_loss`: of messages only those
    of the assistant are learned, which is the default here. `dataset_text_field`: the key of plain
    text. `eos_token`: what ends a text or a completion, appended where it is missing and learned;
    None for the tokenizer's, "" for nothing. `remove_columns`: keys that are left out on purpose;
    others that a form does not have are errors.
    """

    max_length: int | None = 1024
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = True
    dataset_text_field: str = "text"
    eos_token: str | None = None
    remove_columns: Sequence[str] = ()

    def __post_init__(self) -> None:
        most, only = self.max_length, self.completion_only_loss
        fits = most is None or (is_integer(most) and most > 0)
        require(fits, "max_length", "a positive integer or None", most)
        modes = ("keep_start", "keep_end")
        require(self.truncation_mode in modes, "truncation_mode", str(modes), self.truncation_mode)
        is_flag = only is None or isinstance(only, bool)
        require(is_flag, "completion_only_loss", "True, False or None", only)
        flag = self.assistant_only_loss
        require(isinstance(flag, bool), "assistant_only_loss", "True or False", flag)
        field, end, away = self.dataset_text_field, self.eos_token, self.remove_columns
        named = isinstance(field, str) and bool(field)
        require(named, "dataset_text_field", "the name of a key", field)
        require(end is None or isinstance(end, str), "eos_token", "a token, '' or None", end)
        listed = isinstance(away, list | tuple) and all(isinstance(one, str) for one in away)
        require(listed, "remove_columns", "a list of names", away)


DEFAULT_FORM = DataForm()


class TrainingRows:
    """Rows by number, each made of its example when it is asked for.

    `kind`: the form of the examples. `per_example`: rows of each; of a preference row 2i is the
    chosen answer and row 2i + 1 the rejected one. `cut`: numbers of rows, among those made so far,
    that were longer than `max_length`. Rows of examples in memory are made once.
    """

    def __init__(self, examples: Examples, reading: _Reading, kind: Kind) -> None:
        self._examples = examples
        self._reading = reading
        self._made: dict[int, dict[str, Tensor]] = {}
        self.kind = kind
        self.per_example = 2 if kind == "preference" else 1
        self.cut: set[int] = set()

    @property
    def fixed(self) -> bool:
        """True where examples lie in memory, so that a row is the same whenever it is read."""
        return self._examples.fixed

    def __len__(self) -> int:
        return len(self._examples) * self.per_example

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not is_integer(index):
            wanted, got = "the number of a row", shown(index)
            raise RequestError("a row is taken by its number", wanted=wanted, got=got)
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"there is no row {index} among {len(self)}")
        if place in self._made:
            return dict(self._made[place])
        row = self._row(place)
        if self._examples.fixed:
            self._made[place] = row
        return dict(row)

    def _row(self, place: int) -> dict[str, Tensor]:
        number, answer = divmod(place, self.per_example)
        with naming(f"example {number}"):
            row = self._reading.row(
                self._examples[number], self.kind, ("chosen", "rejected")[answer]
            )
            whole = length_of(row, "the row")
            row = _shortened(row, self._reading.form, whole)
        if length_of(row, "the row") < whole:
            self.cut.add(place)
        return row

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"TrainingRows({len(self)} rows, form {self.kind!r})"


def read_rows(
    data: DataLike | TrainingRows,
    model: LanguageModel | None = None,
    tokenizer: TokenizerLike | None = None,
    form: DataForm = DEFAULT_FORM,
) -> TrainingRows:
    """Return the rows of examples, which the Trainer and the collators take.

    `data`: as for `es.read_examples`. An example is {"text": ...}, {"prompt": ..., "completion":
    ...} of texts or messages, {"messages": [...]}, {"prompt": ..., "chosen": ..., "rejected": ...},
    or ids. Messages go through the tokenizer's chat template, with their `tools`, and begin with
    the system message that `model` has for conversations, as in every call; pictures are parts of
    them, or stand beside them as `images`. Rows of ids may hold
    what else the model reads, such as boxes and pixels. A row is made, and its example judged, when
    it is asked for. RequestError for an example of no form, or of another form than the first.

    Example:

        >>> data = [{"prompt": "1, 2,", "completion": " 3"}]
        >>> rows = es.read_rows(data, model, tokenizer)
        >>> rows[0]["labels"].tolist()[:5]
        [-100, -100, -100, -100, -100]
    """
    if isinstance(data, TrainingRows):
        return data
    given: object = form
    if not isinstance(given, DataForm):
        wanted, do = "a DataForm", "Pass es.DataForm(...)"
        raise RequestError("this is no form of data", wanted=wanted, got=shown(given), do=do)
    examples = read_examples(data)
    with naming("example 0"):
        kind = _kind_of(_example_of(examples[0]), form)
    if kind != "ids" and tokenizer is None:
        do = "Pass the tokenizer that es.load returned"
        raise RequestError("text needs a tokenizer", got="no tokenizer", do=do)
    reading = _Reading(model, tokenizer, form)
    reading.require_sense(kind)
    return TrainingRows(examples, reading, kind)


def _example_of(given: object) -> Example:
    if not isinstance(given, Mapping):
        do = "Write a text as {'text': ...}" if isinstance(given, str) else "Pass mappings"
        raise RequestError(
            "this example is no mapping", wanted=_FORMS, got=type(given).__name__, do=do
        )
    return given


def _kind_of(example: Example, form: DataForm) -> Kind:
    """Return the form that an example has; RequestError for none, and for two."""
    keys = {key for key, value in example.items() if value is not None} - {*form.remove_columns}
    found: list[Kind] = ["ids"] if keys & {"input_ids", "inputs_embeds"} else []
    found += [kind for kind, (needed, _) in _KEYS.items() if keys >= {*needed}]
    found += ["text"] if form.dataset_text_field in keys else []
    if len(found) == 1:
        return found[0]
    got = ", ".join(map(str, keys)) or "no key with a value"
    if found:
        do = "Name those that are not to be read: DataForm(remove_columns=[...])"
        raise RequestError(f"this example has {len(found)} forms", wanted=_FORMS, got=got, do=do)
    do = next((do for key, do in _OTHERS.items() if key in keys), "See the guide on training data")
    if {"chosen", "rejected"} <= keys:
        do = "Give the messages before both answers as 'prompt'"
    raise RequestError("this example has no known form", wanted=_FORMS, got=got, do=do)


def _shortened(row: dict[str, Tensor], form: DataForm, whole: int) -> dict[str, Tensor]:
    """Return a row of at most the form's length; RequestError where what else it holds would no
    longer fit its ids."""
    most = form.max_length
    if most is None or whole <= most:
        return row
    other = [name for name in row if name not in PER_POSITION]
    if other:
        raise RequestError(
            f"a row with {other[0]} cannot be shortened",
            wanted=f"at most max_length={most} ids",
            got=whole,
            do="Shorten it together with its ids, or pass DataForm(max_length=None)",
        )
    kept = slice(0, most) if form.truncation_mode == "keep_start" else slice(whole - most, whole)
    return {name: value[..., kept] for name, value in row.items()}


@dataclass(frozen=True, eq=False)
class _Reading:
    """The parts that examples are read with."""

    model: LanguageModel | None
    tokenizer: TokenizerLike | None
    form: DataForm

    @property
    def has_encoder(self) -> bool:
        return self.model is not None and self.model.is_encoder_decoder

    def require_sense(self, kind: Kind) -> None:
        """Refuse options that say nothing about examples of this form."""
        if self.form.completion_only_loss and kind in ("text", "messages"):
            do = "Leave it out, or give prompt and completion"
            raise RequestError(f"completion_only_loss, but {kind} has no completion", do=do)
        if self.has_encoder and kind not in ("ids", "prompt_completion"):
            do = "Give prompt and completion as texts: the encoder reads one, and the other is said"
            got = f"examples with {kind}"
            raise UnsupportedError("a model with an encoder needs a prompt", got=got, do=do)

    def row(self, given: object, kind: Kind, answer: str) -> dict[str, Tensor]:
        """Return the row of an example; of a preference, that with the `answer` so called."""
        example = _example_of(given)
        if (own := _kind_of(example, self.form)) != kind:
            do = "Keep data of different forms in data sets of their own"
            raise RequestError("the form changes", wanted=f"{kind}, as before", got=own, do=do)
        held = {name: value for name, value in example.items() if value is not None}
        held = {name: held[name] for name in held if name not in self.form.remove_columns}
        if kind == "ids":
            return self._of_ids(held)
        self._require_known(held, kind)
        if kind == "text":
            ids = self._ended(self._encode(_text(held[self.form.dataset_text_field], "text")))
            return _made(ids, [True] * len(ids))
        if kind == "messages":
            return self._of_messages(_messages(held["messages"], "messages"), None, held)
        completion = "completion" if kind == "prompt_completion" else answer
        return self._of_completion(held["prompt"], held[completion], completion, held)

    def _require_known(self, held: Example, kind: Kind) -> None:
        needed, more = _KEYS.get(kind, ((self.form.dataset_text_field,), ()))
        for name in held:
            if name not in needed and name not in more:
                near = nearest(str(name), (*needed, *more))
                do = f"Perhaps you meant {near}; or" if near else "Take it out, or"
                do = f"{do} leave it out on purpose: DataForm(remove_columns=[{name!r}])"
                raise UnknownArgumentError(f"an example of {kind} has no {name!r}", do=do)

    # --- ids --------------------------------------------------------------------------------------

    def _of_ids(self, held: Example) -> dict[str, Tensor]:
        row = read_row(
            {name: value for name, value in held.items() if name not in _MASKS},
            "the row",
            aligned=not self.has_encoder,
        )
        masks = [name for name in _MASKS if name in held]
        if "labels" in row:
            if masks:
                do = f"Leave {masks[0]} or labels out"
                raise RequestError(f"labels and {masks[0]} both say what is learned", do=do)
            return row
        if "input_ids" not in row or self.has_encoder:
            do = "Give labels, with -100 where nothing is learned"
            raise RequestError("this row has no labels, and none follow from it", do=do)
        if self.form.completion_only_loss and "completion_mask" not in masks:
            do = "Give labels or completion_mask"
            raise RequestError("completion_only_loss, but ids have no completion", do=do)
        learned = row.get("attention_mask", torch.ones_like(row["input_ids"])).bool()
        asked = {
            "completion_mask": self.form.completion_only_loss is not False,
            "assistant_masks": self.form.assistant_only_loss,
        }
        for name in masks:
            mask = read_row({"input_ids": held[name]}, name)["input_ids"].bool()
            if len(mask) != len(learned):
                what = f"{name} has another length than the ids"
                raise RequestError(what, wanted=len(learned), got=len(mask))
            learned &= mask if asked[name] else True
        row["labels"] = row["input_ids"].masked_fill(~learned, NO_LABEL)
        return row

    # --- texts ------------------------------------------------------------------------------------

    def _encode(self, text: str, **how: Any) -> list[int]:
        """Return the ids of a text."""
        tokenizer: Any = self.tokenizer
        return [int(one) for one in tokenizer.encode(text, **how)]

    def _ended(self, ids: list[int]) -> list[int]:
        """Return ids that end with the end token, if one is asked for."""
        tokenizer: Any = self.tokenizer
        token = tokenizer.eos_token if self.form.eos_token is None else self.form.eos_token
        if token is None:
            do = "Name one: DataForm(eos_token=...), or '' for none"
            raise RequestError("the tokenizer has no end token", got="eos_token None", do=do)
        if not token:
            return ids
        end = tokenizer.get_vocab().get(token) if self.form.eos_token else tokenizer.eos_token_id
        if end is None:
            do = "Name a token of its vocabulary"
            raise RequestError("eos_token is not in the vocabulary", got=shown(token), do=do)
        return ids if ids[-1:] == [end] else [*ids, end]

    def _of_completion(
        self, prompt: object, completion: object, name: str, held: Example
    ) -> dict[str, Tensor]:
        if is_messages(prompt) or is_messages(completion):
            if self.has_encoder:
                do = "Give prompt and completion as texts"
                raise UnsupportedError("a model with an encoder reads no messages", do=do)
            before = _messages(prompt, "prompt")
            return self._of_messages([*before, *_messages(completion, name)], len(before), held)
        if any(key in held for key in _OF_TEMPLATE):
            do = "Give the prompt as messages, or leave them out"
            what = f"{next(key for key in _OF_TEMPLATE if key in held)} are for messages"
            raise RequestError(what, got="a prompt that is a text", do=do)
        prompt, completion = _text(prompt, "prompt"), _text(completion, name)
        first = self._encode(prompt)
        if self.has_encoder:
            said = self._ended(self._encode(completion))
            return read_row({"input_ids": first, "labels": said}, "the row", aligned=False)
        ids = self._ended(self._joined(prompt, completion, first))
        everything = self.form.completion_only_loss is False
        return _made(ids, [everything or place >= len(first) for place in range(len(ids))])

    def _joined(self, prompt: str, completion: str, first: list[int]) -> list[int]:
        """Return the ids of a prompt, as a call reads it, and of its completion.

        Where a token would span both, the completion is split by itself.
        """
        tokenizer: Any = self.tokenizer
        whole = self._encode(prompt + completion)
        if whole[: len(first)] == first:
            return whole
        apart = [*first, *self._encode(completion, add_special_tokens=False)]
        if tokenizer.decode(apart) == tokenizer.decode(whole):
            return apart
        raise RequestError(
            "the tokenizer joins prompt and completion to another text",
            wanted=shown(tokenizer.decode(whole)[-60:]),
            got=shown(tokenizer.decode(apart)[-60:]),
            do="Begin the completion with the space that the prompt ends with",
        )

    # --- messages ---------------------------------------------------------------------------------

    def _of_messages(self, said: Messages, first: int | None, held: Example) -> dict[str, Tensor]:
        """Return the row of a conversation; `first`: how many messages are its prompt, if any."""
        refuse_unread_parts(said)
        said = _with_images(said, held.get("images"))
        turns = list(said) if self.model is None else self.model.chat_defaults.begun(said)
        start = 0 if first is None else first + len(turns) - len(said)
        options = _template_options(held)
        shown = self._shown(turns, options) if has_pictures(said) else {}
        whole = self._rendered(turns, options)
        completion_only = first is not None and self.form.completion_only_loss is not False
        learned = [not self.form.assistant_only_loss] * len(whole)
        if completion_only:
            prompt = self._rendered(turns[:start], options, add_generation_prompt=True)
            _require_beginning(prompt, whole, start, "before")
            learned[: len(prompt)] = [False] * len(prompt)
        if self.form.assistant_only_loss:
            for place, turn in enumerate(turns):
                if turn.get("role") in _ANSWERS and (place >= start or not completion_only):
                    begin, end = self._span(turns, place, whole, options)
                    learned[begin:end] = [True] * (end - begin)
        if shown:  # what stands for a picture is no text that anybody says
            kinds = shown.pop("mm_token_type_ids").flatten().tolist()
            learned = [one and not kind for one, kind in zip(learned, kinds, strict=True)]
        return {**_made(whole, learned), **shown}

    def _shown(self, turns: Messages, options: Mapping[str, object]) -> dict[str, Tensor]:
        """Return the patches and grids of the pictures of a conversation, and which ids stand for
        them; UnsupportedError where the tokenizer reads none."""
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, PictureTokenizer):
            raise UnsupportedError(
                "messages show pictures, and this tokenizer reads none",
                wanted="the tokenizer that es.load returns of a model that reads pictures",
                got=type(tokenizer).__name__,
                do="Leave the pictures out, or give rows of ids with what the model reads beside",
            )
        told: Any = options
        found = tokenizer.apply_chat_template(
            list(turns), tokenize=True, return_dict=True, return_tensors="pt", **told
        )
        return {name: found[name] for name in found if name not in ("input_ids", "attention_mask")}

    def _span(
        self,
        turns: Messages,
        place: int,
        whole: list[int],
        options: Mapping[str, object],
    ) -> tuple[int, int]:
        """Return where an answer begins among the ids of a conversation, and where it ends.

        It ends with its end token: what a template writes after that, no call waits for.
        """
        if not place:
            do = "Begin with a message of the user, or with a system message"
            raise RequestError("a conversation begins with an answer", do=do)
        before = self._rendered(turns[:place], options, add_generation_prompt=True)
        _require_beginning(before, whole, place, "before")
        after = whole
        if place + 1 < len(turns):
            after = self._rendered(turns[: place + 1], options)
            _require_beginning(after, whole, place, "with")
        if len(after) <= len(before):
            do = "Leave the message out"
            raise RequestError(f"the template writes nothing for message {place}", do=do)
        ends = self._ends
        last = max((i for i in range(len(before), len(after)) if after[i] in ends), default=None)
        return len(before), len(after) if last is None else last + 1

    def _rendered(
        self, turns: Messages, options: Mapping[str, object], add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids that the template makes of messages."""
        tokenizer: Any = self.tokenizer
        found = tokenizer.apply_chat_template(
            list(turns),
            tokenize=True,
            return_dict=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
        return [int(one) for one in found]

    @property
    def _ends(self) -> set[int]:
        """The ids that end an answer: the model's, the tokenizer's, and the one that was named."""
        tokenizer: Any = self.tokenizer
        found = end_ids(self.model, tokenizer)
        if self.form.eos_token:
            found |= {int(tokenizer.get_vocab().get(self.form.eos_token, -1))}
        return found


def end_ids(model: LanguageModel | None, tokenizer: TokenizerLike | None) -> set[int]:
    """Return the ids at which a generation ends: those of the model's generation config, and the
    tokenizer's end token where that has none."""
    found: Any = None if model is None else model.generation_config.eos_token_id
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    listed = found if isinstance(found, Sequence) else [found]
    return {int(one) for one in listed if one is not None}


def _made(ids: list[int], learned: list[bool]) -> dict[str, Tensor]:
    """Return a row of ids whose labels are those that are learned."""
    labels = [one if is_learned else NO_LABEL for one, is_learned in zip(ids, learned, strict=True)]
    return read_row({"input_ids": ids, "labels": labels}, "the row")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        got = shown(value)[:80]
        raise RequestError(f"{name} is no text", wanted="a text", got=got, do="Pass texts")
    if not value:
        raise RequestError(f"{name} is empty", wanted="a text", do="Leave the example out")
    return value


def _messages(value: object, name: str) -> Messages:
    """Return a conversation; RequestError for what is none, and for messages without a role."""
    wanted = "a list of messages {'role': ..., 'content': ...}"
    if not is_messages(value):
        got = shown(value)[:80]
        do = "Pass messages; where one of prompt and completion is a list of them, both are"
        raise RequestError(f"{name} are no messages", wanted=wanted, got=got, do=do)
    for place, turn in enumerate(value):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            got = shown(turn)[:80]
            raise RequestError(f"{name}: message {place} is none", wanted=wanted, got=got)
        content = turn.get("content")
        calls = content is None and turn.get("tool_calls")
        if not calls and not isinstance(content, str | list | tuple):
            got, what = shown(content)[:80], f"{name}: message {place} has no content"
            raise RequestError(what, wanted="a text", got=got, do="Give its text as 'content'")
    return value


def _with_images(said: Messages, images: object) -> Messages:
    """Return messages whose parts hold the images that stand beside them, in their order;
    RequestError for other counts, and for an image in both places."""
    if images is None:
        return said
    if not isinstance(images, list | tuple):
        got, do = type(images).__name__, "Pass a list, of one image too"
        raise RequestError("images are no list", wanted="a list of images", got=got, do=do)
    left, turns = list(images), []
    for turn in said:
        content = turn.get("content")
        if isinstance(content, list | tuple):
            parts = []
            for part in content:
                if isinstance(part, Mapping) and {**part} == {"type": "image"} and left:
                    part = {"type": "image", "image": left.pop(0)}
                parts.append(part)
            turn = {**turn, "content": parts}
        turns.append(turn)
    if left:
        raise RequestError(
            "images and messages do not fit",
            wanted=f"{len(images) - len(left)}, one for each part {{'type': 'image'}}",
            got=len(images),
            do="Give each image its part, or hold it there: {'type': 'image', 'image': ...}",
        )
    return turns


def _template_options(held: Example) -> dict[str, object]:
    """Return what an example gives its template beside messages; `tools` may be written as JSON."""
    tools, more = held.get("tools"), held.get("chat_template_kwargs", {})
    if isinstance(tools, str):
        tools = parse_list(tools.encode(), "tools")
    if not isinstance(tools, list | tuple | None):
        wanted = "a list of JSON schemas or functions"
        raise RequestError("tools are no list", wanted=wanted, got=type(tools).__name__)
    if not isinstance(more, Mapping):
        wanted = "a mapping of names to values"
        raise RequestError("chat_template_kwargs is none", wanted=wanted, got=type(more).__name__)
    own = {name: value for name, value in more.items() if value is not None}
    taken = [name for name in own if name in ("tokenize", "return_dict", "add_generation_prompt")]
    if taken:
        raise RequestError(f"chat_template_kwargs may not set {taken[0]}", do="Leave it out")
    return {**own, **({"tools": list(tools)} if tools else {})}


def _require_beginning(beginning: list[int], whole: list[int], place: int, what: str) -> None:
    """Refuse a template that writes messages differently once others follow."""
    if whole[: len(beginning)] == beginning:
        return
    same = next(i for i, one in enumerate(beginning) if i >= len(whole) or whole[i] != one)
    raise UnsupportedError(
        f"the chat template writes what stands {what} message {place} differently in the whole "
        "conversation, so nobody can tell which of its tokens are learned",
        wanted=f"{len(beginning)} tokens as they are at that message",
        got=f"{same} of them",
        do="Give each answer an example of its own, as prompt and completion without white space "
        "at the answer's beginning, or pass labels",
    )
