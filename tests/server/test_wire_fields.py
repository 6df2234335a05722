"""Seeds of answers, special tokens in texts, variables of templates, explanations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import everystep as es
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.link import EngineLink
from everystep.server.local import listening
from everystep.testing.tokenizer import tiny_tokenizer
from tests.server.serving import TOKENIZER, Served, chunks_of, in_thread, joined, tiny
from tests.server.test_runs import explained

HOT: dict[str, Any] = {"prompt": "hello the", "max_tokens": 9, "temperature": 1.3}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
CHAT = "/v1/chat/completions"
SPECIAL = TOKENIZER.convert_tokens_to_ids("<|im_start|>")


def refused(server: Served, said: str, path: str = "/v1/completions", **body: Any) -> None:
    answer = server.post(path, **body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


# --- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**HOT, "logprobs": 2, "return_token_ids": True, "n": 3}),
        ("/v1/completions", {**HOT, "echo": True}),
        ("/v1/completions", {**HOT, "num_beams": 3, "do_sample": True, "n": 3}),
        ("/v1/completions", {**HOT, "best_of": 2}),
        (CHAT, {**TALK, "temperature": 1.3, "n": 3, "prompt_logprobs": 1}),
    ],
)
def test_each_answer_is_that_of_a_request_with_its_seed_alone(
    server: Served, path: str, body: dict[str, Any]
) -> None:
    seeds = [11, 5, 2**62 - 1]
    one_each = {name: value for name, value in body.items() if name != "n"}
    alone = [server.post(path, **one_each, seed=seed).json() for seed in seeds]
    together = server.post(path, **body, seed=seeds).json()
    for number, one in enumerate(alone):
        (wanted,) = one["choices"]
        assert together["choices"][number] == {**wanted, "index": number}
    made = [one["usage"]["completion_tokens"] for one in alone]
    assert together["usage"]["completion_tokens"] == sum(made)
    assert together["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    texts = [one["choices"][0] for one in alone]
    said = [one["text"] if "text" in one else one["message"]["content"] for one in texts]
    assert len(set(said)) == 3
    if "prompt_logprobs" not in body:
        streamed = chunks_of(server.post(path, **body, seed=seeds, stream=True).text)
        assert [joined(streamed, number) for number in range(3)] == said


def test_several_prompts_have_the_seeds_in_turn(server: Served) -> None:
    prompts = ["hello the", "of the"]
    asked = {**HOT, "prompt": prompts, "seed": [4, 9], "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(server.post("/v1/completions", **asked, stream=True).text)
    alone = [
        server.completion(**{**HOT, "prompt": prompt, "seed": seed})
        for prompt in prompts
        for seed in (4, 9)
    ]
    wanted = [one["choices"][0]["text"] for one in alone]
    assert [joined(chunks, number) for number in range(4)] == wanted
    assert last["usage"]["prompt_tokens"] == sum(
        one["usage"]["prompt_tokens"] for one in alone[::2]
    )


@pytest.mark.parametrize("more", [{"n": 2}, {"n": 1}, {"n": 4}, {"num_return_sequences": 2}])
def test_as_many_seeds_as_answers(server: Served, more: dict[str, Any]) -> None:
    refused(server, "seed has another number of seeds", **HOT, **more, seed=[1, 2, 3])
    refused(server, "seed is impossible", **HOT, **more, seed=[])
    refused(server, "seed is impossible", **HOT, **more, seed=[1, "x"])
    refused(server, "seed is impossible", "/v1/everystep/runs", prompt="hello", seed=[1])


# --- special tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_texts_have_special_tokens_where_that_is_wanted(server: Served, path: str) -> None:
    end = TOKENIZER.convert_ids_to_tokens(2)
    asked: dict[str, Any] = {**(HOT if path != CHAT else TALK), "temperature": 1.3, "n": 6}
    asked |= {"seed": 1, "max_tokens": 20, "return_token_ids": True}
    asked["logit_bias"] = {str(SPECIAL): 4.0, "2": 3.0}
    seen = set()
    for kept in (False, True):
        body = {**asked, "skip_special_tokens": False, "include_stop_str_in_output": kept}
        whole = server.post(path, **body).json()["choices"]
        chunks = chunks_of(server.post(path, **body, stream=True).text)
        for number, one in enumerate(whole):
            text = one["text"] if path != CHAT else one["message"]["content"]
            ids = one["token_ids"]
            ended = one["finish_reason"] == "stop"
            assert ended == (ids[-1] == 2)
            wanted = ids[:-1] if ended and not kept else ids
            assert text == TOKENIZER.decode(wanted, skip_special_tokens=False)
            assert joined(chunks, number) == text
            seen |= {"<|im_start|>" in text, ended, f"{kept} {end in text}"}
    assert seen >= {True, "True True", "False False"} and "False True" not in seen
    plain = server.post(path, **asked, skip_special_tokens=True).json()["choices"]
    assert plain == server.post(path, **asked).json()["choices"]
    for one in plain:
        text = one["text"] if path != CHAT else one["message"]["content"]
        assert text == TOKENIZER.decode(one["token_ids"], skip_special_tokens=True)


# --- variables of the template --------------------------------------------------------------------

MOODY = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if mood %}Be {{ mood }}.\n{% endif %}{% if enable_thinking is false %}<think></think>"
    "{% endif %}{{ bos_token }}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def moody() -> Iterator[Served]:
    """A server whose chat template reads a variable."""
    tokenizer = tiny_tokenizer(320)
    tokenizer.chat_template = MOODY
    front = Front(EngineLink(in_thread()), {"tiny": FrontModel(tokenizer, tiny().chat_defaults)})
    with listening(front) as port:
        one = Served(front, port)
        with one.client:
            yield one


def test_variables_reach_the_template(moody: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for mood in ("merry", ["a", 1], {"deep": True}):
        body = {"messages": messages, "chat_template_kwargs": {"mood": mood}}
        text = moody.post("/apply-template", **body).json()["prompt"]
        assert text.count(f"Be {mood}.") == 1 and text.endswith("assistant: ")
        ids = moody.post("/tokenize", **body).json()["tokens"]
        assert ids == TOKENIZER.encode(text, add_special_tokens=False)
        chat = moody.post(CHAT, **body, max_tokens=4, temperature=0, return_token_ids=True).json()
        assert chat["usage"]["prompt_tokens"] == len(ids)
        asked = {"prompt": ids, "max_tokens": 4, "return_token_ids": True}
        plain = moody.completion(**asked)["choices"][0]
        assert chat["choices"][0]["token_ids"] == plain["token_ids"]
    without = moody.post("/apply-template", messages=messages).json()["prompt"]
    assert "Be" not in without
    for name in ("enable_thinking", "thinking"):
        body = {"messages": messages, "chat_template_kwargs": {name: False}}
        text = moody.post("/apply-template", **body).json()["prompt"]
        field = moody.post("/apply-template", messages=messages, enable_thinking=False).json()
        assert text == field["prompt"] and "<think></think>" in text


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"mod": "x"}, "perhaps 'mood'"),
        ({"weather": "x"}, "'weather' is neither an argument nor a variable"),
        ({"messages": []}, "chat_template_kwargs.messages is set by another field"),
        ({"tools": []}, "chat_template_kwargs.tools is set by another field"),
        ({"add_generation_prompt": False}, "is set by another field"),
        ({"tokenize": False}, "is set by another field"),
        ({"chat_template": "x"}, "is set by another field"),
        ({"bos_token": "x"}, "chat_template_kwargs.bos_token is the tokenizer's own"),
        ({"enable_thinking": 3}, "chat_template_kwargs.enable_thinking is impossible"),
        ({"x" * 10_000: 1}, "chat_template_kwargs: "),
    ],
)
def test_variables_that_nobody_reads_are_refused(
    moody: Served, variables: dict[str, Any], said: str
) -> None:
    for path in (CHAT, "/apply-template", "/tokenize"):
        body = {"messages": TALK["messages"], "chat_template_kwargs": variables}
        answer = moody.post(path, **body)
        assert answer.status_code == 400 and said in answer.text and len(answer.content) < 4096
        assert answer.json()["error"]["param"].startswith("chat_template_kwargs")
    refused(moody, "no field", prompt="hello", chat_template_kwargs=variables)
    twice = {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}
    refused(moody, "contradicts enable_thinking", CHAT, **TALK, **twice)


# --- explanations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.3, "seed": 4, "top_k": 9, "n": 2, "repetition_penalty": 1.4},
        {"num_beams": 2},
        {"seed": [1, 2], "temperature": 0.8},
        {"prompt_lookup_num_tokens": 2, "prompt": "hello the hello the", "timeout": 90},
    ],
)
def test_explanations_are_those_of_a_run(server: Served, more: dict[str, Any]) -> None:
    body = {"prompt": "hello the", "max_tokens": 6, "return_token_ids": True, **more}
    told = server.completion(**body, explain=3)["choices"]
    plain = server.completion(**body)["choices"]
    several = isinstance(more.get("seed"), list)
    own = {
        name: one for name, one in more.items() if name not in ("prompt", "n", "seed", "timeout")
    }
    own |= {"num_return_sequences": more["n"]} if "n" in more else {}
    own |= {"do_sample": True} if "temperature" in more else {}
    for number, one in enumerate(told):
        seed = more["seed"][number] if several else more.get("seed", 0)
        with es.open(tiny(), TOKENIZER, body["prompt"], max_new_tokens=6, seed=seed, **own) as run:
            for _ in run:
                pass
            index = 0 if several else number
            wanted = [explained(run.explain(at, 3, index)) for at in range(len(one["token_ids"]))]
        assert one.pop("explanations") == wanted
        assert [why["chosen"]["token"] for why in wanted] == one["token_ids"]
    assert told == plain, "it changes nothing else"


def test_a_conversation_is_explained_too(server: Served) -> None:
    body = {**TALK, "temperature": 1.2, "seed": 6, "return_token_ids": True}
    (told,) = server.post(CHAT, **body, explain=True).json()["choices"]
    assert [why["chosen"]["token"] for why in told["explanations"]] == told["token_ids"]
    assert {len(why["rivals"]) for why in told["explanations"]} == {5}
    assert "explanations" not in server.post(CHAT, **body, explain=False).json()["choices"][0]


def test_what_cannot_be_explained_is_refused(server: Served) -> None:
    refused(server, "a stream has no explanations", **HOT, stream=True, explain=True)
    refused(server, "explain is for few tokens", **{**HOT, "max_tokens": 600}, n=2, explain=1)
    refused(server, "explain is impossible", **HOT, explain=65)
    refused(server, "explain has no place in a run", "/v1/everystep/runs", prompt="x", explain=1)
