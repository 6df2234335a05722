"""Anthropic's wire: messages of blocks come in, and answers of blocks go out, whole or as events.

A body is read as a conversation of `/v1/chat/completions` says it, so that both mean the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from everystep.dialogue import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    DialogueEvent,
    Thought,
    switches_thoughts,
    thoughts_apart,
)
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.server.answering import AnswerReader, Head
from everystep.server.asking import Addressee, Caller, FrontModel, Wanted, read_chat, read_messages
from everystep.server.exchange import HttpError, WireForm
from everystep.server.fields import Json, require_fields
from everystep.server.messages import Begun, Over, RowNews

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ENDS = {"length": "max_tokens", "time": "max_tokens"}
_OWN = {
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop_sequences",
    "enable_thinking": "thinking",
    "thinking_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "schema": "output_config.format",
}
"""Keywords of `generate` -> what a body of this wire calls them."""


def anthropic_error(error: HttpError, id: str) -> dict[str, Json]:
    """Return an error as Anthropic's clients read it."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    about = {"type": _ERROR_TYPES.get(error.status, usual), "message": str(error)[:2000]}
    return {"type": "error", "error": about, "request_id": id}


ANTHROPIC_FORM = WireForm(
    anthropic_error, anthropic_error, named=True, ping=b'event: ping\ndata: {"type":"ping"}\n\n'
)

_MEDIA = ("image/jpeg", "image/png", "image/webp")
"""What pictures are; an animated GIF would be several."""


# --- in -------------------------------------------------------------------------------------------


def read_message_body(given: Mapping[str, Json], to: Addressee, caller: Caller) -> Wanted:
    """Return what a body of /v1/messages asks for."""
    asked = _as_chat(given, to.front)
    asked["max_tokens"] = given["max_tokens"]
    if (stops := given.get("stop_sequences")) is not None:
        asked["stop"] = stops
    asked |= _format(given.get("output_config"), given)
    wanted = read_chat(asked, to, caller, fits=True, told_apart=True)
    return replace(wanted, renamed={**wanted.renamed, **_OWN})


def count_tokens(given: Mapping[str, Json], to: Addressee) -> int:
    """Return how many tokens the prompt of a body has."""
    return len(read_messages(_as_chat(given, to.front), to).ids)


def _as_chat(given: Mapping[str, Json], front: FrontModel) -> dict[str, Json]:
    """Return the fields of a chat that a body stands for, its own ones left out."""
    own = ("system", "stop_sequences", "thinking", "output_config", "tools", "tool_choice")
    asked = {name: value for name, value in given.items() if name not in own}
    messages = [*_messages(given["messages"])]
    if (system := given.get("system")) is not None:
        messages.insert(0, {"role": "system", "content": _text(system, "system")})
    asked["messages"] = messages
    if messages[-1]["role"] == "assistant":
        if messages[-1].keys() & {"tool_calls", "reasoning_content"}:
            raise RequestError(
                "the last message has more than a text to go on with",
                wanted="an assistant's text, or a user's message",
                do="Send the results of its calls after it",
            )
        asked["continue_final_message"] = True
    choice = _choice(given.get("tool_choice"))
    if tools := given.get("tools"):
        asked["tools"] = [_tool(one, f"tools[{place}]") for place, one in enumerate(tools)]
    if tools or choice.get("tool_choice") not in (None, "auto", "none"):
        asked |= choice
    asked |= _thinking(given.get("thinking"), front)
    return asked


def _text(given: Json, where: str) -> str:
    """Return the text of blocks of text."""
    if isinstance(given, str):
        return given
    texts = []
    for place, block in enumerate(given):
        at = f"{where}[{place}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise RequestError(f"{at}.type is impossible", wanted="text", got=shown(kind)[:40])
        require_fields(block, at, ("type", "text", "cache_control", "citations"))
        texts.append(block["text"])
    return "\n".join(texts)


def _messages(given: Sequence[Json]) -> Iterator[dict[str, Json]]:
    """Yield the messages that messages of blocks stand for, results of tools as ones of their
    own."""
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        require_fields(message, where, ("role", "content"))
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            wanted = "user, assistant, system"
            raise RequestError(f"{where}.role is impossible", wanted=wanted, got=shown(role)[:40])
        if not isinstance(content, str | list):
            got = type(content).__name__
            what = f"{where}.content is impossible"
            raise RequestError(what, wanted="a text or blocks", got=got)
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _said(content, f"{where}.content")
        elif role == "system":
            yield {"role": role, "content": _text(content, f"{where}.content")}
        else:
            yield from _asked(content, f"{where}.content")


