"""Features about the course of a generation: kept, copied, watched, scheduled, ended, drafted.

None of them may change what is chosen, so that each check compares with the plain run.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import everystep as es
from everystep.cli import main
from everystep.engine import Continuous, Engine, audit
from everystep.errors import RequestError
from everystep.nn.modes import inference_mode
from everystep.types import Group
from tests.cli.tiny_model import write_tiny_model
from tests.judges.drive import result
from tests.matrix.book import prefix_of, require_equal
from tests.matrix.rows import ROWS, Row
from tests.matrix.subjects import PLAIN, SEED, plain

STEPS = 3


def listed(run: es.Run) -> list[es.Generated]:
    """The result of a run."""
    found = run.result()
    return found if isinstance(found, list) else [found]


def save_and_resume(row: Row, folder: Path) -> None:
    """A run that was kept in a file half way."""
    run = PLAIN.open(row)
    assert len([*islice(run, STEPS)]) == STEPS and not run.done
    run.save(folder / "a.run")
    beside = {"assistant_model": PLAIN.assistant} if row.assisted else {}
    again = es.resume(folder / "a.run", PLAIN.model, PLAIN.tokenizer, **beside)
    require_equal(listed(again), plain(row))
    require_equal(listed(run), plain(row))


def fork(row: Row, folder: Path) -> None:
    """Both halves of a run that was forked half way."""
    run = PLAIN.open(row)
    assert len([*islice(run, STEPS)]) == STEPS and not run.done
    twin = run.fork()
    require_equal(listed(twin), plain(row))
    require_equal(listed(run), plain(row))


def trace(row: Row, folder: Path) -> None:
    """Every step can be looked at: who continued whom, from which logits."""
    run = PLAIN.open(row)
    steps = [*run]
    require_equal(listed(run), plain(row))
    prefix = prefix_of(PLAIN, PLAIN.request(row))
    paths: dict[int, tuple[int, ...]] = {}  # of live hypotheses, by index
    ended: list[tuple[int, ...]] = []
    for step in steps:
        assert step.logits is not None
        for path in {*paths.values()} or {()}:
            gaps = (step.logits.float() - prefix.logits(path)).abs().amax(dim=-1)
            assert float(gaps.min()) < 1e-4
        grown = {}
        for one in step.branches:
            path = (*paths.get(one.parent, ()), *one.tokens)
            if one.finish is None:
                grown[one.index] = path
            else:
                ended.append(path)
        paths = grown
    assert len(steps) > 2 and plain(row)[0].tokens in ended


def neighbours() -> list[Row]:
    """Other strategies that share the engine."""
    return [row for row in ROWS if row.name in ("greedy", "beam")]


def submitted(engine: Engine, row: Row) -> tuple[Group, list[Group]]:
    """The row's own group, between neighbours."""
    before, after = (
        engine.submit(PLAIN.request(one, name=f"neighbour {place}"))
        for place, one in enumerate(neighbours())
    )
    group = engine.submit(PLAIN.request(row, name="own"))
    return group, [before, after]


def wanted(row: Row) -> list[tuple[tuple[int, ...], str]]:
    return [(one.tokens, one.finish_reason.kind) for one in plain(row)]


def told(group: Group) -> list[tuple[tuple[int, ...], str]]:
    return [(one.tokens, one.reason) for one in result(group)]


def preemption(row: Row, folder: Path) -> None:
    """Among others in a continuous batch, in chunks, while it loses its rows again and again."""
    with inference_mode():
        engine = Engine(PLAIN.model.executor(PLAIN.request(row).needs), Continuous(12, 12))
        group, others = submitted(engine, row)
        for step in range(200):
            if not engine.pending:
                break
            engine.step()
            if group.opened and group.live and step % 4 == 3:
                engine.preempt(group)
        audit(engine)
    assert told(group) == wanted(row)
    for one, neighbour in zip(others, neighbours(), strict=True):
        assert told(one) == wanted(neighbour)
    assert engine.counts.preemptions_in_decode > 0


