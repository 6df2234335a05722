"""From the fields of a body to asks: which model, which ids, which keywords of `generate`."""

from __future__ import annotations

import hashlib
import inspect
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from everystep.config import ChatDefaults
from everystep.config.chat_defaults import MOST_NEW_TOKENS
from everystep.config.named_strategies import is_named
from everystep.dialogue import Dialogue, read_dialogue, thoughts_apart
from everystep.errors import (
    OversizeError,
    RequestError,
    TokenizerError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.images import ScaledImage
from everystep.server.access import RecordFolder
from everystep.server.fields import FLAG, GENERATE, Json, require_fields
from everystep.server.line import LinePlace
from everystep.server.messages import Ask, ModelFacts, Pixels, ScoreAsk
from everystep.server.pictures import PictureLimits, with_scaled
from everystep.server.wire_keywords import packed_steering
from everystep.text import Tokenizer

_SHAPING = ("temperature", "top_k", "top_p", "min_p")
_ROLES = ("developer", "system", "user", "assistant", "tool")
_PARTS = ("text", "refusal")
_DIALOGUE = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("enable_thinking", "thinking_budget"),
)
_THINKING = ("enable_thinking", "thinking")
_SET_HERE = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters) | {"messages"}
"""Names that the chat template is given beside the variables of a request."""
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
_WIDE = 256
"""Log-probabilities of prompts from which on an answer is written down in a thread."""
_MOST_EXPLAINED = 1024
"""Tokens of a prompt's answers that are explained at most: for each a step is taken again."""
_ONE_OUT = "Leave one of them out"
_USUAL_TOKENS = 16
"""Tokens of a completion that names no length, as OpenAI has it."""


class UnknownModelError(UnknownArgumentError):
    """No model of the server has the name."""


@dataclass(frozen=True, slots=True)
class FrontModel:
    """The front's part of a model: its tokenizer, what conversations mean to it, and how large
    pictures in them may be."""

    tokenizer: Tokenizer
    chat: ChatDefaults
    pictures: PictureLimits = field(default_factory=PictureLimits)


