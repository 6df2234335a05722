"""Events of everything that generates: batches, several sequences, and beams, which settle late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types.table import common_length

PROMPTS = ["Hello", "Why is it"]
BEAMS = [
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.0},
    {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True},
    {"num_beams": 3, "early_stopping": "never", "length_penalty": 1.5},
    {"num_beams": 3, "length_penalty": -1.0},
    {"num_beams": 3, "do_sample": True, "top_k": 5},
    {"num_beams": 3, "repetition_penalty": 1.4},
]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


class Told(es.BaseStreamer):
    """Writes down events."""

    def __init__(self) -> None:
        self.prompt: torch.Tensor | None = None
        self.events: list[es.Event] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.prompt is None
        self.prompt = value

    def on_event(self, event: es.Event) -> None:
        self.events.append(event)

    def end(self) -> None:
        self.ended += 1


class Ids(es.BaseStreamer):
    """Writes down what is put."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value)

    def end(self) -> None:
        pass


def spelled(events: list[Any]) -> dict[tuple[str, int], tuple[list[int], str]]:
    """Request and index -> the tokens and the text that its events tell, each in its place."""
    told: dict[tuple[str, int], tuple[list[int], str]] = {}
    for event in events:
        tokens, text = told.get((event.request_id, event.index), ([], ""))
        assert event.position == len(tokens)
        tokens = [*tokens, event.token] if event.token >= 0 else tokens
        told[event.request_id, event.index] = (tokens, text + (event.text or ""))
    return told


@pytest.mark.parametrize("options", BEAMS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_what_beams_report_early_is_in_the_result(options: dict[str, Any], seed: int) -> None:
    model = tiny_llama(seed, vocab_size=320)
    stream = es.stream(model, tiny_tokenizer(), PROMPTS, seed=seed, max_new_tokens=16, **options)
    told = spelled(list(stream))
    for prompt, results in enumerate(stream.results()):
        for index, one in enumerate(results):
            assert told[str(prompt), index] == (list(one.tokens), one.text)


def test_beams_do_report_early(model: LanguageModel) -> None:
    """Most tokens are known before the last step, and not only when everything is over."""
    steps: list[int] = []
    streamer = Told()
    told_at: list[int] = []

    def count(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps.append(len(steps))
        told_at.append(sum(event.token >= 0 for event in streamer.events))
        return scores

    ids = torch.tensor([tiny_tokenizer().encode("Hello")])
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 24, "logits_processor": [count]}
    out = model.generate(ids, streamer=streamer, **options)
    tokens = [event.token for event in streamer.events if event.token >= 0]
    assert tokens == out[0, ids.shape[1] :].tolist()[: len(tokens)]
    assert told_at[-1] >= len(tokens) // 2
    assert streamer.ended == 1


def test_one_beam_search_may_be_followed_by_put(model: LanguageModel) -> None:
    ids = torch.tensor([tiny_tokenizer().encode("Hello")])
    streamer = Ids()
    out = model.generate(ids, num_beams=3, max_new_tokens=12, streamer=streamer)
    prompt, *news = streamer.puts
    assert torch.equal(prompt, ids)
    assert torch.cat([new.reshape(-1) for new in news]).tolist() == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("rows", "returns"), [(2, 1), (1, 2)])
def test_several_results_of_beams_need_events(
    model: LanguageModel, rows: int, returns: int
) -> None:
    ids = torch.tensor([[72, 73]]).repeat(rows, 1)
    options = {"num_beams": 2, "num_return_sequences": returns, "max_new_tokens": 5}
    with pytest.raises(UnsupportedError, match=r"Use es.stream"):
        model.generate(ids, streamer=Ids(), **options)
    told = Told()
    model.generate(ids, streamer=told, **options)
    assert len(spelled(told.events)) == rows * returns


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "num_return_sequences": 3}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
def test_events_of_a_batch_spell_its_rows(model: LanguageModel, options: dict[str, Any]) -> None:
    ids = torch.tensor([[72, 101, 72, 101], [90, 91, 90, 91]])
    told = Told()
    out = model.generate(
        ids, max_new_tokens=9, streamer=told, seed=3, tokenizer=tiny_tokenizer(), **options
    )
    returns = options.get("num_return_sequences", 1)
    for (request, index), (tokens, text) in spelled(told.events).items():
        row = out[int(request) * returns + index, 4 : 4 + len(tokens)].tolist()
        assert tokens == row
        assert text == tiny_tokenizer().decode(row, skip_special_tokens=True)
    assert sum(event.finish is not None for event in told.events) == len(out)
    assert told.prompt is not None and told.prompt.shape == (len(out), 4)


def test_put_gets_a_column_per_token_even_where_rows_differ(model: LanguageModel) -> None:
    """With drafts a row may get several tokens in a step, and another one."""
    ids = torch.tensor([[72, 101, 72, 101], [90, 91, 92, 93]])
    streamer = Ids()
    out = model.generate(ids, max_new_tokens=9, streamer=streamer, prompt_lookup_num_tokens=3)
    assert streamer.puts[0].shape == (2, 4)
    assert all(put.shape == (2,) for put in streamer.puts[1:])
    told = [{int(put[row]) for put in streamer.puts[1:]} for row in range(2)]
    assert all(set(out[row, 4:].tolist()) <= told[row] | {3} for row in range(2))


def test_live_beams_can_be_watched(model: LanguageModel) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 10}
    stream = es.stream(model, tiny_tokenizer(), "Hello", beam_events=True, **options)
    settled = 0
    seen = 0
    for event in stream:
        if isinstance(event, es.BeamEvent):
            assert event.position == settled
            scores = [beam.score for beam in event.beams]
            assert scores == sorted(scores, reverse=True)
            assert all(isinstance(beam.text, str) for beam in event.beams)
            seen += 1
        else:
            settled += event.token >= 0
    assert seen >= 5
    plain = list(es.stream(model, tiny_tokenizer(), "Hello", **options))
    assert not any(isinstance(event, es.BeamEvent) for event in plain)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_a_cancelled_stream_reports_what_it_has(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    given = {"max_new_tokens": 30, "seed": 1, "eos_token_id": None, **options}
    stream = es.stream(model, tiny_tokenizer(), PROMPTS, **given)
    events = [next(stream)]
    stream.cancel()
    events += list(stream)
    told = spelled(events)
    for prompt, (result,) in enumerate(stream.results()):
        assert result.finish_reason.kind == "cancelled"
        assert told[str(prompt), 0] == (list(result.tokens), result.text)


def test_what_all_begin_with() -> None:
    def common(*tails: str) -> str:
        ids = [torch.tensor(list(tail.encode())).numpy() for tail in tails]
        return tails[0][: common_length(ids)]

    assert common("abc", "abd", "ab") == "ab"
    assert common("abc") == "abc"
    assert common("abc", "xbc") == ""
    assert common("abc", "") == ""
    assert common_length([]) == 0
