"""The door: one table of the keywords that calls take, and the one place that sorts a call by it.

The fields of `Objects`, `PromptValues`, `Beside` and `OfSpeech` are its rows, with those of
`config/fields.py`: each says which calls take the keyword, its type and its meaning in a line, and
what a call is told that does not take it. The typed dicts that editors read, help(), the reference
and the options of the command line come from here; `scripts/keywords` writes what has to be text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from everystep.config import FIELDS, META
from everystep.config.foreign_names import ADVICE, SAME
from everystep.config.named_strategies import is_named, with_named
from everystep.errors import RequestError, UnknownArgumentError, nearest
from everystep.requests.absent import ARGUMENTS, OF_SPEECH, SPEECH_LATER, refuse_argument

if TYPE_CHECKING:  # it imports torch, without which the command line shows its help
    from everystep.requests.subject import Subject

CallKind = Literal["rectangle", "texts", "prompt", "prefill"]
"""`model.generate`; a call about prompts; a prompt that is a mapping; `es.prefill`."""
Owner = Literal["field", "object", "prompt", "media", "beside", "speech", "absent"]
"""The group of values that a keyword belongs to.

"media" stand beside a prompt, for models that declare them; "speech" is for models that listen;
"absent" is known from transformers and not here.
"""


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword. `type` is source; `line` is its meaning; `elsewhere`: what is wrong with it in a
    call that does not take it, said after its name, and what to do instead."""

    name: str
    owner: Owner
    calls: tuple[CallKind, ...]
    type: str = "object"
    line: str = ""
    elsewhere: tuple[str, str] | None = None


_ALL: tuple[CallKind, ...] = ("rectangle", "texts")
_RECTANGLE: tuple[CallKind, ...] = ("rectangle",)
_TEXTS: tuple[CallKind, ...] = ("texts",)
_CONTENT: tuple[CallKind, ...] = ("prompt", "rectangle", "prefill")
_INNER: tuple[CallKind, ...] = ("rectangle", "prefill")
_TENSORS = "belongs to a rectangle of tensors, not to prompts"
_CALL = (_TENSORS, "Call model.generate with it")
_WAITING = (
    "counts how long a prompt waits among others, and here none waits",
    "Set max_time, or call es.generate, es.stream or an AsyncEngine",
)
_AWAY = (_TENSORS, "Pass negative_prompt, or call model.generate")
_OF_MESSAGES = (_TENSORS, "Pass messages to es.chat or es.generate with it")
_EVENTS = (_TENSORS, "Read the events of es.stream, or call model.generate")


def keyword(
    type: str,
    line: str,
    calls: tuple[CallKind, ...] = _ALL,
    elsewhere: tuple[str, str] | None = None,
) -> object:
    """Return the field of a dataclass that is a row of the table; None is what nobody passed."""
    return field(default=None, metadata={"row": (calls, type, line, elsewhere)})


