"""Tools on the wire: forced calls, whole and streamed, are those of the library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import everystep as es
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.host import HostedModel
from everystep.server.link import EngineLink, ThreadMooring
from everystep.server.local import listening
from everystep.testing.tokenizer import tiny_tokenizer
from tests.clients.client import CLIENTS
from tests.dialogue.templates import FORMS
from tests.server.serving import LIMITS, Served, chunks_of, joined, tiny

ASKED = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
FORCED: Any = {
    "messages": ASKED,
    "tools": [TOOL],
    "tool_choice": "required",
    "temperature": 1,
    "max_tokens": 200,
    "parallel_tool_calls": False,
    "thinking_budget": 4,
}


TOKENIZER = tiny_tokenizer(320)
TOKENIZER.chat_template = next(one for one in FORMS if one.dialect == "hermes").source


_OWN = ("tools", "tool_choice", "parallel_tool_calls", "thinking_budget")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose chat template knows tools."""
    hosted = ThreadMooring(lambda: {"tiny": HostedModel(tiny(), TOKENIZER, LIMITS)}, LIMITS)
    front = Front(EngineLink(hosted), {"tiny": FrontModel(TOKENIZER, tiny().chat_defaults)})
    with listening(front) as port:
        one = Served(front, port)
        with one.client:
            yield one


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_is_that_of_the_library(server: Served, seed: int) -> None:
    answer = server.post("/v1/chat/completions", **FORCED, seed=seed)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    own = {name: FORCED[name] for name in _OWN}
    shape: Any = {"do_sample": True, "temperature": 1, "max_new_tokens": 200, "seed": seed}
    wanted = es.chat(tiny(), TOKENIZER, ASKED, **own, **shape)
    calls = choice["message"]["tool_calls"]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in calls] == [
        (one.name, one.arguments) for one in wanted.tool_calls
    ]
    parts = choice["message"].get("reasoning_content"), choice["message"]["content"] or ""
    assert parts == (wanted.reasoning_content, wanted.message.content)
    assert len(calls) == 1 and choice["finish_reason"] == "tool_calls"
    assert json.loads(calls[0]["function"]["arguments"])["a"] in (1, 2, 3)


def test_a_streamed_call_joins_to_the_whole_one(server: Served) -> None:
    own: Any = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    asked: Any = {"model": "tiny", **FORCED, "seed": 1}
    asked["extra_body"] = {"thinking_budget": asked.pop("thinking_budget")}
    with openai.OpenAI(**own) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            joined = stream.current_completion_snapshot.choices[0]
    (one,), (other,) = whole.message.tool_calls or [], joined.message.tool_calls or []
    assert (one.id, one.function.name) == (other.id, other.function.name)
    assert one.function.arguments == other.function.arguments
    assert joined.finish_reason == whole.finish_reason == "tool_calls"
    body = server.post("/v1/chat/completions", **FORCED, seed=1, stream=True).text
    deltas = [c["choices"][0]["delta"].get("tool_calls") for c in chunks_of(body)]
    said = [delta[0] for delta in deltas if delta]
    assert said[0]["function"]["arguments"] == "" and said[0]["type"] == "function"
    assert all(set(delta) == {"index", "function"} for delta in said[1:])