@dataclass(frozen=True, slots=True)
class Addressee:
    """Who answers: a model, with an adapter or without one. `name`: as it was asked for."""

    name: str
    model: str
    adapter: str | None
    facts: ModelFacts
    front: FrontModel


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is: the digest of its key, None where there are no keys. `background`:
    nobody waits for the answer. `records`: where what the key asks for is recorded, None if it is
    not."""

    key: str | None = None
    background: bool = False
    records: RecordFolder | None = None

    def salt(self, own: str | None) -> str | None:
        """Return what requests must have in common to share rows: the key, and their own salt."""
        if self.key is None:
            return own
        return hashlib.sha256(f"{self.key}\0{own or ''}".encode()).hexdigest()

    @property
    def flow(self) -> str | None:
        """The requests in whose turn the engine reads it: those of the key, those that nobody waits
        for apart; None where there are no keys."""
        return self.salt("in the background" if self.background else None)


CALLER: ContextVar[Caller] = ContextVar("caller")
"""The caller whose request this task answers."""
_NOBODY = Caller()


def calling() -> Caller:
    """Return whose request this task answers; nobody's where it answers none."""
    return CALLER.get(_NOBODY)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, read: what is asked of the engine, and the form of the answer.

    `prompts`: ids and text of each; `keywords`: those of `generate`; `n`: answers per prompt;
    `logprobs`, `prompt_logprobs`: of how many best tokens, None for none; `nothing`: the prompt
    alone is wanted; `dialogue`: what is asked of tools and thoughts. `cut`: the context ends an
    answer before the length that was asked for. `said`: fields of the body that its answer repeats
    or keeps. `pools`: how hidden states become vectors, where these are wanted. `priority`: a lower
    one comes first. `pictures`: those that stand in the one prompt. `counts`: each chunk of a
    stream says how many tokens there are so far. `timings`: the answer says how long it took.
    `seeds`: one for each answer to a prompt, which then stands among the prompts as often, empty
    where all come of one. `special`: texts have special tokens too, and with `keeps_end` the id
    that ends one. `rivals`: how many are told in the explanation of a token, None for none.
    """

    to: Addressee
    prompts: tuple[tuple[list[int], str], ...]
    keywords: Mapping[str, Json]
    in_chat: bool
    n: int = 1
    stream: bool = False
    usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    nothing: bool = False
    ids: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    dialogue: Dialogue | None = None
    cut: bool = False
    caller: Caller = field(default_factory=Caller)
    said: Mapping[str, Json] = field(default_factory=dict)
    pools: str | None = None
    priority: int = 0
    pictures: tuple[Pixels, ...] = ()
    counts: bool = False
    prompt_logprobs: int | None = None
    timings: bool = False
    seeds: tuple[int, ...] = ()
    special: bool = False
    keeps_end: bool = False
    rivals: int | None = None

    @property
    def answers(self) -> int:
        """The number of answers to each prompt that was sent."""
        return self.n * max(1, len(self.seeds))

    @property
    def prompt_size(self) -> int:
        """The number of ids of the prompts that were sent."""
        return sum(len(ids) for ids, _ in self.prompts[:: max(1, len(self.seeds))])

    def is_first(self, number: int) -> bool:
        """Return whether this prompt is the first, or the only, of those that stand for one."""
        return number % max(1, len(self.seeds)) == 0

    def seed(self, number: int) -> int:
        """Return the seed of a prompt's draws."""
        known = self.seeds or (self.keywords.get("seed", 0),)
        return int(known[number % len(known)])

    @property
    def is_wide(self) -> bool:
        """True where an answer has so many log-probabilities of prompts that writing them down
        takes long."""
        known = self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)
        return known and sum(len(ids) for ids, _ in self.prompts) > _WIDE

    def places(self, caller: Caller) -> list[LinePlace]:
        """Return the places in line of these asks."""
        rows = rows_of(self.keywords)
        tokens = self.n * int(self.keywords.get("max_new_tokens") or 0)
        known = rows, self.priority, caller.background
        return [LinePlace(caller.key, len(ids), tokens, *known) for ids, _ in self.prompts]

    def asks(self, numbers: list[int]) -> list[Ask]:
        """Return what is asked of the engine, an ask per prompt."""
        chat, stream = self.in_chat, self.stream
        kept = None if self.pools is not None else calling().records
        beside: Any = {"pools": self.pools, "pictures": list(self.pictures)}
        beside |= {"owner": calling().flow, "rivals": self.rivals}
        return [
            Ask(
                *(number, self.to.model, ids, self._known(place), chat, stream),
                **beside,
                record=None if kept is None else kept.another(),
            )
            for place, (number, (ids, _)) in enumerate(zip(numbers, self.prompts, strict=True))
        ]

    def _known(self, place: int) -> dict[str, Json]:
        """Return the keywords of a prompt."""
        return {**self.keywords, "seed": self.seed(place)} if self.seeds else {**self.keywords}

    def respelled(self, text: str) -> str:
        """Return an error's text with fields named as the request named them."""
        for keyword, name in self.renamed.items():
            text = re.sub(rf"(?<![-\w]){keyword}(?![-\w])", name, text)
        return text


def addressee(
    name: str | None, facts: Mapping[str, ModelFacts], fronts: Mapping[str, FrontModel]
) -> Addressee:
    """Return who is meant; UnknownModelError for a name that nobody has."""
    if name is None:
        first = next(iter(facts))
        return Addressee(first, first, None, facts[first], fronts[first])
    for model, one in facts.items():
        if name == model or name in one.adapters:
            adapter = None if name == model else name
            return Addressee(name, model, adapter, one, fronts[model])
    known = [*facts, *(adapter for one in facts.values() for adapter in one.adapters)]
    near = nearest(name, known)
    raise UnknownModelError(
        f"there is no model {name[:80]!r}",
        wanted=", ".join(known[:8]),
        do=f"Perhaps you meant {near}" if near else "Ask GET /v1/models",
    )


# --- prompts --------------------------------------------------------------------------------------