def cancellation(row: Row, folder: Path) -> None:
    """It ends when it is told to, holds nothing, and those beside it notice nothing."""
    with inference_mode():
        engine = Engine(PLAIN.model.executor(PLAIN.request(row).needs), Continuous(64, 32))
        group, others = submitted(engine, row)
        while not group.opened:
            engine.step()
        engine.step()
        events = engine.cancel(group)
        audit(engine)
        while engine.pending:
            engine.step()
        audit(engine)
    assert not group.live and {kind for _, kind in told(group)} == {"cancelled"}
    assert [event.finish.kind for event in events if event.finish] == ["cancelled"]
    if group.request.strategy.streams:
        ((tokens, _),) = told(group)
        assert 0 < len(tokens) < len(plain(row)[0].tokens)
        assert tokens == plain(row)[0].tokens[: len(tokens)]
    for one, neighbour in zip(others, neighbours(), strict=True):
        assert told(one) == wanted(neighbour)


def speculation(row: Row, folder: Path) -> None:
    """Drafts from the prompt change nothing."""
    ids, options = torch.tensor([PLAIN.ids]), {**PLAIN.options(row), "seed": [SEED]}
    constant = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    out = PLAIN.model.generate(ids, **constant, **options)
    assert [tuple(tokens) for tokens in out.new_tokens] == [one.tokens for one in plain(row)]
    assert out.speculation["drafted"] > 0


TYPED = {
    "constrained_beam": ["--force-words", "xy", "--force-words", "z"],
    "assisted": ["--assistant", "model"],
    "early_exit": ["--assistant-early-exit", "1"],
}
"""What is typed beside the name of a strategy that needs more."""


def asked_for(row: Row, model: Any, tokenizer: Any) -> dict[str, Any]:
    """What a call says for `TYPED`."""
    if row.name == "constrained_beam":
        return {"force_words_ids": [tokenizer(text)["input_ids"] for text in ("xy", "z")]}
    if row.assisted:
        return {"assistant_model": model, "assistant_tokenizer": tokenizer}
    return {"assistant_early_exit": 1} if row.name == "early_exit" else {}


def command_line(row: Row, folder: Path) -> None:
    """`--strategy NAME` is `strategy=NAME`: the same tokens of an equal request."""
    path = write_tiny_model(folder / "model")
    said = ["generate", "abcabc", "-m", "model", "--seed", "3", "-n", "6", "--json"]
    said += ["--strategy", row.name.replace("_", "-"), *TYPED.get(row.name, [])]
    model, tokenizer = es.load(path)
    streams: list[es.Stream] = []
    stream = es.stream

    def noted(*asked: Any, **options: Any) -> es.Stream:
        streams.append(stream(*asked, **options))
        return streams[-1]

    shown, told, empty = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO())
    with (
        redirect_stdout(shown),
        redirect_stderr(told),
        mock.patch.object(sys, "stdin", empty),
        mock.patch.object(es, "stream", noted),
        mock.patch.object(es, "load", lambda *_, **__: (model, tokenizer)),
    ):
        code = main(said)
    if code == 2:  # what a call would raise
        raise RequestError(told.getvalue())
    assert code == 0
    more = {**asked_for(row, model, tokenizer), "seed": 3, "max_new_tokens": 6}
    own = stream(model, tokenizer, "abcabc", strategy=row.name, **more)
    assert [*own]
    ((one,),) = own.results()
    (found,) = json.loads(shown.getvalue())["results"]
    assert (found["tokens"], found["text"]) == ([*one.tokens], one.text)
    typed, called = (one.groups[0].request for one in (streams[0], own))
    for asked in (typed, called):
        assert type(asked.strategy) is type(PLAIN.request(row).strategy)
        assert type(asked.drafter) is type(PLAIN.request(row).drafter)
    assert (typed.strategy, typed.drafter) == (called.strategy, called.drafter)
    assert typed.readout == called.readout
