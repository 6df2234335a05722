"""What the operator has installed is asked for by name over HTTP: strategies, processors, hooks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import everystep as es
from tests.distributions import distribution, own_stages
from tests.server.serving import TOKENIZER, Served, chunks_of, joined, served, tiny
from tests.strategies.test_registry import SECOND_BEST

PROMPT = "hello the"
FAVOUR = {"name": "favour", "options": {"ids": [90, 91], "by": 50}}
INSERT = {"name": "insert", "options": {"ids": [101, 102], "after": 2}}
NTH = {"strategy": "nth_installed", "strategy_options": {"n": 3}}
ASKS: tuple[dict[str, Any], ...] = (
    {"logits_processor": [FAVOUR]},
    {"hooks": [INSERT]},
    {"logits_processor": [FAVOUR, "favour"], "hooks": [INSERT], "num_beams": 3},
    {"logits_processor": [FAVOUR], "hooks": [INSERT], "do_sample": True, "seed": 4},
    NTH,
    {**NTH, "logits_processor": [FAVOUR], "hooks": [INSERT]},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose operator has installed a strategy, a processor and a hook."""
    folder = tmp_path_factory.mktemp("installed")
    own_stages(folder)
    nth = {"everystep.strategies": {"nth_installed": "everystep_nth_best:Nth"}}
    distribution(folder, "everystep_nth_best", SECOND_BEST, nth)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with served() as one:
            yield one


def as_objects(asked: dict[str, Any]) -> dict[str, Any]:
    """The same keywords, with objects in the place of names."""
    stages = importlib.import_module("everystep_own_stages")
    found = dict(asked)
    kinds = {"favour": stages.Favour, "insert": stages.Insert}
    for name in ("logits_processor", "hooks"):
        given = [{"name": one} if isinstance(one, str) else one for one in found.get(name, ())]
        found[name] = [kinds[one["name"]](**one.get("options", {})) for one in given]
    if "strategy" in found:
        kind = importlib.import_module("everystep_nth_best").Nth
        del found["strategy"]
        found["strategy"] = kind(**found.pop("strategy_options"))
    return found


def wanted(asked: dict[str, Any], **beside: Any) -> Any:
    """What the library gives for objects."""
    given = {"max_new_tokens": 8, **as_objects(asked), **beside}
    return es.generate(tiny(), TOKENIZER, PROMPT, return_dict_in_generate=True, **given)


@pytest.mark.parametrize("asked", ASKS, ids=lambda asked: "+".join(asked))
def test_an_answer_is_that_of_the_objects(server: Served, asked: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, **asked}
    found, (choice,) = wanted(asked), server.completion(**body)["choices"]
    assert (choice["text"], choice["token_ids"]) == (found.text, list(found.tokens))
    streamed = server.post("/v1/completions", **body, stream=True)
    assert joined(chunks_of(streamed.text)) == found.text
    plain = server.completion(prompt=PROMPT, max_tokens=8, seed=4)["choices"][0]
    assert choice["text"] != plain["text"]


def test_conversations_of_all_wires_take_them(server: Served) -> None:
    talk: Any = [{"role": "user", "content": "hello"}]
    stages = {"logits_processor": [FAVOUR], "hooks": [INSERT]}
    usual = {"max_new_tokens": 6, "do_sample": False}
    text = es.chat(tiny(), TOKENIZER, talk, **as_objects(stages), **usual)
    body = {"messages": talk, "max_tokens": 6, "temperature": 0, **stages}
    chat = server.post("/v1/chat/completions", **body).json()
    assert chat["choices"][0]["message"]["content"] == text
    message = server.post("/v1/messages", **body).json()
    assert message["content"][0]["text"] == text
    asked = {"input": "hello", "max_output_tokens": 6, "temperature": 0, **stages}
    response = server.post("/v1/responses", **asked).json()
    assert response["output"][-1]["content"][0]["text"] == text


