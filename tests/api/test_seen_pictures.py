"""Each picture is encoded once for all prompts of an engine, whoever brings it, and when."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import everystep as es
from everystep.models.vision.tower import VisionTower
from everystep.requests.pictures import Seen
from tests.api.asking import runs
from tests.images.making import drawn, write_folder

ASKED: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": 4,
    "eos_token_id": None,
    "return_dict_in_generate": True,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return es.load(write_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pictures that towers encode from now on."""
    sizes: list[int] = []
    encode = VisionTower.encode

    def noted(self: VisionTower, pixels: Any, grid: Any) -> Any:
        sizes.append(len(pixels))
        return encode(self, pixels, grid)

    monkeypatch.setattr(VisionTower, "encode", noted)
    return sizes


def chat(*pictures: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": one} for one in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


def test_clients_who_bring_the_same_picture_share_its_features(
    loaded: tuple[Any, Any], encoded: list[int]
) -> None:
    model, tokenizer = loaded
    first, second = drawn(24, 32), drawn(24, 32, seed=9)
    prompts = [chat(first), chat(first), chat(second, first), chat(first)]
    alone = [es.generate(model, tokenizer, [one], **ASKED)[0].tokens for one in prompts]
    encoded.clear()

    async def main() -> None:
        async with es.AsyncEngine(model, tokenizer) as engine:
            found = await asyncio.gather(*(engine.generate(one, **ASKED) for one in prompts))
            assert [one.tokens for one in found] == alone
            assert (await engine.generate(prompts[0], **ASKED)).tokens == alone[0]
            assert len(encoded) == 2

    runs(main())


def test_changed_weights_see_a_picture_anew(loaded: tuple[Any, Any], encoded: list[int]) -> None:
    model, tokenizer = loaded
    model.requires_grad_()
    picture = chat(drawn(24, 32))

    async def main() -> None:
        async with es.AsyncEngine(model, tokenizer) as engine:
            for changes in range(3):
                await engine.generate(picture, **ASKED)
                await engine.generate(picture, **ASKED)
                assert len(encoded) == 1 + changes
                with torch.no_grad():
                    for _, weight in model.named_parameters():
                        weight.mul_(1.01)

    runs(main())


def features(size: int, value: float = 0.0) -> Any:
    return torch.full((size, 4), value), None


def test_who_brings_what_another_encodes_waits_and_a_failure_is_its_own() -> None:
    seen, begun, go = Seen(), threading.Event(), threading.Event()
    found: list[Any] = []

    def slow() -> Any:
        begun.set()
        assert go.wait(60)
        raise ValueError("the first one fails")

    def first() -> None:
        with pytest.raises(ValueError, match="the first"):
            seen.features("a", slow)

    def second() -> None:
        found.append(seen.features("a", lambda: features(2, 5.0)))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert found[0][0].tolist() == [[5.0] * 4] * 2


def test_an_interrupt_leaves_nothing_that_others_would_wait_for() -> None:
    """It comes when the content has been claimed, and before anything is encoded."""
    seen = Seen()
    claimed = Seen._claimed

    def interrupted(self: Seen, content: Any, mine: Any) -> Any:
        claimed(self, content, mine)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Seen, "_claimed", interrupted)
        seen.features("a", lambda: features(1))
    assert seen.features("a", lambda: features(3))[0].shape == (3, 4)


def test_the_least_lately_asked_for_go() -> None:
    seen = Seen(most=3 * 16)  # three positions of four numbers
    made: list[str] = []

    def ask(name: str) -> None:
        def encode() -> Any:
            made.append(name)
            return features(1)

        seen.features(name, encode)

    for name in "abcadab":
        ask(name)
    assert "".join(made) == "abcdb"
    seen.features("large", lambda: features(100))
    ask("a")
    assert "".join(made) == "abcdba"


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent() -> None:
    seen, begun, go = Seen(), threading.Event(), threading.Event()

    def slow() -> Any:
        begun.set()
        go.wait(60)
        return features(1)

    thread = threading.Thread(target=seen.features, args=("a", slow))
    thread.start()
    assert begun.wait(60)
    seen.open_locks()  # as in the child
    assert seen.features("a", lambda: features(3))[0].shape == (3, 4)
    go.set()
    thread.join(60)
