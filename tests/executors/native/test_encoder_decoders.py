"""Encoders, and decoders that look at their states, give natively what torch operators give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.cache.pasts import across_of, kv_of
from everystep.errors import InvariantError
from everystep.executors.choice import encoder_of
from everystep.executors.native import NativeExecutor, obstacles
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model
from everystep.nn.network import Heard
from everystep.nn.rounding import Rounding
from everystep.types import Extra, Prompt, Verb, Work
from tests.executors.members import members
from tests.executors.works import Wanderer, asking, one_feed, only_verbs
from tests.models.tiny import ENCODER_DECODERS, Tensors, reference_pair

pytestmark = pytest.mark.native
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ENCODER_DECODERS},
    "t5, gated": ("t5", {"feed_forward_proj": "gated-gelu"}),
    "t5, near": ("t5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}),
    "bart, scaled": ("bart", {"scale_embedding": True, "activation_function": "relu"}),
    "bart, untied": ("bart", {"tie_word_embeddings": False}),
    "bart, one layer": ("bart", {"encoder_layers": 1, "decoder_layers": 1}),
}
LONG = {"t5": {}, "mt5": {}, "whisper": {"max_source_positions": 400, "max_target_positions": 400}}
NEW = 24


@cache
def model_of(name: str, rounding: Rounding | None = None) -> Model:
    """A tiny random model whose parts all matter."""
    kind, config = FAMILIES[name]
    room = LONG.get(kind, {"max_position_embeddings": 400})
    if rounding == "int4" and "t5" not in kind:
        room = {**room, "encoder_ffn_dim": 64, "decoder_ffn_dim": 96}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        reference = reference_pair(kind, torch.float32, **room, **config)
        for weight in reference.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.15 if "t5" in kind else 0.3)
        reference.tie_weights()
    source = Tensors(reference.state_dict())
    return build_model(reference.config.to_dict(), source, dtype=torch.float32, quantize=rounding)


def states_of(model: Model, seed: int, length: int) -> Tensor:
    """(S, E) encoder states of any size, as a caller may pass them."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(length, model.spec.width, generator=made)


def works_of(model: Model, seed: int, steps: int = 8) -> Iterator[Work]:
    """Works for rows of any history, which look at one of three states."""
    rng = np.random.default_rng(seed)
    wanderer = Wanderer(model, rng, False, 70, 30)
    seen = [states_of(model, seed + i, length) for i, length in enumerate((1, 16, 150))]
    for _ in range(steps):
        work = wanderer.work()
        new = [verb.row for verb in work.verbs if verb.kind == "allocate"]
        yield replace(work, encoders={row: seen[int(rng.integers(3))] for row in new})
    yield only_verbs(*(Verb("free", row) for row in wanderer.histories))


