"""Calls from the outside: what a row gives does not depend on how it was asked for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.draws import seed_of
from everystep.engine import Engine, audit
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def padded(prompts: list[list[int]], side: str, pad: int = 3) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        gap = [pad] * (width - len(prompt))
        real = [1] * len(prompt)
        none = [0] * len(gap)
        ids.append(gap + prompt if side == "left" else prompt + gap)
        mask.append(none + real if side == "left" else real + none)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5}])
def test_padding_on_either_side_gives_the_same_result(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    left = model.generate(**padded(PROMPTS, "left"), max_new_tokens=9, **options)
    right = model.generate(**padded(PROMPTS, "right"), max_new_tokens=9, **options)
    assert torch.equal(left, right)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_a_row_of_a_batch_is_the_row_alone(model: LanguageModel, options: dict[str, Any]) -> None:
    seeds: dict[str, Any] = {"seed": [1, 2, 3]} if "do_sample" in options else {}
    batch = model.generate(**padded(PROMPTS, "left"), max_new_tokens=9, **options, **seeds)
    for row, prompt in enumerate(PROMPTS):
        seed = {"seed": row + 1} if seeds else {}
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=9, **options, **seed)[0]
        together = batch[row, 5 - len(prompt) :]
        assert together[: len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize(("cache", "chunk"), [(True, None), (True, 2), (False, None)])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_cache_and_chunks_change_nothing(
    model: LanguageModel, options: dict[str, Any], cache: bool, chunk: int | None
) -> None:
    plain = model.generate(**padded(PROMPTS, "left"), max_new_tokens=9, **options)
    other = model.generate(
        **padded(PROMPTS, "left"),
        max_new_tokens=9,
        use_cache=cache,
        prefill_chunk_size=chunk,
        **options,
    )
    assert torch.equal(plain, other)


def test_a_prompt_may_be_given_as_embeddings(model: LanguageModel) -> None:
    inputs = padded(PROMPTS, "left")
    table = model.state_dict()["model.embed_tokens.weight"]
    embeds = table[inputs["input_ids"]]
    ids = model.generate(**inputs, max_new_tokens=9)
    new = model.generate(
        inputs_embeds=embeds, attention_mask=inputs["attention_mask"], max_new_tokens=9
    )
    both = model.generate(**inputs, inputs_embeds=embeds, max_new_tokens=9)
    assert torch.equal(new, ids[:, 5:])
    assert torch.equal(both, ids)


def test_positions_given_by_the_caller_are_respected_and_advanced(model: LanguageModel) -> None:
    ids = torch.tensor([PROMPTS[0]])
    shifted = torch.arange(5)[None] * 2
    tokens = model.generate(ids, position_ids=shifted, max_new_tokens=4)[0].tolist()
    for length in range(5, 9):
        positions = torch.tensor([[0, 2, 4, 6, 8, 9, 10, 11][:length]])
        logits = model(torch.tensor([tokens[:length]]), position_ids=positions).logits
        assert int(logits[0, -1].argmax()) == tokens[length]


def test_a_prompt_is_fed_once_whatever_the_width(model: LanguageModel, fed: list[int]) -> None:
    model.generate(torch.tensor([PROMPTS[0]]), num_beams=4, max_new_tokens=3, min_new_tokens=3)
    assert fed == [5, 9, 13]


def test_an_unseeded_call_draws_from_the_global_generator(model: LanguageModel) -> None:
    ids = torch.tensor([PROMPTS[0]])
    torch.manual_seed(3)
    first = model.generate(ids, do_sample=True, max_new_tokens=9)
    second = model.generate(ids, do_sample=True, max_new_tokens=9)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, do_sample=True, max_new_tokens=9), first)
    assert not torch.equal(second, first)


def test_calls_from_several_threads_do_not_disturb_each_other(model: LanguageModel) -> None:
    wanted = {
        b: model.generate(torch.tensor([PROMPTS[0]]), num_beams=b, max_new_tokens=20)
        for b in (1, 2, 3, 4)
    }
    wrong: list[int] = []

    def work(beams: int) -> None:
        for _ in range(5):
            ids = model.generate(torch.tensor([PROMPTS[0]]), num_beams=beams, max_new_tokens=20)
            if not torch.equal(ids, wanted[beams]):
                wrong.append(beams)

    threads = [threading.Thread(target=work, args=(beams,)) for beams in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_interrupt_leaves_the_model_usable(model: LanguageModel) -> None:
    ids = torch.tensor([PROMPTS[0]])
    before = model.generate(ids, max_new_tokens=8)

    def interrupt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 8:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, max_new_tokens=8, logits_processor=[interrupt])
    assert torch.equal(model.generate(ids, max_new_tokens=8), before)


class Heard:
    """A streamer in transformers' manner that writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.said.append(value.tolist())

    def end(self) -> None:
        self.said.append("end")


