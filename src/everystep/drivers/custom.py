"""`custom_generate`: a decoding loop of the caller's in the place of the engine's.

The loop has transformers' contract. It is called as

    loop(model, input_ids, logits_processor=, stopping_criteria=, generation_config=, **inputs)

after everything about the call was checked, and what it returns is returned. `input_ids` (R, T) is
padded on the left and has a row for every beam or returned sequence. Both callables take
`(input_ids, scores)`, and are lists to which the loop may add. `inputs` holds `attention_mask`
(R, T), `use_cache` and, unless that is False, `past_key_values`: the cache that was passed, or an
empty one of the chosen kind. Of a model with an encoder `input_ids` are the decoder's, and
`encoder_outputs` stand beside them, with the mask of what they are of. The loop decides what it
feeds to `model(...)`, which adds to that cache. Keywords that only the loop names are passed on to
it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.config import GenerationConfig
from everystep.engine import Guidance
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.outputs import EncoderOutput
from everystep.processors.base import LogitsProcessorList
from everystep.processors.guidance import LoopGuidance
from everystep.processors.pipeline import apply
from everystep.requests.door import Arguments
from everystep.requests.prepare import Call
from everystep.requests.subject import Subject
from everystep.stops.criteria import by_hand
from everystep.types import Request, Rows, Scores, Sequence, TokenTable
from everystep.types.sources import EncoderSource


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A loop of the caller's, with the model that it is called with."""

    function: Callable[..., object]
    model: Any

    @classmethod
    def of(cls, value: object, model: Any) -> Loop:
        """Return the caller's loop; UnsupportedError for the name of a repository."""
        if callable(value):
            return cls(value, model)
        raise UnsupportedError(
            "custom_generate names code to be fetched and run, which this library never does",
            wanted="a function of (model, input_ids, logits_processor, stopping_criteria, "
            "generation_config, **inputs)",
            got=shown(value),
            do="Import the function yourself and pass it; contrastive search is built in: set "
            "penalty_alpha and top_k",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what it takes beside the model and its ids."""
        try:
            return tuple(inspect.signature(self.function).parameters)[2:]
        except (TypeError, ValueError) as error:
            what = "the arguments of custom_generate are not known"
            wanted, got = "a function of Python", shown(self.function)
            do = "Pass a function of (model, input_ids, ...)"
            raise RequestError(what, wanted=wanted, got=got, do=do) from error


def run_loop(subject: Subject, call: Call, loop: Loop, given: Arguments) -> object:
    """Return what the caller's loop makes of the call, whose cache it fills, if there is one."""
    e = call.options.effective
    width = int(max(e.num_beams or 1, e.num_return_sequences or 1))
    rows = [request for request in call.requests for _ in range(width)]
    ids = torch.from_numpy(call.inputs.table(call.options.ends.fill)).repeat_interleave(
        width, dim=0
    )
    beside, named = given.beside, loop.names
    offered: dict[str, Any] = {"streamer": beside.streamer, "tokenizer": beside.tokenizer}
    offered["seed"] = call.options.seed
    offered = {n: one for n, one in offered.items() if n in named and one is not None}
    if "streamer" in offered:
        offered["streamer"].put(ids)
    cached: dict[str, object] = {"use_cache": call.cache is not None}
    if call.cache is not None:
        passed = given.prompt.past_key_values
        cached["past_key_values"] = subject.core.returned_cache(call.cache, passed)
    inputs = _inputs(call, width)
    processors = LogitsProcessorList(
        [*_guidance(loop.model, rows, inputs, ids.shape[1]), *_processors(rows)]
    )
    with _drawn(None if "seed" in offered else call.options.seed):
        return loop.function(
            loop.model,
            ids.to(subject.device),
            logits_processor=processors,
            stopping_criteria=by_hand(rows[0].stops),
            generation_config=_config(call, subject.device),
            **inputs,
            **cached,
            **offered,
            **beside.of_loop,
        )


def refuse_unseen(call: Call, loop: Loop) -> None:
    """Refuse options that a loop outside the engine would never see."""
    seed = call.options.seed
    if seed is not None and "seed" not in loop.names and not isinstance(seed, int):
        raise UnsupportedError(
            "a loop of custom_generate draws for all of its rows, and has one seed",
            wanted="one seed, or a loop with a parameter of that name, which draws by itself",
            got=shown(seed),
            do="Pass one seed, or call generate once for each prompt",
        )
    for name, asked in (
        ("a length for each row", isinstance(call.options.effective.max_new_tokens, list)),
        ("a mask inside the prompt", any(one.mask is not None for one in call.inputs.prompts)),
        ("named inputs", any(one.inputs or one.whole for one in call.inputs.prompts)),
        ("prompt inputs", bool(call.inputs.values) or any(call.inputs.pictures)),
        ("prefix", call.options.prefix is not None),
        ("hooks", bool(call.options.steering.hooks)),
        ("record", call.options.record is not None),
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


@contextmanager
def _drawn(seed: object) -> Iterator[None]:
    """Let torch's generators begin from the seed, and be as they were afterwards; None: as they
    are."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(int(seed) % 2**64)  # type: ignore[call-overload]
        yield


def _guidance(
    model: Any, requests: list[Request], inputs: Mapping[str, object], length: int
) -> Iterator[LoopGuidance]:
    """Yield what guides away from the rows' negative prompts, where that is asked for."""
    readout = requests[0].readout
    if not isinstance(readout, Guidance):
        return
    lines = [one.companions[0].ids.tolist() for one in requests]  # type: ignore[union-attr]
    most = max(map(len, lines))
    ids = torch.tensor([[0] * (most - len(line)) + line for line in lines])
    real = torch.tensor([[0] * (most - len(line)) + [1] * len(line) for line in lines])
    encoder: dict[str, Any] = {}
    if "encoder_outputs" in inputs:
        encoder = {n: inputs[n] for n in ("encoder_outputs", "attention_mask") if n in inputs}
    yield LoopGuidance(readout.scale, partial(_read, model, encoder), ids, real, length)


def _read(model: Any, encoder: Mapping[str, object], ids: Tensor, real: Tensor, cache: Any) -> Any:
    """Return what a model makes of (R, T) ids after those of a cache, beside what its `encoder`
    made; `real` (R, S + T): what is no padding of all."""
    ids, real = ids.to(model.device), real.to(model.device)
    if encoder:
        beside = {"decoder_attention_mask": real, **encoder}
        return model(decoder_input_ids=ids, past_key_values=cache, **beside)
    places: dict[str, Tensor] = {}
    if model.core.has_positions and not bool(real.all()):
        places["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(input_ids=ids, attention_mask=real, past_key_values=cache, **places)


def _processors(requests: list[Request]) -> list[Callable[..., Tensor]]:
    """Return one processor that runs all of the call, or none."""
    return [partial(_process, requests)] if any(one.processors for one in requests) else []


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


def _inputs(call: Call, width: int) -> dict[str, Any]:
    """Return masks, and what was given beside ids, padded on the left: embeddings and positions,
    or what the encoder made; `width` rows for each prompt."""
    inputs, found = call.inputs, dict[str, Any]()
    gaps = [inputs.prompt_width - (p.length - p.before) for p in inputs.prompts]
    mask = torch.zeros(inputs.batch, inputs.total_width, dtype=torch.int64)
    for row in range(inputs.batch):
        mask[row, inputs.places(row)] = 1
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
    if inputs.source is None:
        found["attention_mask"] = mask
    else:
        states = [request.prompt.encoder for request in call.requests]
        found |= _encoded(inputs.source, [one for one in states if one is not None])
        found |= {} if bool(mask.all()) else {"decoder_attention_mask": mask}
    found = {name: value.repeat_interleave(width, dim=0) for name, value in found.items()}
    if inputs.source is not None:
        found["encoder_outputs"] = EncoderOutput(found["encoder_outputs"])
    if places:
        found["position_ids"] = torch.stack(places, dim=-2).repeat_interleave(width, dim=-2)
    return found


def _encoded(source: EncoderSource, states: list[Tensor]) -> dict[str, Tensor]:
    """Return the states of the rows, (S, E) each, in the rectangle (B, S, E) that was passed, and
    the mask of it where the encoder reads one."""
    width = source.width or max(int(places[-1]) + 1 for places in source.places)
    whole = states[0].new_zeros(len(states), width, states[0].shape[-1])
    mask = torch.zeros(len(states), width, dtype=torch.int64)
    for row, (places, own) in enumerate(zip(source.places, states, strict=True)):
        whole[row, torch.from_numpy(places).to(own.device)], mask[row, places] = own, 1
    shown = {"encoder_outputs": whole}
    return shown if bool(mask.all()) and not source.ids else {**shown, "attention_mask": mask}


def _config(call: Call, device: torch.device) -> GenerationConfig:
    """Return every value that holds, with the special ids as tensors beside it, as loops expect
    them."""
    e, ends = call.options.effective, call.options.ends
    values = {name: value for name, value in e.items() if value is not None}
    visible = e.max_length - call.inputs.embeds_width
    config = GenerationConfig(**{**values, "max_length": visible})
    start = e.decoder_start_token_id
    if start is None and call.inputs.source is not None:
        start = e.bos_token_id
    tensors = {
        "_eos_token_tensor": ends.eos or None,
        "_pad_token_tensor": ends.pad,
        "_bos_token_tensor": e.bos_token_id,
        "_decoder_start_token_tensor": start,
    }
    for name, ids in tensors.items():
        config.extra[name] = None if ids is None else torch.tensor(ids, device=device)
    return config
