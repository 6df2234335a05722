"""`AsyncEngine`: who leaves, is slow, comes too many or fails, disturbs nobody else."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import audit
from everystep.errors import CapacityError, OversizeError, RequestError, UnknownArgumentError
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


def waiting(stream: es.AsyncStream) -> int:
    """How many events of a stream nobody has read."""
    return 0 if stream._one.box is None else len(stream._one.box.events)


def is_aside(stream: es.AsyncStream) -> bool:
    """Whether a stream makes no more events until its reader has caught up."""
    return stream._one.box is not None and stream._one.box.aside


async def all_read(streams: list[es.AsyncStream]) -> None:
    """Every prompt has come to its engine."""
    while any(one._one.box is None for one in streams):
        await asyncio.sleep(0.001)


# --- leaving --------------------------------------------------------------------------------------


async def by_break(engine: es.AsyncEngine) -> None:
    async for _ in engine.stream("one", **LONG):
        break


async def by_closing(engine: es.AsyncEngine) -> None:
    stream = engine.stream("one", **LONG)
    await anext(stream)
    await stream.aclose()
    assert [event async for event in stream] == []
    await stream.aclose()


async def by_never_reading(engine: es.AsyncEngine) -> None:
    engine.stream("one", **LONG)


async def by_an_error(engine: es.AsyncEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        async with engine.stream("one", **LONG) as stream:
            async for _ in stream:
                raise ZeroDivisionError


async def by_cancelling_a_reader(engine: es.AsyncEngine) -> None:
    begun = asyncio.Event()

    async def reader() -> None:
        async for _ in engine.stream("one", **LONG):
            begun.set()

    task = asyncio.create_task(reader())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancelling_who_awaits_the_first_event(engine: es.AsyncEngine) -> None:
    go = threading.Event()
    stream = engine.stream(
        "one", **LONG, logits_processor=[lambda _, scores: go.wait(60) and scores]
    )
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()


async def by_cancelling_a_generate(engine: es.AsyncEngine) -> None:
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        loop.call_soon_threadsafe(begun.set)
        return scores

    task = asyncio.create_task(engine.generate("one", **LONG, logits_processor=[watch]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


LEAVING = [
    by_break,
    by_closing,
    by_never_reading,
    by_an_error,
    by_cancelling_a_reader,
    by_cancelling_who_awaits_the_first_event,
    by_cancelling_a_generate,
]


@pytest.mark.parametrize("leaves", LEAVING, ids=lambda leaves: leaves.__name__)
def test_leaving_in_the_middle_frees_the_rows(model: LanguageModel, leaves: Any) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER, max_rows=2) as engine:
            beside = asyncio.create_task(read(engine.stream("beside", **OPTIONS)))
            for _ in range(3):
                await leaves(engine)
            assert await beside == alone(model, "beside", **OPTIONS)
            await require_nothing_left(engine)

    runs(main())


def test_a_loop_that_is_closed_ends_its_prompts(model: LanguageModel) -> None:
    engine = es.AsyncEngine(model, TOKENIZER, max_rows=1)
    loop = asyncio.new_event_loop()
    stream = engine.stream("one", **LONG)
    reading = loop.create_task(read(stream))
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    async def main() -> None:
        assert await read(engine.stream("two", **OPTIONS)) == alone(model, "two", **OPTIONS)
        await require_nothing_left(engine)
        await engine.close()

    runs(main())
    assert not reading.done()
    reading._log_destroy_pending = False  # type: ignore[attr-defined]


def test_ctrl_c_ends_the_prompts_and_leaves_the_engine_usable(model: LanguageModel) -> None:
    engine = es.AsyncEngine(model, TOKENIZER)

    async def interrupted() -> None:
        async for event in engine.stream("one", **LONG):
            if event.position == 4:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        runs(interrupted())

    async def main() -> None:
        await require_nothing_left(engine)
        assert await read(engine.stream("two", **OPTIONS)) == alone(model, "two", **OPTIONS)
        await engine.close()

    runs(main())


# --- limits ---------------------------------------------------------------------------------------


def test_a_slow_reader_holds_few_events_and_holds_nobody_up(model: LanguageModel) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER, max_rows=1, max_events=4) as engine:
            slow = engine.stream("slow", **LONG)
            first = [kept(await anext(slow))]
            for name in ("quick", "quicker"):
                assert await read(engine.stream(name, **LONG)) == alone(model, name, **LONG)
                while not is_aside(slow):
                    await asyncio.sleep(0.01)
                # Three where four had come before the first was taken.
                assert waiting(slow) in (3, 4)
            assert (await asked(engine, lambda inner: inner.counts)).preemptions == 1
            assert first + await read(slow) == alone(model, "slow", **LONG)
            await require_nothing_left(engine)

    runs(main())


def test_slow_readers_keep_their_rows_while_nobody_needs_them(model: LanguageModel) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER, max_events=4) as engine:
            slow = engine.stream("slow", **LONG)
            other = await read(engine.stream("other", **LONG))
            assert len(other) == LONG["max_new_tokens"]
            while waiting(slow) < 4:
                await asyncio.sleep(0.01)
            assert await read(slow) == alone(model, "slow", **LONG)
            assert (await asked(engine, lambda inner: inner.counts)).preemptions == 0

    runs(main())


def test_a_prompt_beyond_those_that_may_wait_is_refused(model: LanguageModel) -> None:
    go, begun = threading.Event(), threading.Event()

    def gate(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        begun.set()
        go.wait(60)
        return scores

    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER, max_rows=1, max_waiting=2) as engine:
            streams = [engine.stream("first", **OPTIONS, logits_processor=[gate])]
            await asyncio.to_thread(begun.wait, 60)
            streams += [engine.stream(f"waits {i}", **OPTIONS) for i in range(2)]
            await all_read(streams)
            for call in (engine.stream, engine.generate):
                with pytest.raises(CapacityError, match="at most 2; got 2 and this one"):
                    await call("late", **OPTIONS)
            assert (await post(web_app(engine), "late"))[0] == 503
            del streams[1]
            streams.append(engine.stream("waits 2", **OPTIONS))
            with pytest.raises(CapacityError, match="at most 2; got 2 and this one"):
                engine.stream("late", **OPTIONS)
            go.set()
            found = await asyncio.gather(*map(read, streams))
        names = ["first", "waits 1", "waits 2"]
        assert found == [alone(model, name, **OPTIONS) for name in names]

    runs(main())


# --- errors ---------------------------------------------------------------------------------------


def failing(_: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("a processor's own")


def test_errors_of_a_prompt_are_its_own(model: LanguageModel) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            beside = asyncio.create_task(read(engine.stream("beside", **LONG)))
            with pytest.raises(ZeroDivisionError, match="own"):
                await engine.generate("one", **OPTIONS, logits_processor=[failing])
            *_, last = await read(engine.stream("one", **OPTIONS, logits_processor=[failing]))
            assert last[-1].kind == "error"
            assert isinstance(last[-1].matched, ZeroDivisionError)
            too_long = list(range(5, 45)) * 10
            with pytest.raises(OversizeError, match="fills the model's context"):
                await engine.generate(too_long)
            with pytest.raises(OversizeError, match="fills the model's context"):
                await read(engine.stream(too_long))
            with pytest.raises(OversizeError, match="more rows than there are"):
                await engine.generate("wide", num_beams=40)
            with pytest.raises(RequestError, match="a prompt is empty"):
                await engine.generate("")
            assert await beside == alone(model, "beside", **LONG)
            await require_nothing_left(engine)

    runs(main())


def test_wrong_options_are_refused_by_the_call_itself(model: LanguageModel) -> None:
    engine = es.AsyncEngine(model, TOKENIZER)
    with pytest.raises(UnknownArgumentError, match="max_new_tokens"):
        engine.stream("one", max_new_token=3)
    for wrong in (["two", "texts"], None, [[1, 2], [3]], 7):
        with pytest.raises(RequestError, match=r"not one prompt|of no known kind"):
            engine.stream(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="differ from those of the engine"):
        engine.stream("one", cache_implementation="quantized")
    with pytest.raises(RequestError, match="return_dict_in_generate=True"):
        asyncio.run(engine.generate("one", logprobs=1))
    for limit in ("max_rows", "token_budget", "max_positions", "max_waiting", "max_events"):
        for value in (0, -1, 1.5, True):
            with pytest.raises(RequestError, match=f"{limit} is impossible"):
                es.AsyncEngine(model, TOKENIZER, **{limit: value})
    assert not engine._desk._threads, "nothing has begun"


def test_an_error_of_the_step_ends_all_that_are_inside(model: LanguageModel) -> None:
    def exhausting(_: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no more")

    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            beside = engine.stream("beside", **LONG)
            await anext(beside)
            with pytest.raises(MemoryError):
                await engine.generate("one", **OPTIONS, logits_processor=[exhausting])
            *_, last = await read(beside)
            assert isinstance(last[-1].matched, MemoryError)
            await require_nothing_left(engine)
            assert await read(engine.stream("two", **OPTIONS)) == alone(model, "two", **OPTIONS)

    runs(main())


def test_a_tokenizer_that_fails_ends_its_prompt_alone(model: LanguageModel) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            broken = engine.stream("one", **LONG)
            await anext(broken)

            def fail(_: Any) -> Any:
                raise ZeroDivisionError("of the wording")

            broken._wording = fail  # type: ignore[assignment]
            with pytest.raises(ZeroDivisionError, match="wording"):
                await read(broken)
            assert await read(engine.stream("two", **OPTIONS)) == alone(model, "two", **OPTIONS)
            await require_nothing_left(engine)

    runs(main())


def test_one_task_reads_a_stream(model: LanguageModel) -> None:
    async def main() -> None:
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            go = threading.Event()
            held = [lambda _, scores: go.wait(60) and scores]
            stream = engine.stream("one", **OPTIONS, logits_processor=held)
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="two tasks read one stream"):
                await anext(stream)
            go.set()
            assert kept(await first) == alone(model, "one", **OPTIONS)[0]

    runs(main())


def test_closing_ends_what_is_inside_and_takes_no_more(model: LanguageModel) -> None:
    async def main() -> None:
        engine = es.AsyncEngine(model, TOKENIZER, max_rows=2, max_events=8)
        stream, never = engine.stream("one", **LONG), engine.stream("three", **LONG)
        waiting = asyncio.create_task(engine.generate("two", **LONG))
        await anext(stream)
        await asyncio.gather(engine.close(), engine.close())
        last = (await read(stream))[-1]
        assert last[-1].kind == "cancelled"
        with pytest.raises(RequestError, match="closed before the prompt ended"):
            await waiting
        with pytest.raises(RequestError, match="the engine is closed"):
            engine.stream("four")
        try:
            assert (await read(never))[-1][-1].kind == "cancelled"
        except RequestError as error:  # it was read while the engine closed
            assert "closed before the prompt ended" in str(error)
        inner = engine._session._plain.engine
        audit(inner)
        assert inner.ledger.held == set()
        (thread,) = engine._desk._threads.values()
        assert not thread.is_alive

    runs(main())
