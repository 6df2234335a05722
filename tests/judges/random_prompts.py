"""Random prompts: ids, embeddings, positions, features, and prompts that begin as others do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from everystep.testing.hash_function import HashFunction
from everystep.types import Injected, Prompt, Request
from tests.judges.dice import EMBED_DIM, Dice


def random_prompt(function: HashFunction, draw: Dice) -> Prompt:
    """Ids, embeddings or both, sometimes with positions or encoder states."""
    length = draw.between(1, 20)
    ids: np.ndarray | None = draw.ids(function.vocab_size, length)
    embeds = positions = encoder = None
    if draw.chance(0.15):
        embeds = torch.from_numpy(draw.rng.standard_normal((length, EMBED_DIM)).astype(np.float32))
        ids = draw.one_of(None, ids)
    if draw.chance(0.15):
        shape = draw.one_of((length,), (3, length))
        positions = torch.from_numpy(draw.rng.integers(0, 30, shape))
    if draw.chance(0.1):
        size = (draw.between(1, 5), EMBED_DIM)
        encoder = torch.from_numpy(draw.rng.standard_normal(size).astype(np.float32))
    return Prompt(ids, embeds, positions, encoder)


def related(requests: tuple[Request, ...], draw: Dice) -> tuple[Request, ...]:
    """The requests, of which most begin as an earlier one does; their salts are few."""
    made: list[Request] = []
    for request in requests:
        own = request.prompt
        alike = [one for one in made if (one.prompt.embeds is None) == (own.embeds is None)]
        shared = [one for one in alike if not (one.hooks or _reads_more(one.prompt))]
        if alike and draw.chance(0.85):
            other = draw.one_of(*(shared or alike)).prompt
            request = replace(request, prompt=_begun(own, other, draw))
        made.append(replace(request, salt=draw.one_of(*[None] * 5, "other")))
    return tuple(made)


def _reads_more(prompt: Prompt) -> bool:
    """Whether no other request may share what it begins with."""
    return prompt.encoder is not None or prompt.mask is not None


def _begun(own: Prompt, other: Prompt, draw: Dice) -> Prompt:
    """The prompt, in its length, which begins with the ids or embeddings of the other, and mostly
    with all that its positions are given."""
    count = min(own.length, other.length, draw.one_of(20, draw.between(1, 20)))
    embeds, ids = own.embeds, own.ids
    if embeds is not None and other.embeds is not None:
        embeds = torch.cat([other.embeds[:count], embeds[count:]])
    elif ids is not None and other.ids is not None:
        ids = np.concatenate([other.ids[:count], ids[count:]])
    prompt = replace(own, ids=ids, embeds=embeds)
    if draw.chance(0.15):
        return prompt
    return replace(
        prompt,
        positions=_places_begun(own, other.positions, count),
        injected=_features_begun(own, other.injected, count),
    )


def _places_begun(own: Prompt, theirs: Tensor | None, count: int) -> Tensor | None:
    """Position ids, of which the first `count` are theirs; none where they have none."""
    if theirs is None:
        return None
    shape, ours = theirs.shape[:-1], own.positions
    if ours is None or ours.shape[:-1] != shape:
        ours = torch.arange(own.length).expand(*shape, -1)
    return torch.cat([theirs[..., :count], ours[..., count:]], dim=-1)


def _features_begun(own: Prompt, theirs: Injected | None, count: int) -> Injected | None:
    """Features, theirs at the first `count` positions; none where they have none."""
    if theirs is None:
        return None
    parts = [(theirs, theirs.positions < count)]
    if own.injected is not None:
        parts.append((own.injected, own.injected.positions >= count))
    return Injected(
        np.concatenate([one.positions[here] for one, here in parts]),
        torch.cat([one.embeds[torch.from_numpy(here)] for one, here in parts]),
    )


def furnished(prompt: Prompt, function: HashFunction, draw: Dice) -> Prompt:
    """The prompt, perhaps with features among its ids, ids of its own beside embeddings, position
    ids beyond its end, and a mask."""
    length = prompt.length
    if prompt.embeds is None and draw.chance(0.15):
        places = np.flatnonzero(draw.rng.random(length) < 0.5)
        embeds = draw.rng.standard_normal((len(places), EMBED_DIM)).astype(np.float32)
        prompt = replace(prompt, injected=Injected(places, torch.from_numpy(embeds)))
    elif prompt.embeds is not None and draw.chance(0.4):
        ids = draw.ids(function.vocab_size, draw.between(1, 2 * length))
        prompt = replace(prompt, ids=ids)
    if prompt.positions is not None and draw.chance(0.3):
        more = torch.from_numpy(draw.rng.integers(0, 40, (*prompt.positions.shape[:-1], 3)))
        prompt = replace(prompt, positions=torch.cat([prompt.positions, more], dim=-1))
    if draw.chance(0.12):
        shape = draw.one_of((length, length), (2, length, length))
        seen = torch.from_numpy(draw.rng.random(shape) < 0.7) | torch.eye(length, dtype=torch.bool)
        prompt = replace(prompt, mask=seen.tril())
    return prompt
