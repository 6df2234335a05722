"""What a record says in tables and lines of text that anybody may see: its texts are harmless."""

from __future__ import annotations

import codecs
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from everystep.inspector.paths import Node, Paths, choosing, rows_along
from everystep.records import (
    EndToken,
    Record,
    RecordedDraft,
    RecordedRow,
    RecordedRun,
    RecordedStep,
)
from everystep.shown import marked as marked

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
BARS = "▁▂▃▄▅▆▇█"
_EDGE = 60
_MOST_TWINS = 64


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text as it is shown: its marks, its surprise in nats, and how it came about."""

    at: int
    id: int
    text: str
    surprise: float | None
    origin: str
    row: RecordedRow | None
    milliseconds: float | None = None


def spelled(record: Record, id: int) -> str:
    """Return a token's text with its marks."""
    return marked(record.spell(id))


def tokens_of(record: Record, run: RecordedRun, index: int = 0) -> list[Token]:
    """Return the tokens of a sequence."""
    ids = run.tokens.get(index, [])
    spent = {id(row): step.spent for step in run.steps for row in step.rows}
    rows = enumerate(rows_along(run, index))
    return [token_of(record, run, at, ids[at], row, spent.get(id(row))) for at, row in rows]


def token_of(
    record: Record,
    run: RecordedRun,
    at: int,
    id: int,
    row: RecordedRow | None,
    spent: float | None = None,
) -> Token:
    """Return a token that stands at a place, by its choice and the seconds of its step."""
    origin = "given" if at in run.given else "unknown" if row is None else row.origin
    surprise = None
    if row is not None and origin != "given":
        surprise = row.surprise if id == row.chosen else surprise_of(row, id)
    milliseconds = None if spent is None else spent * 1e3
    return Token(at, id, spelled(record, id), surprise, origin, row, milliseconds)


def surprise_of(row: RecordedRow, id: int) -> float | None:
    """Return -log of the model's probability of a token, in nats."""
    logit, total = dict(zip(row.ids, row.logits, strict=True)).get(id), row.totals[0]
    return None if logit is None or total is None else max(total - logit, 0.0)


def share_of(logarithm: float) -> float:
    """Return the share that a logarithm stands for."""
    return math.exp(min(logarithm, 0.0))


def level(surprise: float | None) -> int:
    """Return how surprising a token is: from 0, above one in two, to 4, below one in 1,000."""
    if surprise is None:
        return 0
    return sum(surprise > -math.log(share) for share in (0.5, 0.1, 0.01, 0.001))