def _asked(blocks: Sequence[Json], where: str) -> Iterator[dict[str, Json]]:
    """Yield the messages that a user's blocks stand for."""
    parts: list[Json] = []
    for place, block in enumerate(blocks):
        at, kind = f"{where}[{place}]", block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            if parts:
                yield {"role": "user", "content": parts}
                parts = []
            yield _result(block, at)
        elif kind == "text":
            parts.append({"type": "text", "text": _text([block], at)})
        elif kind == "image":
            parts.append(_image(block, at))
        else:
            wanted = "text, image, tool_result"
            raise RequestError(f"{at}.type is impossible", wanted=wanted, got=shown(kind)[:40])
    if parts:
        yield {"role": "user", "content": parts}


def _image(block: Mapping[str, Json], where: str) -> dict[str, Json]:
    """Return the part of a chat that a block with a picture stands for."""
    require_fields(block, where, ("type", "source", "cache_control"))
    at = f"{where}.source"
    source = require_fields(block.get("source"), at, ("type", "media_type", "data", "url"))
    media, data = source.get("media_type"), source.get("data")
    if source.get("type") != "base64" or "url" in source:
        wanted, got = "type base64, with media_type and data", shown(source.get("type"))[:40]
        do = "Send the picture itself: nothing is fetched"
        raise RequestError(f"{at}.type is impossible", wanted=wanted, got=got, do=do)
    if media not in _MEDIA or not isinstance(data, str):
        what, wanted = f"{at}.media_type is impossible", f"{', '.join(_MEDIA)}, with data"
        raise RequestError(what, wanted=wanted, got=shown(media)[:40])
    return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}


def _result(block: Mapping[str, Json], where: str) -> dict[str, Json]:
    """Return the message of a tool's result; what failed says so first."""
    require_fields(block, where, ("type", "tool_use_id", "content", "is_error", "cache_control"))
    if not isinstance(block.get("tool_use_id"), str):
        raise RequestError(f"{where}.tool_use_id is missing", wanted="the id of the call")
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise RequestError(f"{where}.content is impossible", wanted="a text or blocks")
    said = "" if content is None else _text(content, f"{where}.content")
    said = f"Error: {said}" if block.get("is_error") else said
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": said}


