"""What a result says of itself: how long it took, why it ended, and what each stage did."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.faces.tight import model_of

TOKENIZER = tiny_tokenizer(320)
MODEL = tiny_llama(vocab_size=320, dtype=torch.float32)
OBJECT: dict[str, Any] = {"return_dict_in_generate": True, "eos_token_id": None}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 5, "max_new_tokens": 6}
PROMPTS = [[40, 50, 60], [7, 8, 9, 10]]


def texts(model: LanguageModel, prompts: Any, **given: Any) -> Any:
    return es.generate(model, TOKENIZER, prompts, **{**OBJECT, **given})


def streamed(model: LanguageModel, prompts: Any, **given: Any) -> Any:
    with es.stream(model, TOKENIZER, prompts, eos_token_id=None, **given) as stream:
        for _ in stream:
            pass
        return [one for (one,) in stream.results()]


def engine(model: LanguageModel, prompts: Any, *, seed: int, **given: Any) -> Any:
    """Each prompt draws by the seed as if it were alone."""

    async def main() -> Any:
        async with es.AsyncEngine(model, TOKENIZER) as opened:
            asked = [opened.generate(one, seed=seed, **OBJECT, **given) for one in prompts]
            return await asyncio.gather(*asked)

    return asyncio.run(main())


def scores_of(model: LanguageModel, ids: list[int], temperature: float, k: int) -> Tensor:
    """(V,) what the next token is drawn from, by the definitions of both stages."""
    logits = model(torch.tensor([ids])).logits[0, -1].float() / temperature
    return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf)


@pytest.mark.parametrize("call", [texts, streamed, engine])
def test_a_token_is_explained_from_what_it_was_drawn_from(call: Callable[..., Any]) -> None:
    for prompt, one in zip(PROMPTS, call(MODEL, PROMPTS, seed=3, **DRAWN), strict=True):
        for position in (0, 4):
            why = one.explain(position)
            wanted = scores_of(MODEL, [*prompt, *one.tokens[:position]], 2.0, 5)
            assert why.chosen.token == one.tokens[position]
            assert why.chosen.score == pytest.approx(float(wanted[why.chosen.token]), abs=1e-4)
            assert why.draw is not None and why.draw.low <= why.draw.number <= why.draw.high
            best = wanted.topk(5).indices.tolist()
            assert [rival.token for rival in why.rivals] == best


@pytest.mark.parametrize("call", [texts, streamed, engine])
def test_an_account_adds_up_what_each_stage_did(call: Callable[..., Any]) -> None:
    for one in call(MODEL, PROMPTS, seed=3, **DRAWN):
        account = one.explain()
        assert account.ended == "it has as many tokens as it may have" and account.chosen == 6
        assert [stage[1:] for stage in account.stages] == [(6, 0, 0), (6, 6 * 315, 0)]
        assert str(account).count("\n") == 3


def test_an_account_says_where_another_token_became_the_best() -> None:
    (plain,) = texts(MODEL, PROMPTS[:1], max_new_tokens=5)
    left = [plain.tokens[0]]
    (one,) = texts(MODEL, PROMPTS[:1], max_new_tokens=5, suppress_tokens=left)
    (stage,) = one.explain().stages
    turned = 0  # as plain forwards say
    for place in range(5):
        logits = MODEL(torch.tensor([[*PROMPTS[0], *one.tokens[:place]]])).logits[0, -1]
        turned += int(logits.argmax()) in left
    assert turned and stage[1:] == (5, 5, turned)


@pytest.mark.parametrize("matched", ["token", "text"])
def test_an_account_says_what_ended_it(matched: str) -> None:
    (plain,) = texts(MODEL, PROMPTS[:1], max_new_tokens=5)
    last = plain.tokens[3]
    text = TOKENIZER.decode([last])
    given = {"eos_token_id": last} if matched == "token" else {"stop_strings": [text]}
    (one,) = texts(MODEL, PROMPTS[:1], max_new_tokens=5, **given)
    assert one.explain().ended == (
        f"token {last} ends a text" if matched == "token" else f"the text {text!r} ends it"
    )


@pytest.mark.parametrize("name", ["encoder-decoder", "wrapped decoder", "wrapped encoder-decoder"])
def test_other_kinds_of_models_explain_too(name: str) -> None:
    model = model_of(name, "torch")
    (one,) = es.generate(
        model, TOKENIZER, [PROMPTS[1]], seed=3, pad_token_id=0, **{**OBJECT, **DRAWN}
    )
    assert one.explain(2).chosen.token == one.tokens[2]
    assert one.explain().stages[-1].ruled_out == 6 * 315
    assert one.timings["total_seconds"] > 0


def test_each_of_several_sequences_explains_its_own() -> None:
    (drawn,) = texts(MODEL, PROMPTS[:1], seed=3, **{**DRAWN, "num_return_sequences": 3})
    assert len({one.tokens for one in drawn}) == 3
    for one in drawn:
        assert [one.explain(place).chosen.token for place in (0, 5)] == [
            one.tokens[0],
            one.tokens[5],
        ]
    (beams,) = texts(MODEL, PROMPTS[:1], num_beams=3, num_return_sequences=2, max_new_tokens=4)
    assert [one.explain(3).chosen.token for one in beams] == [one.tokens[3] for one in beams]


def test_a_run_explains_its_result() -> None:
    run = es.open(MODEL, TOKENIZER, PROMPTS[0], seed=3, eos_token_id=None, **DRAWN)
    result = run.result()
    assert result.explain(2) == run.explain(2) and result.explain() == run.account()
    assert result.explain().stages[1].ruled_out == 6 * 315


def test_ids_that_were_sent_are_not_accounted_for() -> None:
    run = es.open(MODEL, TOKENIZER, PROMPTS[0], eos_token_id=None, max_new_tokens=3)
    next(run)
    run.send([5, 6])
    assert run.result().explain().chosen == 3 and len(run.tokens) == 5


def test_what_does_not_come_out_again_is_not_explained() -> None:
    left = [9]

    def once(ids: Tensor, scores: Tensor) -> Tensor:
        if left:
            scores = scores.index_fill(1, torch.tensor([left.pop()]), 1e9)
        return scores

    (one,) = texts(MODEL, PROMPTS[:1], max_new_tokens=2, logits_processor=[once])
    assert one.tokens[0] == 9
    with pytest.raises(RequestError, match="does not come out again"):
        one.explain()


def test_a_record_and_a_deadline_are_not_asked_for_twice(tmp_path: Any) -> None:
    file = tmp_path / "a.jsonl"
    given = {"record": file, "timeout": 100.0, "max_time": 100.0}
    (one,) = texts(MODEL, PROMPTS[:1], max_new_tokens=3, **given)
    before = file.read_bytes()
    assert one.explain(1).chosen.token == one.tokens[1]
    assert file.read_bytes() == before


def test_a_copy_explains_and_a_pickle_says_that_it_cannot() -> None:
    (one,) = texts(MODEL, PROMPTS[:1], max_new_tokens=2)
    assert copy.deepcopy(one).explain(0) == one.explain(0)
    sent = pickle.loads(pickle.dumps(one))
    assert sent == one and sent.timings == one.timings
    with pytest.raises(RequestError, match="nothing that it could be explained from"):
        sent.explain()


@pytest.mark.parametrize("call", [texts, streamed, engine])
def test_timings_are_those_of_a_clock(call: Callable[..., Any]) -> None:
    class Slow:
        """A processor that takes a fiftieth of a second for each token but the first, and a tenth
        for that one."""

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            time.sleep(0.1 if ids.shape[1] == len(PROMPTS[0]) else 0.02)
            return scores

    began = time.monotonic()
    (one,) = call(
        MODEL, PROMPTS[:1], seed=3, **{**DRAWN, "logits_processor": [Slow()], "max_new_tokens": 5}
    )
    most, timings = time.monotonic() - began, one.timings
    assert [*timings] == ["prompt_seconds", "decode_seconds", "total_seconds", "tokens_per_second"]
    assert timings["prompt_seconds"] >= 0.1 and timings["decode_seconds"] >= 0.08
    parts = timings["prompt_seconds"] + timings["decode_seconds"]
    assert parts == pytest.approx(timings["total_seconds"]) and parts <= most
    assert timings["tokens_per_second"] == pytest.approx(4 / timings["decode_seconds"])


def test_a_result_without_tokens_has_no_speed() -> None:
    (one,) = texts(MODEL, PROMPTS[:1], max_new_tokens=1)
    assert one.timings["tokens_per_second"] == 0.0 and one.timings["total_seconds"] > 0


def test_a_prompt_that_fails_says_how_long_it_ran() -> None:
    def broken(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > 4:
            raise ValueError("no")
        return scores

    (one,) = texts(
        MODEL, PROMPTS[:1], max_new_tokens=5, logits_processor=[broken], on_error="return"
    )
    assert one.finish_reason.kind == "error" and len(one.tokens) == 2
    assert one.timings["total_seconds"] > 0
    assert one.explain().ended.endswith("no") and one.explain().chosen == 2