def test_a_run_keeps_them_and_its_file_too(server: Served) -> None:
    runs, stages = "/v1/everystep/runs", {"logits_processor": [FAVOUR], "hooks": [INSERT]}
    found = list(wanted(stages).tokens)

    def result(id: str) -> Any:
        (one,) = server.post(f"{runs}/{id}/result").json()["results"]
        return one["tokens"]

    ids = [server.post(runs, prompt=PROMPT, max_tokens=8, **stages).json()["id"]]
    server.post(f"{runs}/{ids[0]}/step", steps=3)
    saved = server.post(f"{runs}/{ids[0]}/save").content
    kind = {"content-type": "application/octet-stream"}
    ids.append(server.client.post(f"{runs}/resume", content=saved, headers=kind).json()["id"])
    ids.append(server.post(f"{runs}/{ids[0]}/fork").json()["id"])
    assert [result(id) for id in ids] == [found] * 3
    answer = server.post(f"{runs}/{ids[0]}/set", hooks=[])
    assert answer.status_code == 400 and "cannot change while a run is under way" in answer.text
    for id in ids:
        server.client.delete(f"{runs}/{id}")


def test_a_file_asks_for_no_more_than_a_request(server: Served, tmp_path: Path) -> None:
    es.open(tiny(), TOKENIZER, PROMPT, logits_processor=["favour"] * 17).save(tmp_path / "run")
    answer = server.client.post(
        "/v1/everystep/runs/resume",
        content=(tmp_path / "run").read_bytes(),
        headers={"content-type": "application/octet-stream"},
    )
    assert answer.status_code == 400 and "a list of 0 to 16" in answer.text


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"logits_processor": ["favor"]}, "logits_processor", "Perhaps you meant favour"),
        ({"logits_processor": ["x"]}, "logits_processor", "wanted failing, favour, lost"),
        ({"hooks": [{"name": "favour"}]}, "hooks", "wanted insert, no hook"),
        ({"hooks": ["no hook"]}, "hooks", "not a list of hooks"),
        ({"hooks": [INSERT] * 17}, "hooks", "a list of 0 to 16"),
        ({"hooks": "insert"}, "hooks", "each a name, or an object"),
        ({"hooks": [{"name": "insert", "option": {}}]}, "hooks", "an object with name and options"),
        ({"logits_processor": [""]}, "logits_processor", "is impossible"),
        ({"logits_processor": ["os:system"]}, "logits_processor", "that there is not"),
        ({"strategy": "nth_instaled"}, "strategy", "Perhaps you meant nth_installed"),
        ({"strategy": "nth_installed", "strategy_options": {"m": 1}}, "strategy", "cannot be made"),
    ],
)
def test_what_cannot_be_is_400(
    server: Served, asked: dict[str, Any], param: str, said: str
) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=2, **asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error


def test_options_that_do_not_fit_are_400(server: Served) -> None:
    for options in ({"ids": 3}, {"id": [3]}, {}):
        asked: Any = {"hooks": [{"name": "insert", "options": options}]}
        answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=2, **asked)
        assert answer.status_code == 400 and "cannot be made" in answer.text, answer.text


def test_one_that_fails_fails_its_request_alone(server: Served) -> None:
    failing = {"prompt": PROMPT, "max_tokens": 3, "logits_processor": ["failing"]}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/v1/completions", json=failing).status_code >= 400
    found = wanted({"hooks": [INSERT]})
    (choice,) = server.completion(prompt=PROMPT, max_tokens=8, hooks=[INSERT])["choices"]
    assert choice["text"] == found.text


def test_the_document_says_what_one_is(server: Served) -> None:
    table = server.client.get("/openapi.json").json()["paths"]["/v1/completions"]
    schema = table["post"]["requestBody"]["content"]["application/json"]["schema"]
    stage = schema["properties"]["hooks"]["items"]["anyOf"][1]
    assert stage["required"] == ["name"] and stage["additionalProperties"] is False