def strip(values: Sequence[float | None], width: int = 60) -> str:
    """Return bars of the values, the highest of those that share a place."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    most, share = max(known) or 1.0, max(1, math.ceil(len(values) / width))
    bars = []
    for first in range(0, len(values), share):
        own = [v for v in values[first : first + share] if v is not None and math.isfinite(v)]
        bars.append(BARS[min(7, int(max(own) / most * 7.999))] if own else " ")
    return "".join(bars)


def bar(value: float | None, most: float, width: int) -> str:
    """Return a bar as long as its part of the most."""
    if value is None or not math.isfinite(value):
        return ""
    return "█" * min(width, max(0, round(value / most * width)))


def number(value: float | None) -> str:
    """Return a score in four digits; - for what was ruled out."""
    return "-" if value is None else f"{value:.4g}"


def stage_name(name: str) -> str:
    """Return the name of a stage, without what the names of processors end with."""
    short = name.removesuffix("Warper").removesuffix("Processor").removesuffix("Logits")
    return marked(short or name)


# --- what stands at the top -----------------------------------------------------------------------


def heading(record: Record, run: RecordedRun) -> list[tuple[str, str]]:
    """Return what was decided before the first step, by name."""
    about = run.about
    prompt = "".join(spelled(record, id) for id in run.prompt)
    found = [
        ("run", marked(run.name)),
        ("model", _short(record.header.get("model"))),
        ("tokenizer", _short(record.header.get("tokenizer"))),
        ("everystep", _text(record.header.get("everystep"))),
        ("strategy", _text(about.get("strategy"))),
        ("seed", _text(about.get("seed"))),
        ("prompt", f"{len(run.prompt)} ids: {prompt}"),
    ]
    if "source" in about:
        ids = [one for one in _items(about["source"]) if type(one) is int]
        found.append(("encoder", f"{len(ids)} ids: {''.join(spelled(record, id) for id in ids)}"))
    if beyond := _items(about.get("beyond_ids")):
        found.append(("beside ids", ", ".join(map(_text, beyond))))
    if cached := about.get("cached"):
        found.append(("cached", f"{_text(cached)} positions came with the prompt's cache"))
    follows = _items(about.get("follows"))
    if follows:
        found.append(("follows", " ".join(map(_text, follows))))
    for name in ("readout", "drafter"):
        if about.get(name) is not None:
            found.append((name, _text(about[name])))
    for name in ("processors", "stops", "hooks", "adapters"):
        for one in _items(about.get(name)):
            found.append((name, _text(one[-1] if isinstance(one, list) and one else one)))
    if about.get("every_stage") is False:
        found.append(("stages", "all of them together; what each did is not recorded"))
    steer = about.get("steer")
    for layer, said in steer.items() if isinstance(steer, dict) else ():
        norm = said.get("norm") if isinstance(said, dict) else None
        found.append(("steer", f"after layer {_text(layer)}, a vector of length {_text(norm)}"))
    configuration = about.get("configuration")
    if isinstance(configuration, dict):
        for name, said in configuration.items():
            value, source = said if isinstance(said, list) and len(said) == 2 else (said, "")
            found.append((marked(str(name)), f"{_text(value)} ({_text(source)})"))
    if run.parent is not None:
        found.append(("goes on from", f"run {marked(run.parent[0])} after {run.parent[1]} ids"))
    if record.cut:
        found.append(("incomplete", "the file was cut off, or lines were too long"))
    return found


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    text = marked("none" if value is None else str(value)[:400], spaces=False)
    return text.replace("\n", "⏎").replace("\t", "⇥")


def _short(value: object) -> str:
    return _text(value)[:16]


def ends(record: Record, run: RecordedRun) -> list[str]:
    """Return why each sequence stopped, and where it came closest to an end before."""
    nearest = cache(partial(nearest_end, run))
    found = []
    for end in sorted(run.ends, key=lambda one: one.index):
        why = f"sequence {end.index} ended after {end.length} tokens: {marked(end.kind)}"
        if end.matched is not None:
            is_id = type(end.matched) is int
            said = f"token {spelled(record, end.matched)}" if is_id else _text(end.matched)  # type: ignore[arg-type]
            why += f" ({said})"
        found.append(why)
        if end.kind == "length" and (near := nearest(end.index)) is not None:
            at, one, share = near
            left = "ruled out there" if one.score is None else f"rank {one.rank} by the scores"
            found.append(
                f"  closest to an end at token {at}: {share:.2%} by the model's own logits, {left}"
            )
    if not run.ends:
        found.append("nothing ended: the record stops before that")
    return [*found, *speculation(run)]


def speculation(run: RecordedRun) -> list[str]:
    """Return whether drafts paid: how many were right, and the time of a token with and without."""
    drafts = [draft for step in run.steps for draft in step.drafts]
    if not drafts:
        return []
    right, ids = sum(one.right for one in drafts), sum(len(one.ids) for one in drafts)
    steps = choosing(run)
    tokens = sum(len(child.ids) for step in steps for child in step.children)
    found = [f"drafts: {right} of {ids} ids were right; {len(steps)} steps for {tokens} tokens"]
    times: dict[bool, list[float]] = {True: [], False: []}
    for step in steps[1:]:  # the first one has fed the prompt
        chosen = sum(len(child.ids) for child in step.children)
        if chosen:
            times[bool(step.drafts)].append(step.spent * 1e3 / chosen)
    if times[True] and times[False]:
        with_drafts, plain = (sorted(own)[len(own) // 2] for own in (times[True], times[False]))
        found.append(f"  a token took {with_drafts:.2f} ms with drafts, {plain:.2f} ms without")
    return found


def nearest_end(run: RecordedRun, index: int = 0) -> tuple[int, EndToken, float] | None:
    """Return where an end token was likeliest: the place, the token and its share of the logits."""
    best: tuple[int, EndToken, float] | None = None
    for at, row in enumerate(rows_along(run, index)):
        for one in row.ends if row is not None else ():
            total = row.totals[0] if row is not None else None
            if one.logit is None or total is None:
                continue
            share = math.exp(min(one.logit - total, 0.0))
            if best is None or share > best[2]:
                best = at, one, share
    return best


def series(tokens: Sequence[Token], width: int = 60) -> list[tuple[str, str, str]]:
    """Return name, strip and range of the series along a text."""
    rows = [one.row for one in tokens]
    found = {
        "surprise": [one.surprise for one in tokens],
        "entropy": [None if row is None else row.entropies[0] for row in rows],
        "entropy after": [None if row is None else row.entropies[1] for row in rows],
        "rank": [None if row is None or row.ranks is None else float(row.ranks[0]) for row in rows],
    }
    found["milliseconds"] = [one.milliseconds for one in tokens]
    lines = []
    for name, values in found.items():
        known = [value for value in values if value is not None]
        if known:
            span = f"{min(known):.3g} to {max(known):.3g}"
            lines.append((name, strip(values, width), span))
    return lines


# --- tables ---------------------------------------------------------------------------------------


def steps(record: Record, run: RecordedRun) -> Table:
    """Return the steps with choices, one line for each row of each."""
    head = ("step", "seq", "at", "token", "origin", "share", "rank", "entropy", "left", "fed", "ms")
    lines: list[tuple[str, ...]] = []
    for index, step in enumerate(choosing(run)):
        for place, row in enumerate(step.rows):
            share = "" if row.surprise is None else f"{math.exp(-row.surprise):.1%}"
            rank = "" if row.ranks is None else str(row.ranks[0])
            left = " ".join(f"-{stage.removed}" for stage in row.stages if stage.removed)
            fed = " ".join(f"{one.start}+{one.count}" for one in step.fed if one.of == row.of)
            spent = f"{step.spent * 1e3:.1f}"
            chosen = "" if row.chosen is None else spelled(record, row.chosen)
            lines.append(
                (
                    *(str(index), str(row.of), str(row.at), chosen, marked(row.origin), share),
                    *(rank, number(row.entropies[0]), left),
                    *((fed, spent) if place == 0 or len(step.fed) > 1 else ("", "")),
                )
            )
    return head, lines


def candidates(record: Record, row: RecordedRow) -> Table:
    """Return the candidates of a choice, best first, with a column for every stage."""
    ids, logits, stages, scores, total = row.ids, row.logits, row.stages, row.scores, row.totals[1]
    head = ("", "id", "token", "logit", *(stage_name(one.name) for one in stages), "share")
    order = sorted(
        range(len(ids)),
        key=lambda i: (
            scores[i] is None,
            -(scores[i] or 0.0),
            logits[i] is None,
            -(logits[i] or 0.0),
        ),
    )
    lines = []
    for i in order:
        score = scores[i]
        share = 0.0 if score is None or total is None else math.exp(min(score - total, 0.0))
        lines.append(
            (
                "*" if ids[i] == row.chosen else "",
                str(ids[i]),
                spelled(record, ids[i]),
                number(logits[i]),
                *(number(stage.values[i]) for stage in stages),
                "ruled out" if score is None else f"{share:.2%}",
            )
        )
    removed = [str(stage.removed) if stage.removed else "" for stage in stages]
    lines.append(("", "", "ruled out of all", "", *removed, ""))
    return head, lines


def about_choice(record: Record, row: RecordedRow) -> list[str]:
    """Return what is to be said of a choice beside its candidates."""
    found = [
        f"sequence {row.of}, token {row.at}: entropy {number(row.entropies[0])} before and "
        f"{number(row.entropies[1])} after the stages"
    ]
    if row.draw is not None:
        one = row.draw
        found.append(f"drawn: {one.number:.4f} lies in {one.low:.4f} to {one.high:.4f}")
        marks = ["─"] * 50
        for at in range(int(one.low * 49), int(one.high * 49) + 1):
            marks[min(max(at, 0), 49)] = "━"
        marks[min(max(int(one.number * 49), 0), 49)] = "▲"
        found.append(f"0 {''.join(marks)} 1")
    found.append(_ahead(row))
    for end in row.ends:
        score = "ruled out" if end.score is None else f"score {number(end.score)}"
        found.append(f"end {spelled(record, end.id)}: rank {end.rank}, {score}")
    return found


@dataclass(frozen=True, slots=True)
class Lost:
    """A candidate of a search that was not kept: the sequence that it would have continued, its id,
    its score as a sum, and the lowest sum that was kept."""

    of: int
    id: int
    score: float
    least: float


def lost(step: RecordedStep, most: int = 3) -> list[Lost]:
    """Return the best candidates that a search did not keep; none where scores are no sums.

    A hypothesis that ended has its sum divided by a power of its length, so the sums are known by
    those that go on.
    """
    rows = {row.of: row for row in step.rows}
    kept = {(child.parent, child.ids[0]) for child in step.children if child.ids}
    live = [child for child in step.children if child.ids and child.end is None]
    if len(step.children) < 2 or not any(child.score for child in live):
        return []
    sums = {
        (row.of, id): row.score + score
        for row in step.rows
        for id, score in zip(row.ids, row.scores, strict=True)
        if score is not None and row.score is not None
    }
    least = math.inf
    for child in live:
        own = sums.get((child.parent, child.ids[0]), math.inf)
        if child.parent not in rows or child.score is None or abs(own - child.score) > 1e-3:
            return []
        least = min(least, child.score)
    left = sorted((place for place in sums if place not in kept), key=lambda one: -sums[one])
    return [Lost(of, id, sums[of, id], least) for of, id in left[:most]]


def instead(step: RecordedStep, draft: RecordedDraft) -> int | None:
    """Return the token that came in place of the first drafted one that was wrong."""
    own = [child.ids for child in step.children if child.parent == draft.of]
    longest = max(own, key=len, default=())
    return longest[draft.right] if draft.right < min(len(longest), len(draft.ids)) else None


def unseen(record: Record, run: RecordedRun, index: int = 0) -> dict[int, str]:
    """Return what a reader of a stream did not have yet after the step of a token, by its place:
    ids that could still change, half characters, and what may begin a stop string that is cut off.

    Places with nothing of that are left out.
    """
    number = {id(row): at for at, step in enumerate(run.steps) for row in step.rows}
    rows = enumerate(rows_along(run, index))
    known = [(at, number[id(row)]) for at, row in rows if id(row) in number]
    return unseen_after(record, run, known, index)


def unseen_after(
    record: Record, run: RecordedRun, chosen: Sequence[tuple[int, int]], index: int = 0
) -> dict[int, str]:
    """Return the same for some tokens in order, given with the indices of their steps."""
    if not chosen:
        return {}
    ids, strings = run.tokens.get(index, []), _cut_off(run)
    settled = _settled(run, index, chosen[0][1])
    first = max(0, min(settled[0][1], chosen[0][0] + 1) - 1)
    begin = _read_back(record, ids, first, strings)
    held = [*_held(record, ids[begin : chosen[-1][0] + 1], strings)]
    found: dict[int, str] = {}
    place = final = 0
    for at, step in chosen:
        while place < len(settled) and settled[place][0] <= step + 1:
            final, place = settled[place][1], place + 1
        there = min(final, at + 1)
        left = held[there - 1 - begin] if there else b""
        late = b"".join(record.texts.get(one, b"") for one in ids[there : at + 1])
        if left or late:
            found[at] = marked((left + late).decode(errors="backslashreplace"))
    return found


def _settled(run: RecordedRun, index: int, step: int) -> list[tuple[int, int]]:
    """Return after how many steps how many ids of a sequence were final, from what held after the
    step with this index on."""
    found = []
    for steps, own, length in reversed(run.settled):
        if own == index:
            found.append((steps, length))
            if steps <= step + 1:
                return found[::-1]
    return [(0, 0), *found[::-1]]


def _read_back(record: Record, ids: Sequence[int], first: int, strings: Sequence[bytes]) -> int:
    """Return the place from which bytes are read to know what is held back from `first` on."""
    left = 2 * _reach(strings)
    while first > 0 and left > 0:
        first -= 1
        left -= len(record.texts.get(ids[first], b""))
    return first


def unseen_at(record: Record, run: RecordedRun, step: RecordedStep) -> list[str]:
    """Return what a reader of the stream did not have yet after a step, by sequence."""
    found, own = [], {id(row) for row in step.rows}
    for index in run.tokens:
        late = unseen(record, run, index)
        for at, row in enumerate(rows_along(run, index)):
            if id(row) in own:
                what = late.get(at)
                had = (
                    "had all of it after this step" if what is None else f"did not have yet: {what}"
                )
                found.append(f"sequence {index}, token {at}: a reader of the stream {had}")
    return found


def _cut_off(run: RecordedRun) -> list[bytes]:
    """Return the stop strings that texts lose."""
    said = run.about.get("configuration")
    own = said.get("stop_strings") if isinstance(said, dict) else None
    value = own[0] if isinstance(own, list) and own else None
    strings = [value] if isinstance(value, str) else _items(value)
    return [one.encode() for one in strings if isinstance(one, str) and run.about.get("trims")]


def _reach(strings: Sequence[bytes]) -> int:
    """Return how many bytes can be held back at once."""
    return max([4, *map(len, strings)])


def _held(record: Record, ids: Sequence[int], strings: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the bytes after each id that are held back: a half character, or what may become one
    of the strings."""
    reach = _reach(strings)
    tail = b""
    for one in ids:
        tail = (tail + record.texts.get(one, b""))[-2 * reach :]
        half = len(tail[-4:]) - codecs.utf_8_decode(tail[-4:], "replace", False)[1] if tail else 0
        shown = tail[: len(tail) - half]
        begun = max((_overlap(shown, string) for string in strings), default=0)
        yield tail[len(shown) - begun :]


