"""Runs that are saved in one process and resumed in another end as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import audit
from everystep.errors import EverystepError, FormatError, RequestError
from everystep.files.safetensors import read_file
from everystep.runs.saved import checksum
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.reading import ROOT

TOKENIZER = tiny_tokenizer(320)
PLAIN: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": 9}


def model_of(executor: str) -> LanguageModel:
    dtype = torch.float32 if executor == "native" else torch.float64
    return tiny_llama(vocab_size=320, dtype=dtype)


def request_of(number: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt and the options of one of every strategy in turn."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(5, 320, size=int(rng.integers(1, 12))).tolist()
    penalties = {"repetition_penalty": float(rng.uniform(0.8, 1.4))} if rng.random() < 0.5 else {}
    drawn = {"do_sample": True, "temperature": float(rng.uniform(0.5, 1.5)), **penalties}
    kinds: list[dict[str, Any]] = [
        {**penalties},
        {**drawn, "top_k": int(rng.integers(2, 60))},
        {**drawn, "num_return_sequences": 3, "top_p": 0.9},
        {"num_beams": 3, "num_return_sequences": 2, **penalties},
        {"num_beams": 4, "length_penalty": -0.5, "early_stopping": True},
        {"num_beams": 3, "do_sample": True, "temperature": 1.2},
        {"penalty_alpha": 0.5, "top_k": 3},
        {"prompt_lookup_num_tokens": 4, "repetition_penalty": 0.7},
        {**drawn, "mirostat_tau": 3.0},
        {**drawn, "guidance_scale": 1.4},
        {**drawn, "logprobs": 2, "prompt_logprobs": 1},
        {"no_repeat_ngram_size": 2, "sequence_bias": {(7,): 2.0, (8, 9): -3.0}},
    ]
    return prompt, {**PLAIN, **kinds[number % len(kinds)], "seed": number}


def spelled(result: Any) -> list[Any]:
    """A result as JSON types, to the last bit of its scores."""
    found = result if isinstance(result, list) else [result]
    return [
        [list(one.tokens), one.text, one.finish_reason.kind, float(one.score).hex()]
        + ([] if one.logprobs is None else [str(one.logprobs.logprobs.tolist())])
        for one in found
    ]


RESUME = """
import json, sys
from pathlib import Path
import everystep as es
from tests.api.test_saved_runs import TOKENIZER, model_of, spelled

folder, model = Path(sys.argv[1]), model_of(sys.argv[2])
found = {}
for file in sorted(folder.glob("*.run")):
    run = es.resume(file, model, TOKENIZER)
    events = [[e.index, e.token, e.text] for step in run for e in step.events]
    found[file.stem] = [spelled(run.result()), events]
