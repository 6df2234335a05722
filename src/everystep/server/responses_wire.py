"""OpenAI's Responses: items come in, and items go out, whole or as events.

Items are read as the messages of a chat, so that both mean the same. Answers are kept for a while,
a bounded number of bytes for each key, so that a further request can go on from one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from everystep.dialogue import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    DialogueEvent,
    Thought,
)
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError, shown
from everystep.server.answering import AnswerReader, Head, Spelled
from everystep.server.asking import Addressee, Caller, Wanted, read_chat, read_messages
from everystep.server.exchange import HttpError, WireForm, error_body
from everystep.server.fields import Json, require_fields
from everystep.server.messages import Begun, Over, RowNews

RESPONSES_FORM = WireForm(error_body, None, named=True)
LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_OWN = {
    "max_new_tokens": "max_output_tokens",
    "schema": "text.format.schema",
    "enable_thinking": "reasoning.effort",
}
"""Keywords of `generate` -> what a body of this wire calls them."""


# --- what is kept ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response that was kept, and the conversation with it, without instructions."""

    shown: Mapping[str, Json]
    messages: tuple[Json, ...]
    size: int


@dataclass(slots=True)
class KeptResponses:
    """Responses that may be gone on with, by key and id; the oldest of a key make room.

    `most`: responses of a key; `most_bytes`: of these together. Whole answers and streams keep
    theirs, and routes look them up, from several threads.
    """

    most: int = 256
    most_bytes: int = 16 << 20
    _own: dict[str | None, OrderedDict[str, KeptResponse]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, caller: Caller, shown: Mapping[str, Json], messages: Sequence[Json]) -> None:
        """Keep a response for its caller, if it is not too long by itself."""
        size = len(msgspec.json.encode((shown, messages)))
        with self._lock:
            own = self._own.setdefault(caller.key, OrderedDict())
            own[shown["id"]] = KeptResponse(shown, tuple(messages), size)
            while len(own) > self.most or sum(one.size for one in own.values()) > self.most_bytes:
                own.popitem(last=False)

    def find(self, caller: Caller, id: str) -> KeptResponse:
        """Return the response of a caller's; HttpError 404 if it is not there."""
        with self._lock:
            own = self._own.get(caller.key)
            found = None if own is None else own.get(id)
        if found is None:
            code = "previous_response_not_found"
            text = "There is no such response: it is not yours, was not stored, or made room."
            raise HttpError(404, text, code=code, param="previous_response_id")
        return found

    def forget(self, caller: Caller, id: str) -> None:
        """Keep a response no longer; HttpError 404 if it is not there."""
        self.find(caller, id)
        with self._lock:
            self._own[caller.key].pop(id, None)


# --- in -------------------------------------------------------------------------------------------


def read_response_body(
    given: Mapping[str, Json], to: Addressee, caller: Caller, kept: KeptResponses
) -> Wanted:
    """Return what a body of /v1/responses asks for."""
    asked, said = _as_chat(given, caller, kept)
    if (most := given.get("max_output_tokens")) is not None:
        asked["max_tokens"] = most
    asked |= _told_likelihoods(given)
    asked |= _format(given.get("text"))
    wanted = read_chat(asked, to, caller, told_apart=True)
    own = {**wanted.renamed, **_OWN}
    return replace(wanted, renamed=own, said={**given, "messages": said}, caller=caller)


def count_input_tokens(
    given: Mapping[str, Json], to: Addressee, caller: Caller, kept: KeptResponses
) -> int:
    """Return how many tokens the prompt of a body has."""
    return len(read_messages(_as_chat(given, caller, kept)[0], to).ids)


