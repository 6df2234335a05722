"""What do strategies cost beside greedy decoding, and what does speculation gain?

    scripts/bench strategies [--repeats 15] [--new 64] [--only beams,contrastive,lookup]
                             [--executors native,torch] [--no-reference]

Each case is a pair of calls of the default model, one with the strategy and one that it is compared
with, which take turns. What counts is the time beyond that of a call for one token; the figure is
the median over pairs of the one divided by the other, with the quarters beside it. The same pair is
taken of transformers in the same run, with float32 weights, where it has the strategy. `aim` is
what the figure should be at most, or, for what gains, how many times as fast at least. A further
strategy is a further line of CASES.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from parts.clock import alternated, seconds
from parts.models import SHIPPED, Models, reference
from parts.report import options, write

import everystep as es

PASSAGE, TIMES, SHORT = 48, 4, 32
GREEDY: Mapping[str, Any] = {"strategy": "greedy"}
THEIR_GREEDY: Mapping[str, Any] = {"do_sample": False}
BEAMS: Mapping[str, Any] = {"num_beams": 4}


@dataclass(frozen=True)
class Case:
    """`asked` beside `base`: keywords of `generate`; a callable gets the model and gives them.

    `aim`: the ratio of their seconds, at most, or with `gains` how many times as fast at least.
    `prompt`: ids. `theirs`: what transformers is asked, None where it has no such strategy.
    `float32`: natively too, so that a model in 4 bits is a cheap drafter.
    """

    asked: Mapping[str, Any] | Callable[[Any, Any], Mapping[str, Any]]
    aim: float
    gains: bool = False
    base: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    prompt: str = "short"
    rows: int = 1
    theirs: Mapping[str, Any] | None = None
    base_of_theirs: Mapping[str, Any] = field(default_factory=dict)
    float32: bool = False

    def keywords(self, model: Any, tokenizer: Any) -> Mapping[str, Any]:
        """What the model is asked with."""
        return self.asked(model, tokenizer) if callable(self.asked) else self.asked


RECORDS = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["new", "old", "unknown"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}


def words(model: Any, tokenizer: Any) -> Mapping[str, Any]:
    """A search that has to say a word."""
    ids = tokenizer(" light", add_special_tokens=False)["input_ids"]
    return {"strategy": "constrained_beam", "force_words_ids": [ids]}


def records(model: Any, tokenizer: Any) -> Mapping[str, Any]:
    """JSON that is not complete before the length is reached."""
    return {
        **GREEDY,
        "schema": RECORDS,
        "tokenizer": tokenizer,
        "eos_token_id": model.vocab_size - 1,
    }


def in_four_bits(model: Any, tokenizer: Any) -> Mapping[str, Any]:
    """The same model as it is shipped drafts for its float32 values."""
    return {"strategy": "assisted", "assistant_model": loaded("native")[0]}


def three_in_four_bits(model: Any, tokenizer: Any) -> Mapping[str, Any]:
    """It makes up to three drafts, of which the one that is right for longest counts."""
    return {**in_four_bits(model, tokenizer), "num_drafts": 3}


CASES: Mapping[str, Case] = {
    "beams": Case({"strategy": "beam"}, 1.4, theirs=BEAMS),
    "beams in a batch": Case({"strategy": "beam"}, 4.0, rows=8, theirs=BEAMS),
    "drawn beams": Case(
        {"strategy": "beam_sample", "seed": 0},
        1.2,
        base={"strategy": "beam"},
        theirs={**BEAMS, "do_sample": True},
        base_of_theirs=BEAMS,
    ),
    "sampling": Case({"strategy": "sample", "seed": 0}, 1.2, theirs={"do_sample": True}),
    "diverse beams": Case({"strategy": "diverse_beam"}, 1.2, base={"strategy": "beam"}),
    "constrained beams": Case(words, 1.2, base={"strategy": "beam"}),
    "dola": Case({"strategy": "dola"}, 1.25),
    "contrastive": Case({"strategy": "contrastive"}, 1.6),
    "guided": Case({"strategy": "guided"}, 2.0, theirs={"guidance_scale": 1.5}),
    "lookup": Case(
        {"strategy": "lookup"},
        2.0,
        gains=True,
        prompt="copying",
        theirs={"prompt_lookup_num_tokens": 10},
    ),
    "lookup in vain": Case(
        {"strategy": "lookup"}, 0.97, gains=True, theirs={"prompt_lookup_num_tokens": 10}
    ),
    "lookup in vain in a batch": Case({"strategy": "lookup"}, 0.97, gains=True, rows=8),
    "draft model": Case(in_four_bits, 1.3, gains=True, float32=True),
    "draft model in a batch": Case(in_four_bits, 1.3, gains=True, rows=8, float32=True),
    "three drafts": Case(three_in_four_bits, 1.3, gains=True, float32=True),
    "three lookups": Case(
        {"strategy": "lookup", "num_drafts": 3}, 2.0, gains=True, prompt="copying"
    ),
    "early exit in vain": Case(
        {"strategy": "early_exit", "assistant_early_exit": 1}, 0.97, gains=True
    ),
    "early exit in vain in a batch": Case(
        {"strategy": "early_exit", "assistant_early_exit": 1}, 0.97, gains=True, rows=8
    ),
    "schema": Case(records, 1.1),
    "schema in a batch": Case(records, 1.11, rows=32),
}


@cache
def passage() -> list[int]:
    """Ids of a text, long enough for every prompt."""
    _, tokenizer = es.load(Models.default().gguf(SHIPPED))
    text = (Path(__file__).parent / "data" / "opticks.txt").read_text(encoding="utf-8")
    return tokenizer(text[2_000:6_000])["input_ids"]


def prompt(case: Case) -> torch.Tensor:
    """(rows, T) ids: the beginning of a text, or a passage over and over."""
    ids, width = passage(), PASSAGE if case.prompt == "copying" else SHORT
    rows = [ids[row * 7 : row * 7 + width] for row in range(case.rows)]
    return torch.tensor([row * TIMES if case.prompt == "copying" else row for row in rows])


def paired(repeats: int, first: Callable[[], float], second: Callable[[], float]) -> dict[str, Any]:
    """Medians of the seconds of both, and of their ratios; who begins changes with every pair."""
    first(), second()
    pairs = alternated(repeats, first, second)
    ratios = sorted(one / other for one, other in pairs)
    quarter = len(ratios) // 4
    return {
        "seconds": statistics.median(one for one, _ in pairs),
        "base_seconds": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(ratios),
        "quarters": [ratios[quarter], ratios[-1 - quarter]],
    }


def ours(case: Case, executor: str, repeats: int, new: int) -> dict[str, Any]:
    """The pair on one executor of this library."""
    model, tokenizer = in_float32(executor) if case.float32 else loaded(executor)
    ids, asked = prompt(case), case.keywords(model, tokenizer)
    fixed = {"eos_token_id": None, "pad_token_id": 0}

    def call(options: Mapping[str, Any], count: int, **more: Any) -> Any:
        return model.generate(ids, max_new_tokens=count, **{**fixed, **options, **more})

    found = paired(
        repeats,
        lambda: after_first(lambda count: call(asked, count), new),
        lambda: after_first(lambda count: call(case.base, count), new),
    )
    # What holds a cache feeds rows that have ended until all have.
    return {**found, "speculation": call(asked, new, return_dict_in_generate=True).speculation}


def after_first(call: Callable[[int], object], new: int) -> float:
    """The seconds that `call` takes for so many tokens beyond those for one."""
    return seconds(lambda: call(new)) - seconds(lambda: call(1))


@cache
def loaded(executor: str) -> tuple[Any, Any]:
    """The shipped model natively; its float32 values on torch operators, as transformers has."""
    if executor == "native":
        return es.load(Models.default().gguf(SHIPPED))
    return in_float32(executor)


@cache
def in_float32(executor: str) -> tuple[Any, Any]:
    """The float32 values of the shipped model."""
    return es.load(Models.default().float32(), executor=executor)


def beside(case: Case, repeats: int, new: int) -> dict[str, Any]:
    """The same pair of transformers."""
    model, ids = reference(), prompt(case)
    fixed = {**THEIR_GREEDY, "attention_mask": torch.ones_like(ids)}

    def call(options: Mapping[str, Any], count: int) -> Any:
        return model.generate(ids, max_new_tokens=count, **{**fixed, **options})

    return paired(
        repeats,
        lambda: after_first(lambda count: call(case.theirs or {}, count), new),
        lambda: after_first(lambda count: call(case.base_of_theirs, count), new),
    )


def judged(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """With how the ratio compares with the aim."""
    value = 1 / found["ratio"] if case.gains else found["ratio"]
    reached = value >= case.aim if case.gains else value <= case.aim
    return {**found, "figure": value, "aim": case.aim, "gains": case.gains, "reached": reached}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row, a line of which is on standard output."""
    sign = "≥" if row["gains"] else "≤"
    print(f"{row['case']}, {row['engine']}: {row['figure']:.3f} ({sign} {row['aim']})", flush=True)
    return row


def main() -> None:
    """Runs the cases one after another and writes a dated file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--executors", default="native,torch")
    parser.add_argument("--no-reference", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for name in args.only.split(","):
        case = CASES[name]
        for executor in args.executors.split(","):
            found = judged(case, ours(case, executor, args.repeats, args.new))
            rows.append(shown({"case": name, "engine": f"everystep, {executor}", **found}))
        if case.theirs is not None and not args.no_reference:
            found = judged(case, beside(case, args.repeats, args.new))
            rows.append(shown({"case": name, "engine": "transformers", **found}))
    write("strategies", args, {"rows": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
