"""A record opens with what is whole, wherever it was cut; what no writer writes is refused."""

from __future__ import annotations

import gzip
import json
import random
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everystep.errors import FormatError, MissingFileError, RequestError
from everystep.inspector import views
from everystep.inspector.page import document, page
from everystep.records import (
    RecordWriter,
    exact,
    read_record,
    reader,
    record_lines,
    spelled,
    writer,
)
from tests.inspector.long_records import long_record

RUN = {"type": "run", "run": "0", "prompt": [5, 6]}
ROW: dict[str, Any] = {
    "of": 0,
    "at": 0,
    "ids": [3, 4],
    "logits": [1.5, None],
    "stages": [{"name": "TopK", "removed": 1, "values": [1.5, None]}],
    "totals": [1.6, 1.5],
    "entropies": [0.2, 0.0],
    "chosen": 3,
    "origin": "chosen",
    "ranks": [0, 0],
    "surprise": 0.1,
    "draw": [0.5, 0.0, 1.0],
    "ends": [[2, -1.0, None, 1]],
}
STEP = {
    "type": "step",
    "run": "0",
    "step": 1,
    "rows": [ROW],
    "children": [[0, 0, [3], 0.0, None]],
    "drafts": [[0, [3, 4], 1]],
    "fed": [[0, 0, 2]],
    "seconds": {"forward": 0.01},
    "beside": 2,
}
TOKENS = {"type": "tokens", "run": "0", "index": 0, "at": 0, "ids": [3]}
END = {"type": "end", "run": "0", "index": 0, "kind": "length", "matched": None, "length": 1}
SPELLING = {"type": "spelling", "texts": {"3": "\x1b[31mé", "4": {"base64": "w6k="}}}
LINES = [RUN, SPELLING, STEP, TOKENS, {**STEP, "step": 2}, END]


def written(path: Path, more: list[dict[str, Any]] = LINES) -> Path:
    record = RecordWriter(path)
    assert record.begin("m", "t") == "0"
    record.write(more)
    record.flush()
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    record = read_record(written(tmp_path / "a.jsonl"))
    run = record.runs["0"]
    assert record.header["model"] == "m" and run.prompt == (5, 6) and not record.cut
    assert [step.number for step in run.steps] == [1, 2]
    (row,) = run.steps[0].rows
    assert row.ids == (3, 4) and row.scores == (1.5, None) and row.stages[0].removed == 1
    assert row.draw is not None and row.draw.number == 0.5 and row.ends[0].id == 2
    assert run.steps[0].drafts[0].right == 1 and run.steps[0].fed[0].count == 2
    assert run.tokens == {0: [3]} and run.ends[0].kind == "length"
    assert record.texts == {3: "\x1b[31mé".encode(), 4: "é".encode()}
    assert record.text(run) == "\x1b[31mé" and record.spell(9) == "<9>"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_cut_at_any_byte_opens_with_what_is_whole(name: str, tmp_path: Path) -> None:
    data = written(tmp_path / name).read_bytes()
    whole, steps = (gzip.decompress(data) if name.endswith("gz") else data), []
    first = whole.index(b"\n") + 1
    for end in range(len(data)):
        cut = tmp_path / "cut"
        cut.write_bytes(data[:end])
        try:
            record = read_record(cut)
        except FormatError as error:
            assert name.endswith("gz") or end < first - 1, error
            continue
        steps.append(sum(len(run.steps) for run in record.runs.values()))
    assert steps == sorted(steps) and steps[-1] == 2 and (0 in steps or name.endswith("gz"))


def test_blocks_of_gzip_are_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_BLOCK", 100)
    path = written(tmp_path / "a.gz")
    plain = written(tmp_path / "a.jsonl")
    assert gzip.decompress(path.read_bytes()) == plain.read_bytes()
    monkeypatch.setattr(reader, "_BLOCK", 7)
    assert read_record(path) == read_record(plain)


@pytest.mark.parametrize("value", [0.1, -0.0, 1e-40, 3.4e38, 16777217.0, 1 / 3])
def test_numbers_keep_their_bits(value: float) -> None:
    own = np.float32(value)
    there = json.loads(json.dumps(exact(float(own))))
    assert np.float32(there).tobytes() == own.tobytes()


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    assert [exact(float(name)) for name in ("-inf", "inf", "nan")] == [None, "inf", "nan"]
    assert spelled(b"\xc3") == {"base64": "ww=="} and spelled(b"a") == "a"


