"""Summaries of scores, beside torch's; the best of a row, with nan, ties and ruled out tokens;
what is recorded of rows of which an executor lists the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import recording
from everystep.engine.recorded_scores import HeldScores, Summary, best_of
from everystep.engine.recording import RunRecorder
from everystep.records import RecordWriter, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text.digest import tokenizer_digest
from everystep.types import Scores


def scores(size: int, seed: int, ruled_out: float) -> np.ndarray:
    dice = np.random.default_rng(seed)
    found = (dice.standard_normal(size) * 5).round(1).astype(np.float32)
    found[dice.random(size) < ruled_out] = -np.inf
    return found


@pytest.mark.parametrize("size", [1, 7, 320, 4000, 49_152, 50_001])
@pytest.mark.parametrize("ruled_out", [0.0, 0.5, 0.999])
def test_summaries_and_the_best_are_those_of_torch(size: int, ruled_out: float) -> None:
    row = scores(size, size, ruled_out)
    plain = torch.from_numpy(row).double()
    found, count = Summary.of(row), min(10, size)
    if found.possible:
        logs = plain.log_softmax(-1)
        own = logs[logs > -torch.inf]
        assert found.total == pytest.approx(float(plain.logsumexp(-1)), abs=1e-5)
        assert found.entropy == pytest.approx(float(-(own.exp() * own).sum()), abs=1e-4)
        token = int(plain.argmax())
        low, high = HeldScores.of(Scores.of(torch.from_numpy(row)[None])).part(0, token)
        share = plain.softmax(-1)
        assert low == pytest.approx(float(share[:token].sum()), abs=1e-5)
        assert high - low == pytest.approx(float(share[token]), abs=1e-5)
    best = best_of(row, count)
    assert row[best].tolist() == plain.topk(count).values.tolist()
    assert len({*best.tolist()}) == count
    order = [(-row[id], id) for id in best.tolist()]
    assert order == sorted(order)


def test_rows_without_a_number() -> None:
    assert Summary.of(np.full(9, -np.inf, np.float32)).possible == 0
    assert np.isnan(Summary.of(np.array([np.nan, 1.0], np.float32)).entropy)


def test_a_record_says_where_its_prompt_begins_and_which_drafts_were_right(tmp_path: Path) -> None:
    model, prompt = tiny_llama(seed=3), [5, 6, 7, 5, 6, 7, 5]
    given = {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}
    drafting = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    file = tmp_path / "a.jsonl"
    out = es.generate(model, None, prompt, record=file, **given, **drafting)
    run = read_record(file).runs["0"]
    assert (run.about["prompt"], run.about["left_out"]) == (prompt, 0)
    assert run.about["first_position"] == 0
    said, place, rights = [*map(int, out.tokens)], 0, []
    for step in run.steps:
        for draft in step.drafts:
            agreed = [a == b for a, b in zip(draft.ids, said[place:], strict=False)]
            assert draft.right == [*agreed, False].index(False)
            rights.append(draft.right)
        place += max((len(child.ids) for child in step.children), default=0)
    assert place == len(said) and 0 in rights and max(rights) > 0


def test_every_id_of_a_record_is_spelled_once(tmp_path: Path) -> None:
    """In lines of at most 4,096 ids, however long the prompt."""
    file, about = tmp_path / "a.jsonl", {"prompt": [*range(5000), *range(20)], "request": "a"}
    writer = RecordWriter(file)
    own = RunRecorder(writer, ("model", "none"), about, lambda id: f"<{id}>".encode())
    own.forked("a", "b")
    writer.settle()
    lines = map(json.loads, file.read_text().splitlines())
    spelled = [one["texts"] for one in lines if one["type"] == "spelling"]
    assert [len(one) for one in spelled] == [4096, 904]
    every = {int(id): text for one in spelled for id, text in one.items()}
    assert every == {id: f"<{id}>" for id in range(5000)}


WIDE: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 3},
    "top_p": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 0, "seed": 4},
    "penalty": {"repetition_penalty": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "drafted": {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"},
}


@pytest.mark.parametrize("name", WIDE)
def test_natively_a_record_has_whole_rows_where_the_best_decide(name: str, tmp_path: Path) -> None:
    """What is chosen from are the executor's lists, as without a record; what is told of the rows
    is what whole rows say."""
    size, prompt, file = 6000, [5, 6, 7, 5, 6, 7, 5], tmp_path / "a.jsonl"
    model = tiny_llama(seed=3, vocab_size=size, dtype=torch.float32)
    native = LanguageModel(model.core, executor="native")
    given: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": 99, **WIDE[name]}
    given["return_dict_in_generate"] = True
    plain = es.generate(native, None, prompt, **given)
    found = es.generate(native, None, prompt, **given, record=file)
    outs = found if isinstance(found, list) else [found]
    alone = plain if isinstance(plain, list) else [plain]
    assert [one.tokens for one in outs] == [one.tokens for one in alone]
    (run,) = read_record(file).runs.values()
    if name == "beams":
        return
    tokens = [*prompt, *outs[0].tokens]
    logits = model(torch.tensor([tokens])).logits[0].float()
    for at, row in sorted(run.rows().items()):
        whole = logits[len(prompt) - 1 + at].double()
        values = torch.tensor(row.logits, dtype=torch.float64)
        assert torch.allclose(values, whole[[*row.ids]], atol=1e-3)
        assert {*whole.topk(9).indices.tolist()} <= {*row.ids}
        assert row.totals[0] == pytest.approx(float(whole.logsumexp(0)), abs=1e-3)
        logs = whole.log_softmax(0)
        assert row.entropies[0] == pytest.approx(float(-(logs.exp() * logs).sum()), abs=1e-3)
        (end,) = row.ends
        assert end.logit == pytest.approx(float(whole[99]), abs=1e-3)
        if name == "sampled":
            heat, top = row.stages
            assert (heat.removed, top.removed) == (0, size - 20)
            assert sum(value is not None for value in top.values) >= 10
            assert end.score is not None or end.rank == 20
        if name == "greedy":
            assert abs(end.rank - int((whole > whole[99]).sum())) <= 2
            assert row.ranks == (0, 0) and row.stages == ()


def test_candidates_are_the_best_before_and_after_every_stage(tmp_path: Path) -> None:
    """Each processor prefers other tokens, and a sort of the whole row says which are the best."""
    noise = torch.from_numpy(np.random.default_rng(4).normal(0, 3, 320).astype(np.float32))
    whole: list[torch.Tensor] = []

    def reversed_order(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        whole.append(scores[0].clone())
        return -scores

    def noisy(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + noise

    model, file = tiny_llama(seed=3, vocab_size=320, dtype=torch.float32), tmp_path / "a.jsonl"
    given: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 15, "seed": 2}
    own = {"logits_processor": [reversed_order, noisy], "max_new_tokens": 6, "eos_token_id": None}
    es.generate(model, None, [5, 6, 7], **given, **own, record=file)
    rows = read_record(file).runs["0"].rows()
    assert len(rows) == len(whole) == 6
    for at, logits in enumerate(whole):
        heated = (noise - logits) / np.float32(0.8)
        kept = torch.full_like(heated, -torch.inf)
        kept[heated.topk(15).indices] = heated.topk(15).values
        stages = [-logits, noise - logits, heated, kept]
        row, best = rows[at], [one.topk(10).indices.tolist() for one in (logits, *stages)]
        assert len({tuple(one) for one in best}) == 3  # heat and top-k leave the best as they are
        every = [id for one in reversed(best) for id in one]
        assert row.ids == tuple(dict.fromkeys([*every, row.chosen]))
        for stage, scores in zip(row.stages, stages, strict=True):
            said = [-torch.inf if one is None else one for one in stage.values]
            assert said == pytest.approx([float(scores[id]) for id in row.ids], abs=1e-5)
        assert [stage.removed for stage in row.stages] == [0, 0, 0, 305]


def test_a_record_says_what_decided_in_its_order_and_who_spells(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(seed=3, vocab_size=320), tiny_tokenizer(320)
    file = tmp_path / "a.jsonl"
    given = {"do_sample": True, "min_p": 0.01, "top_p": 0.9, "top_k": 5, "temperature": 0.8}
    stops = {"eos_token_id": [2, 3], "stop_strings": ["zz"], "max_time": 60.0}
    more = {"bad_words_ids": [[5]], "repetition_penalty": 1.2, "max_new_tokens": 2}
    es.generate(model, tokenizer, "ab", **given, **stops, **more, record=file)
    record = read_record(file)
    assert record.header["model"] == model.digest()
    assert record.header["tokenizer"] == tokenizer_digest(tokenizer)
    assert record.header["tokenizer"] != tokenizer_digest(tiny_tokenizer(319))
    about: dict[str, Any] = {**record.runs["0"].about}
    assert [name for name, _ in about["processors"]] == [
        "RepetitionPenaltyLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]
    assert [said for _, said in about["processors"]][
        2
    ] == "TemperatureLogitsWarper(temperature=0.8)"
    kinds = [said.partition("(")[0] for said in about["stops"]]
    assert kinds == ["MaxLength", "MaxTime", "StopStrings", "EosToken"]
    es.generate(model, None, [70, 71], max_new_tokens=1, record=file)
    assert read_record(file).header["tokenizer"] == "none"


@pytest.mark.parametrize(
    ("most", "mask", "prompt", "left_out", "first"),
    [
        (9, [0, 0, 1, 1, 1], [0, 0, 70, 71, 72], 0, -2),
        (9, [1, 1, 1, 1, 1], [0, 0, 70, 71, 72], 0, 0),
        (2, [0, 0, 1, 1, 1], [71, 72], 3, 1),
        (2, [1, 1, 1, 1, 1], [71, 72], 3, 3),
    ],
)
def test_the_first_recorded_id_of_a_prompt_has_its_position(
    most: int,
    mask: list[int],
    prompt: list[int],
    left_out: int,
    first: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is hidden before a prompt has negative positions, and what is left out moves them."""
    monkeypatch.setattr(recording, "_MOST_PROMPT", most)
    model, ids = tiny_llama(seed=3, vocab_size=320), torch.tensor([[0, 0, 70, 71, 72]])
    given = {"attention_mask": torch.tensor([mask]), "max_new_tokens": 1, "eos_token_id": None}
    model.generate(ids, **given, record=tmp_path / "a")
    about = read_record(tmp_path / "a").runs["0"].about
    assert (about["prompt"], about["left_out"]) == (prompt, left_out)
    assert (about["first_position"], about["positions"]) == (first, sum(mask))
