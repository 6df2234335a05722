"""Known defects of transformers, and how it has to be asked to give the right answer.

Each is a heading of docs/parity.md and has a test of this library's behaviour there. A draw that
would run into one is put to transformers in another form that means the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.parity.draws import Draw
from tests.parity.models import TINIES, pair
from tests.parity.text import their_tokenizer

# An id that no tiny model can generate.
OUTSIDE = 10_000


def _same(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Defect:
    """`heading`: in docs/parity.md. `ask`: the draw in the form that transformers answers right.
    `read`: its answer, as an answer to the draw itself."""

    heading: str
    applies: Callable[[Draw], bool]
    ask: Callable[[Draw], Draw]
    read: Callable[[Any], Any] = _same


def met(draw: Draw) -> tuple[Defect, ...]:
    """The defects that a draw would run into."""
    return tuple(defect for defect in DEFECTS if defect.applies(draw))


def without(draw: Draw, *names: str, **changes: Any) -> Draw:
    """The draw without some settings, and with others."""
    kept = {name: value for name, value in draw.settings.items() if name not in names}
    return replace(draw, settings=kept | changes)


def wants_layers(draw: Draw) -> bool:
    """Whether hidden states or attentions are part of the result."""
    names = ("output_hidden_states", "output_attentions")
    return any(draw.settings.get(name) for name in names)


def _filled_with_zero(draw: Draw) -> bool:
    return draw.shape.beamed and draw.settings.get("pad_token_id") == 0 and bool(draw.shape.eos)


def _fill_outside(draw: Draw) -> Draw:
    return replace(without(draw, pad_token_id=OUTSIDE), masked=True)


def _outside_as_zero(result: Any) -> Any:
    sequences: Tensor = result if isinstance(result, Tensor) else result.sequences
    sequences[sequences == OUTSIDE] = 0
    return result


def _drafted_layers(draw: Draw) -> bool:
    return draw.shape.looks_up and wants_layers(draw)


def _drafted_stops(draw: Draw) -> bool:
    stops = bool(draw.criteria) or not {"stop_strings", "max_time"}.isdisjoint(draw.settings)
    return draw.shape.looks_up and stops


def _unbounded(draw: Draw) -> bool:
    given = {"max_new_tokens", "max_length"} & set(draw.settings)
    return draw.embedded and not draw.shape.encodes and not given


def _bounded(draw: Draw) -> Draw:
    context = TINIES[draw.model].context or draw.span + 20
    return without(draw, max_new_tokens=min(20, context - draw.span))


def _undrafted(draw: Draw) -> Draw:
    return without(draw, "prompt_lookup_num_tokens", "max_matching_ngram_size")


def _drafted_again(draw: Draw) -> bool:
    return draw.shape.looks_up and draw.earlier is not None and not draw.earlier.apart


def _chunked_layers(draw: Draw) -> bool:
    return "prefill_chunk_size" in draw.settings and wants_layers(draw)


def _chunked_decoder(draw: Draw) -> bool:
    return draw.shape.encodes and "prefill_chunk_size" in draw.settings


def _whole(draw: Draw) -> Draw:
    return without(draw, "prefill_chunk_size")


def _guided_alike(draw: Draw) -> bool:
    given = draw.settings
    return "negative_prompt_ids" in given and given.get("num_return_sequences", 1) > 1


def _repeat_negative(draw: Draw) -> Draw:
    given, times = draw.settings["negative_prompt_ids"], draw.settings["num_return_sequences"]
    return without(draw, negative_prompt_ids=[ids for ids in given for _ in range(times)])


def _written(draw: Draw) -> bool:
    return "WritesInPlace" in draw.processors and bool(draw.settings.get("output_logits"))


def _write_copies(draw: Draw) -> Draw:
    names = ("Writes" if name == "WritesInPlace" else name for name in draw.processors)
    return replace(draw, processors=tuple(names))


def _guessed(draw: Draw) -> bool:
    return draw.shape.encodes and draw.ragged and not draw.masked


def _begins_padded(draw: Draw) -> bool:
    return draw.unsaid and draw.settings.get("pad_token_id") == draw.settings["bos_token_id"]


def _mask(draw: Draw) -> Draw:
    return replace(draw, masked=True)


def _read_unhealed(draw: Draw) -> bool:
    reads = {"encoder_repetition_penalty", "encoder_no_repeat_ngram_size"}
    return "token_healing" in draw.settings and not reads.isdisjoint(draw.settings)


def _heal_first(draw: Draw) -> Draw:
    ids, tokenizer = torch.tensor(draw.prompts), their_tokenizer(draw.shape.vocabulary)
    healed = pair(draw.model).reference.heal_tokens(ids, tokenizer)
    return replace(without(draw, "token_healing"), prompts=tuple(map(tuple, healed.tolist())))


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "Padding with the token 0 after beams", _filled_with_zero, _fill_outside, _outside_as_zero
    ),
    Defect("Layer outputs of drafted tokens", _drafted_layers, _undrafted),
    Defect("Criteria within a draft", _drafted_stops, _undrafted),
    Defect("The default length after embeddings", _unbounded, _bounded),
    Defect("Layer outputs of chunked prompts", _chunked_layers, _whole),
    Defect("Negative prompts of several sequences", _guided_alike, _repeat_negative),
    Defect("Raw logits that a processor wrote into", _written, _write_copies),
    Defect("Padding of an encoder without a mask", _guessed, _mask),
    Defect("A begin token that is the pad token", _begins_padded, _mask),
    Defect("Chunked prompts of a decoder behind an encoder", _chunked_decoder, _whole),
    Defect("Whole prompts with drafts behind a cache", _drafted_again, _undrafted),
    Defect("Penalties on what was healed away", _read_unhealed, _heal_first),
)