def set_in(path: str, value: object) -> Callable[[list[dict[str, Any]]], None]:
    def change(documents: list[dict[str, Any]]) -> None:
        place: Any = documents
        *parents, last = path.split(".")
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(last) if isinstance(place, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_in("0.prompt", ["x"]), "line 2"),
        (set_in("0.run", 7), "line 2"),
        (set_in("2.run", "9"), "line 4"),
        (set_in("2.rows.0.ids", [3]), "line 4"),
        (set_in("2.rows.0.ids", {"a": 1}), "line 4"),
        (set_in("2.rows.0.totals", [1.0]), "line 4"),
        (set_in("2.rows.0.at", True), "line 4"),
        (set_in("2.rows.0.at", 10**30), "line 4"),
        (set_in("2.rows.0.stages.0.values", [1.0]), "line 4"),
        (set_in("2.rows.0.draw", [0.1]), "line 4"),
        (set_in("2.children.0", [0]), "line 4"),
        (set_in("2.seconds", {"a": "b"}), "line 4"),
        (set_in("1.texts", {"3": {"base64": "*"}}), "line 3"),
        (set_in("1.texts", {"x": "a"}), "line 3"),
        (set_in("3.at", 4), "line 5"),
        (set_in("3.at", -1), "line 5"),
    ],
)
def test_what_no_writer_writes_is_refused(
    change: Callable[[list[dict[str, Any]]], None], says: str, tmp_path: Path
) -> None:
    documents = json.loads(json.dumps(LINES))
    change(documents)
    with pytest.raises(FormatError, match=says):
        read_record(written(tmp_path / "a.jsonl", documents))


HEADER = b'{"type":"record","version":1,"model":"m","tokenizer":"t"}\n'


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no first line"),
        (b"\x00" * 100, "no first line"),
        (b"{}\n", "is no record"),
        (b'{"type":"record","version":2}\n', "another version"),
        (HEADER + b"[1]\n" + HEADER, "line 2"),
        (HEADER + b'{"type":"x","a":NaN}\n' + HEADER, "line 2"),
        (HEADER + b'{"a":' * 60 + b"1" + b"}" * 60 + b"\n", "line 2"),
        (HEADER + b'{"a":' + b"[" * 90_000 + b"\n", "line 2"),
        (HEADER + b'{"a":' + b"9" * 9_000 + b"}\n", "line 2"),
        (HEADER + b"x" * (record_lines.MOST_LINE + 70_000), "more than"),
        (b"\x1f\x8b\x08\x00garbage", "no first line"),
    ],
)
def test_hostile_files_are_refused(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=says):
        read_record(path)


def test_what_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_READ", 100_000)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(HEADER + (b'{"type":"new"}\n' * 10_000)))
    with pytest.raises(FormatError, match="too large"):
        read_record(path)
    with pytest.raises(MissingFileError):
        read_record(tmp_path / "none")
    with pytest.raises(RequestError):
        read_record("\0")


def test_unknown_fields_and_lines_are_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "a", [RUN, {**STEP, "weather": "mild"}, {"type": "song", "run": 1}])
    record = read_record(path)
    assert record.runs["0"].steps[0].line["weather"] == "mild"
    assert record.others == [{"type": "song", "run": 1}]


FORKED = b'{"type":"tokens","run":"0","index":0,"at":0,"ids":[%b1]}\n' % (b"7," * 9_999)


def begun(*lines: bytes) -> bytes:
    """A record of one run without a prompt, and these lines."""
    return b"".join((HEADER, b'{"type":"run","run":"0","prompt":[]}\n', *lines))


def fork_of(parent: int, name: int) -> bytes:
    return b'{"type":"fork","run":"%d","parent":"%d"}\n' % (name, parent)


