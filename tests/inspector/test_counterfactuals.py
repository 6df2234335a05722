"""What would have been: records repeated to the bit, and gone on with otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, RequestError
from everystep.inspector.counterfactuals import (
    WhatIf,
    needed,
    needed_lines,
    occlusion,
    outcome_lines,
    repeat,
    speller,
    what_if,
)
from everystep.inspector.sessions import Reading
from everystep.records import Record, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)
PROMPT = "ab ab abc"
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.7, "seed": 3}
LONG: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {**LONG, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sampled": {**LONG, **SAMPLED},
    "several": {**LONG, **SAMPLED, "num_return_sequences": 2},
    "beams": {**LONG, "num_beams": 3, "num_return_sequences": 2},
    "diverse": {**LONG, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {**LONG, "penalty_alpha": 0.6, "top_k": 4},
    "drafted": {**LONG, "prompt_lookup_num_tokens": 3},
    "choices": {"choices": ["yes", "no"]},
    "regex": {"regex": "a+b c", "max_new_tokens": 8},
    "words": {**LONG, "stop_strings": ["zz"], "bad_words_ids": [[70, 71]]},
    "guided": {**LONG, "guidance_scale": 2.0},
}


def recorded(file: Path, **given: Any) -> Record:
    es.generate(MODEL, TOKENIZER, PROMPT, **given, record=file)
    return read_record(file)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return recorded(tmp_path_factory.mktemp("records") / "a", **LONG, **SAMPLED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_enough_to_repeat_it(kind: str, tmp_path: Path) -> None:
    record = recorded(tmp_path / "a", **KINDS[kind])
    (run,) = record.runs.values()
    found = repeat(record, "0", MODEL, TOKENIZER)
    result = found.run.result()
    ids = [list(one.tokens) for one in (result if isinstance(result, list) else [result])]
    assert ids == [own for _, own in sorted(run.tokens.items())]
    assert found.difference == 0.0
    if found.run.alone:
        assert [*repeat(record, "0", MODEL, TOKENIZER, 2).run.tokens] == run.tokens[0][:2]


def test_what_was_done_to_a_run_is_repeated(tmp_path: Path) -> None:
    run = es.open(MODEL, TOKENIZER, PROMPT, **LONG, **SAMPLED, record=tmp_path / "a")
    next(run), next(run)
    run.send("xy")
    next(run)
    twin = run.fork(seed=9)
    run.set(temperature=2.0)
    without = run.without("TopKLogitsWarper")
    for one in (run, twin, without):
        one.result()
    record = run.inspect()
    assert len({tuple(one.tokens[0]) for one in record.runs.values()}) == 3
    for name, one in record.runs.items():
        found = repeat(record, name, MODEL, TOKENIZER)
        assert [*found.run.tokens] == one.tokens[0] and found.difference == 0.0
        assert {*found.run.given} == one.given


def test_what_cannot_be_repeated_says_why(sampled: Record, tmp_path: Path) -> None:
    other = tiny_llama(vocab_size=320, hidden_size=16, seed=5, dtype=torch.float32)
    with pytest.raises(RequestError, match="another model"):
        repeat(sampled, "0", other, TOKENIZER)
    with pytest.raises(RequestError, match="no run"):
        repeat(sampled, "9", MODEL, TOKENIZER)
    with pytest.raises(RequestError, match="no such position"):
        repeat(sampled, "0", MODEL, TOKENIZER, 99)

    def odd(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 0, -torch.inf)

    record = recorded(tmp_path / "a", **LONG, logits_processor=[odd])
    with pytest.raises(RequestError, match="departs from the record at token"):
        repeat(record, "0", MODEL, TOKENIZER)
    assert repeat(record, "0", MODEL, TOKENIZER, logits_processor=[odd]).difference == 0.0


def test_a_prompt_with_more_than_ids_is_not_repeated_from_ids(tmp_path: Path) -> None:
    """What stands inside it is named, though it has no positions of its own."""
    own = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
    own.prompt_inputs = [es.PromptInput("tone", lambda x: x, (1, 16), token=7)]
    file, given = tmp_path / "a", torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(1))
    own.generate(torch.tensor([[5, 7, 9]]), tone=given, max_new_tokens=3, record=file)
    record = read_record(file)
    assert record.runs["0"].about["beyond_ids"] == ["tone"]
    with pytest.raises(RequestError, match="ids and tone"):
        repeat(record, "0", own, TOKENIZER)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_what_was_needed_is_what_is_needed(kind: str, tmp_path: Path) -> None:
    record = recorded(tmp_path / "a", **KINDS[kind])
    ids = record.runs["0"].tokens[0]
    run = repeat(record, "0", MODEL, TOKENIZER, 6).run
    every = {one.token: one for one in (needed(run, 3, token) for token in range(0, 320, 7))}
    assert needed(run, 3, ids[3]).more == 0.0
    assert {one.ruled_out for one in every.values()} >= {None} or kind == "sampled"
    possible = [one for one in every.values() if one.ruled_out is None and one.token != ids[3]]
    for one in possible:
        for least, comes in ((1e-3, True), (-1e-3, False)):

            def lifted(
                ids: torch.Tensor,
                scores: torch.Tensor,
                token: int = one.token,
                by: float = one.more + least,
            ) -> torch.Tensor:
                scores = scores.clone()
                scores[:, token] += by
                return scores

            given = {**KINDS[kind], "logits_processor": [lifted]}
            again = es.open(MODEL, TOKENIZER, PROMPT, **given)
            again.send(ids[:3])
            token = again.step_at(3).branches[0].tokens[0]
            # By chance it comes if its part has the number: from a least weight on, or up to one.
            assert (token == one.token) == comes or kind == "sampled"
            assert kind != "sampled" or not comes or one.more < 0 or token == one.token
    spell = speller(record, TOKENIZER)
    assert all(needed_lines(one, spell) for one in every.values())
    if kind == "sampled":
        killed = [one for one in every.values() if one.ruled_out is not None]
        assert killed and {one.ruled_out for one in killed} == {"TopKLogitsWarper"}
        for one in killed:
            assert one.stages[-1].missed is not None and one.stages[-1].missed >= 0
            assert "and to pass TopK" in needed_lines(one, spell)[-1]


CHANGES: dict[str, dict[str, Any]] = {
    "seed=9": {"seed": 9},
    "temperature=0.1": {"temperature": 0.1},
    "without=TopK": {"top_k": None},
}


@pytest.mark.parametrize("text", CHANGES)
def test_another_value_is_what_a_new_run_does_with_it(text: str, sampled: Record) -> None:
    ids = sampled.runs["0"].tokens[0]
    found = what_if(sampled, "0", MODEL, TOKENIZER, 3, WhatIf.read([text]))
    given = {**LONG, **SAMPLED, **CHANGES[text]}
    given = {name: value for name, value in given.items() if value is not None or "eos" in name}
    other = es.open(MODEL, TOKENIZER, PROMPT, **given)
    other.send(ids[:3])
    assert found.found == other.result().tokens[:8] and found.recorded == tuple(ids)
    assert found.difference == 0.0 and found.sureness is not None
    assert list(found.found[: found.same]) == ids[: found.same]
    lines = outcome_lines(found, speller(sampled, TOKENIZER))
    assert "to the bit" in lines[0] and len(lines) >= 3


def test_a_masked_span_is_a_hole_in_the_prompt(sampled: Record) -> None:
    run = sampled.runs["0"]
    found = what_if(sampled, "0", MODEL, TOKENIZER, 2, WhatIf.read(["mask=1:3"]))
    mask = torch.ones(1, len(run.prompt), dtype=torch.int64)
    mask[0, 1:3] = 0
    places = torch.arange(len(run.prompt))[None]
    given = {"input_ids": torch.tensor([run.prompt]), "attention_mask": mask}
    given["position_ids"] = places
    other = es.open(MODEL, TOKENIZER, given, **LONG, **SAMPLED)
    other.send(run.tokens[0][:2])
    own = other.step_at(2).scores
    assert found.sureness is not None and own is not None
    share = torch.softmax(own[0].double(), dim=-1)[run.tokens[0][2]]
    assert found.sureness[1] == pytest.approx(float(share))
    assert found.found == other.result().tokens[:8]  # ids that were sent do not count as chosen
    with pytest.raises(RequestError, match="no such span"):
        what_if(sampled, "0", MODEL, TOKENIZER, 2, WhatIf.read(["mask=1:99"]))


def test_another_adapter_feeds_the_prompt_anew(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
    own = model.add_adapter("tone", es.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(3)
    with torch.no_grad():
        for one in own.parameters():
            one.normal_(std=0.5)
    model.freeze_adapter("tone") if hasattr(model, "freeze_adapter") else None
    es.generate(model, TOKENIZER, PROMPT, **LONG, record=tmp_path / "a")
    record = read_record(tmp_path / "a")
    ids = record.runs["0"].tokens[0]
    found = what_if(record, "0", model, TOKENIZER, 2, WhatIf.read(["adapter=tone"]))
    other = es.open(model, TOKENIZER, PROMPT, **LONG, adapters={"tone": 1.0})
    other.send(ids[:2])
    # Ids that are sent do not count as chosen; what goes on otherwise is as long as what was.
    assert found.found == other.result().tokens[: len(ids)]
    assert found.found != found.recorded and len(found.found) == len(ids)
    with pytest.raises(RequestError, match="length was reached"):
        what_if(record, "0", model, TOKENIZER, len(ids), WhatIf.read(["adapter=tone"]))
    assert len(what_if(record, "0", model, TOKENIZER, 7, WhatIf.read(["mask=0:2"])).found) == 8


def test_what_was_set_on_the_way_holds_for_what_goes_on_otherwise(tmp_path: Path) -> None:
    run = es.open(MODEL, TOKENIZER, PROMPT, **LONG, record=tmp_path / "a")
    next(run), next(run)
    run.set(suppress_tokens=[*range(5, 100)])
    next(run)
    run.set(max_new_tokens=6)
    ids = run.result().tokens
    record = read_record(tmp_path / "a")
    found = what_if(record, "0", MODEL, TOKENIZER, 4, WhatIf.read(["mask=0:1"]))
    assert len(found.found) == len(ids) == 6 and found.found[:4] == ids[:4]
    assert all(id >= 100 for id in found.found[4:])
    before = what_if(record, "0", MODEL, TOKENIZER, 1, WhatIf.read(["mask=0:1"]))
    assert len(before.found) == 8 and any(id < 100 for id in before.found[1:])


def test_a_search_begins_anew(tmp_path: Path) -> None:
    record = recorded(tmp_path / "a", **KINDS["beams"])
    found = what_if(record, "0", MODEL, TOKENIZER, 4, WhatIf.read(["mask=0:2"]))
    assert found.at == 0 and found.recorded == tuple(record.runs["0"].tokens[0])
    with pytest.raises(EverystepError):
        what_if(record, "0", MODEL, TOKENIZER, 4, WhatIf.read(["without=TopK"]))


def test_occlusion_is_the_fall_of_the_likelihood(sampled: Record) -> None:
    run = sampled.runs["0"]
    parts = occlusion(sampled, "0", MODEL)
    assert [(one.first, one.end) for one in parts] == [(i, i + 1) for i in range(len(run.prompt))]
    assert len(occlusion(sampled, "0", MODEL, spans=2)) == 2
    whole = es.score(MODEL, TOKENIZER, run.tokens[0], after=[*run.prompt])
    mask = torch.ones(1, len(run.prompt), dtype=torch.int64)
    mask[0, 1] = 0
    given = {"input_ids": torch.tensor([run.prompt]), "attention_mask": mask}
    given["position_ids"] = torch.arange(len(run.prompt))[None]
    hidden = es.open(MODEL, TOKENIZER, given, **LONG)
    hidden.send(run.tokens[0])
    rows = [hidden.step_at(at).logits for at in range(8)]
    left = sum(
        float(torch.log_softmax(row[0].double(), dim=-1)[id])
        for row, id in zip(rows, run.tokens[0], strict=True)
        if row is not None
    )
    assert parts[1].loss == pytest.approx(float(whole.logprobs.sum()) - left, abs=1e-3)


@pytest.mark.parametrize("text", ["seed", "=5", "mask=3", "mask=4:2", "mask=a:b"])
def test_what_is_spelled_wrong_is_refused(text: str) -> None:
    if text == "mask=3":
        assert WhatIf.read([text]).masked == (3, 4)
        return
    with pytest.raises(RequestError):
        WhatIf.read([text])


def test_ranks_count_by_the_scores_that_were_chosen_from(tmp_path: Path) -> None:
    """What a processor removed comes after everything that it left."""
    record = recorded(tmp_path / "a", max_new_tokens=4, eos_token_id=None, do_sample=True, top_k=3)
    session, (name,) = Reading(("a", record), None, MODEL, TOKENIZER), record.runs
    row = next(step.rows[0] for step in record.runs[name].steps if step.rows)
    scores = dict(zip(row.ids, row.scores, strict=True))
    order = [session.read_token(record, name, f"#{rank} 0")[0] for rank in range(len(row.ids))]
    assert sorted(order) == sorted(row.ids) and None in scores.values()
    told = [scores[one] for one in order]
    left = [one for one in told if one is not None]
    assert left == sorted(left, reverse=True) and told[: len(left)] == left and len(left) == 3
