"""Hidden states of all layers and attention weights, as the native executor tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import everystep as es
from everystep.cache.formats import CacheDtype
from everystep.executors.choice import open_executor
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model
from everystep.types import Extra, StepOutput, Verb, Work
from tests.executors.models import SPECS, random_model
from tests.executors.works import answer, asking, forgets, ints, one_feed, read
from tests.models.tiny import ids, reference_decoder, with_norms

pytestmark = pytest.mark.native
IDS = [int(one) for one in np.random.default_rng(5).integers(0, 40, 150)]
OPEN = (Verb("allocate", 0),)
WANTS = {"layers": True, "attentions": True, "hidden": True}


def model_of(name: str) -> Model:
    return random_model(SPECS[name], dtype=torch.float32)


def near(found: tuple[Tensor, ...], wanted: Any, most: float = 1e-5) -> None:
    one, other = torch.stack(found), torch.stack(tuple(wanted))
    assert one.shape == other.shape
    assert (one - other).abs().max() <= most * other.abs().max()


def fed(executor: NativeExecutor, counts: tuple[int, ...]) -> list[StepOutput]:
    """A row that is fed so many ids at a time, with all wants."""
    found, start = [], 0
    for count in counts:
        verbs = OPEN if not start else ()
        work = one_feed(IDS[start : start + count], start=start, verbs=verbs)
        found.append(executor.run(asking(work, **WANTS)))
        start += count
    return found


@pytest.mark.parametrize("name", SPECS)
def test_every_specification_tells_what_a_plain_forward_shows(name: str) -> None:
    model, length = model_of(name), 30
    (output,) = fed(NativeExecutor(model), (length,))
    watched = read(model, IDS[:length]).watched(model)
    found = answer(output)
    near(found.layers or (), watched.layers)
    near(found.attentions or (), watched.attentions)
    assert found.hidden is not None and found.layers is not None
    assert torch.equal(found.hidden, found.layers[-1])


@pytest.mark.parametrize("cache_dtype", [None, "float16", "int8"])
@pytest.mark.parametrize("name", ["plain", "window"])
def test_chunks_and_neighbours_change_no_bit(name: str, cache_dtype: CacheDtype | None) -> None:
    """Also where a feed is longer than the parts that are computed together, and beside feeds that
    want nothing or something else."""
    model, long = model_of(name), IDS + IDS
    (whole,) = (
        NativeExecutor(model, cache_dtype).run(asking(one_feed(long, verbs=OPEN), **WANTS)),
    )
    chunked, start = NativeExecutor(model, cache_dtype), 0
    verbs = (*OPEN, Verb("allocate", 1), Verb("allocate", 2))
    for count in (7, 1, 70, 222):
        counts = ints(count, count, count)
        tokens = ints(*long[start : start + count], *IDS[:1] * count, *IDS[1:2] * count)
        extras = {0: Extra(**WANTS), 2: Extra(attentions=True)}
        rows, starts = ints(0, 1, 2), ints(start, start, start)
        output = chunked.run(Work(verbs, rows, starts, counts, counts, tokens, extras))
        assert set(output.answers) == {0, 2}
        own, all_of = answer(output), answer(whole)
        for one, other in zip(own.attentions or (), all_of.attentions or (), strict=True):
            stop = start + count
            assert torch.equal(one, other[:, start:stop, :stop])
            assert not other[:, start:stop, stop:].any()
        for one, other in zip(own.layers or (), all_of.layers or (), strict=True):
            assert torch.equal(one, other[start : start + count])
        verbs, start = (), start + count
    assert start == len(long)


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_weights_are_those_of_what_rows_keep(cache_dtype: CacheDtype) -> None:
    model = model_of("plain")
    outputs = [
        kind(model, cache_dtype=cache_dtype).run(asking(one_feed(IDS[:40], verbs=OPEN), **WANTS))
        for kind in (NativeExecutor, TorchExecutor)
    ]
    found, wanted = map(answer, outputs)
    near(found.attentions or (), wanted.attentions, 1e-4)


def test_logits_are_those_of_a_feed_that_wants_nothing() -> None:
    model = model_of("plain")
    plain = NativeExecutor(model).run(one_feed(IDS[:30], verbs=OPEN)).logits
    found = NativeExecutor(model).run(asking(one_feed(IDS[:30], verbs=OPEN), **WANTS)).logits
    assert torch.equal(plain, found)


def test_such_requests_run_natively() -> None:
    for name in ("plain", "window"):
        assert isinstance(open_executor(model_of(name), "auto", {*WANTS}), NativeExecutor)
        assert forgets(model_of(name)) is (name == "window")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3", "starcoder2", "mistral"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generate_shows_what_the_reference_shows(
    kind: str, way: dict[str, Any], tmp_path: Path
) -> None:
    """Shapes too, beside padding, and where windows are exceeded."""
    window = {"sliding_window": 7} if kind == "mistral" else {}
    with_norms(reference_decoder(kind, torch.float32, **window)).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model = es.load_model(tmp_path, executor="native")
    prompts = ids(2, 9)
    prompts[0, :3] = 0
    given: dict[str, Any] = {
        "attention_mask": (prompts > 0).long(),
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "output_attentions": True,
        "output_hidden_states": True,
        "return_dict_in_generate": True,
        **way,
    }
    ours, theirs = (one.generate(prompts, **given) for one in (model, reference))
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("hidden_states", "attentions"):
        for step, (one, other) in enumerate(zip(ours[name], theirs[name], strict=True)):
            assert [x.shape for x in one] == [x.shape for x in other]
            real = given["attention_mask"].bool() if step == 0 else None
            for x, y in zip(one, other, strict=True):
                if real is not None and name == "hidden_states":
                    keep = real.repeat_interleave(len(x) // len(real), 0)
                    x, y = x[keep], y[keep]
                elif real is not None:
                    keep = real.repeat_interleave(len(x) // len(real), 0)
                    x, y = (z.transpose(1, 2)[keep] for z in (x, y))
                assert (x - y).abs().max() <= 1e-5 * y.abs().max()