def test_a_streamer_hears_the_prompt_the_tokens_and_the_end(model: LanguageModel) -> None:
    heard = Heard()
    ids = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, streamer=heard)
    assert heard.said == [[PROMPTS[0]], *[[token] for token in ids[0, 5:].tolist()], "end"]


def test_a_streamer_hears_the_end_after_an_error(model: LanguageModel) -> None:
    heard = Heard()

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        model.generate(torch.tensor([PROMPTS[0]]), streamer=heard, logits_processor=[fail])
    assert heard.said[-1] == "end"


def test_an_output_object_says_why_rows_ended_and_where_values_came_from(
    model: LanguageModel,
) -> None:
    out = model.generate(
        **padded(PROMPTS, "left"), max_new_tokens=5, eos_token_id=[2], return_dict_in_generate=True
    )
    assert len(out.finish_reasons) == 3
    assert out.effective_config.source("max_new_tokens") == "call"
    assert out.effective_config.source("bos_token_id") == "checkpoint"
    assert out.prompt_length == 5
    assert [len(new) for new in out.new_tokens] == [
        5 if reason.kind == "length" else len(new)
        for new, reason in zip(out.new_tokens, out.finish_reasons, strict=True)
    ]


# --- texts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker() -> tuple[LanguageModel, es.Tokenizer]:
    tokenizer = tiny_tokenizer(vocab_size=320)
    return tiny_llama(vocab_size=320), tokenizer


def test_many_prompts_equal_each_alone_and_hold_few_rows(
    talker: tuple[LanguageModel, es.Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = talker
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 300, rng.integers(1, 12)).tolist() for _ in range(1000)]
    rows = []
    step = Engine.step

    def counted(engine: Engine) -> Any:
        events = step(engine)
        rows.append(len(engine.ledger.held))
        return events

    monkeypatch.setattr(Engine, "step", counted)
    many = es.generate(model, tokenizer, prompts, max_new_tokens=6, seed=1, do_sample=True)
    assert len(many) == 1000
    assert max(rows) <= 32
    for index in (0, 77, 999):
        alone = es.generate(
            model,
            tokenizer,
            prompts[index],
            max_new_tokens=6,
            seed=seed_of(1, index),
            do_sample=True,
        )
        assert alone == many[index]


def test_a_stream_reports_every_token_and_its_text(
    talker: tuple[LanguageModel, es.Tokenizer],
) -> None:
    model, tokenizer = talker
    stream = es.stream(model, tokenizer, "some text", max_new_tokens=12, eos_token_id=None)
    events = list(stream)
    ((generated,),) = stream.results()
    assert [event.token for event in events] == list(generated.tokens)
    assert "".join(event.text or "" for event in events) == generated.text
    assert [event.position for event in events] == list(range(12))
    assert events[-1].finish == es.FinishReason("length")


def test_a_cancelled_stream_ends_with_the_reason_and_frees_its_rows(
    talker: tuple[LanguageModel, es.Tokenizer],
) -> None:
    model, tokenizer = talker
    session_stream = es.stream(
        model, tokenizer, ["one", "two"], max_new_tokens=50, eos_token_id=None
    )
    seen = [next(session_stream) for _ in range(4)]
    session_stream.cancel()
    rest = list(session_stream)
    assert {event.finish for event in rest if event.finish} == {es.FinishReason("cancelled")}
    assert {event.request_id for event in rest if event.finish} == {"0", "1"}
    assert len(seen) == 4
    audit(session_stream._session._plain.engine)


def test_chat_goes_through_the_template(talker: tuple[LanguageModel, es.Tokenizer]) -> None:
    model, tokenizer = talker
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer = es.chat(model, tokenizer, messages, max_new_tokens=8, do_sample=False)
    assert answer == es.generate(model, tokenizer, ids, max_new_tokens=8)


def test_several_sequences_of_one_prompt_are_a_list(
    talker: tuple[LanguageModel, es.Tokenizer],
) -> None:
    model, tokenizer = talker
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "seed": 3}
    texts = es.generate(model, tokenizer, "abc", **options)
    assert len(texts) == 3
    details = es.generate(model, tokenizer, "abc", return_dict_in_generate=True, **options)
    assert [one.text for one in details] == texts