def _overlap(text: bytes, string: bytes) -> int:
    """Return how many bytes of a string's beginning a text ends with, if not all."""
    lengths = range(min(len(string) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(string[:n])), 0)


def drafted(record: Record, step: RecordedStep) -> list[str]:
    """Return what became of the drafts of a step."""
    found = []
    for draft in step.drafts:
        text = "".join(spelled(record, id) for id in draft.ids)
        line = f"drafted after sequence {draft.of}: {text}; the first {draft.right} were right"
        other = instead(step, draft)
        if other is not None:
            wrong = spelled(record, draft.ids[draft.right])
            line += f"; then {spelled(record, other)} in place of {wrong}"
        found.append(line)
    return found


def _ahead(row: RecordedRow) -> str:
    """Return by how much the chosen one was ahead of the next best, or behind the best."""
    scores = dict(zip(row.ids, row.scores, strict=True))
    own = None if row.chosen is None else scores.get(row.chosen)
    others = [score for id, score in scores.items() if id != row.chosen and score is not None]
    if own is None or not others:
        return "no other token was possible"
    ahead = own - max(others)
    tie = ", a tie" if abs(ahead) < 1e-4 else ""
    place = "ahead of the next best" if ahead >= 0 else "behind the best"
    return f"{place} by {abs(ahead):.4g}{tie}"


