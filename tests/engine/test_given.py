"""What a prompt gives beyond ids is read as without a cache, however it is fed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.engine import Continuous, Engine, Lockstep, PromptLookup
from everystep.errors import RequestError, UnsupportedError
from everystep.executors.base import Executor
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model
from everystep.strategies import Beam, Contrastive, Greedy, Sample
from everystep.testing.hash_model import HashExecutor
from everystep.types import InputSpec, Prompt, Request
from tests.executors.layout import (
    BBOX,
    SIDES,
    LayoutDecoder,
    axes_model,
    layout_model,
    masked_logits,
)
from tests.executors.models import PLAIN, random_model
from tests.executors.prefixes import Prefixes
from tests.executors.requests import ENDS, MAX_NEW, REQUESTS, ids, request
from tests.judges import textbook
from tests.judges.drive import Drive
from tests.judges.numpy_executor import NumpyExecutor

STRATEGIES: dict[str, Any] = {
    "greedy": Greedy(),
    "sampled": Sample(3),
    "beams": Beam(3, returns=2, eos_count=len(ENDS), max_new=MAX_NEW),
    "contrastive": Contrastive(3, 0.6),
}
PLAIN_ONES = tuple(one for one in REQUESTS if one.request_id in ("greedy", "beams", "sampled"))
WAYS = ("together", "chunked", "continuous", "preempted")


def everyone(prompt: Prompt) -> tuple[Request, ...]:
    """The prompt under every strategy, among plain requests."""
    own = [request(f"own {name}", one, prompt) for name, one in STRATEGIES.items()]
    drafted = request("own drafted", Greedy(), prompt, drafter=PromptLookup(4, 2))
    return (*own[:2], *PLAIN_ONES, *own[2:], drafted)


def run(requests: Iterable[Request], executor: Executor, way: str) -> Drive:
    """All requests to their ends, in one of WAYS."""
    rows = Continuous(token_budget=11, max_rows=9)
    scheduler = {"together": Lockstep(), "chunked": Lockstep(3)}.get(way, rows)
    going = Drive(Engine(executor, scheduler))
    for one in requests:
        going.submit(one)
    step = 0
    while going.engine.pending:
        if way == "preempted" and step % 5 == 3 and step < 40:
            going.engine.preempt(going.engine.scheduler.groups[0])
        going.step()
        step += 1
    return going.finish()


def assert_equal(found: Drive, wanted: dict[str, list[textbook.Hypothesis]]) -> None:
    """The same tokens for the same reasons."""
    for name, expected in wanted.items():
        own = [(h.tokens, h.reason) for h in found.results[name]]
        assert own == [(h.tokens, h.reason) for h in expected], name


# --- a declared input -----------------------------------------------------------------------------


def boxes(count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(count).integers(0, SIDES, (count, 4)))


def layout() -> tuple[Model, LayoutDecoder]:
    model = layout_model()
    assert isinstance(model.network, LayoutDecoder)
    return model, model.network


LAID_OUT = Prompt(np.tile(ids(11, 4), 4)[:14], inputs={"bbox": boxes(14)})


def dense(one: Request) -> list[textbook.Hypothesis]:
    """The result of a request whose boxes are part of its embeddings, without a cache."""
    _, network = layout()
    prompt = one.prompt
    if "bbox" in prompt.inputs:
        embeds = network.embed(torch.tensor(prompt.ids)) + network.boxes(prompt.inputs["bbox"])
        one = replace(one, prompt=Prompt(prompt.ids, embeds))
    return textbook.generate(one, Prefixes(random_model(PLAIN)))


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_boxes_are_read_at_their_positions(way: str) -> None:
    requests = everyone(LAID_OUT)
    found = run(requests, TorchExecutor(layout_model()), way)
    assert_equal(found, {one.request_id: dense(one) for one in requests})
    if way == "preempted":
        assert found.engine.counts.preemptions_in_decode > 1


def test_boxes_matter() -> None:
    bare = request("own greedy", Greedy(), Prompt(LAID_OUT.ids))
    own = replace(bare, prompt=LAID_OUT)
    assert dense(bare) != dense(own)


@pytest.mark.parametrize("way", WAYS)
def test_one_entry_for_a_prompt_or_a_row_is_given_to_every_position_of_it(way: str) -> None:
    shape = (3,)
    specs = [
        InputSpec("each", "token", shape, torch.float32),
        InputSpec("style", "prompt", shape, torch.float32),
        InputSpec("language", "row", shape, torch.float32),
    ]
    value = torch.tensor([1.0, 2.0, 3.0])
    given = [{}, {"each": value.expand(7, 3)}, {"style": value}, {"language": value}]
    requests = [
        request(f"{i}", Greedy(), Prompt(ids(1, 7), inputs=inputs))
        for i, inputs in enumerate(given)
    ]

    def names(executor: HashExecutor) -> None:
        # The fake model tells inputs apart by name; here the entries alone are to count.
        executor.function.joined = lambda key, name, further: key * 3 + further & 2**64 - 1  # type: ignore[method-assign]

    executor = HashExecutor(40, inputs=tuple(specs))
    names(executor)
    results = run(requests, executor, way).results
    tokens = [results[str(i)][0].tokens for i in range(4)]
    assert tokens[1] == tokens[2]
    assert tokens[0] != tokens[1]
    assert tokens[3][0] == tokens[1][0]
    assert tokens[3] != tokens[1]


# --- masks ----------------------------------------------------------------------------------------


def random_mask(heads: int | None, length: int) -> Tensor:
    """A mask that leaves about two thirds, and each position itself."""
    rng = np.random.default_rng(length + (heads or 0))
    shape = (length, length) if heads is None else (heads, length, length)
    seen = torch.from_numpy(rng.random(shape) < 0.65) | torch.eye(length, dtype=torch.bool)
    return seen.tril()


class MaskedPrefixes(Prefixes):
    """Prefixes of a prompt with a mask, read without a cache."""

    def __init__(self, model: Model, mask: Tensor) -> None:
        super().__init__(model)
        self.mask = mask.view(-1, *mask.shape[-2:])

    def _read(self, state: int) -> Any:
        return _MaskedHistory(super()._read(state).inputs, self.seen)

    def seen(self, count: int) -> Tensor:
        """(heads, count, count)."""
        heads, length = self.mask.shape[:2]
        whole = torch.ones(heads, count, count, dtype=torch.bool)
        for i in range(count):
            for j in range(count):
                if j > i:
                    whole[:, i, j] = False
                elif j < length:
                    whole[:, i, j] = self.mask[:, min(i, length - 1), j]
        return whole


class _MaskedHistory:
    def __init__(self, inputs: Tensor, seen: Any) -> None:
        self.inputs, self.seen = inputs, seen

    def logits(self, model: Model) -> Tensor:
        return masked_logits(model, self.inputs, self.seen(len(self.inputs)))


@pytest.mark.parametrize("heads", [None, 1, 4])
@pytest.mark.parametrize("executor", [TorchExecutor, NumpyExecutor])
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_says_what_is_seen(executor: Any, heads: int | None, way: str) -> None:
    model = random_model(PLAIN)
    prompt = Prompt(np.tile(ids(12, 4), 4)[:14], mask=random_mask(heads, 14))
    own = [one for one in everyone(prompt) if not isinstance(one.strategy, Contrastive)]
    found = run(own, executor(model), way)
    masked = {one.request_id for one in own if one.prompt is prompt}
    bare = {one.request_id: replace(one, prompt=replace(one.prompt, mask=None)) for one in own}
    wanted = {
        name: textbook.generate(
            one, MaskedPrefixes(model, prompt.mask) if name in masked else Prefixes(model)
        )
        for name, one in bare.items()
    }
    assert_equal(found, wanted)


def test_a_mask_that_hides_nothing_changes_nothing() -> None:
    causal = Prompt(ids(1, 7), mask=torch.ones(7, 7).tril().bool())
    bare = replace(REQUESTS[0], prompt=Prompt(ids(1, 7)))
    for way in WAYS:
        found = run([replace(bare, prompt=causal)], TorchExecutor(random_model(PLAIN)), way)
        assert_equal(found, {"greedy": textbook.generate(bare, Prefixes(random_model(PLAIN)))})


# --- positions of several axes --------------------------------------------------------------------

# Text, an image of two by three, and text again; the first generated token stands at 8.
AXES = torch.tensor(
    [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
)


def test_generated_positions_continue_after_the_greatest() -> None:
    cut = Prompt(ids(1, 9), positions=AXES[:, :9])
    assert (cut.follows, Prompt(ids(1, 11), positions=AXES).follows) == (6, 8)
    assert Prompt(ids(1, 3), positions=torch.tensor([0, 9, 4])).follows == 10
    assert Prompt(ids(1, 3)).follows == 3


@pytest.mark.few(2)
@pytest.mark.parametrize("length", [11, 9])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_three_axes_are_read_as_without_a_cache(way: str, interleaved: bool, length: int) -> None:
    model = axes_model(interleaved)
    requests = everyone(Prompt(ids(13, length), positions=AXES[:, :length]))
    for executor in (TorchExecutor(model), NumpyExecutor(model)):
        found = run(requests, executor, way)
        wanted = {one.request_id: textbook.generate(one, Prefixes(model)) for one in requests}
        assert_equal(found, wanted)


# --- what does not fit ----------------------------------------------------------------------------

NINE = ids(1, 9)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        (Prompt(NINE, inputs={"bbox": boxes(8)}), r"wanted \(9, 4\); got \(8, 4\)"),
        (Prompt(NINE, inputs={"bbox": boxes(10)}), r"wanted \(9, 4\); got \(10, 4\)"),
        (Prompt(NINE, inputs={"bbox": boxes(9)[:, :3]}), r"wanted \(9, 4\); got \(9, 3\)"),
        (Prompt(NINE, inputs={"bbox": boxes(9).float()}), "wanted torch.int64; got torch.float32"),
        (Prompt(NINE, positions=AXES[:, :8]), "position_ids"),
        (Prompt(NINE, positions=AXES[:, :9]), "position_ids"),
        (Prompt(NINE, positions=torch.arange(9) - 1), "numbers from 0 on; got -1"),
        (Prompt(NINE, mask=torch.ones(9, 9).tril()), "wanted torch.bool"),
        (Prompt(NINE, mask=torch.ones(8, 8).tril().bool()), "the mask does not fit"),
        (Prompt(NINE, mask=torch.ones(3, 9, 9).tril().bool()), "the mask does not fit"),
        (Prompt(NINE, mask=torch.ones(9, 9).bool()), "none after them"),
        (Prompt(NINE, mask=torch.ones(9, 9).tril(-1).bool()), "see themselves"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(
    prompt: Prompt, wanted: str
) -> None:
    engine = Engine(TorchExecutor(layout_model()), Lockstep())
    whole = replace(prompt, inputs=prompt.inputs or {"bbox": boxes(9)})
    for own in (whole, Prompt(NINE, inputs={"bbox": boxes(9)})):
        companions = () if own is whole else (whole,)
        with pytest.raises(RequestError, match=wanted):
            engine.submit(request("wrong", Greedy(), own, companions=companions))
    assert not engine.pending and engine.counts.forwards == 0


@pytest.mark.parametrize("given", [{"inputs": {"bbox": boxes(9)}}, {"mask": torch.ones(9, 9)}])
def test_what_a_model_does_not_declare_is_refused(given: dict[str, Any]) -> None:
    executor = HashExecutor(40, abilities=frozenset({"truncate"}))
    engine = Engine(executor, Lockstep())
    with pytest.raises(UnsupportedError, match=next(iter(given.get("inputs", given)))):
        engine.submit(request("wrong", Greedy(), Prompt(NINE, **given)))


def test_a_declared_input_is_cast_where_nothing_is_lost() -> None:
    narrow = Prompt(LAID_OUT.ids, inputs={"bbox": boxes(14).to(torch.int16)})
    one = request("own greedy", Greedy(), narrow)
    found = run([one], TorchExecutor(layout_model()), "together")
    assert_equal(found, {"own greedy": dense(request("own greedy", Greedy(), LAID_OUT))})
    assert BBOX.dtype == torch.int64