print(json.dumps(found))
"""


def check(numbers: range, executor: str, folder: Path) -> None:
    """Each is saved at some step and goes on here and in another process."""
    model, wanted = model_of(executor), {}
    for number in numbers:
        prompt, options = request_of(number)
        run = es.open(model, TOKENIZER, prompt, **options)
        for _ in range(int(np.random.default_rng(number).integers(0, 12))):
            next(run, None)
        run.save(folder / f"{number}.run")
        events = [[e.index, e.token, e.text] for step in run for e in step.events]
        wanted[str(number)] = [spelled(run.result()), events]
    command = [sys.executable, "-c", RESUME, str(folder), executor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(wanted))


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_saved_here_and_resumed_there(executor: str, tmp_path: Path) -> None:
    check(range(12), executor, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["torch", "native"])
def test_two_hundred_saved_here_and_resumed_there(executor: str, tmp_path: Path) -> None:
    check(range(200), executor, tmp_path)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return model_of("native")


def saved(model: LanguageModel, path: Path, **more: Any) -> es.Run:
    options: dict[str, Any] = {**PLAIN, "do_sample": True, "seed": 4, **more}
    run = es.open(model, TOKENIZER, "the tool was", **options)
    for _ in range(5):
        next(run)
    run.save(path)
    return run


def test_what_was_changed_on_the_way_is_in_the_file(model: LanguageModel, tmp_path: Path) -> None:
    run = saved(model, tmp_path / "run", eos_token_id=None, logprobs=1)
    run.send("and the")
    next(run)
    run.set(temperature=0.6, top_k=9)
    next(run)
    run.edit(1, [33])
    next(run)
    run.save(tmp_path / "run")
    again = es.resume(tmp_path / "run", model, TOKENIZER)
    assert (again.tokens, again.given) == (run.tokens, run.given)
    assert str(again.explain(3)) == str(run.explain(3))
    assert str(again.explain(-1)) == str(run.explain(-1))
    again.rewind(2)
    run.rewind(2)
    assert spelled(again.result()) == spelled(run.result())
    again.set(max_new_tokens=20)
    again.save(tmp_path / "run")
    third = es.resume(tmp_path / "run", model, TOKENIZER)
    assert spelled(third.result()) == spelled(again.result())
    audit(third._hands.engine)


def test_a_run_that_was_taken_back_to_its_beginning_is_saved(
    model: LanguageModel, tmp_path: Path
) -> None:
    run = es.open(model, TOKENIZER, [5, 6], logprobs=2, seed=1, **PLAIN)
    next(run)
    run.rewind(len(run.tokens))
    run.save(tmp_path / "run")
    again = es.resume(tmp_path / "run", model, TOKENIZER)
    assert again.tokens == () and again.result().tokens == run.result().tokens


def test_a_run_that_ended_is_resumed_ended(model: LanguageModel, tmp_path: Path) -> None:
    for options in ({}, {"num_beams": 2, "do_sample": False}, {"penalty_alpha": 0.5, "top_k": 3}):
        given = {**PLAIN, "eos_token_id": None, "seed": 1, **options}
        run = es.open(model, TOKENIZER, "a", **given)
        wanted = run.result()
        run.save(tmp_path / "run")
        again = es.resume(tmp_path / "run", model, TOKENIZER)
        assert again.done and spelled(again.result()) == spelled(wanted)
    for one in (run, again):
        one.set(max_new_tokens=20)
    assert spelled(again.result()) == spelled(run.result())


def test_what_was_set_after_the_end_is_in_the_file(model: LanguageModel, tmp_path: Path) -> None:
    given = {**PLAIN, "eos_token_id": None, "do_sample": True, "seed": 1}
    for changes in ({"seed": 7}, {"max_new_tokens": 3}, {"top_k": 5, "repetition_penalty": 1.5}):
        run = es.open(model, TOKENIZER, "a", **given)
        wanted = run.result()
        run.set(temperature=0.5)
        run.set(**changes)
        run.save(tmp_path / "run")
        again = es.resume(tmp_path / "run", model, TOKENIZER)
        assert again.done and spelled(again.result()) == spelled(wanted)
        again.save(tmp_path / "run")
        again = es.resume(tmp_path / "run", model, TOKENIZER)
        for one in (run, again):
            one.rewind(12)
            one.set(max_new_tokens=9)
        assert spelled(again.result()) == spelled(run.result()) != spelled(wanted)
        assert len(run.tokens) == 9


def failed(run: es.Run) -> Exception:
    with pytest.raises(EverystepError) as found:
        run.result()
    return found.value


def test_a_run_that_failed_is_resumed_failed(model: LanguageModel, tmp_path: Path) -> None:
    run = es.open(model, TOKENIZER, "a", regex="ab", **PLAIN)
    run.send("z")
    wanted = failed(run)
    run.save(tmp_path / "run")
    again = es.resume(tmp_path / "run", model, TOKENIZER)
    assert again.done and run.done
    assert type(failed(again)) is type(wanted) and str(failed(again)) == str(wanted)
    again.save(tmp_path / "run")
    third = es.resume(tmp_path / "run", model, TOKENIZER)
    assert str(failed(third)) == str(wanted)
    with pytest.raises(RequestError, match="the run has failed; got no token is left"):
        third.rewind(1)


def third_is_odd(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    return torch.tensor([len(row) > 3 and bool(row[3] % 2) for row in input_ids])


@pytest.mark.parametrize("mode", [{"num_return_sequences": 4}, {"num_beams": 4}])
def test_a_criterion_that_ended_a_sequence_is_what_the_call_passes(
    mode: dict[str, Any], model: LanguageModel, tmp_path: Path
) -> None:
    ways = {"stopping_criteria": [third_is_odd]}
    given = {**PLAIN, "do_sample": True, "seed": 3, **mode}
    run = es.open(model, TOKENIZER, [5, 6], **given, **ways)
    for _ in range(8):
        run.save(tmp_path / "run")
        again = es.resume(tmp_path / "run", model, TOKENIZER, **ways)
        assert spelled(again.fork().result()) == spelled(run.fork().result())
        next(run, None)
    reasons = [one.finish_reason for one in np.atleast_1d(again.result())]
    assert reasons == [one.finish_reason for one in np.atleast_1d(run.result())]
    assert any(one.matched is third_is_odd for one in reasons)


def never_even(input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    scores[:, ::2] = -torch.inf
    return scores


def test_what_cannot_be_written_is_passed_again(model: LanguageModel, tmp_path: Path) -> None:
    run = saved(model, tmp_path / "run", logits_processor=[never_even])
    with pytest.raises(RequestError, match="logits_processor"):
        es.resume(tmp_path / "run", model, TOKENIZER)
    with pytest.raises(RequestError, match="stopping_criteria"):
        again: Any = {"logits_processor": [never_even], "stopping_criteria": []}
        es.resume(tmp_path / "run", model, TOKENIZER, **again)
    again = es.resume(tmp_path / "run", model, TOKENIZER, logits_processor=[never_even])
    assert spelled(again.result()) == spelled(run.result())


def test_a_configuration_object_is_written(model: LanguageModel, tmp_path: Path) -> None:
    config = es.GenerationConfig(top_k=7, temperature=0.7, do_sample=True)
    run = saved(model, tmp_path / "run", generation_config=config)
    again = es.resume(tmp_path / "run", model, TOKENIZER)
    assert spelled(again.result()) == spelled(run.result())


def test_a_run_of_somebody_else_is_refused(model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "run"
    saved(model, path)
    others = {
        "another model": (tiny_llama(seed=1, vocab_size=320, dtype=torch.float32), TOKENIZER),
        "another model ": (model_of("torch"), TOKENIZER),
        "another tokenizer": (model, tiny_tokenizer(300)),
        "another tokenizer ": (model, None),
    }
    for told, (other, tokenizer) in others.items():
        with pytest.raises(RequestError, match=told.strip()):
            es.resume(path, other, tokenizer)


def rewritten(path: Path, sign: bool = True, **told: str) -> Path:
    """The file with other metadata, and the checksum that they should have."""
    tensors, metadata = load_file(path), read_file(path)[1]
    metadata |= told
    if sign:
        metadata["sha256"] = checksum(tensors, metadata)
    target = path.with_name("other")
    target.write_bytes(save(tensors, metadata))
    return target


def test_a_run_of_another_version_is_refused(model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "run"
    saved(model, path)
    with pytest.raises(RequestError, match="another version"):
        es.resume(rewritten(path, everystep="99.9"), model, TOKENIZER)
    for version, told in (("5", "newer"), ("3", "older"), ("", "newer"), ("²", "newer")):
        with pytest.raises(FormatError, match=f"{told} everystep"):
            es.resume(rewritten(path, version=version), model, TOKENIZER)
    with pytest.raises(FormatError, match="checksum"):
        es.resume(rewritten(path, sign=False, everystep="99.9"), model, TOKENIZER)


def test_damaged_files_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    saved(model, path)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for length in [0, 7, 8, 100, *rng.integers(1, len(data), 60).tolist(), len(data) - 1]:
        other.write_bytes(data[:length])
        with pytest.raises(EverystepError):
            es.resume(other, model, TOKENIZER)
    start = data.index(b'{"dict"')
    for place in rng.integers(start, len(data) - 1, 60).tolist():
        broken = bytearray(data)
        broken[place] ^= 0x15
        other.write_bytes(broken)
        try:
            es.resume(other, model, TOKENIZER).result()
        except EverystepError:
            continue
    with pytest.raises(EverystepError):
        es.resume(tmp_path / "absent", model, TOKENIZER)
    torch_file = tmp_path / "weights"
    torch_file.write_bytes(b"\x80\x04pickle" * 20)
    with pytest.raises(FormatError):
        es.resume(torch_file, model, TOKENIZER)


def test_a_failed_save_leaves_the_old_file(model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = saved(model, path)
    before = path.read_bytes()
    run._passed = replace(run._passed, past_key_values=object())
    with pytest.raises(RequestError, match="past_key_values"):
        run.save(path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