def about_step(record: Record, step: RecordedStep) -> list[str]:
    """Return what is to be said of a step beside its choices."""
    found = drafted(record, step)
    for one in lost(step):
        least = f"the worst that was kept has {number(one.least)}"
        text = spelled(record, one.id)
        found.append(
            f"not kept: {text} after sequence {one.of}, score {number(one.score)}; {least}"
        )
    found += fed_lines(step)
    spent = ", ".join(f"{marked(name)} {s * 1e3:.2f} ms" for name, s in step.seconds.items())
    return [*found, f"{spent}; {step.beside} other requests in the step"]


def fed_lines(step: RecordedStep) -> list[str]:
    """Return what each sequence fed, what came from a cache, and what its row holds after it."""
    found = []
    for fed in step.fed:
        drafts = [one for one in step.drafts if one.of == fed.of]  # the row's own one comes first
        taken = len(drafts[0].ids) - max(one.right for one in drafts) if drafts else 0
        holds = fed.start + fed.count - taken
        back = f", as {taken} of drafts were taken back" if taken > 0 else ""
        if drafts and drafts[0].right < max(one.right for one in drafts):
            back = ", as another draft was right for longer"
        line = f"sequence {fed.of} fed {fed.count} positions; {fed.start} came from a cache"
        found.append(f"{line}; its row holds {holds} after it{back}")
    return found