THINKING = [
    ({"thinking_budget": 50}, "<think>\n"),
    ({"tools": [TOOL]}, "<think>\n"),
    ({"enable_thinking": True}, ""),  # the template has opened the thought itself
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("asked", "opening"), THINKING)
def test_a_thought_is_told_apart(server: Served, asked: Any, opening: str, seed: int) -> None:
    """A pattern makes the model think; whole and streamed its thought is no part of the text."""
    pattern = rf"{opening}[ab]{{3}}\n</think>\n\n[cd]{{3}}"
    body = {"messages": ASKED, "regex": pattern, "temperature": 1, "seed": seed, **asked}
    (choice,) = server.post("/v1/chat/completions", **body, max_tokens=60).json()["choices"]
    thought, said = choice["message"]["reasoning_content"], choice["message"]["content"]
    assert re.fullmatch("[ab]{3}", thought) and re.fullmatch("[cd]{3}", said)
    shape: Any = {"do_sample": True, "temperature": 1, "max_new_tokens": 60, "seed": seed}
    wanted = es.chat(tiny(), TOKENIZER, ASKED, regex=pattern, **asked, **shape)
    assert (thought, said) == (wanted.reasoning_content, wanted.message.content)
    answer = server.post("/v1/chat/completions", **body, max_tokens=60, stream=True)
    told = [
        (name, delta[name])
        for chunk in chunks_of(answer.text)
        for delta in (chunk["choices"][0]["delta"],)
        for name in ("reasoning_content", "content")
        if delta.get(name)
    ]
    names = [name for name, _ in told]
    assert names == sorted(names, reverse=True), "a thought comes before what is said"
    assert len(told) > 2, "both come in pieces"
    for name, whole in (("reasoning_content", thought), ("content", said)):
        assert "".join(piece for own, piece in told if own == name) == whole


def test_a_thought_that_nobody_asked_about_stays_in_the_text(server: Served) -> None:
    pattern = r"<think>\n[ab]{3}\n</think>\n\n[cd]{3}"
    body = {"messages": ASKED, "regex": pattern, "temperature": 1, "seed": 1, "max_tokens": 60}
    (choice,) = server.post("/v1/chat/completions", **body).json()["choices"]
    shape: Any = {"do_sample": True, "temperature": 1, "max_new_tokens": 60, "seed": 1}
    wanted = str(es.chat(tiny(), TOKENIZER, ASKED, regex=pattern, **shape))
    assert choice["message"]["content"] == wanted and re.fullmatch(pattern, wanted)
    chunks = chunks_of(server.post("/v1/chat/completions", **body, stream=True).text)
    assert joined(chunks) == wanted


def test_openais_client_reads_a_streamed_thought(server: Served) -> None:
    own: Any = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    more = {"regex": r"<think>\n[ab]{3}\n</think>\n\n[cd]{3}", "thinking_budget": 50}
    asked: Any = {"model": "tiny", "messages": ASKED, "seed": 1, "extra_body": more}
    with openai.OpenAI(**own) as client:
        whole: Any = client.chat.completions.create(**asked).choices[0].message
        deltas = [
            one.choices[0].delta for one in client.chat.completions.create(**asked, stream=True)
        ]
    thoughts = [getattr(one, "reasoning_content", None) or "" for one in deltas]
    assert "".join(thoughts) == whole.reasoning_content != ""
    assert "".join(one.content or "" for one in deltas) == whole.content != ""


def test_a_conversation_with_calls_and_results(server: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    body = {**FORCED, "messages": messages, "tool_choice": "auto", "max_tokens": 5}
    assert server.post("/v1/chat/completions", **body).status_code == 200
    named = {"type": "function", "function": {"name": "add"}}
    answer = server.post("/v1/chat/completions", **{**FORCED, "tool_choice": named}, seed=1).json()
    assert answer["choices"][0]["finish_reason"] == "stop", "as OpenAI has it"
    wrong = server.post("/v1/chat/completions", **{**FORCED, "tool_choice": "ad"})
    assert wrong.status_code == 400 and "add" in wrong.json()["error"]["message"]


def test_open_webui_s_calls_are_answered(server: Served, tmp_path: Path) -> None:
    """As `scripts/clients` asks them of the default model."""
    (client,) = [one for one in CLIENTS if not one.pins]
    client.require_shown(server.url, tmp_path)


def test_calls_have_the_ids_that_the_seed_of_their_answer_gives(server: Served) -> None:
    chat = "/v1/chat/completions"
    together = server.post(chat, **FORCED, seed=[3, 8]).json()["choices"]
    alone = [server.post(chat, **FORCED, seed=seed).json()["choices"][0] for seed in (3, 8)]
    assert [one["message"] for one in together] == [one["message"] for one in alone]
    assert together[0]["message"]["tool_calls"] != together[1]["message"]["tool_calls"]
