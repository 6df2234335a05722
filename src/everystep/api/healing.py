"""Token healing: the last token of a prompt is chosen anew among those that continue its text.

A text that ends in the middle of what the tokenizer would make one token, as "http:" does before
"//", leaves the model in a place that it has hardly seen. So the last token is taken back, and the
model chooses among all tokens whose spelling begins with it, the old one slightly preferred. White
space at the end of the prompt is taken off first. Source: `heal_tokens` of transformers 5.23.0;
here the begin token and other special ids of a prompt stay where they are, and are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from everystep.api.inputs import Inputs
from everystep.api.options import Options
from everystep.config import GenerationConfig
from everystep.errors import RequestError
from everystep.types import Prompt

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel

# What transformers adds to the score of each token that may stand last, and to the old one's more.
CONTINUES = 10.0
STAYS = 1.0


def healed(model: LanguageModel, inputs: Inputs, options: Options) -> Inputs:
    """The prompts with their last tokens chosen anew by the model, padded on the left."""
    known = options.tokenizer.get_vocab()
    vocabulary = {piece: token for piece, token in known.items() if token < model.vocab_size}
    read = [prompt.ids.tolist() for prompt in inputs.prompts if prompt.ids is not None]
    stripped = [_stripped(ids, options.tokenizer) for ids in read]
    rows = [_healed_row(model, ids, vocabulary, options.fill) for ids in stripped]
    width = max(len(row) for row in rows)
    pads = tuple(width - len(row) for row in rows)
    prompts = tuple(Prompt(ids=np.array(row)) for row in rows)
    return replace(inputs, prompts=prompts, margins=pads, firsts=pads, width=width, fills=())


def require_healable(inputs: Inputs, options: Options) -> None:
    """RequestError unless these prompts are text of a tokenizer whose vocabulary can be read."""
    tokenizer = options.tokenizer
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise RequestError(
            "token_healing needs a tokenizer",
            wanted="tokenizer=...",
            got="none" if tokenizer is None else type(tokenizer).__name__,
            do="Pass tokenizer=tokenizer to generate",
        )
    prompts = inputs.prompts
    for name, given in (
        ("an encoder", inputs.source is not None),
        ("inputs_embeds", any(prompt.embeds is not None for prompt in prompts)),
        ("position_ids", inputs.place is not None or any(p.positions is not None for p in prompts)),
        ("a mask inside the prompt", any(prompt.mask is not None for prompt in prompts)),
        (
            "named inputs",
            bool(inputs.values)
            or any(inputs.pictures)
            or any(p.inputs or p.whole for p in prompts),
        ),
    ):
        if given:
            raise RequestError(
                f"token_healing does not go with {name}",
                wanted="a prompt given as input_ids alone",
                got=name,
                do=f"Leave token_healing or {name} out",
            )


def _stripped(ids: list[int], tokenizer: Any) -> list[int]:
    """The ids without white space at the end of their text, encoded anew where there was some."""
    special = set(tokenizer.all_special_ids)
    start = next((i + 1 for i in range(len(ids) - 1, -1, -1) if ids[i] in special), 0)
    text = tokenizer.decode(ids[start:])
    if text == text.rstrip() or not text.strip():
        return ids
    return [*ids[:start], *tokenizer.encode(text.rstrip(), add_special_tokens=False)]


def _healed_row(
    model: LanguageModel, ids: list[int], vocabulary: dict[str, int], pad: int
) -> list[int]:
    bias = _continuations(ids[-1], vocabulary)
    if len(ids) == 1 or len(bias) < 2:
        return ids
    config = GenerationConfig(max_new_tokens=1, pad_token_id=pad, sequence_bias=bias)
    start = torch.tensor([ids[:-1]])
    mask = torch.ones_like(start)
    chosen = model.generate(start, config, attention_mask=mask, token_healing=False)
    return [int(token) for token in chosen[0]]


def _continuations(last: int, vocabulary: dict[str, int]) -> dict[tuple[int, ...], float]:
    """The bias of every token whose spelling begins with that of `last`."""
    spelling = next((piece for piece, token in vocabulary.items() if token == last), None)
    if spelling is None:
        return {}
    found: dict[tuple[int, ...], float] = {
        (token,): CONTINUES for piece, token in vocabulary.items() if piece.startswith(spelling)
    }
    return {**found, (last,): CONTINUES + STAYS}