SMALL = b'{"of":0,"at":0,"ids":[],"logits":[],"totals":[0,0],"entropies":[0,0]}'
HOSTILE: dict[str, bytes] = {
    "forks of many ids": begun(FORKED, *(fork_of(0, name) for name in range(1, 500))),
    "a chain of forks": begun(FORKED, *(fork_of(name, name + 1) for name in range(500))),
    "forks of many values": begun(
        b'{"type":"set","run":"0","at":0,"values":{}}\n' * 2_000,
        *(fork_of(0, name) for name in range(1, 500)),
    ),
    "forks of many sequences": begun(
        *(
            b'{"type":"tokens","run":"0","index":%d,"at":0,"ids":[]}\n' % index
            for index in range(500)
        ),
        *(fork_of(0, name) for name in range(1, 500)),
    ),
    "runs": begun(*(b'{"type":"run","run":"%d","prompt":[]}\n' % name for name in range(1, 4_000))),
    "lists in runs": begun(
        *(
            b'{"type":"run","run":"%d","prompt":[],"x":[%b1]}\n' % (name, b"[]," * 10_000)
            for name in range(1, 12)
        )
    ),
    "values": begun(
        b'{"type":"set","run":"0","at":0,"values":{"a":[%b1]}}\n' % (b"{}," * 10_000) * 11
    ),
    "ends": begun(
        *(
            b'{"type":"end","run":"0","index":%d,"kind":"","length":1,"matched":[%b1]}\n'
            % (index, b"[]," * 10_000)
            for index in range(11)
        )
    ),
    "rows": begun(
        *(
            b'{"type":"step","run":"0","step":%d,"rows":[%b]}\n'
            % (number, b",".join([SMALL] * 1_000))
            for number in range(8)
        )
    ),
    "drafts": begun(
        *(
            b'{"type":"step","run":"0","step":%d,"drafts":[%b[0,[],0]]}\n'
            % (number, b"[0,[],0]," * 4_000)
            for number in range(12)
        )
    ),
    "short steps": begun(
        *(b'{"type":"step","run":"0","step":%d,"rows":[]}\n' % number for number in range(20_000))
    ),
    "children": begun(
        *(
            b'{"type":"step","run":"0","step":%d,"children":[%b[0,0,[],0,null]]}\n'
            % (number, b"[0,0,[],0,null]," * 3_000)
            for number in range(20)
        )
    ),
}
ALLOWED = 2**22


