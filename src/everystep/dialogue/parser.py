"""A model's text to calls, thoughts and content, while it comes.

The parser is one reader that asks for more text where it cannot go on, so that pieces are divided
as they happen to come and nothing depends on it. What may become a call is held back until its name
is known, 65,536 characters at most; from then on it is a call, whose arguments are given out as
they come. What turns out to be none is content, letter by letter.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Sequence
from typing import Any

from everystep.dialogue.dialects import (
    CHANNEL_ENDS,
    Braced,
    Channels,
    Dialect,
    JsonObjects,
    Named,
    Pythonic,
    Tagged,
)
from everystep.dialogue.json_scanner import JsonScanner
from everystep.dialogue.parsed import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    DialogueEvent,
    Finish,
    Markup,
    Thought,
)
from everystep.dialogue.reader import MOST_HELD, NONE, Reader
from everystep.dialogue.tools import Tool
from everystep.dialogue.values import TEXT, ValueReader, as_json
from everystep.errors import RequestError

Step = Generator[None, None, None]
Place = Generator[None, None, int]
_MOST_BLANKS = 64
_BEFORE = rf"[ \t\r\n]{{0,{_MOST_BLANKS}}}"
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Parser:
    """Follows one answer of a model.

    `tools`: those of the call, by whose schemas values are read that a form writes without quotes.
    `thinks`: the prompt ends where a thought has begun. `key`: from it and a call's number comes
    the call's id, so that the same answer has the same ids.
    """

    def __init__(
        self, dialect: Dialect, tools: Sequence[Tool] = (), *, thinks: bool = False, key: str = ""
    ) -> None:
        self._dialect = dialect
        self._tools = {tool.name: tool for tool in tools}
        self._key = key
        self._calls = 0
        self._events: list[DialogueEvent] = []
        self._reader = Reader()
        self._open = True
        self._running = self._answer(thinks)
        next(self._running, None)

    def feed(self, text: str) -> tuple[DialogueEvent, ...]:
        """Return what a further piece of text says; RequestError after the end."""
        if not self._open:
            raise RequestError("the parser is closed", do="Make a new one for another answer")
        self._reader.add(text)
        next(self._running, None)
        return self._taken()

    def close(self) -> tuple[DialogueEvent, ...]:
        """Return what was held back, and the end; nothing the second time."""
        if not self._open:
            return ()
        self._open = False
        self._reader.ended = True
        next(self._running, None)
        self._events.append(Finish(self._calls))
        return self._taken()

    def _taken(self) -> tuple[DialogueEvent, ...]:
        found, self._events = _joined(self._events), []
        return tuple(found)

    # --- an answer --------------------------------------------------------------------------------

    def _answer(self, thinks: bool) -> Step:
        dialect = self._dialect
        if isinstance(dialect.form, Channels):
            return (yield from self._messages())
        opening = None if dialect.thoughts is None else dialect.thoughts.opening
        if thinks or (opening is not None and (yield from self._begins(opening))):
            yield from self._thought()
        if dialect.bare:
            yield from self._calls_from((yield from self._reader.blanks(0)))
        yield from self._body()

    def _begins(self, mark: str) -> Generator[None, None, bool]:
        """Take a mark in, and the blanks before it, if the text goes on with it."""
        place = yield from self._reader.mark(0, mark)
        if place > NONE:
            self._events.append(Markup(self._reader.take(place)))
        return place > NONE

    def _body(self) -> Step:
        """Read content, and the thoughts and calls in it, until the text ends."""
        thoughts, first = self._dialect.thoughts, self._first
        marks = [first] if first else []
        anywhere = thoughts.opening.strip() if thoughts and thoughts.anywhere else ""
        marks += [anywhere] if anywhere else []
        found = "|".join(map(re.escape, marks)) or "(?!)"
        opener = re.compile(f"({_BEFORE})({found})")
        while (match := (yield from self._content(opener, marks))) is not None:
            blanks, mark = match
            if mark == anywhere:
                self._events.append(Markup(self._reader.take(len(blanks) + len(mark))))
                yield from self._thought()
            elif not (yield from self._calls_from(len(blanks))):
                self._say(self._reader.take(len(blanks) + len(mark)))

    @property
    def _first(self) -> str:
        """The text that calls begin with."""
        dialect, form = self._dialect, self._dialect.form
        before = form.before if isinstance(form, Named | Tagged) else ""
        return (dialect.section[0] or dialect.opening or before).strip()

    def _content(
        self, opener: re.Pattern[str], marks: Sequence[str]
    ) -> Generator[None, None, tuple[str, str] | None]:
        """Give content out up to a mark, and return the blanks before it and the mark; None where
        the text ends."""
        reader = self._reader
        while True:
            match = opener.search(reader.text, reader.at)
            if match is not None:
                self._say(reader.take(match.start() - reader.at))
                return match[1], match[2]
            kept = 0 if reader.ended else reader.tail(marks, _MOST_BLANKS)
            self._say(reader.take(len(reader.text) - reader.at - kept))
            if reader.ended:
                return None
            yield

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Content(text, text))

    def _thought(self) -> Step:
        """Read a thought that has begun, up to its closing mark and the blanks after it."""
        reader, thoughts = self._reader, self._dialect.thoughts
        closing = thoughts.closing.strip() if thoughts else ""
        place = yield from reader.blanks(0, _MOST_BLANKS)
        self._mark(place)
        opener = re.compile(f"({_BEFORE})({re.escape(closing)})")
        while True:
            match = opener.search(reader.text, reader.at)
            end = match.start() if match else len(reader.text)
            kept = 0 if match or reader.ended else reader.tail([closing], _MOST_BLANKS)
            if text := reader.take(end - kept - reader.at):
                self._events.append(Thought(text, text))
            if match is not None:
                break
            if reader.ended:
                return
            yield
        self._mark(len(match[0]))
        self._mark((yield from reader.blanks(0, _MOST_BLANKS)))

    def _mark(self, length: int) -> None:
        if length:
            self._events.append(Markup(self._reader.take(length)))

    # --- calls ------------------------------------------------------------------------------------

    def _calls_from(self, place: int) -> Generator[None, None, bool]:
        """Read all calls that begin at a place, with what stands around them; False where there is
        none, and nothing was taken."""
        reader, dialect, before = self._reader, self._dialect, self._calls
        if dialect.form is None:
            return False
        begin = dialect.section[0] or dialect.opening
        after = yield from reader.mark(place, begin)
        if after == NONE:
            if not dialect.bare:
                return False
            after = place
        if dialect.section[0]:
            yield from self._section(after)
        elif isinstance(dialect.form, Pythonic) or _is_listed(dialect):
            yield from self._list(after)
        elif isinstance(dialect.form, JsonObjects) and dialect.bare:
            yield from self._separated(after)
        else:
            yield from self._call(after, dialect.closing)
        if self._calls > before:
            self._mark((yield from reader.blanks(0, _MOST_BLANKS)))
        return self._calls > before

    def _section(self, place: int) -> Step:
        """Read calls that stand in a section, each with marks of its own, if it has some."""
        dialect, reader = self._dialect, self._reader
        while True:
            place = yield from reader.mark(place, dialect.opening)
            if place == NONE or not (yield from self._call(place, dialect.closing)):
                break
            place = 0
        if self._calls:
            self._mark((yield from self._ending(dialect.section[1])))

    def _list(self, place: int) -> Step:
        """Read calls that stand in brackets."""
        reader, before = self._reader, self._calls
        place = yield from reader.mark(place, "[")
        while place != NONE and (yield from self._call(place, "")):
            place = yield from reader.mark(0, ",")
        if self._calls > before:
            self._mark((yield from self._ending(f"] {self._dialect.closing}")))

    def _separated(self, place: int) -> Step:
        """Read objects that stand side by side, with marks between them."""
        reader, between = self._reader, (self._dialect.parallel or "").strip()
        while (yield from self._call(place, self._dialect.closing)):
            place = yield from reader.mark(0, between)
            if place == NONE:
                return

    def _ending(self, mark: str) -> Place:
        """Return the length of a mark that ends something, as far as the text holds it before it
        ends itself; 0 if something else comes."""
        reader = self._reader
        place = yield from reader.mark(0, mark)
        if place != NONE:
            return place
        return len(reader.text) - reader.at if reader.short else 0

    def _call(self, place: int, closing: str) -> Generator[None, None, bool]:
        """Read one call from a place on, with its closing mark."""
        match self._dialect.form:
            case JsonObjects() as objects:
                return (yield from self._object(place, objects, closing))
            case Named() as named:
                return (yield from self._named(place, named, closing))
            case Tagged() as tagged:
                return (yield from self._tagged(place, tagged, closing))
            case Pythonic():
                return (yield from self._written(place, closing, ValueReader(self._reader)))
            case Braced(quote):
                values = ValueReader(self._reader, quote)
                return (yield from self._written(place, closing, values))
        return False

    def _begin(self, place: int, name: str, id: str | None = None) -> bool:
        """Begin a call with what stands before a place; False where too much was held for it, or
        where a bare one has a name that no tool has."""
        dialect = self._dialect
        if place > MOST_HELD or not name or (dialect.bare and name not in self._tools):
            return False
        index = self._calls
        self._calls += 1
        raw = self._reader.take(place)
        self._events.append(CallBegin(index, id or self._id(index, name), name, raw))
        return True

    def _id(self, index: int, name: str) -> str:
        """Return the id of a call, which follows from the key and the call's number."""
        if self._dialect.identity == "counted":
            return f"functions.{name}:{index}"
        digest = hashlib.sha256(f"{self._key}/{index}".encode()).hexdigest()
        if self._dialect.identity == "call":
            return f"call_{digest[:24]}"
        number = int(digest, 16)
        return "".join(_LETTERS[number // 62**place % 62] for place in range(9))

    def _argue(self, text: str, raw: str) -> None:
        if text or raw:
            self._events.append(CallArguments(self._calls - 1, text, raw))

    def _end(self, raw: str, *, complete: bool) -> None:
        self._events.append(CallEnd(self._calls - 1, complete, raw))

    # --- calls in JSON ----------------------------------------------------------------------------

    def _object(self, place: int, form: JsonObjects, closing: str) -> Generator[None, None, bool]:
        """Read an object with a name and arguments, in either order."""
        reader = self._reader
        name, held = "", ""
        place = yield from reader.mark(place, "{")
        while place != NONE:
            place, key = yield from reader.string(place)
            if place == NONE:
                return False
            place = yield from reader.mark(place, ":")
            if place == NONE:
                return False
            start = yield from reader.blanks(place)
            if key == form.name:
                place, name = yield from reader.string(start)
            elif key in (form.arguments, "arguments", "parameters") and name:
                if (yield from reader.letter(start)) not in '{"' or not self._begin(start, name):
                    return False
                yield from self._json_arguments(f"}} {closing}", more_keys=True)
                return True
            else:
                place = yield from self._value(start)
                if key in (form.arguments, "arguments", "parameters") and place != NONE:
                    held = reader.peek(start, place)
            if place == NONE:
                return False
            following = yield from reader.mark(place, ",")
            if following == NONE:
                break
            place = following
        return (yield from self._whole_object(place, name, held, closing))

    def _whole_object(
        self, place: int, name: str, held: str, closing: str
    ) -> Generator[None, None, bool]:
        """Read the end of an object whose name stood behind its arguments, or that has none."""
        place = NONE if place == NONE else (yield from self._reader.mark(place, "}"))
        text = _unquoted(held) if held else "{}"
        if place == NONE or not name or text[:1] != "{" or not self._begin(place, name):
            return False
        self._events.append(CallArguments(self._calls - 1, text, ""))
        ending = yield from self._ending(closing)
        self._end(self._reader.take(ending), complete=_is_object(text))
        return True

    def _value(self, place: int) -> Place:
        """Return the place behind a JSON value, NONE where there is none."""
        scanner, reader = JsonScanner(), self._reader
        while True:
            place = scanner.feed(reader.text, reader.at + place, reader.limit) - reader.at
            if scanner.done:
                return place
            if scanner.broken or not (yield from reader.more(place)):
                return NONE

    def _json_arguments(self, ending: str, *, more_keys: bool = False) -> Step:
        """Give out a JSON value as it comes, and end the call with its ending."""
        reader = self._reader
        if (yield from reader.letter(0)) == '"':
            place = yield from self._value(0)
            if place != NONE and place <= MOST_HELD:
                raw = reader.take(place)
                text = _unquoted(raw)
                self._argue(text, raw)
                return (yield from self._close_json(ending, _is_object(text), more_keys))
        scanner = JsonScanner()
        while True:
            end = scanner.feed(reader.text, reader.at)
            piece = reader.take(end - reader.at)
            self._argue(piece, piece)
            if scanner.done or scanner.broken or reader.ended:
                break
            yield
        mark = ending.removeprefix("}").strip()
        if scanner.broken and mark:
            yield from self._raw_until(mark.split()[0])
        yield from self._close_json(ending, scanner.done and scanner.strict, more_keys)

    def _close_json(self, ending: str, complete: bool, more_keys: bool) -> Step:
        """End a call whose arguments are over, with what else stands in its object."""
        reader, place = self._reader, 0
        while more_keys:
            following = yield from reader.mark(place, ",")
            if following == NONE:
                break
            following, _ = yield from reader.string(following)
            following = NONE if following == NONE else (yield from reader.mark(following, ":"))
            following = NONE if following == NONE else (yield from self._value(following))
            if following == NONE:
                break
            place = following
        short = reader.short
        end = yield from reader.mark(place, ending)
        if end == NONE:
            after = yield from reader.mark(0, ending.removeprefix("}").strip())
            left = len(reader.text) - reader.at
            end = left if reader.short or short else max(after, 0) if ending.strip("} ") else 0
        self._end(reader.take(end if end <= MOST_HELD else 0), complete=complete)

    def _raw_until(self, mark: str) -> Step:
        """Give out what the model wrote in place of JSON, up to a mark."""
        reader = self._reader
        while (end := reader.text.find(mark, reader.at)) < 0:
            kept = 0 if reader.ended else reader.tail([mark], 0)
            piece = reader.take(len(reader.text) - reader.at - kept)
            self._argue(piece, piece)
            if reader.ended:
                return
            yield
        piece = reader.take(end - reader.at)
        self._argue(piece, piece)

    def _named(self, place: int, form: Named, closing: str) -> Generator[None, None, bool]:
        """Read a name and the object after it."""
        reader = self._reader
        start = place = yield from reader.mark(place, form.before)
        if place == NONE:
            return False
        start = yield from reader.blanks(place)
        place = yield from reader.name(start, ":" if form.counted else "")
        name, id = reader.peek(start, max(place, start)), None
        if form.counted:
            number = yield from reader.mark(place, ":")
            place = NONE if number == NONE else (yield from reader.name(number))
            id = f"{form.before}{name}:{reader.peek(number, max(place, number))}"
        elif form.identity:
            after = yield from reader.mark(place, form.identity)
            if after != NONE:
                place = yield from reader.name(after)
                id = reader.peek(after, max(place, after))
        if place == NONE:
            return False
        following = yield from reader.mark(place, form.between)
        if following != NONE or form.identity:  # an early version has no mark before its arguments
            place = place if following == NONE else following
            place = yield from reader.blanks(place)
            if (yield from reader.letter(place)) in '{"' and self._begin(place, name, id):
                yield from self._json_arguments(f"{form.after} {closing}")
                return True
        return False

    # --- calls in other syntax --------------------------------------------------------------------

    def _tagged(self, place: int, form: Tagged, closing: str) -> Generator[None, None, bool]:
        """Read a name and parameters between tags, whose values become JSON."""
        reader = self._reader
        place = yield from reader.mark(place, form.before)
        if place == NONE:
            return False
        start = yield from reader.blanks(place)
        end = yield from reader.name(start)
        name = reader.peek(start, max(end, start))
        place = NONE if end == NONE else (yield from reader.mark(end, form.named))
        if place == NONE or not self._begin(place, name):
            return False
        tool, between = self._tools.get(name), "{"
        while True:
            place = yield from reader.mark(0, form.key)
            if place == NONE:
                break
            start = yield from reader.blanks(place)
            end = yield from reader.name(start)
            key = reader.peek(start, max(end, start))
            keyed, plain = (yield from self._keyed(end, form)) if end != NONE else (NONE, None)
            if keyed == NONE:
                break
            self._argue(f"{between}{json.dumps(key, ensure_ascii=False)}: ", reader.take(keyed))
            kinds = None if tool is None else tool.kinds(key)
            if plain is not None:
                kinds = TEXT if plain else None
            if not (yield from self._tag_value(form, kinds)):
                return (yield from self._cut(closing))
            between = ", "
        ending = f"{form.after} {closing}"
        place = yield from reader.mark(0, ending)
        if place != NONE or reader.short:
            place = place if place != NONE else len(reader.text) - reader.at
            self._argue("{}" if between == "{" else "}", "")
            self._end(reader.take(place), complete=True)
            return True
        return (yield from self._cut(closing))

    def _cut(self, closing: str) -> Generator[None, None, bool]:
        """End a call that was left in the midst of its parameters."""
        place = yield from self._ending(closing)
        self._end(self._reader.take(place), complete=False)
        return True

    def _keyed(self, place: int, form: Tagged) -> Generator[None, None, tuple[int, bool | None]]:
        """Return the place where a value begins, and whether it is said to be a text."""
        reader = self._reader
        found = yield from reader.mark(place, form.keyed)
        plain: bool | None = True if form.keyed_json else None
        if found == NONE and form.keyed_json:
            found, plain = (yield from reader.mark(place, form.keyed_json)), False
        if (
            found != NONE
            and form.keyed.endswith("\n")
            and (yield from reader.letter(found)) == "\n"
        ):
            found += 1
        return found, plain

    def _tag_value(self, form: Tagged, kinds: frozenset[str] | None) -> Generator[None, None, bool]:
        """Read a value up to its closing tag, as JSON; False where the text ends before it."""
        reader, closing = self._reader, form.valued.strip()
        lines = "\n" if form.valued.startswith("\n") else ""
        held, held_raw, streams = "", "", kinds == TEXT
        if streams:
            self._argue('"', "")
        while True:
            end = reader.text.find(closing, reader.at)
            over = end >= 0
            kept = 0 if over or reader.ended else reader.tail([closing], len(lines), lines)
            piece = reader.take((end if over else len(reader.text) - kept) - reader.at)
            if over and lines and piece.endswith("\n"):
                piece, rest = piece[:-1], "\n"
            else:
                rest = ""
            if streams:
                self._argue(json.dumps(piece, ensure_ascii=False)[1:-1], piece)
            else:
                held, held_raw = held + piece, held_raw + piece
                if len(held) > MOST_HELD:  # so long a value is a text
                    self._argue('"' + json.dumps(held, ensure_ascii=False)[1:-1], held_raw)
                    held, held_raw, streams = "", "", True
            if over:
                raw = rest + reader.take(len(closing))
                self._argue('"' if streams else as_json(held, kinds), "" if streams else held_raw)
                self._argue("", raw)
                return True
            if reader.ended:
                self._argue("", held_raw)
                return False
            yield

    def _written(
        self, place: int, closing: str, values: ValueReader
    ) -> Generator[None, None, bool]:
        """Read a call in the syntax of a language, which is held back until it has ended."""
        place, name, text = yield from values.call(place)
        if place == NONE or not self._begin(place, name):
            return False
        self._argue(text, "")
        ending = yield from self._ending(closing)
        self._end(self._reader.take(ending), complete=True)
        return True

    # --- channels ---------------------------------------------------------------------------------

    def _messages(self) -> Step:
        """Read messages, each with a header that says what it is."""
        reader, marks = self._reader, ("<|start|>", "<|channel|>")
        while not (reader.ended and reader.at == len(reader.text)):
            if (header := (yield from self._header())) is not None:
                yield from self._message(*header)
                continue
            mark = next((one for one in marks if reader.starts(one)), "")
            self._say(reader.take(len(mark)))
            while (text := (yield from reader.until_any(marks))) is not None:
                self._say(text)

    def _header(self) -> Generator[None, None, tuple[str, str] | None]:
        """Take a header in and return its channel and who is called; None where there is none."""
        reader, called, channel = self._reader, "", ""
        begun, place = yield from self._optional(0, "<|start|>")
        _, place = yield from self._optional(place, "assistant")
        place = yield from reader.blanks(place, _MOST_BLANKS)
        place, called = yield from self._called(place)
        says, place = yield from self._optional(place, "<|channel|>")
        if says:
            place, channel = yield from self._word(place)
            place, late = yield from self._called(place)
            called = called or late
            _, place = yield from self._optional(place, "<|constrain|>")
            place, _ = yield from self._word(place)
        place = yield from reader.literal(place, "<|message|>")
        if place == NONE or not (begun or says or called):
            return None
        called = "" if called == "assistant" else called
        if not called:
            self._mark(place)
        elif not self._begin(place, called.removeprefix("functions.")):
            return None
        return channel, called

    def _optional(self, place: int, mark: str) -> Generator[None, None, tuple[bool, int]]:
        """Return whether a mark stands at a place, and the place behind it if it does."""
        found = yield from self._reader.literal(place, mark)
        return found != NONE, place if found == NONE else found

    def _called(self, place: int) -> Generator[None, None, tuple[int, str]]:
        """Return the place behind who is called, and that; nothing where nobody is."""
        to, place = yield from self._optional(place, "to=")
        return (yield from self._word(place)) if to else (place, "")

    def _word(self, place: int) -> Generator[None, None, tuple[int, str]]:
        """Return the place behind a word and the blanks around it, and the word, perhaps empty."""
        reader = self._reader
        start = yield from reader.blanks(place, _MOST_BLANKS)
        if (yield from reader.starts_at(start, "to=")):
            return start, ""
        end = yield from reader.name(start)
        word = reader.peek(start, max(end, start))
        return (yield from reader.blanks(max(end, start), _MOST_BLANKS)), word

    def _message(self, channel: str, called: str) -> Step:
        """Read what a message says, and its end."""
        reader, scanner = self._reader, JsonScanner()
        while (text := (yield from reader.until_any(CHANNEL_ENDS))) is not None:
            if called:
                self._argue(text, text)
                read = scanner.feed(text, 0)
                if scanner.done and text[read:].strip():
                    scanner.strict = False
            elif channel == "analysis":
                self._events.append(Thought(text, text))
            else:
                self._say(text)
        ends = next((e for e in CHANNEL_ENDS[:3] if reader.starts(e)), "")
        if called:
            self._end(reader.take(len(ends)), complete=scanner.done and scanner.strict)
        else:
            self._mark(len(ends))


def _is_listed(dialect: Dialect) -> bool:
    return isinstance(dialect.form, JsonObjects) and dialect.form.listed


def _unquoted(text: str) -> str:
    """Return the text that a JSON string holds, or any other value as it stands."""
    if text[:1] != '"':
        return text
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return text
    return str(found)


def _is_object(text: str) -> bool:
    scanner = JsonScanner()
    end = scanner.feed(text, 0)
    return scanner.done and scanner.strict and text[:1] == "{" and not text[end:].strip()


def _joined(events: Sequence[DialogueEvent]) -> list[DialogueEvent]:
    """Return the events with neighbours of one kind made one."""
    found: list[DialogueEvent] = []
    group: list[Any] = []
    for one in [*events, None]:
        if group and (type(one) is not type(group[0]) or isinstance(one, CallBegin | CallEnd)):
            found.append(_one_of(group))
            group = []
        if one is not None:
            group.append(one)
    return found


def _one_of(group: Sequence[Any]) -> DialogueEvent:
    first, raw = group[0], "".join(one.raw for one in group)
    if len(group) == 1:
        return first
    if isinstance(first, Markup):
        return Markup(raw)
    text = "".join(one.text for one in group)
    if isinstance(first, CallArguments):
        return CallArguments(first.index, text, raw)
    return Content(text, raw) if isinstance(first, Content) else Thought(text, raw)
