"""From what the engine tells to answers: texts, log-probabilities, usage, chunks of streams.

Texts are made here, by the tokenizer of the front, as `everystep.generate` and `everystep.stream`
make them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from everystep.dialogue import (
    CallArguments,
    CallBegin,
    Content,
    DialogueEvent,
    Finish,
    Markup,
    Parser,
    Thought,
)
from everystep.drivers.generated import end_of_prompt
from everystep.server.asking import Wanted
from everystep.server.fields import Json
from everystep.server.messages import Begun, Ended, Likelihoods, Over, RowNews
from everystep.stops.ends import moment
from everystep.streamers import Wording
from everystep.text import Spelling, Tokenizer, Trimmer, follow
from everystep.types import Event, FinishReason

_LOWEST = -9999.0
"""What stands for a log-probability of minus infinity, which JSON does not have."""
_REASONS: Mapping[str, str] = {
    "stop": "stop",
    "criteria": "stop",
    "length": "length",
    "time": "length",
}


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return value if math.isfinite(value) else _LOWEST


@dataclass(slots=True)
class Usage:
    """Tokens of a request: of its prompts, each counted once, and of its answers."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def shown(self) -> dict[str, Json]:
        """Return it as an answer has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Spelled:
    """The tokens of a vocabulary as texts, and the forms that log-probabilities have in answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = Spelling.of(tokenizer)
        self._texts: dict[int, str] = {}

    def text(self, id: int) -> str:
        """Return the text of one id by itself."""
        if (found := self._texts.get(id)) is None:
            found = self._texts[id] = self._tokenizer.decode([id], skip_special_tokens=False)
        return found

    def of_prompt(self, known: Likelihoods, best: int) -> msgspec.Raw:
        """Return a list with null for the first id of a prompt, and an object for each other one:
        by id, that one and the `best` best there.

        It is written down place by place, so that other threads may go on between two.
        """
        places = (self._place(id, value, tops[:best]) for id, value, tops in rows_of(known))
        return msgspec.Raw(b"[" + b",".join([b"null", *map(msgspec.json.encode, places)]) + b"]")

    def _place(
        self, id: int, known: float | None, best: Sequence[tuple[int, float]]
    ) -> dict[str, dict[str, Json]]:
        # How many are likelier than an id that is none of the best is not known.
        found: dict[int, tuple[float | None, int | None]] = {id: (known, None)}
        found |= {other: (value, rank) for rank, (other, value) in enumerate(best, 1)}
        return {
            str(one): {
                "logprob": None if value is None else finite(value),
                "rank": rank,
                "decoded_token": self.text(one),
            }
            for one, (value, rank) in found.items()
        }

    def of_completion(
        self,
        rows: Iterable[tuple[int, float | None, Sequence[tuple[int, float]] | None]],
        start: int,
    ) -> dict[str, list[Json]]:
        """Return the four lists of a completion: each row is an id, its log-probability and the
        best; `start`: characters before the first."""
        found: dict[str, list[Json]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for id, known, best in rows:
            spelled = self.text(id)
            tops: dict[str, float] | None = None
            if known is not None:
                tops = {}
                for other, value in [*(best or ()), (id, known)]:
                    name = self.text(other)
                    tops[name] = max(finite(value), tops.get(name, -math.inf))
            values = spelled, None if known is None else finite(known), tops, start
            for column, cell in zip(found.values(), values, strict=True):
                column.append(cell)
            start += len(spelled)
        return found

    def of_chat(
        self, rows: Iterable[tuple[int, float | None, Sequence[tuple[int, float]] | None]]
    ) -> list[Json]:
        """Return the entries of a chat, one for each row."""
        return [
            {**self._entry(id, known), "top_logprobs": [self._entry(*one) for one in best or ()]}
            for id, known, best in rows
        ]

    def _entry(self, id: int, known: float | None) -> dict[str, Json]:
        raw = list(self._bytes(id))
        return {"token": self.text(id), "bytes": raw, "logprob": finite(known or 0.0)}


def rows_of(known: Likelihoods) -> list[tuple[int, float | None, list[tuple[int, float]]]]:
    """Return a table of likelihoods row by row."""
    parts = zip(known.tokens, known.logprobs, known.top_tokens, known.top_logprobs, strict=True)
    return [(id, value, list(zip(tops, values, strict=True))) for id, value, tops, values in parts]


@dataclass(slots=True)
class Clock:
    """The times of a request's prompts, all by the clock of this process."""

    began: float = math.inf
    opened: float = 0.0
    ended: float = 0.0

    def note(self, message: Over) -> None:
        """Take in how long a prompt took that ends now."""
        now = moment()
        begun = now - message.seconds
        self.began = min(self.began, begun)
        self.opened = max(self.opened, begun + message.opened)
        self.ended = now

    def shown(self) -> dict[str, Json]:
        """Return the seconds as an output object names them: until the last prompt had its first
        token, from there on, and in all."""
        return {
            "prompt_seconds": self.opened - self.began,
            "decode_seconds": self.ended - self.opened,
            "total_seconds": self.ended - self.began,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """The part that every chunk of an answer has in common."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str, choices: list[Json]) -> dict[str, Json]:
        """Return an answer, or a chunk, with these choices."""
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices}


def reason(kind: str, matched: str | int | None) -> dict[str, Json]:
    """Return how a choice says why it ended."""
    told: str | int | None = matched if isinstance(matched, str) else None
    return {
        "finish_reason": _REASONS.get(kind, "stop"),
        "stop_reason": kind if kind == "time" else told,
    }


class Whole(Protocol):
    """An answer in one piece, made while news come in."""

    usage: Usage

    def begin(self, number: int, message: Begun) -> None:
        """Note that this prompt has begun."""

    def end(self, number: int, message: Over) -> None:
        """Take the results of this prompt in."""

    def shown(self) -> dict[str, Json]:
        """Return the answer."""
        raise NotImplementedError


class Streamed(Protocol):
    """An answer in pieces, made while news come in."""

    usage: Usage

    def opening(self) -> Iterator[dict[str, Json]]:
        """Yield what stands before all tokens."""
        raise NotImplementedError

    def begin(self, number: int, message: Begun) -> None:
        """Note that this prompt has begun."""

    def row(self, number: int, row: RowNews) -> Iterator[dict[str, Json]]:
        """Yield the pieces of one row."""
        raise NotImplementedError

    def end(self, number: int, message: Over) -> Iterator[dict[str, Json]]:
        """Yield what is left of this prompt."""
        raise NotImplementedError

    def closing(self) -> Iterator[dict[str, Json]]:
        """Yield what stands after all tokens."""
        raise NotImplementedError

    def failing(self, text: str) -> Iterator[dict[str, Json]]:
        """Yield what stands before the error that ends a stream."""
        raise NotImplementedError


class WholeAnswer:
    """The answer of a request in one piece, as `Over` after `Over` comes in."""

    def __init__(self, wanted: Wanted, head: Head) -> None:
        self._wanted, self._head = wanted, head
        self._spelled = Spelled(wanted.to.front.tokenizer)
        self._strings: dict[int, Sequence[str]] = {}
        self._choices: dict[int, list[Json]] = {}
        self._clock = Clock()
        self._of_prompt: Json = None
        self.usage = Usage()

    def begin(self, number: int, message: Begun) -> None:
        """Note which strings the texts of this prompt lose."""
        self._strings[number] = message.strings

    def end(self, number: int, message: Over) -> None:
        """Take the results of this prompt in."""
        wanted = self._wanted
        place = number * wanted.n
        first = message.results[0]
        self._clock.note(message)
        if wanted.is_first(number):
            self.usage.prompt += first.prompt_tokens
            self.usage.cached += first.cached_tokens
        known, best = first.known_prompt, wanted.prompt_logprobs
        self._of_prompt = None
        if known is not None and best is not None:
            self._of_prompt = self._spelled.of_prompt(known, best)
        self._choices[number] = [
            self._choice(place + i, number, one, known) for i, one in enumerate(message.results)
        ]

    def shown(self) -> dict[str, Json]:
        """Return the answer."""
        kind = "chat.completion" if self._wanted.in_chat else "text_completion"
        choices = [one for number in sorted(self._choices) for one in self._choices[number]]
        answer = {**self._head.of(kind, choices), "usage": self.usage.shown()}
        answer["system_fingerprint"] = None
        if self._wanted.in_chat and self._wanted.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._of_prompt  # where vLLM's clients look for it
        if self._wanted.timings:
            answer["timings"] = self._clock.shown()
        return answer

    def _choice(
        self, place: int, number: int, one: Ended, of_prompt: Likelihoods | None
    ) -> dict[str, Json]:
        wanted = self._wanted
        tokens = [] if wanted.nothing else one.tokens
        self.usage.completion += len(tokens)
        text = shown_text(wanted, _spelled_ids(wanted, one) if tokens else [])
        if strings := self._strings.get(number):
            before = prompt_end(wanted, number, strings)
            text = Trimmer(tuple(strings), before).finish(text, one.matched)
        ended = reason("length" if wanted.nothing else one.kind, one.matched)
        choice: dict[str, Json] = {"index": place, **ended}
        if one.score:
            choice["score"] = one.score
        if wanted.ids:
            choice["token_ids"] = tokens
        if wanted.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._of_prompt
        if wanted.rivals is not None:
            choice["explanations"] = [] if wanted.nothing else one.explanations
        if wanted.in_chat:
            message: dict[str, Json] = {"role": "assistant", "content": text, "refusal": None}
            if wanted.dialogue is not None:
                asked = prompt_text(wanted), call_key(wanted, place)
                parts = wanted.dialogue.message(text, *asked)
                message |= parts.as_dict()
                if parts.tool_calls:
                    message["content"] = parts.content or None
                    choice |= called(wanted, choice)
            known = None
            if one.known is not None:
                known = {"content": self._spelled.of_chat(rows_of(one.known)), "refusal": None}
            return {**choice, "message": message, "logprobs": known}
        said = wanted.prompts[number][1] if wanted.echo else ""
        return {**choice, "text": said + text, "logprobs": self._known(number, one, of_prompt)}

    def _known(self, number: int, one: Ended, of_prompt: Likelihoods | None) -> Json:
        if one.known is None:
            return None
        rows = [] if self._wanted.nothing else rows_of(one.known)
        whole: list[tuple[int, float | None, Sequence[tuple[int, float]] | None]] = [*rows]
        if self._wanted.echo:
            ids = self._wanted.prompts[number][0]
            said = [] if of_prompt is None else rows_of(of_prompt)
            best = self._wanted.logprobs
            cut = [(id, value, tops[:best]) for id, value, tops in said]
            whole = [(ids[0], None, None), *cut, *rows]
        return self._spelled.of_completion(whole, 0)


def kept_ids(wanted: Wanted) -> frozenset[int]:
    """Return the special ids whose text an answer keeps."""
    if wanted.special:
        return frozenset(wanted.to.front.tokenizer.all_special_ids)
    return frozenset() if wanted.dialogue is None else wanted.dialogue.kept


def _is_bare_end(wanted: Wanted, token: int, kind: str | None, matched: str | int | None) -> bool:
    """Return whether an id ends an answer whose text has special tokens, but not that one."""
    return wanted.special and not wanted.keeps_end and kind == "stop" and matched == token


def _spelled_ids(wanted: Wanted, one: Ended) -> list[int]:
    """Return the ids that the text of an answer is made of."""
    tokens = one.tokens
    return tokens[:-1] if _is_bare_end(wanted, tokens[-1], one.kind, one.matched) else tokens


def shown_text(wanted: Wanted, tokens: list[int]) -> str:
    """Return the text of an answer, with the marks by which calls and thoughts are told."""
    tokenizer, kept = wanted.to.front.tokenizer, kept_ids(wanted)
    if not kept:
        return tokenizer.decode(tokens, skip_special_tokens=True)
    follower = follow(tokenizer, kept=kept)
    return follower.push(tokens) + follower.finish()


def prompt_text(wanted: Wanted) -> str:
    """Return the text of a conversation's last ids, marks and all."""
    return end_of_prompt(wanted.to.front.tokenizer, wanted.prompts[0][0])


def call_key(wanted: Wanted, place: int) -> str:
    """Return what the ids of a choice's calls are made of."""
    own = 0 if wanted.seeds else place  # with a seed of its own it is as if it were alone
    return f"{wanted.seed(place)}/{own}/{len(wanted.prompts[0][0])}"


def called(wanted: Wanted, ended: Mapping[str, Json]) -> dict[str, Json]:
    """Return how a choice with calls says why it ended: a cut one keeps its reason, and so does one
    whose call was named in the request."""
    named = wanted.dialogue is not None and wanted.dialogue.choice.name is not None
    stopped = ended["finish_reason"] == "stop" and not named
    return {"finish_reason": "tool_calls"} if stopped else {}


def prompt_end(wanted: Wanted, number: int, strings: Sequence[str]) -> str:
    """Return the end of a prompt's text, in which a stop string may begin."""
    longest = max((len(one.encode()) for one in strings), default=0)
    ids = wanted.prompts[number][0][-longest:] if longest else []
    return wanted.to.front.tokenizer.decode(ids, skip_special_tokens=True)


def delta_of(event: DialogueEvent) -> dict[str, Json] | None:
    """Return what a chunk says of a part of an answer, None where that is nothing."""
    match event:
        case Content():
            return {"content": event.text}
        case Thought():
            return {"reasoning_content": event.text}
        case CallBegin():
            function = {"name": event.name, "arguments": ""}
            begun = {"index": event.index, "id": event.id, "type": "function"}
            return {"tool_calls": [{**begun, "function": function}]}
        case CallArguments():
            piece = {"arguments": event.text}
            return {"tool_calls": [{"index": event.index, "function": piece}]}
        case _:
            return None


def untold(one: Ended, index: int, told: int) -> list[RowNews]:
    """Return the rows of a sequence after those that were told; the last one ends it, so that a
    text can lose what ended it."""
    known = [] if one.known is None else rows_of(one.known)[told:]
    rows = [RowNews(0, index, token) for token in one.tokens[told:]] or [RowNews(0, index, -1)]
    for place, (_, value, best) in enumerate(known[: len(rows)]):
        rows[place] = msgspec.structs.replace(rows[place], logprob=value, top=best)
    rows[-1] = msgspec.structs.replace(rows[-1], kind=one.kind, matched=one.matched)
    return rows


class StreamedAnswer:
    """The answer of a request in chunks, as rows come in."""

    def __init__(self, wanted: Wanted, head: Head) -> None:
        self._wanted, self._head = wanted, head
        self._spelled = Spelled(wanted.to.front.tokenizer)
        self._wording = Wording(wanted.to.front.tokenizer)
        self._offsets: dict[int, int] = {}
        self._ended: set[int] = set()
        self._told: dict[int, int] = {}
        self._parsers: dict[int, Parser] = {}
        self._called: set[int] = set()
        self._clock = Clock()
        self.usage = Usage()

    def opening(self) -> Iterator[dict[str, Json]]:
        """Yield what stands before all tokens: every choice, in order."""
        wanted = self._wanted
        for number in range(len(wanted.prompts)):
            for i in range(wanted.n):
                place, said = number * wanted.n + i, wanted.prompts[number][1]
                if wanted.in_chat:
                    delta = {"role": "assistant", "content": ""}
                    yield self._chunk(place, {"delta": delta, "logprobs": None})
                elif wanted.echo:
                    self._offsets[place] = len(said)
                    yield self._chunk(place, {"text": said, "logprobs": None})

    def begin(self, number: int, message: Begun) -> None:
        """Note which strings the texts of this prompt lose, and which marks they keep."""
        self._wording.keep(str(number), kept_ids(self._wanted))
        if message.strings:
            before = prompt_end(self._wanted, number, message.strings)
            self._wording.trim(str(number), tuple(message.strings), before)

    def row(self, number: int, row: RowNews) -> Iterator[dict[str, Json]]:
        """Yield the chunks of one row."""
        place = number * self._wanted.n + row.index
        finish = None if row.kind is None else FinishReason(row.kind, row.matched)  # type: ignore[arg-type]
        bare = _is_bare_end(self._wanted, row.token, row.kind, row.matched)
        event = Event(str(number), row.index, -1 if bare else row.token, finish=finish)
        text = self._wording(event).text or ""
        known = None
        if row.token >= 0:
            self.usage.completion += 1
            self._told[place] = self._told.get(place, 0) + 1
            known = self._known(place, row)
        ids = [row.token] if row.token >= 0 else []
        if self._wanted.dialogue is not None:
            yield from self._parts(place, text, known, ids, over=row.kind is not None)
        elif text or known is not None or (self._wanted.ids and ids):
            yield self._piece(place, text, known, ids)
        if row.kind is not None:
            yield self._end(place, row.kind, row.matched)

    def end(self, number: int, message: Over) -> Iterator[dict[str, Json]]:
        """Yield what is left of this prompt, whose results are there."""
        first = message.results[0]
        self._clock.note(message)
        if self._wanted.is_first(number):
            self.usage.prompt += first.prompt_tokens
            self.usage.cached += first.cached_tokens
        for i, one in enumerate(message.results):
            place = number * self._wanted.n + i
            if place not in self._ended:
                for row in untold(one, i, self._told.get(place, 0)):
                    yield from self.row(number, row)
        for i in range(len(message.results), self._wanted.n):  # ended before it was forked
            yield self._end(number * self._wanted.n + i, first.kind, first.matched)

    def closing(self) -> Iterator[dict[str, Json]]:
        """Yield what stands after all tokens."""
        wanted, beside = self._wanted, dict[str, Json]()
        if wanted.usage or (wanted.timings and wanted.counts):
            beside["usage"] = self.usage.shown()
        if wanted.timings:
            beside["timings"] = self._clock.shown()
        if beside:
            kind = "chat.completion.chunk" if wanted.in_chat else "text_completion"
            yield {**self._head.of(kind, []), **beside}

    def failing(self, text: str) -> Iterator[dict[str, Json]]:
        """Yield nothing: the error says it."""
        return iter(())

    def _known(self, place: int, row: RowNews) -> Json:
        if self._wanted.logprobs is None or row.logprob is None:
            return None
        rows = [(row.token, row.logprob, row.top)]
        if self._wanted.in_chat:
            return {"content": self._spelled.of_chat(rows), "refusal": None}
        found = self._spelled.of_completion(rows, self._offsets.get(place, 0))
        self._offsets[place] = self._offsets.get(place, 0) + len(self._spelled.text(row.token))
        return found

    def _parts(
        self, place: int, text: str, known: Json, ids: list[int], *, over: bool
    ) -> Iterator[dict[str, Json]]:
        """Yield the chunks of a text in its parts: what is said, thought and called."""
        wanted = self._wanted
        if (dialogue := wanted.dialogue) is None:
            return
        if (parser := self._parsers.get(place)) is None:
            parser = dialogue.parser(prompt_text(wanted), call_key(wanted, place))
            self._parsers[place] = parser
        events = (*parser.feed(text), *(parser.close() if over else ()))
        deltas = [delta for event in events if (delta := delta_of(event)) is not None]
        if any("tool_calls" in delta for delta in deltas):
            self._called.add(place)
        if not deltas and (known is not None or (wanted.ids and ids)):
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            own = {"logprobs": None if number else known}
            beside = {"token_ids": ids} if wanted.ids and not number else {}
            yield self._chunk(place, {"delta": delta, **own, **beside})

    def _piece(self, place: int, text: str, known: Json, ids: list[int]) -> dict[str, Json]:
        beside = {"token_ids": ids} if self._wanted.ids else {}
        if self._wanted.in_chat:
            return self._chunk(place, {"delta": {"content": text}, "logprobs": known, **beside})
        return self._chunk(place, {"text": text, "logprobs": known, **beside})

    def _end(self, place: int, kind: str, matched: str | int | None) -> dict[str, Json]:
        self._ended.add(place)
        body: dict[str, Json] = {"delta": {}} if self._wanted.in_chat else {"text": ""}
        ended = reason(kind, matched)
        if place in self._called:
            ended |= called(self._wanted, ended)
        return self._chunk(place, {**body, "logprobs": None, **ended})

    def _chunk(self, place: int, said: Mapping[str, Json]) -> dict[str, Json]:
        kind = "chat.completion.chunk" if self._wanted.in_chat else "text_completion"
        choice = {"index": place, "finish_reason": None, **said}
        chunk = self._head.of(kind, [choice])
        if self._wanted.counts:
            return {**chunk, "usage": self._usage_so_far()}
        return {**chunk, "usage": None} if self._wanted.usage else chunk

    def _usage_so_far(self) -> dict[str, Json]:
        return replace(self.usage, prompt=self._wanted.prompt_size).shown()


class AnswerReader:
    """Reads the one answer of a conversation as parts: what is said, thought and called.

    `usage`: its tokens, of which `thought` were thoughts. `kind`, `matched`: how it ended.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._wording = Wording(wanted.to.front.tokenizer)
        self._parser: Parser | None = None
        self._thinks = False
        self._blank: str | None = ""  # held back; None within a text, whose blanks are its own
        self._begun = False
        self.usage = Usage(prompt=len(wanted.prompts[0][0]))
        self.thought = 0
        self.kind: str | None = None
        self.matched: str | int | None = None
        if (dialogue := wanted.dialogue) is not None:
            self._parser = dialogue.parser(prompt_text(wanted), call_key(wanted, 0))
            self._wording.keep("", dialogue.kept)

    def begin(self, message: Begun) -> None:
        """Note which strings the text loses."""
        if message.strings:
            before = prompt_end(self._wanted, 0, message.strings)
            self._wording.trim("", tuple(message.strings), before)

    def read(self, row: RowNews) -> list[DialogueEvent]:
        """Return the parts that a row adds."""
        finish = None if row.kind is None else FinishReason(row.kind, row.matched)  # type: ignore[arg-type]
        text = self._wording(Event("", 0, row.token, finish=finish)).text or ""
        if row.kind is not None:
            self.kind, self.matched = row.kind, row.matched
        if self._parser is None:
            events: list[DialogueEvent] = [Content(text, text)] if text else []
        else:
            events = list(self._parser.feed(text))
            events += self._parser.close() if row.kind is not None else ()
        self._count(row, events)
        found = [one for event in events for one in self._solid(event)]
        if row.kind is not None and self._blank and not self._begun:
            found.append(Content(self._blank, self._blank))  # an answer of nothing else
        return found

    def _solid(self, event: DialogueEvent) -> Iterator[DialogueEvent]:
        """Yield a part, blanks alone left out beside others: nobody may send such a text back."""
        if not isinstance(event, Content):
            if not isinstance(event, Markup | Finish):
                self._begun, self._blank = True, ""
            yield event
        elif self._blank is None:
            yield event
        elif (text := self._blank + event.text).strip():
            self._begun, self._blank = True, None
            yield Content(text, text)
        else:
            self._blank = text

    def finish(self, message: Over) -> list[tuple[RowNews, list[DialogueEvent]]]:
        """Return the rows that are left, since the results are there, each with its parts."""
        one = message.results[0]
        rows = [] if self.kind is not None else untold(one, 0, self.usage.completion)
        self.usage.prompt, self.usage.cached = one.prompt_tokens, one.cached_tokens
        return [(row, self.read(row)) for row in rows]

    def _count(self, row: RowNews, events: Sequence[DialogueEvent]) -> None:
        thinks = any(isinstance(one, Thought) for one in events)
        if row.token >= 0:
            self.usage.completion += 1
            self.thought += thinks or (self._thinks and not events)
        self._thinks = thinks or (self._thinks and not events)
