"""What a prompt is made of does not matter, only what the model reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from everystep.engine import Contrast
from everystep.stops.ends import MaxLength
from everystep.types import Request
from tests.judges.drive import hash_executor, run_scheduled, run_together
from tests.judges.mixes import Mix, random_mix


def as_embeddings(request: Request, mix: Mix, *, keep_ids: bool) -> Request:
    """The same request with the embeddings of its ids, and of the features among them, if it was
    given as ids."""
    prompt = request.prompt
    if prompt.embeds is not None:
        return request
    embeds = hash_executor(mix).function.embed(prompt.ids)
    if prompt.injected is not None:
        embeds[torch.tensor(prompt.injected.positions)] = prompt.injected.embeds
    ids = prompt.ids if keep_ids else None
    return replace(request, prompt=replace(prompt, embeds=embeds, ids=ids, injected=None))


def ending_after(request: Request, new_tokens: int) -> Request:
    """The request with another length limit; without ids, fewer of them are visible."""
    *others, _ = request.stops
    return replace(request, stops=(*others, MaxLength(request.prompt_visible + new_tokens)))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(60))
def test_embeddings_of_ids_equal_ids(seed: int) -> None:
    mix = random_mix(seed)
    embedded = tuple(as_embeddings(request, mix, keep_ids=True) for request in mix.requests)
    expected = run_together(mix.requests, hash_executor(mix)).results
    assert run_together(embedded, hash_executor(mix)).results == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(60))
def test_prompts_without_ids_can_be_chunked_and_preempted(seed: int) -> None:
    mix = random_mix(seed)
    # An amateur reads ids.
    alone = [
        replace(r, readout=None) if isinstance(r.readout, Contrast) else r for r in mix.requests
    ]
    embedded = tuple(
        ending_after(as_embeddings(request, mix, keep_ids=False), new_tokens=4) for request in alone
    )
    schedule = replace(mix.schedule, cancels=(None,) * len(embedded))
    expected = run_together(embedded, hash_executor(mix)).results
    assert run_scheduled(embedded, schedule, hash_executor(mix)).results == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(60))
def test_own_positions_equal_none(seed: int) -> None:
    mix = random_mix(seed)
    bare = [replace(r, prompt=replace(r.prompt, positions=None)) for r in mix.requests]
    numbered = [
        replace(r, prompt=replace(r.prompt, positions=torch.arange(r.prompt.length).expand(3, -1)))
        for r in mix.requests
    ]
    expected = run_together(bare, hash_executor(mix)).results
    assert run_together(numbered, hash_executor(mix)).results == expected
