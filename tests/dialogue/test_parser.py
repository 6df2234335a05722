"""The parser: the same events however a text is divided, nothing lost, and little held."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from everystep.dialogue import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Finish,
    Markup,
    Parser,
    Thought,
    written,
)
from everystep.dialogue.dialects import ROWS, Dialect
from everystep.dialogue.json_scanner import JsonScanner
from everystep.dialogue.reader import MOST_HELD
from everystep.errors import RequestError
from tests.dialogue.calls import CALLS, READ, TOOLS, parsed, parts

MAKE_CALLS = [row for row in ROWS if row.form is not None]
BY_NAME = {row.name: row for row in reversed(ROWS)}
HERMES = BY_NAME["hermes"]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
_PIECES = (
    *('{"name": "get_weather", "arguments": ', '"parameters": ', "{}", '{"a": "<tool_call>"}'),
    *('"', "{", "}", "[", "]", "\n", " ", "x", "get_weather", "now", "(", "city=", ")", ",", ":"),
    *("\\", "é🎉", "\\u00e9", "<", "functions.", "call:", "'", '"x"', "12", "-", "true", " " * 70),
    *("assistant", " to=functions.now", "analysis", "final"),
)
_TEXTS = ("Paris", 'q"\n{\\', "<tool_call>", "</tool_ca", "", "</parameter", "<|", "é🎉")


def random_text(row: Dialect, seed: random.Random) -> str:
    """A text of calls, of parts of them, or of both."""
    pieces = [*row.spoken, *(mark.strip() for mark in row.spoken), *_PIECES]
    if seed.random() < 0.5:
        return "".join(seed.choice(pieces) for _ in range(seed.randint(1, 25)))
    given = {"city": seed.choice(_TEXTS), "days": seed.randint(-5, 5), "any": [1.5, None, "x"]}
    calls = [("get_weather", given), ("now", {})]
    letters = list(written(row, calls[: 1 if row.parallel is None else 2]))
    for _ in range(seed.randint(0, 3)):
        place = seed.randrange(len(letters) + 1)
        letters[place : place + seed.randint(0, 1)] = [seed.choice(pieces)]
    return seed.choice(["", "hello ", "\n\n", "<think>\nhm\n</think>\n"]) + "".join(letters)


def check_cuts(number: int) -> None:
    """The same events letter by letter and in random pieces, and all of the text in them."""
    seed = random.Random(number)
    row = MAKE_CALLS[number % len(MAKE_CALLS)]
    text = random_text(row, seed)
    how = {"thinks": row.thoughts is not None and seed.random() < 0.2}
    whole = parsed(row, text, **how)
    assert "".join(one.raw for one in whole) == text
    places = range(1, len(text))
    some = sorted(seed.sample(places, min(len(places), seed.randint(0, 6))))
    for cuts in (list(places), some):
        assert parsed(row, text, cuts, **how) == whole, (row.name, text, cuts)


def test_events_do_not_depend_on_how_a_text_is_divided() -> None:
    for number in range(600):
        check_cuts(number)


@pytest.mark.slow
def test_events_do_not_depend_on_how_many_texts_are_divided() -> None:
    for number in range(600, 10_000):
        check_cuts(number)


def test_a_call_is_told_as_it_comes() -> None:
    parser = Parser(HERMES, READ, key="k")
    assert parser.feed("It is \n") == (Content("It is", "It is"),)
    assert parser.feed('<tool_call>\n{"name": "now", "argu') == ()
    assert parser.feed('ments": ') == ()
    begin, first = parser.feed('{"zo')
    assert isinstance(begin, CallBegin) and (begin.index, begin.name) == (0, "now")
    assert first == CallArguments(0, '{"zo', '{"zo')
    assert parser.feed('ne": "UT') == (CallArguments(0, 'ne": "UT', 'ne": "UT'),)
    assert parser.feed('C"}}\n</tool') == (CallArguments(0, 'C"}', 'C"}'),)
    assert parser.feed("_call>\n") == (CallEnd(0, True, "}\n</tool_call>"),)
    assert parser.feed("So.") == (Markup("\n"), Content("So.", "So."))
    assert parser.close() == (Finish(1),) and parser.close() == ()
    with pytest.raises(RequestError, match="closed"):
        parser.feed("x")


def test_ids_follow_from_the_key_and_the_number_of_the_call() -> None:
    def ids(name: str, key: str) -> list[str]:
        text = written(BY_NAME[name], CALLS)
        return [e.id for e in parsed(BY_NAME[name], text, key=key) if isinstance(e, CallBegin)]

    assert ids("hermes", "a") == ids("hermes", "a") != ids("hermes", "b")
    assert len({*ids("hermes", "a"), *ids("hermes", "b")}) == 4
    assert all(one.startswith("call_") and len(one) == 29 for one in ids("hermes", "a"))
    assert all(one.isalnum() and len(one) == 9 for one in ids("mistral", "a"))
    assert ids("kimi-k2", "a") == ["functions.get_weather:0", "functions.now:1"]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n</tool_call>",
        '<tool_call>{"name": "now", "arguments": 3}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "now", "argu',
        "a < b, <tool_cal",
        "  \n",
        "<think> is a tag, and </think> another",
    ],
)
def test_what_is_no_call_is_content_letter_by_letter(text: str) -> None:
    row = HERMES
    if text.startswith("<think>"):
        text = f"Here: {text}"
    assert parts(parsed(row, text)) == (text, "", [])
    assert parts(parsed(row, text, range(1, len(text)))) == (text, "", [])


def test_a_tag_within_an_argument_is_part_of_it() -> None:
    given = {"zone": "</tool_call><tool_call>{}"}
    text = written(HERMES, [("now", given)])
    assert parts(parsed(HERMES, text)) == ("", "", [("now", given, True)])


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('{"zone": "UT', '{"zone": "UT'),
        ('{"zone": UTC}}\n</tool_call>', '{"zone": UTC}}\n'),
        ("{'zone': 1}\n</tool_call> So", "{'zone': 1}\n"),
    ],
)
def test_arguments_that_are_cut_or_no_json_are_given_out_and_said_to_be_so(
    said: str, arguments: str
) -> None:
    text = f'<tool_call>\n{{"name": "now", "arguments": {said}'
    content, _, calls = parts(parsed(HERMES, text))
    assert calls == [("now", arguments, False)]
    assert content == ("So" if text.endswith("So") else "")


def test_a_new_line_within_a_string_is_no_strict_json() -> None:
    text = CALL.replace("UTC", "U\nC")
    assert parts(parsed(HERMES, text))[2] == [("now", '{"zone": "U\nC"}', False)]


def test_arguments_may_stand_first_be_left_out_or_be_a_text_of_json() -> None:
    for inner in (
        '{"arguments": {"zone": "UTC"}, "name": "now"}',
        '{"id": "7", "name": "now", "arguments": "{\\"zone\\": \\"UTC\\"}", "x": [1]}',
        '{"name": "now", "parameters": {"zone": "UTC"}, "id": "7"}',
    ):
        events = parsed(HERMES, f"<tool_call>{inner}</tool_call>")
        assert parts(events) == ("", "", [("now", {"zone": "UTC"}, True)])
    bare = parsed(HERMES, '<tool_call>{"name": "now"}</tool_call>')
    assert parts(bare) == ("", "", [("now", {}, True)])


def test_an_object_without_marks_is_a_call_if_a_tool_has_its_name() -> None:
    llama = BY_NAME["llama-3"]
    call = '{"name": "now", "parameters": {}}'
    assert parts(parsed(llama, call)) == ("", "", [("now", {}, True)])
    other = call.replace("now", "later")
    assert parts(parsed(llama, other)) == (other, "", [])
    assert parts(parsed(llama, f"See: {call}")) == (f"See: {call}", "", [])
    marked = f"<|python_tag|>{call}; {call}"
    assert parts(parsed(llama, marked)) == ("", "", [("now", {}, True)] * 2)
    code = '<|python_tag|>print("x")'
    assert parts(parsed(llama, code)) == (code, "", [])


def test_values_between_tags_are_what_their_schemas_say() -> None:
    coder = BY_NAME["qwen3-coder"]
    said = {"city": "12", "days": "3", "warm": "True", "hours": "[6, 12]", "unit": "C", "x": "7"}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in said.items())
    text = f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"
    read = {"city": "12", "days": 3, "warm": True, "hours": [6, 12], "unit": "C", "x": 7}
    assert parts(parsed(coder, text)) == ("", "", [("get_weather", read, True)])
    null = text.replace("get_weather", "now").replace(
        "<parameter=city>\n12", "<parameter=zone>\nnull"
    )
    assert parts(parsed(coder, null))[2][0][1]["zone"] is None


def test_a_long_text_between_tags_comes_piece_by_piece() -> None:
    parser = Parser(BY_NAME["qwen3-coder"], READ)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    (piece,) = parser.feed('Par\nis "')
    assert piece == CallArguments(0, 'Par\\nis \\"', 'Par\nis "')


def test_channels_say_what_is_thought_said_and_called() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>"
        '{"zone": "<|x|>"}<|call|>'
    )
    events = parsed(BY_NAME["harmony"], text)
    assert parts(events) == ("I look.", "Hm.", [("now", {"zone": "<|x|>"}, True)])
    assert parts(parsed(BY_NAME["harmony"], "Plain <|mess")) == ("Plain <|mess", "", [])
    final = "<|channel|>final<|message|>Yes: 1 < 2<|return|>"
    assert parts(parsed(BY_NAME["harmony"], final)) == ("Yes: 1 < 2", "", [])


def hostile(row: Dialect) -> Iterator[str]:
    """Beginnings of calls that never end, over and over."""
    begin = row.section[0] + row.opening
    yield from (f'{begin}{{"', f'{begin}{{"a":[', f"{begin}[f(a=[", f"{begin}call:f{{a:")
    yield f'{begin}{{"arguments":{{"x":"'
    yield f'{begin}[{{"name":"now","arguments":{{"zone":"'
    yield from row.spoken
    yield from (" ", "[", "{", '"', "\\", "x")


def check_held(row: Dialect) -> None:
    for piece in hostile(row):
        text = (row.section[0] + row.opening) + piece * (80_000 // len(piece))
        parser, held = Parser(row, READ), 0
        for start in range(0, len(text), 5_000):
            events = parser.feed(text[start : start + 5_000])
            held += len(text[start : start + 5_000]) - sum(len(one.raw) for one in events)
            assert held <= MOST_HELD + 5_000 + 200
        assert held == sum(len(one.raw) for one in parser.close())


@pytest.mark.parametrize("name", ["hermes", "mistral-v11", "qwen3-coder", "lfm2", "gemma-4"])
def test_little_is_held_of_what_never_ends(name: str) -> None:
    check_held(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("row", MAKE_CALLS, ids=lambda row: row.name)
def test_little_is_held_in_any_form(row: Dialect) -> None:
    check_held(row)


@pytest.mark.parametrize("size", [MOST_HELD - 200, MOST_HELD - 8, MOST_HELD, MOST_HELD + 9])
def test_what_is_held_too_long_is_content_however_it_comes(size: int) -> None:
    long = "x" * size
    for row, text in (
        (HERMES, f'<tool_call>{{"arguments": {{"zone": "{long}"}}, "name": "now"}}</tool_call>'),
        (BY_NAME["lfm2"], f"<|tool_call_start|>[now(zone='{long}')]<|tool_call_end|>"),
        (BY_NAME["gemma-4"], f'<|tool_call>call:now{{zone:<|"|>{long}<|"|>}}<tool_call|>'),
    ):
        whole = parsed(row, text)
        assert whole == parsed(row, text, range(0, len(text), 4_999))
        if not MOST_HELD - 200 < size < MOST_HELD:
            assert (parts(whole)[0] == text) == (size >= MOST_HELD)


def test_a_scanner_takes_what_json_is_and_no_more() -> None:
    seed = random.Random(0)

    def value(depth: int) -> Any:
        kinds: list[Any] = [None, True, 1, -2.5e7, 'a"\\é\n', 0]
        if depth:
            kinds += [[value(depth - 1) for _ in range(seed.randint(0, 3))]]
            kinds += [{str(n): value(depth - 1) for n in range(seed.randint(0, 3))}]
        return seed.choice(kinds)

    for _ in range(300):
        text = json.dumps(value(3), indent=seed.choice([None, 1]))
        letters = list(text)
        if seed.random() < 0.7 and letters:
            letters[seed.randrange(len(letters))] = seed.choice('{}[]",:x1 \\.e-')
        text = "".join(letters)
        scanner = JsonScanner()
        end = scanner.feed(text, 0)
        scanner.end()
        try:
            json.loads(text)
            sound = True
        except ValueError:
            sound = False
        taken = scanner.done and scanner.strict and not text[end:].strip()
        assert taken == sound, text


def test_nesting_without_end_is_no_json() -> None:
    scanner = JsonScanner()
    scanner.feed("[" * 100_000, 0)
    assert scanner.broken


def test_thoughts_that_never_end_are_thoughts() -> None:
    assert parts(parsed(HERMES, "<think>\nhm </thin")) == ("", "hm </thin", [])
    events = parsed(HERMES, "so\n</think>\n\nYes", thinks=True)
    assert events[0] == Thought("so", "so") and parts(events)[0] == "Yes"
    assert len(TOOLS) == 2
