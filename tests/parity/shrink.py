"""The smallest form of a draw that still differs: `python -m tests.parity.shrink NUMBER ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.parity.defects import without
from tests.parity.draws import Draw, draw
from tests.parity.judge import Verdict, judge

# What a draw's shape and padding rest on.
FRAME = {
    "do_sample",
    "num_beams",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
}
# Settings that may have a value per prompt.
PER_ROW = {"negative_prompt_ids", "decoder_start_token_id"}


def shrink(found: Draw, differs: Callable[[Draw], bool]) -> Draw:
    """A draw that differs, and no smaller neighbour of which does."""
    for smaller in _smaller(found):
        if differs(smaller):
            return shrink(smaller, differs)
    return found


def _smaller(one: Draw) -> Iterator[Draw]:
    """The draw without one thing each; what its mode rests on stays."""
    if one.as_config:
        yield replace(one, as_config=False)
    if one.padding == "right":
        yield replace(one, padding="left")
    for part in ("processors", "criteria"):
        names = getattr(one, part)
        yield from (replace(one, **{part: tuple(n for n in names if n != gone)}) for gone in names)
    if one.prefix:
        yield replace(one, prefix=False)
    if one.earlier is not None:
        whole = replace(one.shape, width=one.span)
        yield replace(one, earlier=None, shape=whole)
    yield from (without(one, name) for name in one.settings if name not in FRAME)
    yield from (_without_prompt(one, row) for row in range(len(one.prompts)) if one.shape.batch > 1)


def _without_prompt(one: Draw, row: int) -> Draw:
    """Whatever there is per row goes with it; the width of a decoder behind an encoder stays."""
    gone = {name: _others(value, row) for name, value in one.settings.items() if name in PER_ROW}
    smaller = replace(without(one, **gone), prompts=_others(one.prompts, row), masked=True)
    longest = smaller.span - one.span
    shape = replace(one.shape, batch=one.shape.batch - 1)
    if not one.shape.encodes:
        shape = replace(shape, width=shape.width + longest)
    return replace(smaller, begun=_others(one.begun, row), shape=shape)


def _others(rows: Any, row: int) -> Any:
    return rows if isinstance(rows, int) else rows[:row] + rows[row + 1 :]


def main(numbers: list[str]) -> None:
    """Prints what differs in each draw, and its smallest form."""
    for number in numbers:
        whole = judge(draw(int(number)))
        print(f"{whole.draw}\n{_words(whole)}")
        if whole.problems:
            small = shrink(whole.draw, lambda one: bool(judge(one).problems))
            print(f"{small}\n{_words(judge(small))}")


def _words(verdict: Verdict) -> str:
    return "\n".join(map(str, verdict.problems)) or f"equal {verdict.explained}"


if __name__ == "__main__":
    main(sys.argv[1:])