_content = partial(keyword, calls=_CONTENT)
_inner = partial(keyword, calls=_INNER, elsewhere=_CALL)
_of_rectangle = partial(keyword, calls=_RECTANGLE, elsewhere=_CALL)
_speech = partial(keyword, calls=(), elsewhere=OF_SPEECH)


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """The objects of the caller's beside fields and prompt, as they were passed."""

    generation_config: object = keyword("object", "Values for all that the call does not set.")
    logits_processor: object = keyword(
        "Sequence[Callable[..., object] | str | Mapping[str, object]] | None",
        "Functions of (input_ids, scores) that change the scores, or names of installed ones.",
    )
    stopping_criteria: object = keyword(
        "Sequence[Callable[..., object]] | None",
        "Functions of (input_ids, scores) that say whether a sequence ends.",
    )
    prefix_allowed_tokens_fn: object = keyword(
        "Callable[[int, Tensor], object] | None",
        "A function of (row, ids) that returns the ids that may follow.",
    )
    allowed_sequences: object = keyword(
        "AllowedSequences | Sequence[object] | None",
        "The texts, or lists of ids, of which the answer is one.",
    )
    seed: object = keyword(
        "int | Sequence[int] | None",
        "Where the draws come from, one for all rows or one each; by default torch's generator.",
    )
    logprobs: object = keyword(
        "int | None", "Keep the log-probability of every chosen token, and of this many best ones."
    )
    prompt_logprobs: object = keyword("int | None", "The same for every token of the prompt.")
    prefix: object = keyword(
        "Prefix | None", "What `es.prefill` made: every prompt goes on from it."
    )
    hooks: object = keyword(
        "Sequence[Hook | str | Mapping[str, object]] | None",
        "What sees every step and adds to it, or names of installed ones.",
    )
    adapter_names: object = keyword(
        "str | Sequence[str | None] | None",
        "The adapter that the model runs with, by the name it was loaded under, or one per row.",
    )
    adapters: object = keyword(
        "Mapping[str, float] | Sequence[Mapping[str, float] | str | None] | None",
        'Adapters with their weights, {"a": 0.7, "b": 0.3}, or a list with such a mix per row.',
    )
    steer: object = keyword(
        "Mapping[int, Tensor] | Sequence[Mapping[int, Tensor] | None] | None",
        "Vectors that are added to the hidden states after layers, {12: vector}, or one per row.",
    )
    schema: object = keyword(
        "str | Mapping[str, object] | bool | None", "The JSON schema that the text follows."
    )
    regex: object = keyword("str | None", "The regular expression that the text matches.")
    grammar: object = keyword("str | None", "The grammar that the text follows.")
    choices: object = keyword("Sequence[str] | None", "The texts of which the answer is one.")
    n_best: object = keyword("int | None", "Return so many hypotheses of a beam search.")
    best_of: object = keyword("int | None", "Draw so many samples and return the best.")
    majority: object = keyword(
        "Callable[[str], object] | None",
        "With best_of: finds the answer in a text; the most frequent one wins.",
    )
    scorer: object = keyword(
        "Callable[[str], float] | None", "With best_of: rates a text; the highest wins."
    )
    amateur_model: object = keyword(
        "Subject | None", "A weaker model: tokens that it finds likely too lose."
    )
    contrast_alpha: object = keyword(
        "float | None", "With amateur_model: tokens below this share of the best are never chosen."
    )
    contrast_beta: object = keyword(
        "float | None", "With amateur_model: how strongly its logits count."
    )
    assistant_model: object = keyword("object", "A smaller model, which drafts.")
    assistant_tokenizer: object = keyword(
        "object", "The tokenizer of assistant_model, where it is another one."
    )
    draft_corpus: object = keyword("Corpus | None", "Texts that drafts are copied from.")
    strategy: object = keyword(
        "str | Strategy | None",
        'The way of choosing by name ("beam", "contrastive", ...), or an object of your own.',
    )
    record: object = keyword(
        "str | PathLike[str] | None",
        "The file that gets a record of every step; gzip where its name ends in .gz.",
    )
    strategy_options: object = keyword(
        "Mapping[str, object] | None", "What a strategy of another package is made with."
    )