def read_completion(given: Mapping[str, Json], to: Addressee, caller: Caller) -> Wanted:
    """Return what a body of /v1/completions asks for."""
    prompt = given["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = tuple(_ids(one, to) for one in (prompt if several else [prompt]))
    echo, nothing = bool(given.get("echo")), given.get("max_tokens") == 0
    if nothing and not echo:
        raise RequestError(
            "max_tokens=0 asks for nothing", wanted="echo with it", do="Set echo, or ask for tokens"
        )
    best = given.get("logprobs")
    keywords, renamed = _keywords(given, to, caller)
    if nothing:
        keywords["max_new_tokens"] = 1  # which is left out: its row of logits is read anyway
    elif not {"max_new_tokens", "max_length"} & set(keywords):
        keywords["max_new_tokens"] = _USUAL_TOKENS
    if best is not None:
        keywords["logprobs"] = best
        if echo:  # each of the two gets its own number of them
            keywords["prompt_logprobs"] = max(best, keywords.get("prompt_logprobs", 0))
    if given.get("stream") and echo and best is not None:
        raise _untold_in_streams("stream, echo and logprobs", "Leave one of the three out")
    return _wanted(given, to, prompts, keywords, renamed, best, nothing=nothing, echo=echo)


def read_chat(
    given: Mapping[str, Json],
    to: Addressee,
    caller: Caller,
    *,
    fits: bool = False,
    told_apart: bool = False,
) -> Wanted:
    """Return what a body of /v1/chat/completions asks for.

    `fits`: an answer ends at the context where it may be longer than that. `told_apart`: thoughts
    are no part of the text, also where the body does not mention them.
    """
    best = given.get("top_logprobs")
    if best is not None and not given.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs", wanted="logprobs true with it")
    if given.get("logprobs"):
        best = best or 0
    conversation = read_messages(given, to)
    dialogue = conversation.dialogue
    if dialogue is None and told_apart:
        dialogue = thoughts_apart(to.front.tokenizer)
    known = {name: one for name, one in given.items() if name not in ("logprobs", "top_logprobs")}
    if (most := known.pop("max_completion_tokens", None)) is not None:
        known["max_tokens"] = most
    keywords, renamed = _keywords(known, to, caller)
    if given.get("max_completion_tokens") is not None:
        renamed["max_new_tokens"] = "max_completion_tokens"
    keywords |= _format(given.get("response_format"), keywords)
    if keywords.get("max_new_tokens") == 0:
        raise RequestError("max_tokens=0 asks for nothing", do="Ask for tokens")
    if best is not None:
        keywords["logprobs"] = best
    prompts: tuple[tuple[list[int], str], ...] = ((conversation.ids, ""),)
    wanted = _wanted(given, to, prompts, keywords, renamed, best, in_chat=True, fits=fits)
    if conversation.pictures and wanted.rivals is not None:
        raise UnsupportedError("explain is for answers about texts", do="Leave explain out")
    return replace(wanted, dialogue=dialogue, pictures=conversation.pictures)


@dataclass(frozen=True, slots=True)
class ReadMessages:
    """Messages, read: their ids, what they ask of tools and thoughts, and their pictures."""

    ids: list[int]
    dialogue: Dialogue | None
    pictures: tuple[Pixels, ...]


def read_messages(given: Mapping[str, Json], to: Addressee) -> ReadMessages:
    """Return what the messages of a body are."""
    asked = _asked_of_template(given, to)
    front = to.front
    own = given["messages"], front.tokenizer, front.pictures
    messages, pictures = with_scaled(*own, sees=to.facts.sees)
    rendered = _rendered(messages, front, asked, tokenize=True, return_dict=False)
    return ReadMessages(list(rendered), asked.dialogue, tuple(pictures))


@dataclass(frozen=True, slots=True)
class _TemplateAsked:
    """The wishes of a body for the chat template: whether the answer is begun, whether the last
    message stays open, the dialogue, and further variables."""

    begins: bool
    continues: bool = False
    dialogue: Dialogue | None = None
    variables: Mapping[str, Json] = field(default_factory=dict)


def _asked_of_template(given: Mapping[str, Json], to: Addressee) -> _TemplateAsked:
    """Return what a body asks of the chat template."""
    continues = bool(given.get("continue_final_message"))
    begins = bool(given.get("add_generation_prompt", not continues))
    variables = dict(given.get("chat_template_kwargs") or {})
    _require_own(variables, to.front.tokenizer)
    known = {**given}
    for name in [one for one in _THINKING if one in variables]:  # fields of ours by other names
        value = variables.pop(name)
        if known.setdefault("enable_thinking", value) is not value:
            what = f"chat_template_kwargs.{name} contradicts enable_thinking"
            raise RequestError(what, do=_ONE_OUT)
        if type(value) is not bool:
            what = f"chat_template_kwargs.{name} is impossible"
            raise RequestError(what, wanted=FLAG.wanted, got=shown(value)[:40])
    dialogue = read_dialogue(to.front.tokenizer, *(known.get(name) for name in _DIALOGUE))
    return _TemplateAsked(begins, continues, dialogue, variables)


def _require_own(variables: Mapping[str, Json], tokenizer: Tokenizer) -> None:
    """Raise RequestError for a variable of the chat template that is not the client's to set."""
    for name in variables:
        if name in _SET_HERE:
            what = f"chat_template_kwargs.{name[:80]} is set by another field"
            raise RequestError(what, do="Leave it out, and set that field where there is one")
        if name in tokenizer.special_tokens_map:
            what = f"chat_template_kwargs.{name[:80]} is the tokenizer's own"
            raise RequestError(what, do="Leave it out")


def _wanted(
    given: Mapping[str, Json],
    to: Addressee,
    prompts: tuple[tuple[list[int], str], ...],
    keywords: Mapping[str, Json],
    renamed: Mapping[str, str],
    best: int | None,
    *,
    in_chat: bool = False,
    nothing: bool = False,
    echo: bool = False,
    fits: bool = False,
) -> Wanted:
    stream, options = bool(given.get("stream")), given.get("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options are for streams", do="Set stream, or leave them out")
    told = _stream_options(options or {})
    if stream and given.get("prompt_logprobs") is not None:
        raise _untold_in_streams("stream and prompt_logprobs", _ONE_OUT)
    vocabulary = to.facts.vocabulary
    for ids, _ in prompts:
        if any(one >= vocabulary for one in ids):
            raise RequestError(
                "the prompt has ids beyond the vocabulary", wanted=f"0 to {vocabulary - 1}"
            )
    keywords, seeds = _with_seeds(keywords)
    prompts = tuple(one for one in prompts for _ in range(max(1, len(seeds))))
    n = int(keywords.get("num_return_sequences") or keywords.get("n_best") or 1)
    longest = max(len(ids) for ids, _ in prompts)
    within = _within_context(keywords, longest, to.facts.context, fits)
    return Wanted(
        to,
        prompts,
        within,
        in_chat,
        n,
        stream,
        told.get("include_usage", False),
        echo,
        best,
        nothing,
        bool(given.get("return_token_ids")),
        renamed,
        cut=within.get("max_new_tokens") != keywords.get("max_new_tokens"),
        priority=given.get("priority", 0),
        counts=told.get("continuous_usage_stats", False),
        prompt_logprobs=given.get("prompt_logprobs"),
        timings=bool(given.get("timings")),
        seeds=seeds,
        special=given.get("skip_special_tokens") is False,
        keeps_end=bool(given.get("include_stop_str_in_output")),
        rivals=_rivals(given, within, n * max(1, len(seeds))),
    )


def _with_seeds(keywords: Mapping[str, Json]) -> tuple[Mapping[str, Json], tuple[int, ...]]:
    """Return the keywords of one answer, and the seeds of the answers where each has its own;
    RequestError for other than a seed for each."""
    seed = keywords.get("seed")
    if not isinstance(seed, list):
        return keywords, ()
    n = keywords.get("num_return_sequences", len(seed))
    if n != len(seed) or "n_best" in keywords:
        wanted, got = f"{n} of them, one for each of n answers", f"{len(seed)} seeds"
        raise RequestError("seed has another number of seeds than answers", wanted=wanted, got=got)
    rest = {name: one for name, one in keywords.items() if name != "num_return_sequences"}
    return {**rest, "seed": seed[0]}, tuple(seed)


def _rivals(given: Mapping[str, Json], keywords: Mapping[str, Json], answers: int) -> int | None:
    """Return how many rivals each token's explanation has, None where none is asked for."""
    asked = given.get("explain")
    if asked is None or asked is False:
        return None
    if given.get("stream"):
        raise RequestError("a stream has no explanations", got="stream and explain", do=_ONE_OUT)
    most = answers * int(keywords.get("max_new_tokens") or _MOST_EXPLAINED)
    if most > _MOST_EXPLAINED:
        raise RequestError(
            "explain is for few tokens",
            wanted=f"at most {_MOST_EXPLAINED} in all answers to a prompt",
            got=f"{answers} of up to {most // answers}",
            do="Ask for fewer tokens",
        )
    return 5 if asked is True else int(asked)


def _untold_in_streams(got: str, do: str) -> RequestError:
    return RequestError("a stream has no log-probabilities of its prompt", got=got, do=do)


def _stream_options(given: Json) -> dict[str, bool]:
    """Return the options of a stream that are set; RequestError for one that is not a flag."""
    asked = require_fields(given, "stream_options", _STREAM_OPTIONS)
    found = {name: value for name, value in asked.items() if value is not None}
    for name, value in found.items():
        if not FLAG.accepts(value):
            got = shown(value)[:80]
            raise RequestError(f"stream_options.{name} is impossible", wanted=FLAG.wanted, got=got)
    return found


def rows_of(keywords: Mapping[str, Json]) -> int:
    """Return how many rows of the engine a prompt needs at least."""
    named = ("num_beams", "num_return_sequences", "best_of")
    return max(int(keywords.get(name) or 1) for name in named)


def _within_context(
    keywords: Mapping[str, Json], longest: int, context: int | None, fits: bool
) -> Mapping[str, Json]:
    """Return the keywords with room for what they ask for; OversizeError where there is none.

    A length that nobody named ends at the context, and with `fits` one that somebody did.
    """
    if context is None:
        return keywords
    room, asked = context - longest, keywords.get("max_new_tokens")
    if fits and isinstance(asked, int) and asked > room >= 1:
        return {**keywords, "max_new_tokens": room}
    if room < 1 or (isinstance(asked, int) and asked > room):
        raise OversizeError(
            "the prompt with what is asked for is longer than the model's context length",
            wanted=f"at most {context} tokens together",
            got=f"{longest} of the prompt and {asked or 'more'} new ones",
            do="Send a shorter prompt, or ask for fewer tokens",
        )
    named = asked is not None or keywords.get("max_length") is not None
    usual = MOST_NEW_TOKENS if room > MOST_NEW_TOKENS else room
    return keywords if named else {**keywords, "max_new_tokens": usual}


def _ids(prompt: str | list[int], to: Addressee) -> tuple[list[int], str]:
    """Return the ids and the text of a prompt."""
    tokenizer = to.front.tokenizer
    if isinstance(prompt, list):
        return prompt, tokenizer.decode(prompt, skip_special_tokens=False)
    ids = list(tokenizer.encode(prompt))
    if not ids:
        raise RequestError("the prompt is empty", wanted="a text with tokens, or ids")
    return ids, prompt


def render(messages: list[Json], front: FrontModel, *, begins: bool) -> list[int]:
    """Return the ids of a conversation; RequestError for a message that cannot be read."""
    asked = _TemplateAsked(begins)
    return list(_rendered(messages, front, asked, tokenize=True, return_dict=False))


def _rendered(messages: list[Json], front: FrontModel, asked: _TemplateAsked, **form: bool) -> Any:
    """Return what the chat template makes of a conversation."""
    for number, message in enumerate(messages):
        _require_message(message, f"messages[{number}]")
    if front.tokenizer.chat_template is None:
        raise TokenizerError("the model has no chat template", do="Ask /v1/completions instead")
    begun, dialogue = front.chat.begun(_flat(messages, front.tokenizer)), asked.dialogue
    told: dict[str, Any] = {**asked.variables, **({} if dialogue is None else dialogue.template)}
    told |= {"add_generation_prompt": asked.begins, "continue_final_message": asked.continues}
    told |= form
    turns = begun if dialogue is None else dialogue.messages(begun)
    try:
        return front.tokenizer.apply_chat_template(turns, **told)
    except UnknownArgumentError as error:
        raise UnknownArgumentError(f"chat_template_kwargs: {error}") from error


def rendered_text(given: Mapping[str, Json], to: Addressee) -> str:
    """Return the text of a conversation, as the chat template writes it."""
    asked = _asked_of_template(given, to)
    own = given["messages"], to.front.tokenizer, to.front.pictures
    messages, _ = with_scaled(*own, sees=to.facts.sees)
    return str(_rendered(messages, to.front, asked, tokenize=False))


def _flat(messages: list[Json], tokenizer: Tokenizer) -> list[Json]:
    """Return messages whose texts are whole, where the chat template would print their parts as
    they are."""
    if not any(isinstance(one.get("content"), list) for one in messages):
        return messages
    probe = [{"role": "user", "content": [{"type": "text", "text": ""}]}]
    try:
        reads = "type" not in tokenizer.apply_chat_template(probe, tokenize=False)
    except (RequestError, TokenizerError):
        reads = False
    return messages if reads else [_joined(one) for one in messages]


def _joined(message: Json) -> Json:
    """Return a message with its parts as one text, a line for each."""
    parts = message.get("content")
    if not isinstance(parts, list) or any(one["type"] not in _PARTS for one in parts):
        return message
    return {**message, "content": "\n".join(one[one["type"]] for one in parts)}


def _require_message(message: Mapping[str, Json], where: str) -> None:
    role = message.get("role")
    if role not in _ROLES:
        wanted = ", ".join(_ROLES)
        raise RequestError(f"{where}.role is impossible", wanted=wanted, got=shown(role)[:40])
    for name in ("function_call", "audio"):
        if message.get(name):
            raise UnsupportedError(f"{where}.{name} cannot be read yet", do="Leave it out")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        got = type(content).__name__
        raise RequestError(f"{where}.content is impossible", wanted="a text or parts", got=got)
    for place, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and isinstance(part.get("image"), ScaledImage):
            continue  # which no body has: it was read as a picture
        at = f"{where}.content[{place}]"
        if kind == "input_audio":
            what = f"{at} is a sound, which no model here answers to"
            do = "Send it to /v1/audio/transcriptions, and then its text"
            raise UnsupportedError(what, do=do)
        if kind not in _PARTS or not isinstance(part.get(kind), str):
            raise RequestError(
                f"{at}.type is impossible",
                wanted="text, with a text, or image_url where the model reads pictures",
                got=shown(kind)[:40],
                do="Send the text that is in it",
            )


def _format(asked: Json, keywords: Mapping[str, Json]) -> dict[str, Json]:
    """Return the keywords that a `response_format` stands for."""
    if asked is None:
        return {}
    kind = asked.get("type")
    extra = [name for name in asked if name not in ("type", "json_schema")]
    if kind not in ("text", "json_object", "json_schema") or extra:
        raise RequestError(
            "response_format is impossible",
            wanted="type text, json_object, or json_schema with json_schema",
            got=shown(extra or kind)[:80],
        )
    if kind == "text":
        return {}
    if taken := [name for name in ("schema", "regex", "grammar", "choices") if name in keywords]:
        raise RequestError(f"response_format contradicts {taken[0]}", do="Leave one of them out")
    if kind == "json_object":
        return {"schema": {"type": "object"}}
    described = asked.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        got = shown(described)[:80]
        raise RequestError("response_format.json_schema has no schema", wanted="an object", got=got)
    return {"schema": schema}


# --- keywords -------------------------------------------------------------------------------------


def _keywords(
    given: Mapping[str, Json], to: Addressee, caller: Caller
) -> tuple[dict[str, Json], dict[str, str]]:
    """Return the keywords of `generate` that fields stand for, and which of them were renamed."""
    known = {one.name for one in GENERATE}
    found = {name: one for name, one in given.items() if name in known}
    renamed: dict[str, str] = {}
    found.pop("logprobs", None)
    found.pop("add_generation_prompt", None)  # the ids that the template gave say it
    names = (
        ("max_tokens", "max_new_tokens"),
        ("n", "num_return_sequences"),
        ("stop", "stop_strings"),
    )
    for name, keyword in names:
        if (value := given.get(name)) is None:
            continue
        if keyword in found:
            raise RequestError(f"{name} and {keyword} are the same", do="Leave one of them out")
        if name != "n" or value > 1 or isinstance(found.get("seed"), list):
            found[keyword], renamed[keyword] = value, name
    if "stop_strings" in found and not given.get("include_stop_str_in_output"):
        found["trim_stop_strings"] = True
    ends = list(given.get("stop_token_ids") or ())
    if given.get("ignore_eos") or ends:
        kept = [] if given.get("ignore_eos") else to.facts.ends
        found["eos_token_id"] = [*kept, *ends] or None
    if to.adapter is not None:
        found["adapter_names"] = to.adapter
    if "steer" in found:
        found["steer"] = packed_steering(found["steer"], to.facts)
    if "negative_prompt" in found:
        found["negative_prompt"] = _negative(found["negative_prompt"], to)
    _shape(found)
    found.setdefault("seed", secrets.randbits(62))
    if (salt := caller.salt(found.get("cache_salt"))) is not None:
        found["cache_salt"] = salt
    return found, renamed


def _shape(found: dict[str, Json]) -> None:
    """Let what shapes sampling turn it on; a temperature of 0 turns it off, and needs no more."""
    strategy = found.get("strategy")
    if strategy is not None:
        if not is_named(strategy) and "temperature" in found:
            return
        if found.get("temperature") == 0:
            raise RequestError("temperature=0 has no effect beside strategy", do="Leave it out")
        return
    if found.get("temperature") == 0 and not found.get("do_sample"):
        for name in _SHAPING:
            if name != "top_k" or not found.get("penalty_alpha"):
                found.pop(name, None)
        found["do_sample"] = False
        return
    shaping = [name for name in (*_SHAPING, "best_of") if found.get(name) is not None]
    if found.get("penalty_alpha") and "top_k" in shaping:
        shaping.remove("top_k")  # then it says how many candidates are compared
    if shaping:
        found.setdefault("do_sample", True)


def _negative(prompt: Json, to: Addressee) -> list[int]:
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        return render(prompt, to.front, begins=True)
    return _ids(prompt, to)[0]


# --- vectors --------------------------------------------------------------------------------------


def read_inputs(
    given: Mapping[str, Json],
    inputs: Json,
    to: Addressee,
    keywords: Mapping[str, Json],
    pools: str,
) -> Wanted:
    """Return that a vector is wanted of a text or a list of ids, or of each of several."""
    several = isinstance(inputs, list) and not isinstance(inputs[0], int)
    prompts = tuple(_ids(one, to) for one in (inputs if several else [inputs]))
    known = {name: one for name, one in given.items() if name == "priority"}
    wanted = _wanted(known, to, prompts, keywords, {}, None)
    return replace(wanted, said=given, pools=pools)


# --- runs -----------------------------------------------------------------------------------------


def read_open(given: Mapping[str, Json], to: Addressee, caller: Caller) -> dict[str, Json]:
    """Return what a body of /v1/everystep/runs opens: a model, ids and keywords."""
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        raise RequestError("one of prompt and messages is wanted", do="Send one of them")
    if prompt is not None:
        if given.get("add_generation_prompt") is not None:
            what = "add_generation_prompt has no effect on a prompt that is no conversation"
            raise RequestError(what, do="Send messages, or leave it out")
        ids = _ids(prompt, to)[0]
    else:
        ids = render(messages or [], to.front, begins=given.get("add_generation_prompt", True))
    if any(one >= to.facts.vocabulary for one in ids):
        wanted = f"0 to {to.facts.vocabulary - 1}"
        raise RequestError("the prompt has ids beyond the vocabulary", wanted=wanted)
    keywords, _ = _keywords(given, to, caller)
    if given.get("logprobs") is not None:
        keywords["logprobs"] = given["logprobs"]
    within = _within_context(keywords, len(ids), to.facts.context, fits=False)
    opened = {"model": to.model, "prompt": ids, "keywords": dict(within)}
    return {**opened, "in_chat": messages is not None}


def read_changes(given: Mapping[str, Json], to: Addressee) -> dict[str, Json]:
    """Return the keywords that are set in a run; those of the fields that a body has, no others."""
    found, _ = _keywords(given, to, Caller())
    if "seed" not in given:
        del found["seed"]
    found.pop("adapter_names", None)
    found.pop("trim_stop_strings", None)
    return found


def read_ids(given: Mapping[str, Json], to: Addressee) -> list[int]:
    """Return the ids of what is sent into a run: `ids`, or those of `text`."""
    text, ids = given.get("text"), given.get("ids")
    if (text is None) == (ids is None):
        raise RequestError("one of text and ids is wanted", do="Send one of them")
    if text is None:
        return [*(ids or ())]
    return list(to.front.tokenizer.encode(text, add_special_tokens=False))


# --- scores ---------------------------------------------------------------------------------------


def read_score(given: Mapping[str, Json], to: Addressee, number: int) -> ScoreAsk:
    """Return what a body of /v1/everystep/score asks for."""
    texts, tokenizer = given["texts"], to.front.tokenizer
    several = isinstance(texts, list) and not isinstance(texts[0], int)
    after = given.get("after")
    before = None if after is None else _ids(after, to)[0]

    def row(one: str | list[int]) -> list[int]:
        if isinstance(one, list):
            return one
        return list(tokenizer.encode(one, add_special_tokens=before is None))

    rows = [row(one) for one in (texts if several else [texts])]
    asked = given.get("steer")
    steer = None if asked is None else packed_steering(asked, to.facts)
    return ScoreAsk(number, to.model, rows, before, given.get("best") or 0, to.adapter, steer)
