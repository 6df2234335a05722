"""What prompts share is fed once, and nobody can tell from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.draws import SeededDraws
from everystep.engine import Continuous, Engine, Reuse, audit
from everystep.engine.watching import StepRecord
from everystep.executors.base import Executor
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.stops.ends import MaxLength
from everystep.strategies import Beam, Contrastive, Greedy, Sample
from everystep.testing.hash_model import ABILITIES, HashExecutor
from everystep.types import Hook, InputSpec, Prompt, Request, adapter_ability
from tests.engine.contents import CONTENT, SHARED, VOCABULARY
from tests.engine.test_interrupts import SMALL, Tripwire, finished
from tests.executors.models import family_model, narrow_model
from tests.judges.drive import Drive, hash_executor, run_together
from tests.judges.mixes import random_mix
from tests.judges.mutants import PREFIX_MUTANTS
from tests.models.tiny import ours, reference_pair

BOXES = InputSpec("bbox", "token", (2,), torch.int64)
STYLE = InputSpec("style", "row", (1,), torch.float32)
ADAPTERS = frozenset({"adapters", adapter_ability("a"), adapter_ability("b")})


def executor(without: Iterable[str] = ()) -> HashExecutor:
    able = (ABILITIES | ADAPTERS) - set(without)
    return HashExecutor(VOCABULARY, 4, abilities=able, inputs=(BOXES, STYLE))


def request(name: str, ids: Any, new: int = 4, strategy: Any = None, **changes: Any) -> Request:
    prompt = ids if isinstance(ids, Prompt) else Prompt(ids=np.asarray(ids, dtype=np.int64))
    made = Request(
        name,
        prompt,
        strategy or Greedy(),
        SeededDraws(5),
        max_length=prompt.length + new,
        **changes,
    )
    return replace(made, stops=(MaxLength(made.prompt_visible + new),))


def run_of(opened: Executor | None = None, kept: int = 0, budget: int = 1024, **more: Any) -> Drive:
    scheduler = Continuous(budget, more.pop("rows", 64), reuse=Reuse(kept, more.pop("least", 16)))
    return Drive(Engine(opened or executor(), scheduler, **more))


def in_turn(requests: Iterable[Request], run: Drive) -> Drive:
    """Each request when the one before has ended."""
    for one in requests:
        run.submit(one)
        run.finish()
    return run


def alone(requests: Iterable[Request]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in requests:
        found |= run_together([one], executor()).results
    return found


@pytest.mark.parametrize("budget", [1024, 300, 64])
@pytest.mark.parametrize("tail", [0, 9])
def test_a_prefix_of_many_requests_is_fed_once(budget: int, tail: int) -> None:
    tails = np.random.default_rng(3).integers(0, VOCABULARY, (32, tail))
    requests = [request(str(n), [*SHARED, *own]) for n, own in enumerate(tails)]
    run = run_of(budget=budget)
    for one in requests:
        run.submit(one)
    run.finish()
    own = tail or 1  # without a tail the last position is fed for its logits
    generated = 3 * 32
    fed = run.engine.counts.fed - generated
    assert 1000 < fed <= 1000 + 32 * own
    assert run.engine.counts.forked >= 31 * (1000 + tail - own)
    assert run.results == alone(requests)
    cached = sorted(group.cached_tokens for group in run.groups.values())
    assert cached[0] == 0 and cached[1] >= 1000 + tail - own


def test_requests_of_one_step_wait_for_the_first() -> None:
    run = run_of(budget=4096)
    for n in range(3):
        run.submit(request(str(n), [*SHARED, n]))
    run.step()
    assert run.engine.counts.fed == 1001
    run.step()
    assert run.engine.counts.fed == 1001 + 1 + 2


class Named(NamedTuple):
    """What the name of an adapter stands for, which another one of the same values is not."""

    number: int
    needs: frozenset[str] = ADAPTERS


def of_name(number: int) -> dict[str, Any]:
    """A request for the adapter "a", which is the one of this number."""
    return {"adapters": (("a", 1.0),), "resolved": (Named(number),)}


KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "salt": ({"salt": "one"}, {"salt": "other"}),
    "no salt": ({}, {"salt": "other"}),
    "adapter": ({"adapters": (("a", 1.0),)}, {"adapters": (("b", 1.0),)}),
    "no adapter": ({}, {"adapters": (("a", 1.0),)}),
    "weight": ({"adapters": (("a", 1.0),)}, {"adapters": (("a", 0.5),)}),
    "an adapter that was loaded again": (of_name(1), of_name(2)),
}


def forked(first: Request, other: Request, together: bool) -> int:
    """How many positions the second has of the first, beside it or after its end."""
    run = run_of(kept=4096)
    run.submit(first)
    if not together:
        run.finish()
    run.submit(other)
    run.finish()
    assert run.results == alone([first, other]) or first.adapters != other.adapters
    return run.engine.counts.forked


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", KEYS)
def test_other_salts_and_adapters_never_share(name: str, together: bool) -> None:
    one, other = KEYS[name]
    pair = (request("0", SHARED, **one), request("1", SHARED, **other))
    assert forked(*pair, together) == 0
    assert forked(pair[0], replace(pair[0], request_id="1"), together) == 999


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", CONTENT)
def test_rows_are_shared_up_to_where_contents_differ(name: str, together: bool) -> None:
    one, other, count = CONTENT[name]
    assert forked(request("0", one), request("1", other), together) == count


def beside(name: str, states: Tensor, tail: int = 3) -> Request:
    """A request whose decoder looks at encoder states."""
    ids = np.r_[np.arange(4, 34), tail]
    return request(name, Prompt(ids=ids, encoder=states), 6)


def states_of(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(9, 32, dtype=torch.float64, generator=generator)


@cache
def encoder_decoder() -> Any:
    return ours(reference_pair("t5", torch.float64))


@pytest.mark.parametrize("together", [True, False])
def test_rows_of_other_sources_never_share(together: bool) -> None:
    model, one = encoder_decoder(), states_of(0)
    requests = [beside("0", one), beside("1", states_of(1)), beside("2", one.clone(), 7)]
    run = run_of(TorchExecutor(model), kept=4096)
    for each in requests:
        run.submit(each)
        if not together:
            run.finish()
    run.finish()
    assert run.engine.counts.forked == 30
    for each in requests:
        alone = run_together([each], TorchExecutor(model)).results[each.request_id]
        assert run.results[each.request_id] == alone


def test_encoder_states_count_once() -> None:
    one, other = states_of(0), states_of(1)
    run = run_of(TorchExecutor(encoder_decoder()), kept=100)
    run.engine.scheduler.max_positions = 400
    for name, states, tail in (("0", one, 3), ("1", one, 5), ("2", other, 3)):
        run.submit(beside(name, states, tail))
    run.step()
    # 31 ids of each prompt and 9 states of each source, before a token is chosen.
    assert run.engine.scheduler.planned.positions == 400 - 3 * 31 - 2 * 9
    run.finish()
    held = sum(len(row.content) for row in run.engine.prefixes.kept)
    sources = {id(row.encoder) for row in run.engine.prefixes.kept}
    assert run.engine.prefixes.positions() == held + 9 * len(sources) <= 100


class Idle(Hook):
    """Gives and wants nothing; an engine cannot know that before it asks."""


@pytest.mark.parametrize("together", [True, False])
def test_requests_with_hooks_share_nothing(together: bool) -> None:
    plain, hooked = request("0", SHARED), request("1", SHARED, hooks=(Idle(),))
    for first, other in ((plain, hooked), (hooked, plain), (hooked, hooked)):
        pair = replace(first, request_id="0"), replace(other, request_id="1")
        assert forked(*pair, together) == 0


def test_a_conversation_goes_on_from_the_row_of_its_last_turn() -> None:
    run, ids = run_of(kept=4096), list(SHARED[:100])
    for turn in range(4):
        one = request(str(turn), ids)
        before = run.engine.counts.fed
        in_turn([one], run)
        assert run.results[str(turn)] == alone([one])[str(turn)]
        # The last token of an answer is chosen and not fed.
        own = 1 + 5 if turn else 100
        assert run.engine.counts.fed - before == own + 3
        ids += [*run.results[str(turn)][0].tokens, *range(5)]


def test_kept_rows_stay_within_the_budget_least_recently_used_first_out() -> None:
    run = run_of(kept=250, least=1)
    prompts = [np.r_[n, SHARED[:60]] for n in range(4)]
    in_turn([request(f"{n}", prompts[n]) for n in range(3)], run)
    in_turn([request("again", prompts[0])], run)  # now the second is the oldest
    in_turn([request("3", prompts[3])], run)
    assert sum(len(one.content) for one in run.engine.prefixes.kept) <= 250
    audit(run.engine)
    found = {}
    for n in (0, 2, 1):
        before = run.engine.counts.forked
        in_turn([request(f"then {n}", prompts[n], 1)], run)
        found[n] = run.engine.counts.forked - before
    assert found == {0: 60, 2: 60, 1: 0}


def test_kept_rows_take_no_row_that_a_group_needs() -> None:
    tight = HashExecutor(VOCABULARY, 4, max_rows=3)
    run = run_of(tight, kept=10_000, rows=3, least=1)
    requests = [request(f"{n}", np.r_[SHARED[: 20 + n], n]) for n in range(9)]
    in_turn(requests[:4], run)
    wide = request("wide", SHARED[:50], strategy=Sample(3))
    for one in (*requests[4:], wide):
        run.submit(one)
    while run.engine.pending:
        run.step()
        audit(run.engine)
    assert run.results == alone([*requests, wide])
    assert run.engine.counts.forked > 100


def test_what_needs_every_position_is_fed_every_position() -> None:
    plain = request("0", SHARED[:50])
    wants = [replace(plain.wants, **one) for one in ({"layers": True}, {"prompt_logprobs": 1})]
    others = [request(str(n), SHARED[:50], wants=one) for n, one in enumerate(wants, 1)]
    others.append(request("3", SHARED[:50], strategy=Contrastive(2, 0.5)))
    others.append(request("4", Prompt(ids=SHARED[:50], mask=torch.ones(50, 50).tril().bool())))
    run = in_turn([plain, *others], run_of(kept=1000))
    assert run.engine.counts.forked == 0


def test_rows_that_cannot_be_cut_are_continued_whole_or_not_at_all() -> None:
    run = run_of(executor(without=["cut"]), kept=4096)
    first = request("0", SHARED[:80])
    in_turn([first], run)
    whole = [*SHARED[:80], *run.results["0"][0].tokens]
    longer, other = request("1", [*whole, 1, 2]), request("2", [*whole[:82], 3, 3, 3])
    in_turn([other], run)
    assert run.engine.counts.forked == 0
    in_turn([longer], run)
    assert run.engine.counts.forked == 83
    assert run.results == alone([first, other, longer])
    assert run.engine.executor.counts["truncate"] == 0


@pytest.mark.parametrize("family", ["mamba", "mistral"])
def test_states_and_windows_go_on_exactly(family: str) -> None:
    sizes = {"sliding_window": 5} if family == "mistral" else {"state_size": 4}
    model = family_model(family, **sizes)
    run, ids = run_of(TorchExecutor(model), kept=4096), list(range(30))
    for turn in range(3):
        one = request(str(turn), ids)
        in_turn([one], run)
        plain = run_together([one], TorchExecutor(model)).results[str(turn)]
        assert run.results[str(turn)] == plain
        ids += [*plain[0].tokens, 5, 6]
    assert run.engine.counts.forked > 60


# --- bits -----------------------------------------------------------------------------------------


class Seen:
    """The scores of every step, by request."""

    def __init__(self) -> None:
        self.scores: dict[str, list[Tensor]] = {}

    def __call__(self, record: StepRecord) -> None:
        values = record.scored.scores.whole().values
        for row, sequence in zip(values, record.scored.layout.sequences, strict=True):
            self.scores.setdefault(sequence.request.request_id, []).append(row.clone())


@pytest.mark.native
@pytest.mark.parametrize("cache_dtype", [None, "float16", "int8"])
@pytest.mark.parametrize("rounding", [None, "int8", "int4"])
def test_a_hit_changes_no_bit_natively(rounding: Any, cache_dtype: Any) -> None:
    model = narrow_model("llama", rounding, panels=True)
    rng, common = np.random.default_rng(1), np.arange(150) * 7 % 29
    lengths = [0, 1, 15, 16, 17, 31, 32, 33, 64, 100, 149]
    requests = [
        request(str(n), np.r_[common[:count], rng.integers(0, 29, 5)], 6)
        for n, count in enumerate(lengths)
    ]
    shared, single = Seen(), Seen()
    opened = NativeExecutor(model, cache_dtype)
    run = run_of(opened, kept=2000, least=1, budget=40, observers=(shared,))
    for one in reversed(requests):
        run.submit(one)
        run.step()
    run.finish()
    in_turn([replace(one, request_id=f"later {one.request_id}") for one in requests], run)
    assert run.engine.counts.forked > 2 * sum(lengths) - 200
    for one in requests:
        in_turn([one], run_of(NativeExecutor(model, cache_dtype), observers=(single,)))
        expected = single.scores[one.request_id]
        for name in (one.request_id, f"later {one.request_id}"):
            assert all(map(torch.equal, shared.scores[name], expected)), name
            assert len(shared.scores[name]) == len(expected)


# --- endings and interrupts -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Greedy(), Sample(3), Beam(3, max_new=6)], ids=str)
def test_cancels_and_preemptions_release_nothing_twice(strategy: Any) -> None:
    requests = [request(f"{n}", [*SHARED[:40], n, n], 6, strategy) for n in range(6)]
    run = run_of(kept=200, least=1, budget=24)
    for n, one in enumerate(requests):
        run.submit(one)
        for _ in range(4):
            run.step()
            audit(run.engine)
        groups = run.engine.scheduler.groups
        if n % 3 == 0:
            run.cancel(one)
        elif groups:
            run.engine.preempt(groups[0])
        audit(run.engine)
    run.finish()
    expected = alone(requests)
    left = [one.request_id for one in requests if one.request_id not in run.cancelled]
    assert {name: run.results[name] for name in left} == {name: expected[name] for name in left}


@pytest.mark.parametrize("seed", SMALL[:2])
def test_an_interrupt_loses_kept_rows_and_nothing_else(seed: int) -> None:
    mix = random_mix(seed)
    twice = [
        *mix.requests,
        *(replace(one, request_id=f"{one.request_id}'") for one in mix.requests),
    ]

    def fresh() -> Drive:
        return run_of(hash_executor(mix), kept=100, least=1, budget=16)

    def went(run: Drive, wire: Tripwire) -> bool:
        tripped = False
        for one in twice:
            run.submit(one)
            tripped |= finished(run, None if tripped else wire)
        return tripped

    expected, counter = run_together(twice, hash_executor(mix)).results, Tripwire()
    calm = fresh()
    went(calm, counter)
    assert calm.results == expected and calm.engine.counts.forked
    for at in range(1 + seed % 97, counter.lines, 599):
        run = fresh()
        assert went(run, Tripwire(at)), at
        assert run.results == expected, at
        audit(run.engine)


# --- mutants --------------------------------------------------------------------------------------

JUDGES: dict[str, Callable[[], None]] = {
    "salt ignored": lambda: test_other_salts_and_adapters_never_share("salt", True),
    "adapter ignored": lambda: test_other_salts_and_adapters_never_share("adapter", False),
    "kept row not released": (test_kept_rows_stay_within_the_budget_least_recently_used_first_out),
    "row kept longer than its truncation": (
        lambda: test_rows_are_shared_up_to_where_contents_differ("ids", False)
    ),
    "source ignored": lambda: test_rows_of_other_sources_never_share(False),
    "inputs ignored": lambda: test_rows_are_shared_up_to_where_contents_differ("boxes", True),
    "nobody waits": lambda: test_a_prefix_of_many_requests_is_fed_once(1024, 9),
}


@pytest.mark.parametrize("name", PREFIX_MUTANTS)
def test_a_mutant_of_prefixes_is_found(name: str) -> None:
    JUDGES[name]()
    with PREFIX_MUTANTS[name](), pytest.raises(Exception):  # noqa: B017
        JUDGES[name]()