def _as_chat(
    given: Mapping[str, Json], caller: Caller, kept: KeptResponses
) -> tuple[dict[str, Json], list[Json]]:
    """Return the fields of a chat that a body stands for, and its conversation without
    instructions."""
    own = ("input", "instructions", "max_output_tokens", "text", "reasoning", "include", "store")
    also = ("previous_response_id", "background", "truncation", "metadata", "tools", "tool_choice")
    named = (*own, *also, "top_logprobs")
    asked = {name: value for name, value in given.items() if name not in named}
    messages: list[Json] = []
    if (earlier := given.get("previous_response_id")) is not None:
        messages += kept.find(caller, earlier).messages
    said = given.get("input", [])
    messages += [{"role": "user", "content": said}] if isinstance(said, str) else _messages(said)
    told = given.get("instructions")
    asked["messages"] = [
        *([] if told is None else [{"role": "system", "content": told}]),
        *messages,
    ]
    if not asked["messages"]:
        raise RequestError("input is empty", wanted="a text, or items")
    if tools := given.get("tools"):
        asked["tools"] = [_tool(one, f"tools[{place}]") for place, one in enumerate(tools)]
    choice = given.get("tool_choice")
    if choice is not None and (tools or choice not in ("auto", "none")):
        asked["tool_choice"] = _choice(choice)
    for name in given.get("stream_options") or ():
        if name != "include_obfuscation":
            raise UnknownArgumentError(f"stream_options.{name[:80]} is unknown", do="Leave it out")
    if given.get("background"):
        raise UnsupportedError("background answers are not made here", do="Leave background out")
    return asked | _reasoning(given.get("reasoning")), messages


class ItemReader:
    """Reads items as messages; thoughts and calls in turn belong to one message."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._open: dict[str, Json] | None = None

    def read(self, item: Json, where: str) -> None:
        """Take one item in."""
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._result(item, where)
            case "reasoning":
                self._thought(item, where)
            case _:
                wanted = "message, function_call, function_call_output, reasoning"
                got = shown(kind)[:40]
                raise RequestError(f"{where}.type is impossible", wanted=wanted, got=got)

    def _message(self, item: Mapping[str, Json], where: str) -> None:
        require_fields(item, where, ("type", "role", "content", "id", "status", "phase"))
        role = item.get("role")
        if role not in _ROLES:
            wanted = ", ".join(_ROLES)
            raise RequestError(f"{where}.role is impossible", wanted=wanted, got=shown(role)[:40])
        content = _parts(item.get("content"), f"{where}.content")
        if role == "assistant":
            if self._open is None or self._open["content"] or "tool_calls" in self._open:
                self._begin()
            self._answer()["content"] = content
        else:
            self._open = None
            self.messages.append({"role": role, "content": content})

    def _call(self, item: Mapping[str, Json], where: str) -> None:
        require_fields(item, where, ("type", "id", "call_id", "name", "arguments", "status"))
        texts = {name: item.get(name) for name in ("call_id", "name", "arguments")}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise RequestError(f"{where}.{name} is missing", wanted="a text")
        function = {"name": texts["name"], "arguments": texts["arguments"]}
        call = {"id": texts["call_id"], "type": "function", "function": function}
        self._answer().setdefault("tool_calls", []).append(call)

    def _result(self, item: Mapping[str, Json], where: str) -> None:
        require_fields(item, where, ("type", "id", "call_id", "output", "status"))
        if not isinstance(item.get("call_id"), str):
            raise RequestError(f"{where}.call_id is missing", wanted="the call_id of a call")
        said = _parts(item.get("output"), f"{where}.output")
        told = {"role": "tool", "tool_call_id": item["call_id"], "content": said}
        self._open = None
        self.messages.append(told)

    def _thought(self, item: Mapping[str, Json], where: str) -> None:
        known = ("type", "id", "summary", "content", "status", "encrypted_content")
        require_fields(item, where, known)
        parts = item.get("content") or item.get("summary") or []
        texts = [one.get("text") if isinstance(one, dict) else None for one in parts]
        if not texts or not all(isinstance(one, str) for one in texts):
            what = f"{where} is a thought without its text"
            raise RequestError(what, wanted="content with reasoning_text", do="Leave it out")
        self._begin()["reasoning_content"] = "".join(map(str, texts))

    def _begin(self) -> dict[str, Json]:
        self._open = {"role": "assistant", "content": ""}
        self.messages.append(self._open)
        return self._open

    def _answer(self) -> dict[str, Json]:
        """Return the message that an assistant's item belongs to."""
        return self._begin() if self._open is None else self._open