def assert_near(found: Tensor, wanted: Tensor, share: float = 1e-5) -> None:
    """Within a share of the largest number."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if wanted.numel():
        assert (found - wanted).abs().max() <= share * wanted.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_any_history(name: str) -> None:
    model = model_of(name)
    assert not obstacles(model)
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for work in works_of(model, seed=5):
        assert_near(native.run(work).logits, judge.run(work).logits)
        assert native.audit() == judge.audit()
    assert native.rows.pool.in_use == 0 and native.across is not None
    assert native.across.pages.pool.in_use == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_what_layers_show(name: str) -> None:
    model = model_of(name)
    native, judge = NativeExecutor(model), TorchExecutor(model)
    for work in works_of(model, seed=6, steps=5):
        asked = asking(work, hidden=True, layers=True, attentions=True)
        answers = native.run(asked).answers
        for feed, wanted in judge.run(asked).answers.items():
            found = answers[feed]
            for one, other in (
                ((found.hidden,), (wanted.hidden,)),
                (found.layers, wanted.layers),
                (found.attentions, wanted.attentions),
                (found.cross_attentions, wanted.cross_attentions),
            ):
                assert one is not None and other is not None and len(one) == len(other)
                for a, b in zip(one, other, strict=True):
                    assert a is not None and b is not None
                    assert_near(a, b, 2e-5)


@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_encoder_gives_its_states(name: str, length: int) -> None:
    model = model_of(name)
    encode = encoder_of(model)
    assert encode is not None
    hidden = states_of(model, length, length)[None]
    wanted, found = Heard(), Heard()
    with torch.inference_mode():
        assert_near(encode(hidden, None), model.network.encode(hidden, None))
        states = encode(hidden, None, found)
        assert torch.equal(states, encode(hidden, None))
        model.network.encode(hidden, None, wanted)
    for one, other in ((found.layers, wanted.layers), (found.attentions, wanted.attentions)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_near(a, b, 2e-5)


@pytest.mark.parametrize("name", ["t5", "t5, near", "bart", "marian"])
def test_long_prompts_go_through_the_encoder_in_parts(name: str) -> None:
    """More positions than the buffers hold at once, and many more than distances tell apart."""
    model = model_of(name)
    encode = encoder_of(model)
    assert encode is not None
    hidden = states_of(model, 1, 391)[None]
    with torch.inference_mode():
        wanted = model.network.encode(hidden, None)
        found = encode(hidden, None)
        assert_near(found, wanted, 2e-5)
        with members(2):
            assert torch.equal(encode(hidden, None), found)
        # What longer prompts left in memory changes nothing.
        encode(torch.full_like(hidden, torch.nan), None)
        short = hidden[:, :37]
        again = encoder_of(model_of(name))
        assert again is not None
        assert torch.equal(again(short, None), encode(short, None))
        assert bool(encode(short, None).isfinite().all())


def logits_of(model: Model, tokens: list[int], states: Tensor, parts: list[int]) -> Tensor:
    """(T, V) of one row that is fed in parts."""
    executor, found, start = NativeExecutor(model), [], 0
    first: tuple[Verb, ...] = (Verb("allocate", 0),)
    for count in parts:
        work = one_feed(tokens[start : start + count], start=start, verbs=first)
        found.append(executor.run(replace(work, encoders={0: states} if first else {})).logits)
        start, first = start + count, ()
    return torch.cat(found)


@pytest.mark.parametrize("rounding", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["t5, gated", "bart", "marian", "whisper"])
def test_bits_do_not_depend_on_chunks_threads_or_neighbours(
    name: str, rounding: Rounding | None
) -> None:
    model = model_of(name, rounding)
    tokens, states = [*range(3, 39)], states_of(model, 7, 77)
    wanted = logits_of(model, tokens, states, [36])
    for parts in ([1] * 36, [1, 12, 13, 10], [20, 16]):
        assert torch.equal(logits_of(model, tokens, states, parts), wanted)
    with members(2):
        assert torch.equal(logits_of(model, tokens, states, [30, 6]), wanted)
    executor = NativeExecutor(model)
    opened = tuple(Verb("allocate", row) for row in range(3))
    feeds = [tokens[:20], tokens, tokens[5:11]]
    counts = np.array([len(one) for one in feeds])
    work = Work(opened, np.arange(3), np.zeros(3, np.int64), counts, counts, np.concatenate(feeds))
    other = states_of(model, 8, 130)
    found = executor.run(replace(work, encoders={0: other, 1: states, 2: states})).logits
    assert torch.equal(found[20:56], wanted)


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_rounded_weights_are_read(name: str, rounding: Rounding) -> None:
    """Activations are rounded there and here; sums differ in their last bit, and codes then may."""
    model = model_of(name, rounding)
    tokens, states = [*range(3, 13)], states_of(model, 7, 30)
    found = logits_of(model, tokens, states, [10])
    work = one_feed(tokens, verbs=(Verb("allocate", 0),))
    wanted = TorchExecutor(model).run(replace(work, encoders={0: states})).logits
    assert_near(found, wanted, 0.05)
    off = ((found - wanted).abs().amax(1) > 1e-4 * wanted.abs().max()).float().mean()
    assert off <= 0.5


def test_states_are_made_once_and_shared() -> None:
    model, states = model_of("bart"), states_of(model_of("bart"), 0, 33)
    executor = NativeExecutor(model)
    assert executor.across is not None
    pages = executor.across.pages
    executor.run(replace(only_verbs(Verb("allocate", 0)), encoders={0: states}))
    executor.run(replace(only_verbs(Verb("allocate", 1), Verb("fork", 2, 1)), encoders={1: states}))
    held = pages.pool.in_use
    assert list(pages.lengths().values()) == [33]
    executor.run(only_verbs(Verb("free", 0), Verb("free", 1)))
    assert pages.pool.in_use == held
    executor.run(only_verbs(Verb("free", 2)))
    assert pages.pool.in_use == 0
    # The same states again, after they were forgotten.
    executor.run(replace(only_verbs(Verb("allocate", 1)), encoders={1: states}))
    assert pages.pool.in_use == held


def test_what_a_row_holds_is_taken_over() -> None:
    model, states = model_of("marian"), states_of(model_of("marian"), 2, 21)
    native, judge = NativeExecutor(model), TorchExecutor(model)
    work = replace(one_feed([*range(3, 23)], verbs=(Verb("allocate", 0),)), encoders={0: states})
    native.run(work), judge.run(work)
    found, wanted = native.export(0), judge.export(0)
    assert_near(kv_of(found), kv_of(wanted))
    across = across_of(found), across_of(wanted)
    assert across[0] is not None and across[1] is not None
    assert_near(across[0], across[1])
    follow = one_feed([5, 6], row=1, start=20, verbs=(Verb("allocate", 1),))
    follow = replace(follow, encoders={1: states}, pasts={1: found})
    wanted_logits = native.run(one_feed([5, 6], start=20)).logits
    assert torch.equal(NativeExecutor(model).run(follow).logits, wanted_logits)


def test_a_row_without_states_is_an_error() -> None:
    with pytest.raises(InvariantError, match="no encoder states"):
        NativeExecutor(model_of("bart")).run(one_feed([3], verbs=(Verb("allocate", 0),)))


def test_after_an_interrupt_states_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = model_of("bart"), states_of(model_of("bart"), 4, 40)
    wanted = logits_of(model, [3, 4], states, [2])
    executor = NativeExecutor(model)
    work = replace(one_feed([3, 4], verbs=(Verb("allocate", 0),)), encoders={0: states})

    def stop(*given: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor._library, "es_keep_states", stop)
        with pytest.raises(KeyboardInterrupt):
            executor.run(work)
    again = one_feed([3, 4], row=1, verbs=(Verb("allocate", 1), Verb("free", 0)))
    assert torch.equal(executor.run(replace(again, encoders={1: states})).logits, wanted)


def test_a_line_that_no_row_came_to_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes after the line is there, and before a row looks at it."""
    model, states = model_of("bart"), states_of(model_of("bart"), 4, 40)
    executor = NativeExecutor(model)
    assert executor.across is not None
    pages = executor.across.pages

    def stop(states: dict[int, Tensor], line: int, held: Tensor) -> None:
        raise KeyboardInterrupt

    work = replace(only_verbs(Verb("allocate", 0)), encoders={0: states})
    with monkeypatch.context() as patch:
        patch.setattr(executor.across, "_held", type("Held", (dict,), {"__setitem__": stop})())
        with pytest.raises(KeyboardInterrupt):
            executor.run(work)
        assert pages.lengths() == {0: 0}
    executor.run(replace(only_verbs(Verb("free", 0), Verb("allocate", 1)), encoders={1: states}))
    assert list(pages.lengths().values()) == [40]
    executor.run(only_verbs(Verb("free", 1)))
    assert pages.lengths() == {} and pages.pool.in_use == 0