@dataclass(frozen=True, slots=True, eq=False)
class PromptValues:
    """A prompt as it was passed, tensors, arrays and lists among it.

    `named`: what the model declares beside these, by keyword.
    """

    input_ids: object = _content("Numbers | None", "(B, T) the ids of the prompt.")
    inputs_embeds: object = _content(
        "Tensor | None", "(B, T, E) embeddings in the place of ids, or beside them."
    )
    attention_mask: object = _content(
        "Numbers | None", "(B, T) 1 for what is read and 0 for padding; or (B, 1 or heads, T, T)."
    )
    position_ids: object = _content(
        "Tensor | Callable[..., object] | None",
        "(B, T), or (axes, B, T), positions other than 0, 1, ...",
    )
    decoder_input_ids: object = _content(
        "Numbers | None", "(B, T) what a decoder beside an encoder begins with, or goes on with."
    )
    decoder_attention_mask: object = _inner("Tensor | None", "(B, T) 1 for what is read of it.")
    encoder_outputs: object = _inner("object", "What an encoder made of the prompt, in its place.")
    assistant_encoder_outputs: object = _inner(
        "object", "What the encoder of assistant_model made of the prompt, where that is passed so."
    )
    past_key_values: object = _inner("object", "The cache that the call goes on from.")
    negative_prompt_ids: object = _of_rectangle(
        "Numbers | None",
        "(B, T) with guidance_scale: the prompt that is guided away from.",
        elsewhere=_AWAY,
    )
    negative_prompt_attention_mask: object = _of_rectangle(
        "Numbers | None", "(B, T) 1 for what is read of it.", elsewhere=_AWAY
    )
    named: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> PromptValues:
        """Return these values by name, of which the others are what a model declares."""
        own = {name: value for name, value in values.items() if name in cls.__slots__}
        named = {name: value for name, value in values.items() if name not in own}
        return cls(**own, named=named)

    def passed(self) -> dict[str, object]:
        """Return what was passed, by name."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "named"}
        return {name: one for name, one in own.items() if one is not None} | dict(self.named)


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """The values that belong to one kind of call, as they were passed.

    `of_loop`: what the caller's decoding loop names, and nothing else reads.
    """

    tokenizer: object = keyword("object", "What texts are made with.", calls=_RECTANGLE)
    streamer: object = keyword(
        "object",
        "What is given every new token: an object with put and end.",
        calls=_RECTANGLE,
        elsewhere=_EVENTS,
    )
    custom_generate: object = _of_rectangle(
        "Callable[..., object] | None", "A decoding loop in the place of the engine's."
    )
    synced_gpus: object = keyword(
        "bool | None",
        "Whether all processes make each forward together, as weights in parts on them need it.",
        calls=_RECTANGLE,
        elsewhere=(
            "belongs to model.generate: other calls find out by themselves",
            "Leave it out, or call model.generate",
        ),
    )
    return_legacy_cache: object = keyword(
        "bool | None", "Return the cache as tuples of tensors.", calls=_RECTANGLE
    )
    add_generation_prompt: object = keyword(
        "bool",
        "Whether the chat template begins the answer to messages; it does unless this is False.",
        calls=_TEXTS,
    )
    trim_stop_strings: object = keyword(
        "bool", "Whether texts lose the stop string that ended them.", calls=_TEXTS
    )
    cache_salt: object = keyword(
        "str | None",
        "Only prompts of the same salt share what the cache holds of their beginnings.",
        calls=_TEXTS,
    )
    timeout: object = keyword(
        "float | None",
        "Seconds after which a prompt ends, counted from the call, its waiting too.",
        calls=_TEXTS,
        elsewhere=_WAITING,
    )
    negative_prompt: object = keyword(
        "str | Numbers | Mapping[str, object] | None",
        "With guidance_scale: the prompt that is guided away from, as a text, messages or ids.",
        calls=_TEXTS,
        elsewhere=("belongs to calls about prompts", "Pass negative_prompt_ids"),
    )
    tools: object = keyword(
        "Sequence[Mapping[str, object] | Callable[..., object]] | None",
        "The functions that may be called in answer to messages, or their JSON schemas.",
        calls=_TEXTS,
        elsewhere=_OF_MESSAGES,
    )
    tool_choice: object = keyword(
        "str | Mapping[str, object] | None",
        'With tools: "auto", "required", "none", or the name of the one that is called.',
        calls=_TEXTS,
        elsewhere=_OF_MESSAGES,
    )
    parallel_tool_calls: object = keyword(
        "bool | None",
        "With tools: whether an answer may make several calls; it may unless this is False.",
        calls=_TEXTS,
        elsewhere=_OF_MESSAGES,
    )
    enable_thinking: object = keyword(
        "bool | None",
        "Whether the model thinks before it answers messages, where its chat template has both.",
        calls=_TEXTS,
        elsewhere=_OF_MESSAGES,
    )
    thinking_budget: object = keyword(
        "int | None",
        "The tokens after which thoughts are ended, in answer to messages.",
        calls=_TEXTS,
        elsewhere=_OF_MESSAGES,
    )
    of_loop: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class OfSpeech:
    """The values that a model that listens takes beside, as they were passed."""

    language: object = _speech(
        "str | Sequence[str] | None",
        "The language that is spoken, one for all rows or one each; found out if left out.",
    )
    task: object = _speech(
        'Literal["transcribe", "translate"] | None',
        "Write what is said, or its translation into English.",
    )
    is_multilingual: object = _speech("bool | None", "Whether the model knows several languages.")
    return_timestamps: object = _speech("bool | None", "Whether segments have times.")
    return_segments: object = _speech("bool | None", "Return the segments beside the ids.")
    prompt_ids: object = _speech("object", "Ids of what was said before, or of words to expect.")
    prompt_condition_type: object = _speech(
        'Literal["first-segment", "all-segments"] | None', "Which windows prompt_ids stand before."
    )
    condition_on_prev_tokens: object = _speech(
        "bool | None", "Whether a window reads what was written of the one before."
    )
    compression_ratio_threshold: object = _speech(
        "float | None",
        "A window whose text repeats itself more is written again, at the next temperature.",
    )
    logprob_threshold: object = _speech(
        "float | None", "A window whose tokens are less likely on average is written again."
    )
    no_speech_threshold: object = _speech(
        "float | None", "A window that is silence with a higher probability is left out."
    )


_MEDIA = {
    "pixel_values": "The patches of images, as the tokenizer or processor returned them.",
    "image_grid_thw": "(images, 3) how many patches each has: times, rows, columns.",
    "pixel_values_videos": "The patches of videos.",
    "video_grid_thw": "(videos, 3) how many patches each has.",
    "mm_token_type_ids": "(B, T) which ids are places of images (1) and videos (2).",
    "second_per_grid_ts": "Seconds that a grid of a video stands for.",
    "bbox": "(B, n, 4) the boxes of the lines of a page.",
    "input_features": "(B, channels, frames) what an encoder of sounds reads.",
}
_FURTHER = (
    Keyword("text", "prompt", ("prompt",), "str", "The prompt as a text."),
    Keyword(
        "messages",
        "prompt",
        ("prompt",),
        "Sequence[Mapping[str, object]]",
        "The prompt as a conversation.",
    ),
    Keyword("inputs", "prompt", (), "Tensor | None", "(B, T) the ids of the prompt."),
    *(
        Keyword(name, "media", (), "object", line, ARGUMENTS.get(name))
        for name, line in _MEDIA.items()
    ),
)
"""What becomes ids before there are values, and what models read in a prompt that declare it."""


def _rows(
    owner: Owner, values: type[Objects | PromptValues | Beside | OfSpeech]
) -> Iterator[Keyword]:
    """Yield the rows that the fields of a dataclass are."""
    for one in fields(values):
        if (row := one.metadata.get("row")) is not None:
            yield Keyword(one.name, owner, *row)


def _table() -> dict[str, Keyword]:
    """Return every row by name, those of fields last."""
    absent = (Keyword(name, "absent", (), "", "", why) for name, why in ARGUMENTS.items())
    of_fields = (
        Keyword(one.name, "field", _ALL, one.type, one.line)
        for one in FIELDS.values()
        if one.name not in META
    )
    groups = (
        *_rows("object", Objects),
        *_rows("prompt", PromptValues),
        *_rows("beside", Beside),
        *_rows("speech", OfSpeech),
    )
    return {row.name: row for row in (*absent, *groups, *_FURTHER, *of_fields)}


KEYWORDS: Mapping[str, Keyword] = _table()
"""Every keyword by name."""


# --- what a call is sorted into -------------------------------------------------------------------

NO_PROMPT, NO_OBJECTS, NOTHING_BESIDE = PromptValues(), Objects(), Beside()


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The keywords of a call, sorted; `fields` are those of the configuration, None among them.

    None elsewhere is the same as nothing.
    """

    fields: Mapping[str, object] = field(default_factory=dict)
    objects: Objects = NO_OBJECTS
    prompt: PromptValues = NO_PROMPT
    beside: Beside = NOTHING_BESIDE
    speech: OfSpeech | None = None