def _messages(items: Sequence[Json]) -> list[Json]:
    reader = ItemReader()
    for place, item in enumerate(items):
        reader.read(item, f"input[{place}]")
    return reader.messages


def _parts(content: Json, where: str) -> Json:
    """Return the content of a message as chats have it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        got = type(content).__name__
        raise RequestError(f"{where} is impossible", wanted="a text or parts", got=got)
    found = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        name = _TEXTS.get(kind) if isinstance(kind, str) else None
        if name is None or not isinstance(part.get(name), str):
            what, wanted = f"{where}[{place}].type is impossible", ", ".join(_TEXTS)
            raise RequestError(what, wanted=wanted, got=shown(kind)[:40])
        found.append({"type": "text", "text": part[name]})
    return found[0]["text"] if len(found) == 1 else found


def _tool(given: Json, where: str) -> dict[str, Json]:
    """Return a tool as chats have it; UnsupportedError for one that a server would run."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "function":
        what = f"{where}.type is a tool that the server would run"
        raise UnsupportedError(what, wanted="function", got=shown(kind)[:40], do="Leave it out")
    names = ("name", "description", "parameters", "strict")
    require_fields(given, where, ("type", *names))
    function = {name: given[name] for name in names if given.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(given: Json) -> Json:
    """Return a `tool_choice` as chats have it."""
    if isinstance(given, str):
        return given
    if given.get("type") == "function" and isinstance(given.get("name"), str):
        return {"type": "function", "function": {"name": given["name"]}}
    wanted = "none, auto, required, or type function with a name"
    raise RequestError("tool_choice is impossible", wanted=wanted, got=shown(given)[:80])


def _reasoning(given: Json) -> dict[str, Json]:
    """Return the fields of a chat that `reasoning` stands for."""
    if given is None:
        return {}
    require_fields(given, "reasoning", ("effort", "summary"))
    if given.get("summary") not in (None, "auto"):
        raise UnsupportedError(
            "reasoning.summary is written by no model here",
            wanted="auto: thoughts are told as they are",
            do="Leave it out",
        )
    if (effort := given.get("effort")) is None:
        return {}
    if effort != "none":
        what, got = "reasoning.effort is read by no model here", shown(effort)[:40]
        raise UnsupportedError(what, wanted="none, which ends thoughts", got=got, do="Leave it out")
    return {"enable_thinking": False}


def _told_likelihoods(given: Mapping[str, Json]) -> dict[str, Json]:
    """Return the fields of a chat for log-probabilities, where they are to be included."""
    include, best = given.get("include") or [], given.get("top_logprobs")
    for one in include:
        if one != LOGPROBS:
            what = f"include has {one[:80]!r}, which is not made here"
            raise UnsupportedError(what, wanted=LOGPROBS, do="Leave it out")
    if best is not None and not include:
        raise RequestError("top_logprobs needs include", wanted=f"include [{LOGPROBS!r}] with it")
    return {"logprobs": True, "top_logprobs": best or 0} if include else {}


def _format(given: Json) -> dict[str, Json]:
    """Return the field of a chat that `text` stands for."""
    if given is None:
        return {}
    require_fields(given, "text", ("format", "verbosity"))
    if given.get("verbosity") is not None:
        raise UnsupportedError("text.verbosity is read by no model here", do="Leave it out")
    if (asked := given.get("format")) is None:
        return {}
    names = ("name", "schema", "strict", "description")
    require_fields(asked, "text.format", ("type", *names))
    if asked.get("type") == "json_schema":
        described = {name: asked[name] for name in names if name in asked}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    return {"response_format": {"type": asked.get("type")}}


# --- out ------------------------------------------------------------------------------------------


class ItemWriter:
    """Writes the parts of an answer as items, each opened, filled and closed in turn, as events.

    `items`: those that are closed.
    """

    def __init__(self, id: str) -> None:
        self._id = id
        self._kind: str | None = None
        self._item: dict[str, Json] = {}
        self._text = ""
        self._logprobs: list[Json] = []
        self._waiting: list[Json] = []
        self.items: list[dict[str, Json]] = []

    def write(self, event: DialogueEvent) -> Iterator[dict[str, Json]]:
        """Yield the events that a part adds."""
        match event:
            case Content():
                yield from self._into("message", {"role": "assistant", "content": []})
                known, self._waiting = self._waiting, []
                self._logprobs += known
                told = {"delta": event.text, "logprobs": known}
                yield self._delta("response.output_text.delta", event.text, told)
            case Thought():
                yield from self._into("reasoning", {"summary": [], "content": []})
                told = {"delta": event.text}
                yield self._delta("response.reasoning_text.delta", event.text, told)
            case CallBegin():
                yield from self.close()
                begun = {"call_id": event.id, "name": event.name, "arguments": ""}
                yield from self._into("function_call", begun)
            case CallArguments():
                name = "response.function_call_arguments.delta"
                yield self._delta(name, event.text, {"delta": event.text})
            case CallEnd():
                yield from self.close("completed" if event.complete else "incomplete")
            case _:
                return

    def note(self, known: Json, events: Sequence[DialogueEvent]) -> None:
        """Take the log-probability of a token, which belongs to the text that comes next."""
        if not any(isinstance(one, Thought | CallBegin | CallArguments) for one in events):
            self._waiting.append(known)

    def close(self, status: str = "completed") -> Iterator[dict[str, Json]]:
        """Yield the end of the open item."""
        if self._kind is None:
            return
        place = self._place
        if self._kind == "function_call":
            self._item["arguments"] = self._text
            done = {"arguments": self._text, "name": self._item["name"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        else:
            if self._kind == "message":  # tokens without a text of their own
                self._logprobs, self._waiting = [*self._logprobs, *self._waiting], []
            part, place = self._part(), {**place, "content_index": 0}
            said: dict[str, Json] = {"text": self._text}
            said |= {"logprobs": self._logprobs} if self._kind == "message" else {}
            yield {"type": f"response.{part['type']}.done", **place, **said}
            yield {"type": "response.content_part.done", **place, "part": part}
            self._item["content"] = [part]
        self._item["status"] = status
        self._kind = None
        number = len(self.items)
        self.items.append(self._item)
        yield {"type": "response.output_item.done", "output_index": number, "item": self._item}

    @property
    def _place(self) -> dict[str, Json]:
        return {"item_id": self._item["id"], "output_index": len(self.items)}

    def _part(self) -> dict[str, Json]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        about = {"annotations": [], "logprobs": self._logprobs}
        return {"type": "output_text", "text": self._text, **about}

    def _delta(self, name: str, text: str, told: Mapping[str, Json]) -> dict[str, Json]:
        self._text += text
        place = (
            self._place if self._kind == "function_call" else {**self._place, "content_index": 0}
        )
        return {"type": name, **place, **told}

    def _into(self, kind: str, empty: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
        if self._kind == kind:
            return
        yield from self.close()
        short = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._kind, self._text, self._logprobs = kind, "", []
        id = f"{short}_{self._id}_{len(self.items)}"
        self._item = {"id": id, "type": kind, "status": "in_progress", **empty}
        number = len(self.items)
        added = {**self._item}  # as it is now
        yield {"type": "response.output_item.added", "output_index": number, "item": added}
        if kind != "function_call":
            place = {**self._place, "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": self._part()}


class StreamedResponse:
    """An answer as the events of Responses' streams."""

    def __init__(self, wanted: Wanted, head: Head, kept: KeptResponses) -> None:
        self._wanted, self._head, self._kept = wanted, head, kept
        self._reader = AnswerReader(wanted)
        self._writer = ItemWriter(head.id.removeprefix("resp_"))
        self._spelled = Spelled(wanted.to.front.tokenizer)
        self._number = -1
        self.usage = self._reader.usage

    def opening(self) -> Iterator[dict[str, Json]]:
        """Yield the response without its output, twice, as clients expect."""
        for name in ("created", "in_progress"):
            about = {"response": self._shown("in_progress", [])}
            yield self._numbered({"type": f"response.{name}", **about})

    def begin(self, number: int, message: Begun) -> None:
        """Note which strings the text loses."""
        self._reader.begin(message)

    def row(self, number: int, row: RowNews) -> Iterator[dict[str, Json]]:
        """Yield the events of one row."""
        yield from self._written(row, self._reader.read(row))

    def end(self, number: int, message: Over) -> Iterator[dict[str, Json]]:
        """Yield what is left, and the end of the last item."""
        for row, events in self._reader.finish(message):
            yield from self._written(row, events)
        status = "incomplete" if self._cut else "completed"
        yield from map(self._numbered, self._writer.close(status))

    def closing(self) -> Iterator[dict[str, Json]]:
        """Yield the whole response."""
        name = "incomplete" if self._cut else "completed"
        yield self._numbered({"type": f"response.{name}", "response": self.whole()})

    def failing(self, text: str) -> Iterator[dict[str, Json]]:
        """Yield the response with the error that ends its stream."""
        about = self._shown("failed", self._writer.items)
        about["error"] = {"code": "server_error", "message": text[:2000]}
        yield self._numbered({"type": "response.failed", "response": about})

    def whole(self) -> dict[str, Json]:
        """Return the response, and keep it where that is wanted."""
        status = "incomplete" if self._cut else "completed"
        found = self._shown(status, self._writer.items)
        if self._wanted.said.get("store", True):
            messages = [*self._wanted.said["messages"], *_messages(self._writer.items)]
            self._kept.keep(self._wanted.caller, found, messages)
        return found

    @property
    def _cut(self) -> bool:
        return self._reader.kind in ("length", "time")

    def _written(self, row: RowNews, events: Sequence[DialogueEvent]) -> Iterator[dict[str, Json]]:
        if row.token >= 0 and row.logprob is not None and self._wanted.logprobs is not None:
            (known,) = self._spelled.of_chat([(row.token, row.logprob, row.top)])
            self._writer.note(known, events)
        for event in events:
            yield from map(self._numbered, self._writer.write(event))

    def _numbered(self, event: dict[str, Json]) -> dict[str, Json]:
        self._number += 1
        return {**event, "sequence_number": self._number}

    def _shown(self, status: str, output: list[dict[str, Json]]) -> dict[str, Json]:
        said, usage = self._wanted.said, self.usage
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reader.thought},
            "total_tokens": usage.prompt + usage.completion,
        }
        names = ("instructions", "max_output_tokens", "previous_response_id")
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "model": self._head.model,
            "output": [*output],
            **{name: said.get(name) for name in (*names, "temperature", "top_p", "reasoning")},
            "parallel_tool_calls": said.get("parallel_tool_calls", True),
            "tool_choice": said.get("tool_choice", "auto"),
            "tools": said.get("tools", []),
            "text": said.get("text", {"format": {"type": "text"}}),
            "truncation": "disabled",
            "store": said.get("store", True),
            "metadata": said.get("metadata", {}),
            "usage": None if status == "in_progress" else told,
        }


class WholeResponse:
    """An answer in one piece: what the events of its stream add up to."""

    def __init__(self, wanted: Wanted, head: Head, kept: KeptResponses) -> None:
        self._streamed = StreamedResponse(wanted, head, kept)
        self.usage = self._streamed.usage

    def begin(self, number: int, message: Begun) -> None:
        """Note which strings the text loses."""
        self._streamed.begin(number, message)

    def end(self, number: int, message: Over) -> None:
        """Take the results in."""
        for _ in self._streamed.end(number, message):
            pass

    def shown(self) -> dict[str, Json]:
        """Return the response."""
        return self._streamed.whole()
