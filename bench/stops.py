"""What do stop strings cost compared with transformers, to set up and per step?

scripts/bench stops [--out NAME]
"""

from __future__ import annotations

from functools import partial
from itertools import product

import tokenizers
import torch
import transformers
from parts.clock import medians, seconds
from parts.report import options, write
from tokenizers import decoders, models

from everystep.stops.strings import StopStrings
from everystep.text import Spelling, Tokenizer
from everystep.text.pieces import byte_alphabet
from everystep.types.request import Candidates

STRINGS = ["<|im_end|>", "\n\n", "Observation:", "日本"]
LENGTH, ROWS, STEPS = 4_000, 32, 60


def vocabulary(size: int) -> Tokenizer:
    """A byte-level tokenizer of the given size: bytes, then words of two to four letters."""
    letters = [*byte_alphabet().values()]
    words = ("".join(word) for n in (2, 3, 4) for word in product(letters[66:90], repeat=n))
    tokens = letters + [word for word, _ in zip(words, range(size - len(letters)), strict=False)]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def rectangles(size: int) -> list[torch.Tensor]:
    """What a batch of long rows looks like, step by step; ids are log-uniform, as in text."""
    drawn = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(0))
    ids = (size**drawn).long() - 1
    return [ids[:, : LENGTH - step] for step in range(STEPS)]


def ours(tokenizer: Tokenizer) -> tuple[float, float, float]:
    """As `theirs`, per step of the engine, which has its candidates already."""
    made = seconds(lambda: StopStrings(tuple(STRINGS), Spelling.of(tokenizer)))
    stop = StopStrings(tuple(STRINGS), Spelling.of(tokenizer))
    steps = [Candidates.of_rows(ids.numpy()) for ids in rectangles(len(tokenizer))]
    return made, *_new_and_known([partial(stop, step) for step in steps])


def theirs(tokenizer: Tokenizer) -> tuple[float, float, float]:
    """Seconds to set up, per step when ids are new, and per step when they were seen before."""
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    made = seconds(lambda: transformers.StopStringCriteria(fast, STRINGS))
    criterion = transformers.StopStringCriteria(fast, STRINGS)
    steps = rectangles(len(tokenizer))
    return made, *_new_and_known([partial(criterion, ids, None) for ids in steps])


def _new_and_known(calls: list[partial[object]]) -> tuple[float, float]:
    (new,), (known,) = medians(calls), medians(calls)
    return new, known


def main() -> None:
    """A line per vocabulary and library, and a dated file."""
    args = options(__doc__, threads=1).parse_args()
    torch.set_num_threads(args.threads)
    print(f"{len(STRINGS)} strings, {ROWS} rows of {LENGTH} ids, milliseconds")
    rows = []
    for size in (49_152, 150_000):
        for name, measure in (("everystep", ours), ("transformers", theirs)):
            figures = dict(
                zip(("set up", "new ids", "known ids"), measure(vocabulary(size)), strict=True)
            )
            cells = "  ".join(f"{kind} {one * 1e3:9.3f}" for kind, one in figures.items())
            print(f"{size:>10,}  {name:12}  {cells}")
            rows.append({"vocabulary": size, "library": name, "seconds": figures})
    write("stops", args, {"rows": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