@pytest.mark.parametrize("kind", HOSTILE)
def test_short_lines_that_take_much_memory_are_refused_in_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_MEMORY", ALLOWED)
    (tmp_path / "a").write_bytes(gzip.compress(HOSTILE[kind]))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="too much memory, up to line"):
            read_record(tmp_path / "a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * ALLOWED


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call executes."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def step_of(run: int, number: int) -> bytes:
    return b'{"type":"step","run":"%d","step":%d,"rows":[%b]}\n' % (run, number, SMALL)


def ended(index: int, length: int) -> bytes:
    line = b'{"type":"end","run":"0","index":%d,"kind":"length","length":%d}\n'
    return line % (index, length)


MANY: dict[str, Callable[[int], bytes]] = {
    "ends": lambda i: (
        b'{"type":"end","run":"0","index":%d,"kind":"stop","matched":2,"length":1}\n' % i
    ),
    "ends of one sequence": lambda i: (
        b'{"type":"end","run":"0","index":0,"kind":"stop","matched":[],"length":%d}\n' % i
    ),
    "ends of others beside steps": lambda i: step_of(0, i) + ended(i + 1, i),
    "ends of one sequence beside steps": lambda i: (
        b'{"type":"tokens","run":"0","index":0,"at":0,"ids":[7]}\n' + step_of(0, i) + ended(0, i)
    ),
    "forks": lambda i: fork_of(0, i + 1),
    "a chain of forks": lambda i: fork_of(i, i + 1),
    "forks of steps": lambda i: step_of(i, i) + fork_of(i, i + 1),
}


@pytest.mark.parametrize("kind", MANY)
def test_twice_the_lines_are_twice_the_work(kind: str, tmp_path: Path) -> None:
    """Of reading them, and of the page, which shows each fork below its parent."""
    work = []
    for count in (150, 300):
        file = tmp_path / str(count)
        file.write_bytes(begun(*map(MANY[kind], range(count))))
        work.append(lines_run(lambda file=file: document(read_record(file), "a")))  # type: ignore[misc]
    assert work[1] < 2.3 * work[0], work


def test_an_end_that_is_written_twice_is_one(tmp_path: Path) -> None:
    other = {**END, "index": 1, "matched": [2]}
    later = {**END, "length": 2}
    lines = [RUN, END, END, other, other, END, later, later]
    ends = read_record(written(tmp_path / "a", lines)).runs["0"].ends
    assert [(one.index, one.length) for one in ends] == [(0, 1), (1, 1), (0, 2)]


@pytest.mark.parametrize("line", [b"{}", b'{"type":"cut"}', b'{"x":[[],[],[],[],{"a":{}}]}'])
def test_lines_of_unknown_kinds_stay_small(line: bytes, tmp_path: Path) -> None:
    count = 150_000 // len(line)
    (tmp_path / "a").write_bytes(gzip.compress(HEADER + (line + b"\n") * count))
    tracemalloc.start()
    try:
        record = read_record(tmp_path / "a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(record.others) == count and peak < 3_000_000
    assert all(one == json.loads(line) for one in record.others)
    assert record.others[-2:] == [json.loads(line)] * 2
    assert record.cut is (b"cut" in line)


def test_what_any_record_may_take_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file in its place begins from nothing, and each line is counted once."""
    monkeypatch.setattr(reader, "MOST_MEMORY", 0)
    monkeypatch.setattr(reader, "MORE_MEMORY", 64)
    growing = reader.GrowingRecord(written(tmp_path / "a"))
    for _ in range(3):
        growing.read()
        written(tmp_path / "a", [*LINES, *[TOKENS] * 20])
        growing.read()
        written(tmp_path / "a")
    monkeypatch.setattr(reader, "MORE_MEMORY", 1)
    with pytest.raises(FormatError, match="too much memory"):
        read_record(tmp_path / "a")


@pytest.mark.parametrize("beams", [1, 4])
def test_what_the_library_writes_is_far_from_too_much(
    beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_MEMORY", 2**20)
    long_record(tmp_path / "a.gz", 1_500 // beams, beams)
    whole = read_record(tmp_path / "a.gz").runs["0"]
    assert len(whole.steps) == 1_500 // beams
    monkeypatch.setattr(reader, "MORE_MEMORY", 0)
    with pytest.raises(FormatError, match="too much memory"):
        read_record(tmp_path / "a.gz")


def test_a_fork_has_the_choices_that_its_ids_were_made_by(tmp_path: Path) -> None:
    """Neither those that its parent makes later nor those of ids that were not final."""

    def step(run: str, number: int, at: int, chosen: int) -> dict[str, Any]:
        row = {**ROW, "at": at, "chosen": chosen}
        return {**STEP, "run": run, "step": number, "rows": [row]}

    def tokens(run: str, at: int, *ids: int) -> dict[str, Any]:
        return {**TOKENS, "run": run, "at": at, "ids": ids}

    def fork(name: str, parent: str) -> dict[str, Any]:
        return {"type": "fork", "run": name, "parent": parent}

    lines = [RUN, step("0", 1, 0, 3), step("0", 2, 1, 4), step("0", 3, 2, 5), tokens("0", 0, 3, 4)]
    lines += [fork("1", "0"), fork("2", "1"), step("0", 4, 0, 6)]
    lines += [{"type": "edit", "run": "2", "at": 1, "ids": [9, 9], "given": [1, 2]}]
    lines += [fork("3", "2"), step("1", 5, 2, 7), tokens("1", 2, 7), fork("4", "1")]
    record = read_record(written(tmp_path / "a", lines))
    chosen = {
        name: {at: row.chosen for at, row in run.rows().items()}
        for name, run in record.runs.items()
    }
    assert chosen == {
        "0": {0: 6, 1: 4, 2: 5},
        "1": {0: 3, 1: 4, 2: 7},
        "2": {0: 3, 1: 4},
        "3": {0: 3, 1: 4},
        "4": {0: 3, 1: 4, 2: 7},
    }
    for name, run in record.runs.items():
        one_by_one = {at: row.chosen for at in range(4) if (row := run.row_at(at)) is not None}
        assert one_by_one == chosen[name]
        assert run.rows(1) == {} and run.row_at(0, 1) is None
    assert record.runs["4"].row_at(0) is record.runs["0"].steps[0].rows[0]
    assert record.runs["3"].parent == ("2", 3) and record.runs["3"].tokens == {0: [3, 9, 9]}
    assert record.runs["3"].given == {1, 2} and record.runs["1"].given == set()


def leaves(value: Any) -> Iterator[str]:
    """The texts in it, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Iterable):
        for one in value:
            yield from leaves(one)


def test_mutations_end_in_a_refusal_or_in_a_record_that_can_be_shown(tmp_path: Path) -> None:
    data, dice, path = written(tmp_path / "a").read_bytes(), random.Random(5), tmp_path / "b"
    opened = 0
    for _ in range(2000):
        spoilt = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(spoilt))
            if dice.random() < 0.5:
                spoilt[at] = dice.randrange(256)
            else:
                del spoilt[at : at + dice.randint(1, 9)]
        path.write_bytes(spoilt)
        try:
            record = read_record(path)
        except FormatError:
            continue
        opened += 1
        assert page(record, "spoilt") and record._repr_html_()
        for run in record.runs.values():
            told = [views.steps(record, run), views.comparison(record, record)]
            told += [views.series(views.tokens_of(record, run)), views.heading(record, run)]
            for step in run.steps:
                told += [views.about_step(record, step), views.unseen_at(record, run, step)]
                for row in step.rows:
                    told += [views.candidates(record, row), views.about_choice(record, row)]
            assert "\x1b" not in "".join(leaves(told))
    assert 0 < opened < 2000