# --- findings -------------------------------------------------------------------------------------


def places_of(tokens: Sequence[Token], text: str) -> list[int]:
    """Return the tokens in which a text begins; #7 is the id 7."""
    if text.startswith("#") and text[1:].isdigit():
        return [one.at for one in tokens if one.id == int(text[1:])]
    wanted, whole, starts = marked(text), "", []
    for one in tokens:
        starts.append(len(whole))
        whole += one.text
    found: dict[int, None] = {}
    at = whole.find(wanted) if wanted else -1
    while at >= 0:
        found[bisect_right(starts, at) - 1] = None
        at = whole.find(wanted, at + 1)
    return [*found]


@dataclass(frozen=True, slots=True)
class RepeatedTokens:
    """Tokens that stand there several times: how many tokens, how often, where first and again."""

    size: int
    count: int
    first: int
    again: int


def repetition(tokens: Sequence[Token]) -> RepeatedTokens | None:
    """Return the longest run of tokens, up to 32, that stands there twice without overlapping."""
    ids = [one.id for one in tokens]
    for size in range(min(32, len(ids) // 2), 1, -1):
        seen: dict[tuple[int, ...], int] = {}
        for at in range(len(ids) - size + 1):
            own = tuple(ids[at : at + size])
            first = seen.setdefault(own, at)
            if at >= first + size:
                return RepeatedTokens(size, _count(ids, own), first, at)
    return None


def _count(ids: Sequence[int], own: tuple[int, ...]) -> int:
    """Return how often ids stand there without overlapping."""
    count = at = 0
    while at + len(own) <= len(ids):
        same = tuple(ids[at : at + len(own)]) == own
        count, at = count + same, at + (len(own) if same else 1)
    return count


def findings(tokens: Sequence[Token]) -> list[str]:
    """Return where a text is least sure of itself, what was given, and what repeats."""
    found = []
    known = [one for one in tokens if one.surprise is not None]
    if known:
        least = max(known, key=lambda one: one.surprise or 0.0)
        share = share_of(-(least.surprise or 0.0))
        found.append(f"lowest share: token {least.at} ({least.text}), {share:.2%}")
        low = next((one for one in known if level(one.surprise) >= 2), None)
        if low is not None:
            found.append(f"the first below 10 %: token {low.at} ({low.text})")
    if given := _spans([one.at for one in tokens if one.origin == "given"]):
        found.append(f"given, not chosen: tokens {given}")
    if (twice := repetition(tokens)) is not None:
        text = "".join(one.text for one in tokens[twice.first : twice.first + twice.size])
        where = f"first at {twice.first}, again at {twice.again}"
        found.append(f"{twice.size} tokens stand there {twice.count} times, {where}: {text}")
    return found


def _spans(places: Sequence[int]) -> str:
    """Return places in order as text, those beside each other as one span."""
    spans: list[list[int]] = []
    for at in places:
        if spans and spans[-1][-1] == at - 1:
            spans[-1][1:] = [at]
        else:
            spans.append([at])
    return ", ".join(" to ".join(map(str, one)) for one in spans)


# --- trees ----------------------------------------------------------------------------------------


def tree(record: Record, run: RecordedRun) -> list[str]:
    """Return the hypotheses of a run as lines of a tree, with why each one stopped being one."""
    paths = Paths.of(run)
    alive = {id(node) for node in paths.live.values()}
    results = {tuple(ids) for ids in run.tokens.values()}
    lines = [f"run {marked(run.name)}: {len(paths.ended)} ended, {len(paths.live)} live"]
    power = _length_penalty(run)
    todo: list[tuple[Node, str, bool]] = [
        (child, "", child is paths.root.children[-1]) for child in reversed(paths.root.children)
    ]
    while todo:
        node, indent, last = todo.pop()
        edge = [node]
        while len(edge[-1].children) == 1 and edge[-1].end is None:
            edge.append(edge[-1].children[0])
        tip = edge[-1]
        text = "".join(spelled(record, one.id) for one in edge)
        if len(text) > _EDGE:
            text = f"{text[: _EDGE // 2]} … {text[-_EDGE // 2 :]} ({len(edge)} tokens)"
        fate = _fate(tip, alive, results, power)
        lines.append(f"{indent}{'└─' if last else '├─'} {text}{fate}")
        below = indent + ("   " if last else "│  ")
        todo += [(one, below, one is tip.children[-1]) for one in reversed(tip.children)]
    return [*lines, *_twins(record, paths)]


def _twins(record: Record, paths: Paths) -> list[str]:
    """Return which hypotheses say the same in other tokens."""
    said: dict[str, list[Node]] = {}
    for node in [*paths.ended, *paths.live.values()][:_MOST_TWINS]:
        own = b"".join(record.texts.get(one.id, b"<%d>" % one.id) for one in node.way())
        said.setdefault(own.decode(errors="backslashreplace"), []).append(node)
    return [
        f"{len(nodes)} hypotheses say the same in other tokens: {marked(text)[-_EDGE:]}"
        for text, nodes in said.items()
        if len(nodes) > 1
    ]


def forest(record: Record, run: RecordedRun) -> list[str]:
    """Return the tree of a run, those of its forks, and what became of its drafts."""
    found = tree(record, run)
    for fork in run.forks:
        at = 0 if fork.parent is None else fork.parent[1]
        found.append(f"run {marked(fork.name)} goes on from token {at}{_otherwise(run, fork)}:")
        found += [f"  {line}" for line in tree(record, fork)[1:]]
    for number, step in enumerate(choosing(run)):
        found += [f"step {number}: {line}" for line in drafted(record, step)]
    return found


def _otherwise(run: RecordedRun, fork: RecordedRun) -> str:
    """Return what was set in a fork beyond what was set before."""
    own = fork.changes[len(run.changes) :] if fork.changes != run.changes else []
    said = [f"{marked(name)}={_text(value)}" for _, values in own for name, value in values.items()]
    return f" with {', '.join(said)}" if said else ""


def _length_penalty(run: RecordedRun) -> float | None:
    """Return the power of the length that sums are divided by; None where nothing is a sum."""
    said = run.about.get("configuration")
    if type(run.about.get("width")) is not int or run.about["width"] == 1:
        return None
    value = said.get("length_penalty") if isinstance(said, dict) else None
    own = value[0] if isinstance(value, list) and value else 1.0
    return float(own) if isinstance(own, int | float) and abs(own) < 100 else None


def _fate(node: Node, alive: set[int], results: set[tuple[int, ...]], power: float | None) -> str:
    """Return what became of a hypothesis; nothing where others continue it."""
    score = f" {node.score:.4g}" if node.score else ""
    if node.score and power is not None and node.end is not None:
        length = len(node.way())  # by which the sum is divided in the score of what ended
        score = f" {node.score * length**power:.4g} / {length}^{power:g} = {node.score:.4g}"
    if node.end is not None:
        won = tuple(one.id for one in node.way()) in results
        return f" [{marked(node.end)}{score}{', returned' if won else ''}]"
    if node.children:
        return ""
    if id(node) in alive:
        return f" [live{score}]"
    return f" [dropped at step {node.step + 1}: its score{score} was not among the best]"


# --- comparison -----------------------------------------------------------------------------------


def comparison(one: Record, other: Record, index: int = 0) -> Iterator[str]:
    """Yield what differs between two records: what was asked, and the first other token of each
    pair of runs, with the margin by which each was chosen."""
    for name in ("model", "tokenizer", "everystep"):
        if one.header.get(name) != other.header.get(name):
            pair = _short(one.header.get(name)), _short(other.header.get(name))
            yield f"another {name}: {pair[0]} and {pair[1]}"
    pairs = zip(one.runs.values(), other.runs.values(), strict=False)
    for first, second in pairs:
        yield from _difference(one, first, other, second, index)
    if len(one.runs) != len(other.runs):
        yield f"{len(one.runs)} runs and {len(other.runs)}"


def _difference(
    one: Record, first: RecordedRun, other: Record, second: RecordedRun, index: int
) -> Iterator[str]:
    run_of = f"run {marked(first.name)}"
    seed = ["seed"] if _draws(first) or _draws(second) else []
    for name in ("strategy", *seed, "processors", "stops", "configuration"):
        if first.about.get(name) != second.about.get(name):
            what = f"{run_of}: another {name}"
            yield f"{what}: {_text(first.about.get(name))}"
            yield f"{' ' * len(what)}  {_text(second.about.get(name))}"
    if first.prompt != second.prompt:
        same = common(first.prompt, second.prompt)
        yield f"{run_of}: the prompts differ from id {same} on"
    mine, theirs = first.tokens.get(index, []), second.tokens.get(index, [])
    at = common(mine, theirs)
    if at == len(mine) == len(theirs):
        yield f"{run_of}: the same {at} tokens"
        return
    if at in (len(mine), len(theirs)):
        yield f"{run_of}: the same {at} tokens, then one of them goes on"
        return
    pair = spelled(one, mine[at]), spelled(other, theirs[at])
    yield f"{run_of}: the first other token is {at}: {pair[0]} and {pair[1]}"
    for run, own, rival in ((first, mine[at], theirs[at]), (second, theirs[at], mine[at])):
        yield f"  {_margin(rows_along(run, index)[at], own, rival)}"


def _draws(run: RecordedRun) -> bool:
    """Tell whether a run was asked to draw, so that its seed decides something."""
    said = run.about.get("configuration")
    own = said.get("do_sample") if isinstance(said, dict) else None
    return isinstance(own, list) and own[:1] == [True]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many ids both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _margin(row: RecordedRow | None, own: int, rival: int) -> str:
    """Return by how much a token was ahead of another one."""
    if row is None:
        return "it was given, not chosen"
    scores = dict(zip(row.ids, row.scores, strict=True))
    mine, theirs = scores.get(own), scores.get(rival)
    if mine is None or theirs is None:
        return "the other one was ruled out, or not among the candidates"
    tie = ", a tie" if abs(mine - theirs) < 1e-4 else ""
    margin = f"a margin of {mine - theirs:.4g}{tie}"
    return f"score {number(mine)}, the other one's {number(theirs)}: {margin}"