def _said(blocks: Sequence[Json], where: str) -> dict[str, Json]:
    """Return the message that an assistant's blocks stand for."""
    texts, thoughts, calls = list[str](), list[str](), list[Json]()
    for place, block in enumerate(blocks):
        at, kind = f"{where}[{place}]", block.get("type") if isinstance(block, dict) else None
        match kind:
            case "text":
                texts.append(_text([block], at))
            case "thinking" if isinstance(block.get("thinking"), str):
                require_fields(block, at, ("type", "thinking", "signature"))
                thoughts.append(block["thinking"])
            case "tool_use" if isinstance(block.get("input"), dict):
                require_fields(
                    block, at, ("type", "id", "name", "input", "caller", "cache_control")
                )
                arguments = json.dumps(block["input"], ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                wanted = "text, thinking, tool_use with an object as input"
                raise RequestError(f"{at}.type is impossible", wanted=wanted, got=shown(kind)[:40])
    message: dict[str, Json] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(given: Json, where: str) -> dict[str, Json]:
    """Return a tool as chats have it; UnsupportedError for one that a server would run."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in (None, "custom"):
        what = f"{where}.type is a tool that the server would run"
        raise UnsupportedError(what, wanted="custom", got=shown(kind)[:40], do="Leave it out")
    known = ("type", "name", "description", "input_schema", "strict")
    require_fields(given, where, (*known, "cache_control", "eager_input_streaming"))
    if not isinstance(given.get("input_schema"), dict):
        raise RequestError(f"{where}.input_schema is missing", wanted="a JSON schema of an object")
    names = ("name", "description", "input_schema", "strict")  # in the order that is usual
    told = {one: given[one] for one in names if given.get(one) is not None}
    function = {("parameters" if name == "input_schema" else name): told[name] for name in told}
    return {"type": "function", "function": function}


def _choice(given: Json) -> dict[str, Json]:
    """Return the fields of a chat that a `tool_choice` stands for."""
    if given is None:
        return {}
    require_fields(given, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    kind, name, single = (given.get(one) for one in ("type", "name", "disable_parallel_tool_use"))
    modes: Mapping[Json, Json] = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool" and isinstance(name, str):
        chosen: Json = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in modes and name is None:
        chosen = modes[kind]
    else:
        wanted = "type auto, any, none, or tool with a name"
        raise RequestError("tool_choice is impossible", wanted=wanted, got=shown(given)[:80])
    if single is not None and not isinstance(single, bool):
        what = "tool_choice.disable_parallel_tool_use is impossible"
        raise RequestError(what, wanted="true or false", got=shown(single)[:40])
    return {"tool_choice": chosen} | ({"parallel_tool_calls": not single} if single else {})


def _thinking(given: Json, front: FrontModel) -> dict[str, Json]:
    """Return the fields of a chat that `thinking` stands for."""
    if given is None:
        return {}
    require_fields(given, "thinking", ("type", "budget_tokens", "display"))
    kind, budget = given.get("type"), given.get("budget_tokens")
    if given.get("display") not in (None, "summarized"):
        wanted, got = "summarized: thoughts are told", shown(given["display"])[:40]
        raise RequestError("thinking.display is impossible", wanted=wanted, got=got)
    if kind not in ("enabled", "adaptive", "disabled"):
        wanted = "enabled, adaptive, disabled"
        raise RequestError("thinking.type is impossible", wanted=wanted, got=shown(kind)[:40])
    if (kind == "enabled") != (budget is not None):
        what = "thinking.budget_tokens belongs to enabled thoughts, which have one"
        raise RequestError(what, got=shown(given)[:80])
    switches = switches_thoughts(front.tokenizer)
    thinks = thoughts_apart(front.tokenizer) is not None
    if kind == "enabled" and not thinks:
        raise UnsupportedError(
            "thinking.budget_tokens has no effect: the chat template knows no thoughts",
            do="Leave thinking out, or ask a model that thinks",
        )
    if kind == "enabled":
        return {"thinking_budget": budget} | ({"enable_thinking": True} if switches else {})
    if kind == "disabled" and (thinks or switches):
        return {"enable_thinking": False}
    return {}


def _format(given: Json, body: Mapping[str, Json]) -> dict[str, Json]:
    """Return the keyword that an `output_config` stands for."""
    if given is None:
        return {}
    require_fields(given, "output_config", ("format", "effort"))
    if given.get("effort") is not None:
        raise UnsupportedError("output_config.effort is read by no model here", do="Leave it out")
    if (asked := given.get("format")) is None:
        return {}
    require_fields(asked, "output_config.format", ("type", "schema"))
    if asked.get("type") != "json_schema" or not isinstance(asked.get("schema"), dict):
        wanted = "type json_schema, with an object as schema"
        raise RequestError("output_config.format is impossible", wanted=wanted)
    for name in ("schema", "regex", "grammar", "choices"):
        if body.get(name) is not None:
            raise RequestError(f"output_config.format contradicts {name}", do="Leave one out")
    return {"schema": asked["schema"]}


# --- out ------------------------------------------------------------------------------------------


class BlockWriter:
    """Writes the parts of an answer as events of blocks, which are opened and closed in turn."""

    def __init__(self) -> None:
        self._place = -1
        self._open: str | None = None
        self._thought = ""
        self.called = False

    def write(self, event: DialogueEvent) -> Iterator[dict[str, Json]]:
        """Yield the events that a part adds."""
        match event:
            case Content():
                yield from self._into("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": event.text})
            case Thought():
                yield from self._into("thinking", {"thinking": "", "signature": ""})
                self._thought += event.text
                yield self._delta({"type": "thinking_delta", "thinking": event.text})
            case CallBegin():
                yield from self.close()
                self.called = True
                begun = {"id": event.id, "name": event.name, "input": {}}
                yield from self._into("tool_use", begun)
            case CallArguments():
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            case CallEnd():
                yield from self.close()
            case _:
                return

    def close(self) -> Iterator[dict[str, Json]]:
        """Yield the end of the open block; a thought's is signed with its digest."""
        if self._open is None:
            return
        if self._open == "thinking":
            signature = hashlib.sha256(self._thought.encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": signature})
            self._thought = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._place}

    def _into(self, kind: str, empty: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
        if self._open == kind:
            return
        yield from self.close()
        self._open, self._place = kind, self._place + 1
        block = {"type": kind, **empty}
        yield {"type": "content_block_start", "index": self._place, "content_block": block}

    def _delta(self, delta: Mapping[str, Json]) -> dict[str, Json]:
        return {"type": "content_block_delta", "index": self._place, "delta": delta}


class StreamedMessage:
    """An answer as the events of Anthropic's streams."""

    def __init__(self, wanted: Wanted, head: Head) -> None:
        self._wanted, self._head = wanted, head
        self._reader = AnswerReader(wanted)
        self._blocks = BlockWriter()
        self.usage = self._reader.usage

    def opening(self) -> Iterator[dict[str, Json]]:
        """Yield the message without its content."""
        yield {"type": "message_start", "message": self.message([])}

    def begin(self, number: int, message: Begun) -> None:
        """Note which strings the text loses."""
        self._reader.begin(message)

    def row(self, number: int, row: RowNews) -> Iterator[dict[str, Json]]:
        """Yield the events of one row."""
        for event in self._reader.read(row):
            yield from self._blocks.write(event)

    def end(self, number: int, message: Over) -> Iterator[dict[str, Json]]:
        """Yield what is left, and the end of the last block."""
        for _, events in self._reader.finish(message):
            for event in events:
                yield from self._blocks.write(event)
        yield from self._blocks.close()

    def closing(self) -> Iterator[dict[str, Json]]:
        """Yield how the message ended, and its end."""
        usage = self.shown_usage()
        yield {"type": "message_delta", "delta": self.ended(), "usage": usage}
        yield {"type": "message_stop"}

    def failing(self, text: str) -> Iterator[dict[str, Json]]:
        """Yield nothing: the error says it."""
        return iter(())

    def ended(self) -> dict[str, Json]:
        """Return how the message ended."""
        kind, matched = self._reader.kind or "", self._reader.matched
        why = _ENDS.get(kind, "end_turn")
        if why == "max_tokens" and kind == "length" and self._wanted.cut:
            why = "model_context_window_exceeded"
        elif why == "end_turn" and isinstance(matched, str):
            why = "stop_sequence"
        elif why == "end_turn" and self._blocks.called:
            why = "tool_use"
        return {"stop_reason": why, "stop_sequence": matched if why == "stop_sequence" else None}

    def message(self, content: list[Json]) -> dict[str, Json]:
        """Return the message with this content, its end not told."""
        about = {"id": self._head.id, "type": "message", "role": "assistant"}
        ended = {"stop_reason": None, "stop_sequence": None}
        model = {"model": self._head.model, "content": content}
        return {**about, **model, **ended, "usage": self.shown_usage()}

    def shown_usage(self) -> dict[str, Json]:
        """Return the tokens as this wire counts them: cached ones are not among those of input."""
        return {
            "input_tokens": self.usage.prompt - self.usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.usage.cached,
            "output_tokens": self.usage.completion,
        }


class WholeMessage:
    """An answer in one piece: what the events of its stream add up to."""

    def __init__(self, wanted: Wanted, head: Head) -> None:
        self._streamed = StreamedMessage(wanted, head)
        self._blocks: list[dict[str, Json]] = []
        self.usage = self._streamed.usage

    def begin(self, number: int, message: Begun) -> None:
        """Note which strings the text loses."""
        self._streamed.begin(number, message)

    def end(self, number: int, message: Over) -> None:
        """Take the results in."""
        pieces: list[str] = []
        for event in self._streamed.end(number, message):
            match event["type"]:
                case "content_block_start":
                    self._blocks.append({**event["content_block"]})
                    pieces = []
                case "content_block_delta":
                    self._add(event["delta"], pieces)
                case _ if self._blocks[-1]["type"] == "tool_use":
                    self._blocks[-1]["input"] = _arguments("".join(pieces))

    def _add(self, delta: Mapping[str, Json], pieces: list[str]) -> None:
        block = self._blocks[-1]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case _:
                pieces.append(delta["partial_json"])

    def shown(self) -> dict[str, Json]:
        """Return the message."""
        return self._streamed.message([*self._blocks]) | self._streamed.ended()


def _arguments(text: str) -> dict[str, Json]:
    """Return the arguments of a call; none of one that was cut, whose message says so."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
