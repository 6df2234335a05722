"""Several models and adapters behind one engine, each asked for by its name."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

import everystep as es
from everystep.engine import prefixes
from everystep.models import named_weights
from everystep.server.local import serving
from everystep.testing.models import tiny_llama
from tests.adapters.making import PROJECTIONS, random_lora, write_folder
from tests.server.serving import TOKENIZER


def test_adapters_and_further_models_answer_by_name() -> None:
    first, second = tiny_llama(vocab_size=320), tiny_llama(1, vocab_size=320)
    adapter = first.add_adapter("poet", es.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in adapter.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype) * 0.5)
    asked = {"prompt": "hello", "max_tokens": 12}
    wanted = {
        "first": es.generate(first, TOKENIZER, "hello", max_new_tokens=12),
        "poet": es.generate(first, TOKENIZER, "hello", max_new_tokens=12, adapter_names="poet"),
        "second": es.generate(second, TOKENIZER, "hello", max_new_tokens=12),
    }
    assert len(set(wanted.values())) == 3
    models = {"first": (first, TOKENIZER), "second": (second, TOKENIZER)}
    with serving(models) as address, httpx.Client(base_url=address, timeout=60) as client:
        for name, text in wanted.items():
            answer = client.post("/v1/completions", json={**asked, "model": name}).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["choices"][0]["text"] == wanted["first"], "the first is meant by none"
        mixed = {**asked, "adapters": {"poet": 1.0}}
        answer = client.post("/v1/completions", json=mixed).json()
        assert answer["choices"][0]["text"] == wanted["poet"]
        listed = {one["id"]: one["parent"] for one in client.get("/v1/models").json()["data"]}
        assert listed == {"first": None, "poet": "first", "second": None}
        score = {"texts": "hello the", "model": "poet"}
        (scored,) = client.post("/v1/everystep/score", json=score).json()["data"]
    wanted_score = es.score(first, TOKENIZER, "hello the", adapter_names="poet")
    assert scored["logprobs"] == wanted_score.logprobs.tolist()


def answers_of_reloaded(folder: Path) -> list[tuple[str, int]]:
    """What a server says by an adapter, and how much of the prompt it had, before and after another
    one was loaded under its name, each asked twice; and what the library says by the second."""
    model = tiny_llama(vocab_size=320)
    weights = dict(named_weights(model.core))  # type: ignore[arg-type]
    folders = [
        write_folder(folder / str(seed), random_lora(weights, seed, PROJECTIONS)) for seed in (3, 4)
    ]
    body = {"prompt": "hello the and of it was in " * 4, "max_tokens": 8, "model": "style"}
    model.load_adapter(folders[0], "style")
    found = []
    with serving({"tiny": (model, TOKENIZER)}) as address:
        for one in folders:
            model.delete_adapter("style")
            model.load_adapter(one, "style")
            for _ in range(2):
                answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                found.append((answer["choices"][0]["text"], cached))
    given = {"max_new_tokens": 8, "adapter_names": "style"}
    found.append((es.generate(model, TOKENIZER, str(body["prompt"]), **given), 0))
    return found


def test_an_adapter_that_is_loaded_again_shares_no_rows_with_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other, once_more, wanted = answers_of_reloaded(tmp_path)
    assert first[1] == 0 < again[1], "the cache is on"
    assert other[1] == 0 and once_more[1] == again[1]
    assert first[0] == again[0] != other[0] == once_more[0] == wanted[0]
    true = prefixes.key_of
    monkeypatch.setattr(prefixes, "key_of", lambda one: true(one)._replace(resolved=()))
    _, _, stale, *_ = answers_of_reloaded(tmp_path)
    assert stale[1] > 0, "by its name alone it would have had them"