def sort(
    call: CallKind, subject: Subject, given: Mapping[str, object], of_loop: Collection[str] = ()
) -> Arguments:
    """Return the keywords of a call as values of their groups, nothing read yet.

    A strategy's name is replaced by the fields that it stands for. `of_loop`: names that the
    caller's own loop has, which win over fields and over what the model declares.
    UnknownArgumentError, which proposes the nearest name, for a name that nobody knows;
    RequestError and UnsupportedError for one that belongs elsewhere.
    """
    strategy = given.get("strategy")
    if isinstance(strategy, str) and is_named(strategy):
        given = with_named(strategy, given)
    found: dict[str, dict[str, object]] = {}
    strange: dict[str, object] = {}
    for name, value in given.items():
        row = KEYWORDS.get(name)
        if name in of_loop and (row is None or row.owner not in ("object", "prompt", "beside")):
            found.setdefault("loop", {})[name] = value
        elif row is None or call not in row.calls:
            strange[name] = value
        elif value is not None or row.owner == "field":
            found.setdefault(row.owner, {})[name] = value
    if strange:
        found |= _declared(call, subject, strange)
    prompt, beside = found.get("prompt", {}), found.get("beside", {})
    named, own = found.get("media"), found.get("loop")
    return Arguments(
        found.get("field", {}),
        Objects(**found["object"]) if "object" in found else NO_OBJECTS,
        PromptValues(**prompt, named=named or {}) if prompt or named else NO_PROMPT,
        Beside(**beside, of_loop=own or {}) if beside or own else NOTHING_BESIDE,
        OfSpeech(**found.get("speech", {})) if call == "rectangle" and subject.listens else None,
    )


