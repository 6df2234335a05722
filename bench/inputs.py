"""What do hooks, bridged models, prefixes and saved runs cost?

    scripts/bench inputs [--repeats 5] [--only hooks,bridge,beams,prefix,saved] [--out NAME]

hooks: microseconds of a step with a hook that does nothing, less the same step without one.
bridge: milliseconds of a step of a wrapped model, less those of a loop by hand over the same module
and its cache. beams: seconds of four beams through the bridge, beside the module's own `generate`.
prefix: the first token after 1,000 positions that another prompt has fed, beside a one-token step,
and how many positions 32 such prompts feed together. saved: milliseconds to save and to resume a
run of 1,000 positions. Medians; where two things are compared, they take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_overhead import KINDS, PROMPT, WARM_UP, ReadyExecutor
from parts.clock import medians, seconds
from parts.models import Models, reference
from parts.report import options, write

import everystep as es
from everystep.drivers.session import Session
from everystep.engine import Engine, Lockstep

PREFIX, NEW = 1_000, 48


class Nothing(es.Hook):
    """A hook that is asked at every moment, looks at nothing and adds nothing."""

    def before_step(self, step: es.BeforeStep) -> None:
        """It gives nothing."""

    def after_step(self, step: es.AfterStep) -> None:
        """Nothing follows."""


def in_turn(repeats: int, **ways: Callable[[], object]) -> dict[str, float]:
    """The median seconds of each way, which are called in turn, after each once to warm up."""
    series = ([way] * (1 + repeats) for way in ways.values())
    return dict(zip(ways, medians(*series), strict=True))


def hooks(repeats: int) -> dict[str, Any]:
    """Microseconds per step of one greedy row on an executor that answers at once."""
    kind, steps = KINDS[0], 200 * repeats

    def engine(*attached: es.Hook) -> Engine:
        made = Engine(ReadyExecutor(1_000, 1, kind.listed), Lockstep())  # type: ignore[arg-type]
        request = kind.request(0, np.arange(1, PROMPT + 1), WARM_UP + steps + 1, 0)
        made.submit(replace(request, hooks=attached))
        return made

    plain, hooked = engine(), engine(Nothing())
    series = ([one.step] * (WARM_UP + steps) for one in (hooked, plain))
    with_hook, without = (1e6 * median for median in medians(*series, warm_up=WARM_UP))
    return {"with_us": with_hook, "without_us": without, "hook_us": with_hook - without}


def bridge(repeats: int) -> dict[str, Any]:
    """Milliseconds per step, greedy, one row."""
    theirs = reference()
    ours, ids = es.wrap(theirs), torch.arange(100, 132)[None]

    @torch.no_grad()
    def by_hand() -> None:
        cache, fed = None, ids
        for _ in range(NEW):
            out = theirs(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, fed = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    greedy = {"max_new_tokens": NEW, "do_sample": False}
    found = in_turn(
        repeats,
        hand=by_hand,
        bridge=lambda: ours.generate(ids, **greedy),
        transformers=lambda: theirs.generate(ids, attention_mask=torch.ones_like(ids), **greedy),
    )
    steps = {f"{name}_ms": 1e3 * value / NEW for name, value in found.items()}
    return {**steps, "beside_ms": steps["bridge_ms"] - steps["hand_ms"]}


def beams(repeats: int) -> dict[str, Any]:
    """Seconds of a call with four beams."""
    theirs = reference()
    ours, ids = es.wrap(theirs), torch.arange(100, 132)[None]
    asked = {"max_new_tokens": NEW, "num_beams": 4, "do_sample": False}
    mask = torch.ones_like(ids)
    found = in_turn(
        repeats,
        bridge=lambda: ours.generate(ids, attention_mask=mask, **asked),
        transformers=lambda: theirs.generate(ids, attention_mask=mask, **asked),
    )
    named = {f"{name}_s": value for name, value in found.items()}
    return {**named, "ratio": found["transformers"] / found["bridge"]}


def prefix(repeats: int) -> dict[str, Any]:
    """Milliseconds on the native executor, and counts of fed positions."""
    model, tokenizer = es.load(Models.default().gguf("Q8_0"))
    shared = np.random.default_rng(0).integers(100, 40_000, PREFIX).tolist()
    common = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    session = Session(model, tokenizer, (), None, 0, common)
    first, later = [], []
    for number in range(2 + 4 * repeats):
        driver, box = session.submit(session.request([*shared, 100 + number], number))
        times = []
        while not box.over:
            times.append(seconds(driver.step))
        if number > 1:
            first.append(times[0])
            later.append(times[1])
    session = Session(model, tokenizer, (), None, 0, common)
    prompts = [[*shared, 100 + number] for number in range(32)]
    boxes = [session.submit(session.request(one, number)) for number, one in enumerate(prompts)]
    driver = boxes[0][0]
    while not all(box.over for _, box in boxes):
        driver.step()
    hit, step = statistics.median(first), statistics.median(later)
    counts = driver.engine.counts
    return {
        "hit_ms": 1e3 * hit,
        "step_ms": 1e3 * step,
        "ratio": hit / step,
        "fed_by_32": counts.fed,
        "forked_by_32": counts.forked,
    }


def saved(repeats: int) -> dict[str, Any]:
    """Milliseconds of a run with 1,000 positions."""
    model, tokenizer = es.load(Models.default().gguf("Q8_0"))
    ids = np.random.default_rng(0).integers(100, 40_000, PREFIX).tolist()
    run = es.open(model, tokenizer, ids, max_new_tokens=16, do_sample=False)
    for _ in range(4):
        next(run)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        found = in_turn(
            4 * repeats,
            save=lambda: run.save(path),
            resume=lambda: es.resume(path, model, tokenizer),
        )
        return {f"{name}_ms": 1e3 * value for name, value in found.items()}


CASES = {"hooks": hooks, "bridge": bridge, "beams": beams, "prefix": prefix, "saved": saved}


def main() -> None:
    """Runs the cases one after another and writes a dated file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(CASES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {}
    for name in args.only.split(","):
        found[name] = CASES[name](args.repeats)
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in found[name].items()}
        print(name, shown, flush=True)
    write("inputs", args, found, packages=("transformers",))


if __name__ == "__main__":
    main()
