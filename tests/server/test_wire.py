"""The wire as OpenAI's own client reads it, streamed and whole."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from pydantic import BaseModel

from everystep.server.answering import Clock
from everystep.server.messages import Over
from tests.server.serving import TOKENIZER, Served, chunks_of, joined, tiny

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "seed": 3, "max_tokens": 12, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        joined = stream.current_completion_snapshot
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.choices[0].message.role == "assistant"
    assert joined.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert joined.usage == whole.usage or joined.usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 12 and whole._request_id


def test_several_choices_and_their_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "n": 3, "seed": 1, "max_tokens": 5}
    asked |= {"logprobs": True, "top_logprobs": 2, "temperature": 1.0}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert len({c.message.content for c in whole.choices}) > 1
    for one, other in zip(whole.choices, final.choices, strict=True):
        assert one.message.content == other.message.content
        content = one.logprobs.content
        assert len(content) == 5
        assert [entry.token for entry in content] == [e.token for e in other.logprobs.content]
        spelled = b"".join(bytes(entry.bytes) for entry in content)
        shown = re.sub(r"<\|\w+\|>|<\w+>", "", spelled.decode(errors="replace"))
        assert shown == one.message.content  # which has no special tokens
        for entry in content:
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("last", [False, True])
def test_each_chunk_counts_tokens_so_far(server: Served, path: str, last: bool) -> None:
    """As load generators ask for it."""
    asked = {"messages": HELLO} if "chat" in path else {"prompt": ["hello", "the and"]}
    options = {"continuous_usage_stats": True, "include_usage": last}
    body = {**asked, "n": 2, "do_sample": True, "seed": 3, "max_tokens": 5, "ignore_eos": True}
    whole = server.post(path, **body).json()["usage"]
    answer = server.post(path, **body, stream=True, stream_options=options)
    chunks = chunks_of(answer.text)
    assert bool(not chunks[-1]["choices"]) == last
    counted = [one["usage"] for one in chunks]
    assert {one["prompt_tokens"] for one in counted} == {whole["prompt_tokens"]}
    made = [one["completion_tokens"] for one in counted]
    assert made == sorted(made) and made[-1] == whole["completion_tokens"] and len(set(made)) > 4
    assert all(
        one["total_tokens"] == one["prompt_tokens"] + made
        for one, made in zip(counted, made, strict=True)
    )


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/messages", {"messages": HELLO, "model": "tiny"}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_nobody_between_keeps_a_stream_back(server: Served, path: str, asked: Any) -> None:
    """Proxies hold answers back, and keep them for others, unless they are told not to."""
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = server.post(path, **asked, **{most: 2}, stream=True)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"do_sample": True, "n": 2}])
def test_an_answer_says_how_long_it_took(server: Served, path: str, how: Any) -> None:
    asked = {"messages": HELLO} if "chat" in path else {"prompt": ["hello", "the and"]}
    body = {**asked, **how, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    usual = tiny().generate(torch.tensor([[5, 6]]), max_new_tokens=1, return_dict_in_generate=True)
    whole = server.post(path, **body, timings=True).json()
    for beside in ({}, {"include_usage": True}, {"continuous_usage_stats": True}):
        options = {"stream": True, "stream_options": beside}
        last = chunks_of(server.post(path, **body, **options, timings=True).text)[-1]
        assert last["choices"] == [] and ("usage" in last) == bool(beside)
        if beside:
            assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        for took in (last["timings"], whole["timings"]):
            assert took.keys() == usual.timings.keys()
            # Each token after the first takes a step, and the first one takes one too.
            assert took["prompt_seconds"] > 0 and took["decode_seconds"] > 0
            parts = took["prompt_seconds"] + took["decode_seconds"]
            assert parts == pytest.approx(took["total_seconds"])
        assert not any(
            "timings" in one for one in chunks_of(server.post(path, **body, **options).text)
        )
    assert "timings" not in server.post(path, **body, timings=False).json()


def test_timings_of_several_prompts_are_those_of_all() -> None:
    """One that ends later than another, and one that has its first token later."""
    clock = Clock()
    seconds = iter((10.0, 12.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("everystep.server.answering.moment", lambda: next(seconds))
        clock.note(Over(1, [], 2.0, 3.0))  # from 7 on, opened at 9
        clock.note(Over(2, [], 1.0, 4.0))  # from 8 on, opened at 9
    assert clock.shown() == {"prompt_seconds": 2.0, "decode_seconds": 3.0, "total_seconds": 5.0}


def test_every_choice_is_opened_first_and_says_its_role_once(server: Served) -> None:
    body = {
        "messages": HELLO,
        "n": 3,
        "seed": 1,
        "max_tokens": 4,
        "stream": True,
        "do_sample": True,
    }
    answer = server.post("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "\nid:" not in answer.text
    chunks = chunks_of(answer.text)
    opening = [c["choices"][0] for c in chunks[:3]]
    assert [(c["index"], c["delta"]["role"]) for c in opening] == [
        (i, "assistant") for i in range(3)
    ]
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[3:-1])
    ends = [c["choices"][0]["index"] for c in chunks[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    assert all(c["usage"] is None for c in chunks[:-1])
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


class Colour(BaseModel):
    """A colour."""

    name: str
    warm: bool


def test_an_answer_that_follows_a_schema(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 400}
    found: Any = None
    for seed in range(8):  # a tiny model may write a text that has no end
        asked |= {"temperature": 1, "seed": seed}
        try:
            found = client.chat.completions.parse(response_format=Colour, **asked)
            break
        except openai.LengthFinishReasonError:
            continue
    assert isinstance(found.choices[0].message.parsed, Colour)


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "prompt": ["hello", "it was"],
        "n": 2,
        "seed": 1,
        "temperature": 1,
    }
    whole = client.completions.create(**asked, max_tokens=4)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    pieces: dict[int, str] = {}
    for chunk in client.completions.create(**asked, max_tokens=4, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + choice.text
    assert [pieces[i] for i in range(4)] == [c.text for c in whole.choices]
    lengths = [len(TOKENIZER.encode(text)) for text in ("hello", "it was")]
    assert whole.usage.prompt_tokens == sum(lengths), "a prompt is counted once"
    single = client.completions.create(**asked | {"prompt": "it was"}, max_tokens=4)
    assert [c.text for c in single.choices] == [c.text for c in whole.choices[2:]]


def test_stop_strings_are_left_out_and_named(server: Served) -> None:
    plain = server.completion(prompt="hello", max_tokens=12)["choices"][0]["text"]
    stop = plain[3]
    asked: Any = {"prompt": "hello", "max_tokens": 12, "stop": [stop]}
    (cut,) = server.completion(**asked)["choices"]
    assert cut["text"] == plain[: plain.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    (kept,) = server.completion(**asked, include_stop_str_in_output=True)["choices"]
    assert kept["text"].startswith(cut["text"] + stop)
    chunks = chunks_of(server.post("/v1/completions", **asked, stream=True).text)
    assert joined(chunks) == cut["text"]


def test_log_probabilities_of_a_stream_are_those_of_the_whole(server: Served) -> None:
    asked: Any = {"prompt": "hello", "max_tokens": 6, "logprobs": 3, "seed": 4, "temperature": 1}
    (whole,) = server.completion(**asked)["choices"]
    chunks = chunks_of(server.post("/v1/completions", **asked, stream=True).text)
    pieces = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name, values in whole["logprobs"].items():
        got = [one for piece in pieces for one in piece[name]]
        assert got == pytest.approx(values) if name == "token_logprobs" else got == values
    assert all(math.isfinite(one) for one in whole["logprobs"]["token_logprobs"])


def test_ends_of_ones_own(server: Served) -> None:
    ids = server.completion(prompt="hello", max_tokens=8, return_token_ids=True, ignore_eos=True)
    tokens = ids["choices"][0]["token_ids"]
    assert len(tokens) == 8
    (cut,) = server.completion(
        prompt="hello", max_tokens=8, return_token_ids=True, stop_token_ids=[tokens[2]]
    )["choices"]
    assert cut["token_ids"][-1] == tokens[2] and cut["finish_reason"] == "stop"


def test_models(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_errors_are_those_that_clients_know(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert "temperature" in raised.value.message and raised.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_the_asynchronous_client(server: Served) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def ask(seed: int) -> str:
                asked: Any = {"model": "tiny", "prompt": "hello", "seed": seed, "temperature": 1}
                stream = await client.completions.create(**asked, max_tokens=20, stream=True)
                return "".join([c.choices[0].text async for c in stream])

            return list(await asyncio.gather(*map(ask, range(24))))

    asked: Any = {"prompt": "hello", "temperature": 1, "max_tokens": 20}
    wanted = [server.completion(**asked, seed=s)["choices"][0]["text"] for s in range(24)]
    assert asyncio.run(main()) == wanted, "neighbours change nothing"


def test_texts_to_ids_and_back(server: Served) -> None:
    found = server.post("/tokenize", prompt="hello the", return_token_strs=True).json()
    assert found["tokens"] == TOKENIZER.encode("hello the") and found["count"] == len(
        found["tokens"]
    )
    assert "".join(found["token_strs"]) == "hello the" and found["max_model_len"] == 4096
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "hello the"}
    chat = server.post("/tokenize", messages=HELLO).json()["tokens"]
    assert chat == list(
        TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    )


def test_what_a_template_makes_of_messages(server: Served) -> None:
    asked: Any = {"messages": HELLO}
    for beside in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        options: Any = {"add_generation_prompt": not beside.get("continue_final_message"), **beside}
        wanted = TOKENIZER.apply_chat_template(HELLO, tokenize=False, **options)
        assert server.post("/apply-template", **asked, **beside).json() == {"prompt": wanted}
        ids = server.post("/tokenize", **asked, **beside).json()["tokens"]
        assert ids == list(TOKENIZER.apply_chat_template(HELLO, return_dict=False, **options))
    begun = [*HELLO, {"role": "assistant", "content": "it was"}]
    text = server.post("/apply-template", messages=begun, continue_final_message=True).json()
    assert text["prompt"].endswith("it was")
    chat = {"messages": begun, "continue_final_message": True, "max_tokens": 6, "temperature": 0}
    answer = server.post("/v1/chat/completions", **chat).json()["choices"][0]
    ids = TOKENIZER.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    plain = server.completion(prompt=list(ids), max_tokens=6, temperature=0)["choices"][0]
    assert answer["message"]["content"] == plain["text"]


def test_what_a_tokenizer_is(server: Served) -> None:
    """What lm-eval asks before it evaluates without a tokenizer of its own."""
    found = server.client.get("/tokenizer_info").json()
    known = TOKENIZER.special_tokens_map
    assert {name: found[name] for name in known} == known and "eos_token" in found
    assert found["chat_template"] == TOKENIZER.chat_template
    assert (found["vocab_size"], found["max_model_len"]) == (320, 4096)
    assert server.client.get("/tokenizer_info", params={"model": "other"}).status_code == 404


def test_what_shows_how_it_goes(server: Served) -> None:
    server.completion(prompt="hello", max_tokens=3)
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").status_code == 200
    text = server.client.get("/metrics").text
    assert 'everystep_generation_tokens_total{model_name="tiny"}' in text
    assert 'everystep_http_responses_total{status="200"}' in text
    assert 'everystep_num_requests_running{model_name="tiny"} 0.0' in text


@pytest.mark.parametrize(
    "path",
    ["/a%0ab", "/%0a", "/v1/models/a%0ab", "/v1/files/a%0a%0ab/content", "/a%0d%0ab/", "/x%0a/"],
)
def test_a_path_with_a_line_break_is_told_as_any_other(server: Served, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = server.client.request(method, path)
        assert answer.status_code == 404, (method, answer.status_code)
        assert answer.json()["error"]["type"] == "not_found_error", answer.text
        assert answer.headers["x-request-id"] and "location" not in answer.headers
