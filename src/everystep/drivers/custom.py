"""`custom_generate`: a decoding loop of the caller's in the place of the engine's.

The loop has transformers' contract. It is called as

    loop(model, input_ids, logits_processor=, stopping_criteria=, generation_config=, **inputs)

after everything about the call was checked, and what it returns is returned. `input_ids` (R, T) is
padded on the left and has a row for every beam or returned sequence. Both callables take
`(input_ids, scores)`, and are lists to which the loop may add. `inputs` holds `attention_mask`
(R, T), `use_cache` and, unless that is False, `past_key_values`: the cache that was passed, or an
empty one of the chosen kind. The loop decides what it feeds to `model(...)`, which adds to that
cache. Keywords that only the loop names are passed on to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.config import GenerationConfig
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.processors.base import LogitsProcessorList
from everystep.processors.pipeline import apply
from everystep.requests.door import Arguments
from everystep.requests.prepare import Call
from everystep.requests.subject import Subject
from everystep.stops.criteria import by_hand
from everystep.types import Request, Rows, Scores, Sequence, TokenTable

Loop = Callable[..., object]


def require_loop(value: object) -> Loop:
    """Return the caller's loop; UnsupportedError for the name of a repository."""
    if callable(value):
        return value
    raise UnsupportedError(
        "custom_generate names code to be fetched and run, which this library never does",
        wanted="a function of (model, input_ids, logits_processor, stopping_criteria, "
        "generation_config, **inputs)",
        got=shown(value),
        do="Import the function yourself and pass it; contrastive search is built in: set "
        "penalty_alpha and top_k",
    )


def names_of(loop: Loop) -> tuple[str, ...]:
    """Return the names of what the loop takes beside the model and its ids."""
    try:
        return tuple(inspect.signature(loop).parameters)[2:]
    except (TypeError, ValueError) as error:
        what = "the arguments of custom_generate are not known"
        do = "Pass a function of (model, input_ids, ...)"
        raise RequestError(what, wanted="a function of Python", got=shown(loop), do=do) from error


def run_loop(subject: Subject, call: Call, loop: Loop, given: Arguments) -> object:
    """Return what the caller's loop makes of the call; it has its model already, and fills the
    call's cache, if there is one."""
    e = call.options.effective
    width = int(max(e.num_beams or 1, e.num_return_sequences or 1))
    rows = [request for request in call.requests for _ in range(width)]
    ids = torch.from_numpy(call.inputs.table(call.options.ends.fill)).repeat_interleave(
        width, dim=0
    )
    named, beside = inspect.signature(loop).parameters, given.beside
    offered: dict[str, Any] = {"streamer": beside.streamer, "tokenizer": beside.tokenizer}
    offered = {n: one for n, one in offered.items() if n in named and one is not None}
    if "streamer" in offered:
        offered["streamer"].put(ids)
    cached: dict[str, object] = {"use_cache": call.cache is not None}
    if call.cache is not None:
        passed = given.prompt.past_key_values
        cached["past_key_values"] = subject.core.returned_cache(call.cache, passed)
    return loop(
        ids.to(subject.device),
        logits_processor=_processors(rows),
        stopping_criteria=by_hand(rows[0].stops),
        generation_config=_config(call),
        **_inputs(call, width),
        **cached,
        **offered,
        **beside.of_loop,
    )


def refuse_unseen(call: Call) -> None:
    """Refuse options that a loop outside the engine would never see."""
    for name, asked in (
        ("guidance_scale", call.options.effective.guidance_scale not in (None, 1)),
        ("an encoder", call.inputs.source is not None),
        ("seed", call.options.seed is not None),
        ("a mask inside the prompt", any(one.mask is not None for one in call.inputs.prompts)),
        ("named inputs", any(one.inputs or one.whole for one in call.inputs.prompts)),
        ("prompt inputs", bool(call.inputs.values) or any(call.inputs.pictures)),
        ("prefix", call.options.prefix is not None),
        ("hooks", bool(call.options.steering.hooks)),
        ("amateur_model", call.options.choosing.contrast is not None),
        ("n_best", call.options.choosing.n_best is not None),
        ("best_of", call.options.choosing.best_of is not None),
        ("strategy", call.options.choosing.strategy is not None),
    ):
        if asked:
            raise UnsupportedError(
                f"custom_generate does not go with {name}",
                wanted="a loop over the model's own logits and draws",
                got=name,
                do="Leave one of the two out",
            )


def _processors(requests: list[Request]) -> LogitsProcessorList:
    """Return a list to which a loop may add: one processor that runs all of the call, or none."""
    asked = any(one.processors for one in requests)
    return LogitsProcessorList([partial(_process, requests)] if asked else [])


def _process(requests: list[Request], input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return (R, V) scores after all processors of a call, from (R, T) ids and (R, V) scores; a
    request per row."""
    ids = input_ids.cpu().numpy()
    table = TokenTable(lines=len(ids), capacity=max(ids.shape[1], 1))
    sequences = [
        Sequence(request, table.open(row), length=len(row) - request.shift, index=index)
        for index, (request, row) in enumerate(zip(requests, ids, strict=True))
    ]
    lengths = np.full(len(ids), ids.shape[1])
    return apply(Rows(table, sequences, lengths), Scores.of(scores)).whole().values


def _inputs(call: Call, width: int) -> dict[str, Tensor]:
    """Return the mask, and embeddings and positions if they were given, padded on the left."""
    inputs = call.inputs
    gaps = [inputs.prompt_width - (p.length - p.before) for p in inputs.prompts]
    mask = torch.zeros(inputs.batch, inputs.total_width, dtype=torch.int64)
    for row in range(inputs.batch):
        mask[row, inputs.places(row)] = 1
    found = {"attention_mask": mask}
    embeds = [
        F.pad(p.embeds, (0, 0, gap, 0))
        for p, gap in zip(inputs.prompts, gaps, strict=True)
        if p.embeds is not None
    ]
    places = [
        F.pad(p.positions[..., p.before : p.length], (gap, 0))
        for p, gap in zip(inputs.prompts, gaps, strict=True)
        if p.positions is not None
    ]
    if embeds:
        found["inputs_embeds"] = torch.stack(embeds)
    found = {name: value.repeat_interleave(width, dim=0) for name, value in found.items()}
    if places:
        found["position_ids"] = torch.stack(places, dim=-2).repeat_interleave(width, dim=-2)
    return found


def _config(call: Call) -> GenerationConfig:
    """Return every value that holds, with the special ids as tensors beside it, as loops expect
    them."""
    values = {name: value for name, value in call.options.effective.items() if value is not None}
    visible = call.options.effective.max_length - call.inputs.embeds_width
    config = GenerationConfig(**{**values, "max_length": visible})
    tensors = {
        "_eos_token_tensor": call.options.ends.eos or None,
        "_pad_token_tensor": call.options.ends.pad,
        "_bos_token_tensor": call.options.effective.bos_token_id,
    }
    for name, ids in tensors.items():
        config.extra[name] = None if ids is None else torch.tensor(ids)
    return config
