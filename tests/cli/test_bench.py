"""`everystep bench`: every figure that was asked for, with how it came about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import everystep as es
from everystep.api import speed
from everystep.api.speed import measure_speed
from everystep.errors import RequestError
from everystep.executors.native import status
from tests.bridge.families import model_of
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model

QUICK = ("--prompt-tokens", "16", "--tokens", "3", "--after", "2", "--repeats", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny model."""
    return write_tiny_model(tmp_path / "tiny")


def test_json_says_what_was_measured_and_how(folder: Path, call: Caller) -> None:
    outcome = call("bench", str(folder), *QUICK, "--batch", "1", "--batch", "3", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert found["model"] == str(folder) and found["repeats"] == 2
    assert set(found["versions"]) == {"everystep", "torch", "python"}
    assert found["threads"] == torch.get_num_threads() and found["processor"]
    assert (status().instructions or "torch") in found["executor"]
    assert set(found["weights"]) == {"float32"} and found["cache_dtype"] == "float32"
    assert found["first_token"]["prompt_tokens"] == 16
    seconds = found["first_token"]["seconds"]
    assert found["first_token"]["tokens_per_second"] == pytest.approx(16 / seconds)
    assert [(one["rows"], one["prompt_tokens"], one["tokens"]) for one in found["decode"]] == [
        (1, 2, 3),
        (3, 2, 3),
    ]
    for one in found["decode"]:
        assert one["tokens_per_second"] == pytest.approx(one["rows"] / one["seconds_per_step"])


def test_a_table_has_a_line_per_figure(folder: Path, call: Caller) -> None:
    outcome = call("bench", str(folder), *QUICK)
    names = [line.split("\t")[0] for line in outcome.out.splitlines()]
    assert names == [
        "first token after 16",
        *("a step of 1 row", "a step of 8 rows", "a step of 32 rows"),
    ]
    assert "medians of 2 runs" in outcome.err and "float32" in outcome.err


@pytest.mark.parametrize("option", ["--prompt-tokens", "--tokens", "--batch", "--repeats"])
def test_a_count_of_nothing_is_a_wrong_command_line(call: Caller, option: str) -> None:
    outcome = call("bench", option, "0")
    assert outcome.code == 2 and option in outcome.err


def test_no_row_ends_early_and_the_median_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = es.load_model(folder)
    settings = model.generation_config
    settings.eos_token_id = list(range(259))
    taken, lengths = iter([(9.0, 9.0), (1.0, 4.0), (5.0, 2.0), (2.0, 8.0)]), []
    generate = model.generate

    def recorded(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        out = generate(*inputs, **options)
        lengths.append(tuple(out.shape))
        return out

    monkeypatch.setattr(model, "generate", recorded)
    measured = speed._seconds
    monkeypatch.setattr(speed, "_seconds", lambda *asked: (measured(*asked), next(taken))[1])
    found = measure_speed(model, rows=2, positions=5, tokens=7, repeats=3)
    assert lengths == [(2, 5 + 8)] * 4  # the first tokens, seven more, and one run to warm up
    assert (found.first, found.rest) == (2.0, 4.0)
    assert model.generation_config is settings


def test_what_the_model_would_choose_otherwise_is_left_out(folder: Path) -> None:
    model = es.load_model(folder)
    model.generation_config = own = es.GenerationConfig(
        num_beams=2, max_length=6, repetition_penalty=1.5, do_sample=True, temperature=0.5
    )
    options = speed._greedy_without_end(model)
    ids = torch.arange(3, 9)[None]
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=8, **options)
    plain = es.load_model(folder)
    plain.generation_config = es.GenerationConfig(pad_token_id=0)
    assert torch.equal(found, plain.generate(ids, attention_mask=mask, max_new_tokens=8))
    assert measure_speed(model, positions=4, tokens=2, repeats=1).tokens == 2
    assert model.generation_config is own


def test_a_model_of_transformers_is_measured_too() -> None:
    assert measure_speed(es.wrap(model_of("llama")), positions=4, tokens=2, repeats=1).rest > 0


def test_a_first_token_comes_before_the_rest(folder: Path) -> None:
    found = measure_speed(es.load_model(folder), positions=4, tokens=20, repeats=1)
    assert found.first > 0 and found.rest > 0
    with pytest.raises(RequestError, match="rows is impossible"):
        measure_speed(es.load_model(folder), rows=0)
