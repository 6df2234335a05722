"""`custom_generate`: a decoding loop of the caller's in the place of the engine's.

The loop has transformers' contract. It is called as

    loop(model, input_ids, logits_processor=, stopping_criteria=, generation_config=, **inputs)

after everything about the call was checked, and what it returns is returned. `input_ids` (R, T) is
padded on the left and has a row for every beam or returned sequence. Both callables take
`(input_ids, scores)`. `inputs` holds `attention_mask` (R, T), `use_cache` and, unless that is
False, `past_key_values`: the cache that was passed, or an empty one of the chosen kind. The loop
decides what it feeds to `model(...)`, which adds to that cache. Keywords that only the loop names
are passed on to it.
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
from everystep.processors.pipeline import apply
from everystep.requests.options import MODEL_INPUTS, OBJECTS, OF_RECTANGLES
from everystep.requests.prepare import Call
from everystep.stops.criteria import by_hand
from everystep.types import Request, Rows, Scores, Sequence, TokenTable

Loop = Callable[..., Any]
_OFFERED = ("streamer", "tokenizer")


def require_loop(value: Any) -> Loop | None:
    """The caller's loop, if any; UnsupportedError for the name of a repository."""
    if value is None or callable(value):
        return value
    raise UnsupportedError(
        "custom_generate names code to be fetched and run, which this library never does",
        wanted="a function of (model, input_ids, logits_processor, stopping_criteria, "
        "generation_config, **inputs)",
        got=shown(value),
        do="Import the function yourself and pass it; contrastive search is built in: set "
        "penalty_alpha and top_k",
    )


def take_own(loop: Loop, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes out of `kwargs` what the loop names and no other loop has, and returns it."""
    try:
        named = list(inspect.signature(loop).parameters)[2:]
    except (TypeError, ValueError) as error:
        what = "the arguments of custom_generate are not known"
        do = "Pass a function of (model, input_ids, ...)"
        raise RequestError(what, wanted="a function of Python", got=shown(loop), do=do) from error
    known = {*MODEL_INPUTS, *OBJECTS, *OF_RECTANGLES}
    return {name: kwargs.pop(name) for name in named if name in kwargs and name not in known}


def run_loop(model: Any, call: Call, given: dict[str, Any], own: dict[str, Any]) -> Any:
    """What the caller's loop makes of the call; it fills the call's cache, if there is one."""
    loop: Loop = given["custom_generate"]
    e = call.options.effective
    width = int(max(e.num_beams or 1, e.num_return_sequences or 1))
    rows = [request for request in call.requests for _ in range(width)]
    ids = torch.from_numpy(call.inputs.table(call.options.fill)).repeat_interleave(width, dim=0)
    named = inspect.signature(loop).parameters
    offered = {n: given[n] for n in _OFFERED if n in named and given.get(n) is not None}
    if "streamer" in offered:
        offered["streamer"].put(ids)
    cached: dict[str, Any] = {"use_cache": call.cache is not None}
    if call.cache is not None:
        passed = given.get("past_key_values")
        cached["past_key_values"] = model.core.returned_cache(call.cache, passed)
    return loop(
        model,
        ids.to(model.device),
        logits_processor=partial(_process, rows),
        stopping_criteria=by_hand(rows[0].stops),
        generation_config=_config(call),
        **_inputs(call, width),
        **cached,
        **offered,
        **own,
    )


def refuse_unseen(call: Call) -> None:
    """UnsupportedError for options that a loop outside the engine would never see."""
    for name, asked in (
        ("guidance_scale", call.options.effective.guidance_scale not in (None, 1)),
        ("an encoder", call.inputs.source is not None),
        ("seed", call.options.seed is not None),
        ("a mask inside the prompt", any(one.mask is not None for one in call.inputs.prompts)),
        ("named inputs", any(one.inputs or one.whole for one in call.inputs.prompts)),
        ("prompt inputs", bool(call.inputs.values) or any(call.inputs.pictures)),
        ("prefix", call.options.prefix is not None),
        ("hooks", bool(call.options.hooks)),
        ("amateur_model", call.options.contrast is not None),
        ("n_best", call.options.n_best is not None),
        ("best_of", call.options.best_of is not None),
        ("strategy", call.options.strategy is not None),
    ):
        if asked:
            raise UnsupportedError(
                f"custom_generate does not go with {name}",
                wanted="a loop over the model's own logits and draws",
                got=name,
                do="Leave one of the two out",
            )


def _process(requests: list[Request], input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
    """All processors of a call: (R, T) ids and (R, V) scores -> (R, V) scores; a request per
    row."""
    ids = input_ids.cpu().numpy()
    table = TokenTable(lines=len(ids), capacity=max(ids.shape[1], 1))
    sequences = [
        Sequence(request, table.open(row), length=len(row) - request.shift, index=index)
        for index, (request, row) in enumerate(zip(requests, ids, strict=True))
    ]
    lengths = np.full(len(ids), ids.shape[1])
    return apply(Rows(table, sequences, lengths), Scores.of(scores)).whole().values


def _inputs(call: Call, width: int) -> dict[str, Tensor]:
    """The mask, and embeddings and positions if they were given, padded on the left."""
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
    """Every value that holds, with the special ids as tensors beside it, as loops expect them."""
    values = {name: value for name, value in call.options.effective.items() if value is not None}
    visible = call.options.effective.max_length - call.inputs.embeds_width
    config = GenerationConfig(**{**values, "max_length": visible})
    tensors = {
        "_eos_token_tensor": call.options.eos or None,
        "_pad_token_tensor": call.options.pad,
        "_bos_token_tensor": call.options.effective.bos_token_id,
    }
    found: dict[str, Any] = {
        name: None if ids is None else torch.tensor(ids) for name, ids in tensors.items()
    }
    config.update(allow_custom_entries=True, **found)
    return config
