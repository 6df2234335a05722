"""Every face takes an adapter and a prompt with holes, on the executor that it has by default.

Which executor runs a request follows from what the request needs, so one such prompt among others
changes nothing for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.models import named_weights
from everystep.testing.models import tiny_llama
from tests.adapters.making import PROJECTIONS, random_lora, write_folder

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
PLAIN = [5, 9, 30, 7]
HOLED = {"input_ids": [5, 6, 7, 8], "attention_mask": [1, 0, 1, 1]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    made = tiny_llama(dtype=torch.float32, vocab_size=320)
    weights = dict(named_weights(made.core))  # type: ignore[arg-type]
    folder = tmp_path_factory.mktemp("adapter")
    write_folder(folder, random_lora(weights, 3, PROJECTIONS, 3))
    made.load_adapter(folder, "style")
    return made


def of_one(options: dict[str, Any], index: int) -> dict[str, Any]:
    """The options of the prompt of this number, which may bring a seed of its own."""
    seed = options.get("seed")
    return {**options, "seed": seed[index]} if isinstance(seed, list) else options


def by_model(model: LanguageModel, prompt: Any, options: dict[str, Any]) -> list[int]:
    given = prompt if isinstance(prompt, dict) else {"input_ids": prompt}
    rows = {name: torch.tensor([value]) for name, value in given.items()}
    count = rows["input_ids"].shape[1]
    return [int(one) for one in model.generate(**rows, **options)[0, count:]]


def by_text(model: LanguageModel, prompt: Any, options: dict[str, Any]) -> list[int]:
    return list(es.generate(model, None, prompt, **options))


def by_list(model: LanguageModel, prompt: Any, options: dict[str, Any]) -> list[int]:
    """Among others, which are as they are alone."""
    alone = es.generate(model, None, PLAIN, **of_one(options, 0))
    first, found, last = es.generate(model, None, [PLAIN, prompt, PLAIN], **options)
    assert first == last == alone
    return list(found)


def by_stream(model: LanguageModel, prompt: Any, options: dict[str, Any]) -> list[int]:
    return [event.token for event in es.stream(model, None, prompt, **options)]


def by_streams(model: LanguageModel, prompt: Any, options: dict[str, Any]) -> list[int]:
    events = list(es.stream(model, None, [PLAIN, prompt], **options))
    alone = [event.token for event in es.stream(model, None, PLAIN, **of_one(options, 0))]
    assert [event.token for event in events if event.request_id == "0"] == alone
    return [event.token for event in events if event.request_id == "1"]


def by_run(model: LanguageModel, prompt: Any, options: dict[str, Any]) -> list[int]:
    return list(es.open(model, None, prompt, **options).result().tokens)


def by_engine(model: LanguageModel, prompt: Any, options: dict[str, Any]) -> list[int]:
    async def main() -> list[int]:
        async with es.AsyncEngine(model) as engine:
            beside, found, events = await asyncio.gather(
                engine.generate(PLAIN, **options),
                engine.generate(prompt, **options),
                tokens(engine.stream(prompt, **options)),
            )
            assert beside == es.generate(model, None, PLAIN, **options)
            assert found == events
            return list(found)

    return asyncio.run(main())


async def tokens(stream: es.AsyncStream) -> list[int]:
    return [event.token async for event in stream]


FACES: list[Callable[..., list[int]]] = [
    by_text, by_list, by_stream, by_streams, by_run, by_engine,
]  # fmt: skip


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}], ids=str)
def test_an_adapter_in_every_face(
    model: LanguageModel, face: Callable[..., list[int]], options: dict[str, Any]
) -> None:
    if options and face in (by_list, by_streams):
        options = {**options, "seed": [8, 3] if face is by_streams else [8, 3, 8]}
    given = {**OPTIONS, **options, "adapter_names": "style"}
    first = by_text(model, PLAIN, of_one(given, 1))
    assert face(model, PLAIN, given) == first
    assert first != by_text(model, PLAIN, of_one({**OPTIONS, **options}, 1))
    if not options:
        assert first == by_model(model, PLAIN, given)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_mask_with_holes_in_every_face(
    model: LanguageModel, face: Callable[..., list[int]]
) -> None:
    first = by_model(model, HOLED, OPTIONS)
    assert face(model, HOLED, OPTIONS) == first
    assert first != by_model(model, {"input_ids": HOLED["input_ids"]}, OPTIONS)


def test_an_adapter_that_comes_later_is_there_for_an_engine_that_runs(
    model: LanguageModel, tmp_path: Path
) -> None:
    weights = dict(named_weights(model.core))  # type: ignore[arg-type]
    write_folder(tmp_path, random_lora(weights, 11, PROJECTIONS, 3))

    async def main() -> None:
        async with es.AsyncEngine(model) as engine:
            before = await engine.generate(PLAIN, **OPTIONS)
            model.load_adapter(tmp_path, "later")
            try:
                given = {**OPTIONS, "adapter_names": "later"}
                assert await engine.generate(PLAIN, **given) == by_text(model, PLAIN, given)
            finally:
                model.delete_adapter("later")
            assert await engine.generate(PLAIN, **OPTIONS) == before

    asyncio.run(main())
