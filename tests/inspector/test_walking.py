"""A walk through a record in a terminal, driven by the pilot of textual itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from rich.console import Console

import everystep as es
from everystep.inspector import views
from everystep.inspector.walking import RecordWalk
from everystep.records import Record, RecordedRun, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    model = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
    file: Path = tmp_path_factory.mktemp("records") / "a"
    given = {"do_sample": True, "top_k": 20, "temperature": 0.7, "max_new_tokens": 60, "seed": 2}
    es.generate(model, tiny_tokenizer(320), "ab", **given, eos_token_id=None, record=file)
    return read_record(file)


def shown(app: RecordWalk) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(app.said())
    return captured.get()


def test_keys_walk_through_the_choices(record: Record) -> None:
    (run,) = record.runs.values()
    tokens = views.tokens_of(record, run)

    async def walked() -> None:
        app = RecordWalk(record, run, 0)
        async with app.run_test(size=(140, 30)) as pilot:
            await pilot.press("right", "right", "left")
            assert app.lines.at == 1
            assert "drawn:" in shown(app) and str(tokens[1].id) in shown(app)
            await pilot.press("end")
            assert app.lines.at == 59 and "ended after 60 tokens: length" in shown(app)
            assert app.lines.scroll_offset.y > 20
            await pilot.press("home", "pagedown", "pageup", "left", "down", "up")
            assert app.lines.at == 0
            await pilot.press("b")
            low = [one.at for one in tokens if views.level(one.surprise) >= 2 and one.at > 0]
            assert app.lines.at == low[0]
            await pilot.press("e")
            assert app.lines.measure == 1
            await pilot.press("home", "slash", *f"#{tokens[40].id}", "enter")
            assert app.lines.at == next(one.at for one in tokens[1:] if one.id == tokens[40].id)
            await pilot.press("t")
            await pilot.press("q")

    asyncio.run(walked())


def test_what_is_not_seen_is_not_drawn() -> None:
    run = RecordedRun("0", {}, (), tokens={0: [0] * 100_000})
    record = Record({}, {"0": run}, {0: b"\x1b[31mx"})

    async def walked() -> None:
        app = RecordWalk(record, run, 0)
        async with app.run_test(size=(140, 30)) as pilot:
            await pilot.press("end")
            assert app.lines.at == 99_999
            assert 0 < app.lines.drawn < 500
            line = app.lines.render_line(0)
            assert "\x1b" not in "".join(one.text for one in line)

    asyncio.run(walked())
