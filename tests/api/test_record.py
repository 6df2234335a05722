"""`record=FILE` in every call: the file has every run, and the call gives what it gives without."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import recording, watching
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.records import Record, RecordWriter, read_record, writer
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.8, "seed": 3}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.3},
    "sampled": SAMPLED,
    "several": {**SAMPLED, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "drafted": {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    "chosen": {"choices": ["yes", "no"]},
    "guided": {"guidance_scale": 2.0, "negative_prompt": "no"},
    "best_of": {**SAMPLED, "best_of": 3},
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)


def ids(found: Any) -> list[list[int]]:
    return [[*one.tokens] for one in (found if isinstance(found, list) else [found])]


def recorded(record: Record, run: str = "0") -> list[list[int]]:
    return [tokens for _, tokens in sorted(record.runs[run].tokens.items())]


def recorded_all(record: Record) -> list[str]:
    every = [recorded(record, run)[0] for run in record.runs]
    return [TOKENIZER.decode(own, skip_special_tokens=True) for own in every]


@pytest.mark.parametrize("name", ASKED)
def test_a_call_gives_the_same_and_the_file_has_it(
    name: str, model: LanguageModel, tmp_path: Path
) -> None:
    given = {"max_new_tokens": 6, "return_dict_in_generate": True, **ASKED[name]}
    plain = es.generate(model, TOKENIZER, "ab ab ab", **given)
    found = es.generate(model, TOKENIZER, "ab ab ab", **given, record=tmp_path / "a.jsonl.gz")
    assert ids(found) == ids(plain)
    record = read_record(tmp_path / "a.jsonl.gz")
    assert recorded(record) == ids(found)
    run = record.runs["0"]
    assert [one.kind for one in sorted(run.ends, key=lambda one: one.index)] == [
        one.finish_reason.kind for one in (found if isinstance(found, list) else [found])
    ]
    assert "unknown" not in {s.name for step in run.steps for r in step.rows for s in r.stages}
    assert b"".join(record.texts[id] for id in run.prompt) == b"ab ab ab"
    if name == "drafted":
        assert any(step.drafts for step in run.steps)
    if name == "chosen":
        assert {row.origin for row in run.rows().values()} >= {"forced"}
    if name == "sampled":
        assert [stage.name for stage in run.steps[0].rows[0].stages] == [
            "TemperatureLogitsWarper",
            "TopKLogitsWarper",
        ]
        assert run.about["configuration"]["temperature"] == [0.8, "call"]  # type: ignore[index]


@pytest.mark.parametrize("name", ASKED)
def test_without_stages_it_has_what_they_began_and_ended_with(
    name: str, model: LanguageModel, tmp_path: Path
) -> None:
    given = {"max_new_tokens": 6, "return_dict_in_generate": True, **ASKED[name]}
    whole, brief = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    found = es.generate(model, TOKENIZER, "ab ab ab", **given, record=whole)
    less = es.generate(
        model, TOKENIZER, "ab ab ab", **given, record=RecordWriter(brief, stages=False)
    )
    assert ids(less) == ids(found)
    one, other = read_record(whole).runs["0"], read_record(brief).runs["0"]
    assert one.tokens == other.tokens and one.ends == other.ends
    assert other.about["every_stage"] is False and "every_stage" not in one.about
    pairs = zip(one.steps, other.steps, strict=True)
    rows = [pair for steps in pairs for pair in zip(*(s.rows for s in steps), strict=True)]
    for full, row in rows:
        for field in ("chosen", "origin", "totals", "entropies", "ranks", "draw", "ends", "score"):
            assert getattr(row, field) == getattr(full, field), field
        logits, scores = (dict(zip(full.ids, v, strict=True)) for v in (full.logits, full.scores))
        assert [logits[id] for id in row.ids] == [*row.logits]
        assert [scores[id] for id in row.ids] == [*row.scores]
        assert {stage.name for stage in row.stages} <= {"all", "drafts"}
        removed = sum(stage.removed for stage in full.stages)
        assert sum(stage.removed for stage in row.stages) == removed
    if name in ("sampled", "chosen"):
        assert all(len(row.stages) == 1 for _, row in rows)
    if name == "sampled":
        assert brief.stat().st_size < whole.stat().st_size


CALLS: dict[str, Callable[..., Any]] = {
    "es.stream": lambda m, **o: [*es.stream(m, TOKENIZER, "ab", **o)],
    "es.open": lambda m, **o: es.open(m, TOKENIZER, "ab", **o).result(),
    "es.chat": lambda m, **o: es.chat(m, TOKENIZER, "ab", **o),
    "model.generate": lambda m, **o: m.generate(torch.tensor([[70, 71]]), **o),
    "AsyncEngine": lambda m, **o: asyncio.run(asked(m, **o)),
}


async def asked(model: LanguageModel, **options: Any) -> Any:
    async with es.AsyncEngine(model, TOKENIZER) as engine:
        return await asyncio.gather(
            engine.generate("ab", **options), engine.generate("cd", **options)
        )


@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_it(call: str, model: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    CALLS[call](model, max_new_tokens=3, eos_token_id=None, record=str(file))
    record = read_record(file)
    assert [len(tokens) for run in record.runs for tokens in recorded(record, run)] == [3] * len(
        record.runs
    )
    assert len(record.runs) == 1 + (call == "AsyncEngine")
    assert record.header["model"] == model.digest()


def test_several_prompts_are_runs_of_one_file(model: LanguageModel, tmp_path: Path) -> None:
    prompts, file = ["ab", "cd", "ef"], tmp_path / "a.jsonl"
    texts = es.generate(model, TOKENIZER, prompts, max_new_tokens=4, record=file)
    record = read_record(file)
    assert recorded_all(record) == texts
    own = tmp_path / "own.jsonl"
    options = [{"record": own}, {}, {"record": own}]
    es.generate(model, TOKENIZER, prompts, max_new_tokens=4, options=options)
    record = read_record(own)
    assert recorded_all(record) == [texts[0], texts[2]]


def test_a_run_records_what_is_done_to_it(model: LanguageModel, tmp_path: Path) -> None:
    run = es.open(model, TOKENIZER, "ab", max_new_tokens=8, record=tmp_path / "a.gz", **SAMPLED)
    next(run), next(run)
    run.send("xy")
    next(run)
    why = run.explain(0)
    twin = run.fork(seed=8)
    run.rewind(2)
    run.result(), twin.result()
    record = run.inspect()
    first, second = record.runs.values()
    assert recorded(record) == [[*run.tokens]] and first.given == {*run.given}
    assert recorded(record, "1") == [[*twin.tokens]] and second.parent == ("0", 5)
    row = first.row_at(0)
    assert row is not None and row.draw is not None and why.draw is not None
    assert row.chosen == why.chosen.token
    assert row.draw.number == why.draw.number
    assert (row.draw.low, row.draw.high) == pytest.approx((why.draw.low, why.draw.high))
    saved = tmp_path / "saved.run"
    run.save(saved)
    again = es.resume(saved, model, TOKENIZER)
    with pytest.raises(RequestError, match="keeps no record"):
        again.inspect()
    noted = es.resume(saved, model, TOKENIZER, record=tmp_path / "b.jsonl")
    noted.set(max_new_tokens=10)
    noted.result()
    assert recorded(noted.inspect()) == [[*noted.tokens]]
    with pytest.raises(RequestError, match="record"):
        run.set(record=tmp_path / "c")


@pytest.mark.parametrize(
    "asked",
    [SAMPLED, {**SAMPLED, "num_return_sequences": 2}, {"num_beams": 3, "num_return_sequences": 2}],
    ids=["one", "several", "beams"],
)
def test_a_run_that_goes_on_is_recorded_from_there(
    asked: dict[str, Any], model: LanguageModel, tmp_path: Path
) -> None:
    run = es.open(model, TOKENIZER, "ab", max_new_tokens=8, eos_token_id=None, **asked)
    next(run), next(run)
    if asked is SAMPLED:
        run.send("xy")
    next(run)
    run.save(tmp_path / "run")
    given = {*run.given}
    again = es.resume(tmp_path / "run", model, TOKENIZER, record=tmp_path / "a.jsonl")
    assert recorded(again.inspect()) in ([], [[*run.tokens]], [[*run.tokens], [*run._ids(1)]])
    found = again.result()
    (own,) = read_record(tmp_path / "a.jsonl").runs.values()
    assert [ids for _, ids in sorted(own.tokens.items())] == ids(found)
    assert own.given == given and own.choices == 5
    assert own.row_at(0) is None and own.row_at(7) is not None


def test_processors_of_the_caller_run_once(model: LanguageModel, tmp_path: Path) -> None:
    def counted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        return scores + torch.arange(scores.shape[1]) * 1e-3 * len(calls)

    given = {"max_new_tokens": 4, "logits_processor": [counted], "eos_token_id": None}
    calls: list[int] = []
    plain = es.generate(model, TOKENIZER, "ab", **given)
    before, calls = calls, []
    assert es.generate(model, TOKENIZER, "ab", **given, record=tmp_path / "a") == plain
    assert calls == before
    (run,) = read_record(tmp_path / "a").runs.values()
    assert [row.stages[0].name for row in run.rows().values()] == ["counted"] * 4


def test_without_a_record_nobody_looks_and_nothing_is_written(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def told(kind: type, name: str) -> None:
        begin = kind.__init__  # type: ignore[misc]

        def noted(self: Any, *args: Any, **more: Any) -> None:
            made.append(name)
            begin(self, *args, **more)

        monkeypatch.setattr(kind, "__init__", noted)

    told(watching.Watch, "look")
    told(recording.StepSeen, "step")
    told(recording.HeldOfStep, "scores")
    told(RecordWriter, "writer")
    told(writer.ThreadPoolExecutor, "thread")
    for asked in ASKED.values():
        es.generate(model, TOKENIZER, "ab", max_new_tokens=3, **asked)
    run = es.open(model, TOKENIZER, "ab", max_new_tokens=3, eos_token_id=None)
    next(run), next(run.fork())
    run.result()
    assert made == []
    es.generate(model, TOKENIZER, "ab", max_new_tokens=3, record=tmp_path / "a")
    assert {*made} == {"look", "step", "scores", "writer", "thread"}


def test_a_draw_from_the_global_generator_stays(model: LanguageModel, tmp_path: Path) -> None:
    prompt = torch.tensor([[70, 71]])
    given = {"max_new_tokens": 6, "do_sample": True, "xtc_probability": 0.5, "xtc_threshold": 0.01}
    torch.manual_seed(5)
    plain = model.generate(prompt, **given)
    torch.manual_seed(5)
    assert torch.equal(model.generate(prompt, **given, record=tmp_path / "a"), plain)


def test_a_record_that_cannot_be_is_refused_before_any_compute(
    model: LanguageModel, tmp_path: Path
) -> None:
    for file in (tmp_path / "none" / "a", tmp_path, 7):
        with pytest.raises(EverystepError):
            es.generate(model, TOKENIZER, "ab", record=file)
    with pytest.raises(UnsupportedError, match="record"):
        model.generate(
            torch.tensor([[70]]), custom_generate=lambda **_: None, record=tmp_path / "a"
        )
    assert not (tmp_path / "a").exists()


def test_a_full_disk_stops_the_record_and_not_the_text(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = es.generate(model, TOKENIZER, "ab", max_new_tokens=4)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("everystep.records.writer._append_waiting", full)
    with pytest.warns(UserWarning, match="No space left"):
        found = es.generate(model, TOKENIZER, "ab", max_new_tokens=4, record=tmp_path / "a")
    assert found == plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = es.generate(model, TOKENIZER, "ab", max_new_tokens=4, record=tmp_path / "a")
    assert found == plain


TURNS = [{"role": "user", "content": "ab ab"}]


async def streamed(model: LanguageModel, prompt: Any, **options: Any) -> list[Any]:
    async with es.AsyncEngine(model, TOKENIZER) as engine:
        return [event async for event in engine.stream(prompt, **options)]


def said_of(events: list[Any]) -> list[int]:
    return [event.token for event in events if event.token >= 0]


STREAMED: dict[str, tuple[Callable[..., Any], Callable[..., list[Any]]]] = {
    "es.stream": (
        lambda m, **o: es.generate(m, TOKENIZER, "ab ab", **o),
        lambda m, **o: [*es.stream(m, TOKENIZER, "ab ab", **o)],
    ),
    "AsyncEngine.stream": (
        lambda m, **o: es.generate(m, TOKENIZER, "ab ab", **o),
        lambda m, **o: asyncio.run(streamed(m, "ab ab", **o)),
    ),
    "es.stream of messages": (
        lambda m, **o: es.generate(m, TOKENIZER, TURNS, **o),
        lambda m, **o: [*es.stream(m, TOKENIZER, TURNS, **o)],
    ),
    "AsyncEngine.stream of messages": (
        lambda m, **o: es.generate(m, TOKENIZER, TURNS, **o),
        lambda m, **o: asyncio.run(streamed(m, TURNS, **o)),
    ),
    "es.chat(stream=True)": (
        lambda m, **o: es.chat(m, TOKENIZER, TURNS, **o),
        lambda m, **o: [*es.chat(m, TOKENIZER, TURNS, stream=True, **o)],
    ),
}


@pytest.mark.parametrize("name", ["greedy", "sampled", "drafted"])
@pytest.mark.parametrize("call", STREAMED)
def test_a_stream_has_the_record_of_the_plain_call(
    call: str, name: str, model: LanguageModel, tmp_path: Path
) -> None:
    plain, stream = STREAMED[call]
    given = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False, **ASKED[name]}
    plain(model, **given, record=tmp_path / "a")
    events = stream(model, **given, record=tmp_path / "b")
    (run,) = read_record(tmp_path / "b").runs.values()
    assert said_of(events) == run.tokens[0] == said_of(stream(model, **given))
    if "messages" in call or "chat" in call:
        begun = "<|im_start|>user\nab ab<|im_end|>\n<|im_start|>assistant\n"
        assert TOKENIZER.decode([*run.prompt], skip_special_tokens=False) == begun
    one, other = facts_of(tmp_path / "a"), facts_of(tmp_path / "b")
    for lines in (one, other):
        if name != "sampled":  # a seed that decides nothing is another one in each call
            assert type(lines[1][0].pop("seed")) is int
    assert one == other and len(one[2]) == len(run.steps)


def facts_of(file: Path) -> tuple[list[Any], ...]:
    """The lines of a record by kind, but for the times."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["type"] == "step":
            assert line.pop("seconds").keys() >= {"forward", "choose"}
        if line["type"] == "run":  # a chat of this model asks for no other
            line["configuration"].pop("return_dict_in_generate", None)
    kinds = ("record", "run", "step", "tokens", "end", "spelling")
    return tuple([line for line in lines if line["type"] == kind] for kind in kinds)