def _declared(
    call: CallKind, subject: Subject, strange: Mapping[str, object]
) -> dict[str, dict[str, object]]:
    """Return what the model declares of names that the call does not take, and what it hears by;
    an error about the others."""
    from everystep.requests.pictures import prompt_names  # imports torch

    declared = {*subject.inputs, *prompt_names(subject)}
    named: dict[str, object] = {}
    speech: dict[str, object] = {}
    unknown, heard = [], call == "rectangle" and subject.listens
    for name, value in strange.items():
        row = KEYWORDS.get(name)
        if call == "texts" and (name in declared or (row is not None and "prompt" in row.calls)):
            if value is not None:
                _refuse_common(name)
        elif name in declared:
            named |= {} if value is None else {name: value}
        elif row is not None and row.owner == "speech" and heard:
            speech |= {} if value is None else {name: value}
        elif heard and name in SPEECH_LATER:
            refuse_argument(name, value, SPEECH_LATER[name])
        elif row is not None and row.elsewhere is not None:
            refuse_argument(name, value, row.elsewhere)
        else:
            unknown.append(name)
    if unknown:
        _refuse_unknown(call, unknown, declared)
    return {"media": named, "speech": speech}


def _refuse_common(name: str) -> NoReturn:
    """Raise the error for an input of one prompt among what all prompts have in common."""
    beside = "" if name in CONTENTS else "'text': ..., "
    raise RequestError(
        f"{name} belongs to one prompt, and not to all of them",
        wanted="a prompt that is a mapping",
        got=f"{name} as a keyword",
        do=f"Pass the prompt as {{{beside}{name!r}: ...}}",
    )


def _refuse_unknown(call: CallKind, unknown: list[str], declared: Collection[str]) -> NoReturn:
    """Raise the error for names that nobody knows, with the nearest one of each."""
    names = [*(row.name for row in KEYWORDS.values() if _proposed(call, row)), *declared]
    guesses = [(name, SAME.get(name) or nearest(name, names)) for name in unknown]
    hints = [f"{near} instead of {name}" for name, near in guesses if near and name not in ADVICE]
    told = [ADVICE[name] for name in unknown if name in ADVICE]
    told += [f"Perhaps you meant {', '.join(hints)}"] if hints else []
    do = ". ".join(told) or "See help(model.generate)"
    noun = "argument" if len(unknown) == 1 else "arguments"
    listed = ", ".join(map(repr, unknown))
    raise UnknownArgumentError(f"generate() knows no {noun} {listed}", do=do)


def _proposed(call: CallKind, row: Keyword) -> bool:
    """Return True for a keyword that a misspelt one may have meant: one that the call takes, or
    explains."""
    explained = row.elsewhere is not None and "rectangle" in row.calls
    return call in row.calls or (call == "texts" and (explained or "prefill" in row.calls))


CONTENTS = ("text", "messages", "input_ids", "inputs_embeds")
"""What a prompt that is a mapping has one of, unless an encoder reads something else."""
_IN_PROMPTS = (row.name for row in KEYWORDS.values() if "prompt" in row.calls)
IN_PROMPTS = tuple(dict.fromkeys((*CONTENTS, *_IN_PROMPTS)))
"""What such a mapping may hold beside what the model declares."""


# --- what help() says -----------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., object])
_EXAMPLE = "\n\nExample:\n"


def listed(call: CallKind) -> list[Keyword]:
    """Return the rows that a call takes of any model, those of fields last."""
    beside = {"rectangle": ("media", "speech"), "prefill": ("media",)}.get(call, ())
    first = {"prefill": _CONTENT}.get(call)
    return [
        row
        for row in KEYWORDS.values()
        if row.owner in beside
        or (row.name == "inputs" and call == "rectangle")
        or (call in row.calls and (first is None or row.calls == first))
    ]


def lists_options(call: CallKind) -> Callable[[F], F]:
    """Return what adds the keywords of a call, with a line for each, to a function's docstring,
    before the example that it ends with.

    Parameters that a function has by name alone stand in its own words. Where there is no
    docstring, it stays as it is.
    """

    def described(function: F) -> F:
        if function.__doc__ is not None:
            own = function.__kwdefaults__ or {}
            rows = [f"    {row.name}: {row.line}\n" for row in listed(call) if row.name not in own]
            text, mark, example = inspect.cleandoc(function.__doc__).partition(_EXAMPLE)
            function.__doc__ = f"{text}\n\nOptions:\n\n{''.join(rows)}{mark[1:]}{example}"
        return function

    return described
