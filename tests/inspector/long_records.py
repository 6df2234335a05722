"""Long records, as the library writes them but without a model: random candidates, two stages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from everystep.records import Line, RecordWriter, exact

VOCABULARY, BEST, BLOCK = 49_152, 10, 1000
ABOUT = {
    "prompt": [1, 2],
    "strategy": "Sample()",
    "processors": [["Temperature", "Temperature(0.8)"], ["TopK", "TopK(50)"]],
}


def long_record(file: Path, steps: int, beams: int = 1) -> None:
    """A record of one run with so many steps, of one row or of beams, and as many tokens."""
    dice, writer = random.Random(0), RecordWriter(file)
    name = writer.begin("model", "none")
    texts = {str(id): f" w{id}" for id in range(2000)}
    start = {"type": "run", "run": name, **ABOUT, "width": beams}
    writer.write([{"type": "spelling", "texts": texts}, start])
    for first in range(0, steps, BLOCK):
        writer.write(_block(name, dice, range(first, min(first + BLOCK, steps)), beams))
    kind = {"kind": "length", "matched": None, "length": steps}
    writer.write([{"type": "end", "run": name, "index": i, **kind} for i in range(beams)])
    writer.flush()


def _block(name: str, dice: random.Random, steps: range, beams: int) -> Iterator[Line]:
    for step in steps:
        rows = [_row(dice, step, index) for index in range(beams)]
        children = [[i, i, [row["chosen"]], 0.0, None] for i, row in enumerate(rows)]
        seconds = {name: round(dice.random() / 100, 7) for name in ("draft", "forward", "choose")}
        line = {"type": "step", "run": name, "step": step + 1, "rows": rows, "children": children}
        fed = [[index, step + 1, 1] for index in range(beams)]
        yield {**line, "fed": fed, "seconds": seconds, "beside": 0}
        for index, row in enumerate(rows):
            kind = {"type": "tokens", "run": name, "index": index}
            yield {**kind, "at": step, "ids": [row["chosen"]]}


def _row(dice: random.Random, at: int, index: int) -> dict[str, object]:
    ids = [dice.randrange(2000) for _ in range(BEST)]
    logits = sorted((dice.gauss(12, 4) for _ in ids), reverse=True)
    values = [exact(one) for one in logits]
    heated = [exact(one / 0.8) for one in logits]
    return {
        "of": index,
        "at": at,
        "ids": ids,
        "logits": values,
        "stages": [
            {"name": "Temperature", "removed": 0, "values": heated},
            {"name": "TopK", "removed": VOCABULARY - 50, "values": heated},
        ],
        "totals": [exact(logits[0] + dice.random()), exact(logits[0] / 0.8 + dice.random())],
        "entropies": [exact(dice.random() * 3), exact(dice.random() * 2)],
        "chosen": ids[0],
        "origin": "chosen",
        "ranks": [0, 0],
        "surprise": exact(dice.random()),
        "draw": [dice.random(), 0.0, 1.0],
        "ends": [[2, exact(dice.gauss(0, 4)), None, 50]],
    }