def test_a_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_lines, "MOST_LINE", 1_000)
    path = written(tmp_path / "a", [RUN, {**STEP, "noise": "x" * 2_000}, TOKENS])
    record = read_record(path)
    assert record.cut and record.runs["0"].steps == [] and record.runs["0"].tokens == {0: [3]}
    assert record.others[0]["what"] == "step"
    monkeypatch.setattr(writer, "MOST_BYTES", 3_000)
    path = written(tmp_path / "b", [RUN])
    long = RecordWriter(tmp_path / "b")
    long.begin("m", "t")
    for number in range(1, 90):
        long.write([{"type": "song", "n": number}] if number > 1 else [RUN])
        long.write([{"type": "song", "n": "x" * 100}])
    record = read_record(tmp_path / "b")
    assert record.cut and record.others[-1]["what"] == "the rest"
    assert (tmp_path / "b").stat().st_size < 3_500


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    record = RecordWriter(tmp_path / "a")
    record.begin("m", "t")

    def write() -> None:
        for _ in range(50):
            record.write([{"type": "song", "text": "x" * 3_000}])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(read_record(tmp_path / "a").others) == 200


def test_a_file_that_cannot_be_written_stops_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    record = RecordWriter(tmp_path / "in" / "a")
    record.begin("m", "t")
    (tmp_path / "in" / "a").unlink()
    (tmp_path / "in").rmdir()
    with pytest.warns(UserWarning, match="stops here"):
        record.write([RUN])
    record.write([RUN])


def test_a_place_where_no_file_can_be_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        RecordWriter(tmp_path / "none" / "a")
    with pytest.raises(RequestError):
        RecordWriter(5)  # type: ignore[arg-type]


def test_what_is_handed_over_is_written_in_order_and_few_rows_are_held(tmp_path: Path) -> None:
    one, gate, order = RecordWriter(tmp_path / "a.jsonl"), threading.Event(), list[int]()
    name = one.begin("model", "none")

    def write(number: int) -> None:
        gate.wait()
        order.append(number)
        one.write([{**STEP, "run": name, "step": number}])

    handed = threading.Event()

    def hand_over() -> None:
        for number in range(8):
            one.later(lambda number=number: write(number), writer.MOST_HELD // 4)  # type: ignore[misc]
        handed.set()

    caller = threading.Thread(target=hand_over)
    caller.start()
    assert not handed.wait(0.2)  # it waits for the first ones
    gate.set()
    caller.join()
    one.flush()
    assert order == [*range(8)]
    steps = [
        line["step"]
        for line in map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
        if "step" in line
    ]
    assert steps == order


def test_an_error_beside_the_steps_ends_the_record_alone(tmp_path: Path) -> None:
    one = RecordWriter(tmp_path / "a.jsonl")
    one.begin("model", "none")
    with pytest.warns(UserWarning, match="stops here"):
        one.later(lambda: one.write([{"what": object()}]))
        one.flush()
    one.later(lambda: one.write([RUN]))
    one.flush()
    assert (tmp_path / "a.jsonl").read_text().count("\n") == 1
