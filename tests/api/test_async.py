"""`AsyncEngine`: prompts that come and go while it runs get what each would get alone."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from tests.api.asking import (
    LONG,
    OPTIONS,
    TOKENIZER,
    alone,
    asked,
    kept,
    post,
    read,
    require_nothing_left,
    runs,
    web_app,
)


def test_eight_streams_of_a_web_application_share_one_engine(model: LanguageModel) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            app = web_app(engine)
            texts = [f"question {i}" for i in range(8)]
            answers = await asyncio.gather(*(post(app, text) for text in texts))
            wanted = es.generate(model, TOKENIZER, texts, **LONG)
            assert answers == [(200, text) for text in wanted]
            counts = await asked(engine, lambda inner: inner.counts)
            assert counts.steps < 2 * LONG["max_new_tokens"], "they were not read together"
            await require_nothing_left(engine)

    runs(main())


def test_clients_that_go_away_end_their_prompts_alone(model: LanguageModel) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER, max_rows=4) as engine:
            app = web_app(engine)
            texts = [f"question {i}" for i in range(8)]
            pieces = [None if i % 2 else i for i in range(8)]
            answers = await asyncio.gather(*map(post, [app] * 8, texts, pieces))
            await require_nothing_left(engine)
            wanted = es.generate(model, TOKENIZER, texts[1::2], **LONG)
            assert answers[1::2] == [(200, text) for text in wanted]

    runs(main())


# --- the same as alone ----------------------------------------------------------------------------

VARIOUS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "likely": {"logprobs": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "guided": {"guidance_scale": 1.5},
    "trimmed": {"stop_strings": ["e", "7"], "trim_stop_strings": True},
}


@pytest.mark.parametrize("most", [1, 256])
def test_events_are_those_of_a_stream_of_the_prompt_alone(model: LanguageModel, most: int) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER, max_rows=6, max_events=most) as engine:
            calls = [(f"{name} {i}", {**OPTIONS, **own, "seed": i}) for i in range(3)
                     for name, own in VARIOUS.items()]  # fmt: skip
            streams = [engine.stream(prompt, **options) for prompt, options in calls]
            found = await asyncio.gather(*map(read, streams))
            for (prompt, options), events, stream in zip(calls, found, streams, strict=True):
                beside = es.stream(model, TOKENIZER, prompt, **options)
                assert sorted(events, key=repr) == sorted(map(kept, beside), key=repr), options
                assert repr(stream.results()) == repr(beside.results()[0])
            await require_nothing_left(engine)

    runs(main())


def test_generate_gives_what_everystep_generate_gives(model: LanguageModel) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        ("a text", {}),
        ([5, 6, 7], {"do_sample": True, "seed": 3, "num_return_sequences": 2}),
        ([{"role": "user", "content": "hello"}], {"num_beams": 2}),
        ("an object", {"return_dict_in_generate": True, "logprobs": 1}),
    ]

    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            made = (engine.generate(prompt, **OPTIONS, **own) for prompt, own in calls)
            found = await asyncio.gather(*made)
        for (prompt, own), one in zip(calls, found, strict=True):
            wanted = es.generate(model, TOKENIZER, prompt, **OPTIONS, **own)
            assert repr(one) == repr(wanted)

    runs(main())


def test_prompts_without_a_seed_have_noise_of_their_own(model: LanguageModel) -> None:
    async def main() -> list[Any]:
        torch.manual_seed(5)
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            made = (engine.generate("same", **OPTIONS, do_sample=True) for _ in range(4))
            return list(await asyncio.gather(*made))

    first, second = asyncio.run(main()), asyncio.run(main())
    assert len(set(first)) == 4
    assert first == second, "torch's generator says what they are"


def test_two_hundred_prompts_at_any_time_among_cancelled_ones(model: LanguageModel) -> None:
    chance = random.Random(7)
    prompts = [f"prompt number {i}" * chance.randint(1, 6) for i in range(200)]
    options = [
        {
            "max_new_tokens": chance.randint(1, 14),
            "seed": chance.randint(0, 99),
            **chance.choice(list(VARIOUS.values())[:3]),
        }
        for _ in prompts
    ]
    cut = [chance.choice([None, None, 0, 1, 4]) for _ in prompts]
    found: dict[int, Any] = {}

    async def one(engine: es.AsyncEngine, number: int) -> None:
        for _ in range(chance.randint(0, 400)):
            await asyncio.sleep(0)
        if cut[number] is None:
            found[number] = await engine.generate(prompts[number], **options[number])
            return
        stream = engine.stream(prompts[number], **options[number])
        left = cut[number]
        async for event in stream:
            if (left := left - 1) < 0 or event.finish is not None:
                break

    async def main() -> None:
        limits = {"max_rows": 8, "token_budget": 60, "max_positions": 400, "max_events": 3}
        async with es.AsyncEngine(model, TOKENIZER, **limits) as engine:
            await asyncio.gather(*(one(engine, number) for number in range(200)))
            await require_nothing_left(engine)

    runs(main())
    whole = [i for i in range(200) if cut[i] is None]
    assert sorted(found) == whole
    for i in whole:
        assert found[i] == es.generate(model, TOKENIZER, prompts[i], **options[i]), prompts[i]


def test_several_loops_in_several_threads_share_an_engine(model: LanguageModel) -> None:
    engine = es.AsyncEngine(model, TOKENIZER, max_rows=3)
    found: dict[str, Any] = {}

    def user(name: str) -> None:
        async def main() -> None:
            found[name] = await read(engine.stream(name, **OPTIONS))
            found[name + "!"] = await read(engine.stream(name + "!", **OPTIONS))

        runs(main())

    threads = [threading.Thread(target=user, args=(f"user {i}",)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    runs(engine.close())
    assert len(found) == 10
    assert found == {name: alone(model, name, **OPTIONS) for name in found}