def test_threads_begin_with_what_comes_next() -> None:
    model, states = model_of("bart"), states_of(model_of("bart"), 4, 40)
    with members(2):
        plain, ahead = NativeExecutor(model, ahead=False), NativeExecutor(model)
        for executor in (plain, ahead):
            work = replace(one_feed([3], verbs=(Verb("allocate", 0),)), encoders={0: states})
            said = []
            for at in range(NEW):
                work = replace(work, best=np.array([1]))
                best = executor.run(work).best
                assert best is not None
                said.append((int(best.tokens[0, 0]), float(best.values[0, 0])))
                work = one_feed([said[-1][0]], start=at + 1)
            if executor is plain:
                wanted = said
    assert said == wanted
    assert ahead.guesses()[1] > NEW // 2


def sides(kind: str) -> tuple[es.LanguageModel, es.LanguageModel]:
    """The same model natively and on torch operators."""
    model = model_of(kind)
    return es.LanguageModel(model), es.LanguageModel(model, executor="torch")


START = {"decoder_start_token_id": 2, "max_new_tokens": NEW}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
    "scores": {"output_scores": True, "output_hidden_states": True, "output_attentions": True},
}


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("kind", [kind for kind in ENCODER_DECODERS if kind != "whisper"])
def test_generation_gives_the_same_tokens(kind: str, way: str) -> None:
    native, judge = sides(kind)
    assert native.runs_on.startswith("native")
    read = torch.arange(60).view(3, 20) + 3
    given = {"min_new_tokens": NEW, "return_dict_in_generate": True, **START, **OPTIONS[way]}
    found, wanted = (one.generate(read, **given) for one in (native, judge))
    assert torch.equal(found.sequences, wanted.sequences)
    if way == "scores":
        for name in ("encoder_hidden_states", "encoder_attentions"):
            for one, other in zip(getattr(found, name), getattr(wanted, name), strict=True):
                assert_near(one, other, 2e-5)


def test_holes_in_a_mask_are_left_to_torch_operators() -> None:
    native, judge = sides("bart")
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, 4:6] = 0
    read = torch.arange(24).view(2, 12) + 3
    given = {"attention_mask": mask, "do_sample": False, **START}
    assert torch.equal(native.generate(read, **given), judge.generate(read, **given))


def test_prompts_have_the_bits_they_have_alone() -> None:
    model = model_of("t5")
    together = es.LanguageModel(model)
    prompts = [Prompt(ids=np.arange(3, 3 + n)) for n in (5, 18, 40)]
    encode = encoder_of(model)
    alone = [model.encode(one, None, encode) for one in prompts]
    again = [model.encode(one, None, encode) for one in reversed(prompts)]
    for one, other in zip(alone, reversed(again), strict=True):
        assert torch.equal(one, other)
    assert together.runs_on.startswith("native")


def test_extras_are_answered_for_the_feeds_that_want_them() -> None:
    model, states = model_of("bart"), states_of(model_of("bart"), 1, 20)
    executor = NativeExecutor(model)
    verbs = (Verb("allocate", 0), Verb("allocate", 1))
    counts = np.array([4, 6])
    work = Work(verbs, np.arange(2), counts * 0, counts, counts * 0, np.arange(3, 13))
    asked = replace(
        work, encoders={0: states, 1: states[:9].clone()}, extras={1: Extra(attentions=True)}
    )
    answers = executor.run(asked).answers
    assert set(answers) == {1} and answers[1].cross_attentions is not None
    assert answers[1].cross_attentions[0].shape == (model.spec.decoder.heads, 6, 9)
