"""Token healing: the last token of a prompt is chosen anew among those that continue its text.

A text that ends in the middle of what the tokenizer would make one token, as "http:" does before
"//", leaves the model in a place that it has hardly seen. So the last token is taken back, and the
model chooses among all tokens whose spelling begins with it, the old one slightly preferred. White
space at the end of the prompt is taken off first. Source: `heal_tokens` of transformers 5.23.0;
here the begin token and other special ids of a prompt stay where they are, and are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from everystep.config import GenerationConfig
from everystep.drivers.driver import Driver, finished
from everystep.engine import Engine, Lockstep
from everystep.engine.decided import results_of
from everystep.requests.door import Arguments, Objects, PromptValues
from everystep.requests.inputs import Inputs
from everystep.requests.options import Options
from everystep.requests.prepare import prepare
from everystep.requests.reading import read_options
from everystep.requests.rectangles import read_inputs
from everystep.requests.subject import Subject
from everystep.types import Prompt

# What transformers adds to the score of each token that may stand last, and to the old one's more.
CONTINUES = 10.0
STAYS = 1.0


def healed(model: Subject, inputs: Inputs, options: Options) -> Inputs:
    """Return the prompts with their last tokens chosen anew by the model, padded on the left."""
    known = options.tokenizer.get_vocab()
    vocabulary = {piece: token for piece, token in known.items() if token < model.vocab_size}
    read = [prompt.ids.tolist() for prompt in inputs.prompts if prompt.ids is not None]
    stripped = [_stripped(ids, options.tokenizer) for ids in read]
    rows = [_healed_row(model, ids, vocabulary, options.ends.fill) for ids in stripped]
    width = max(len(row) for row in rows)
    pads = tuple(width - len(row) for row in rows)
    prompts = tuple(Prompt(ids=np.array(row)) for row in rows)
    return replace(inputs, prompts=prompts, margins=pads, firsts=pads, width=width, fills=())


def _stripped(ids: list[int], tokenizer: Any) -> list[int]:
    """Return the ids without white space at the end of their text, encoded anew where there was
    some."""
    special = set(tokenizer.all_special_ids)
    start = next((i + 1 for i in range(len(ids) - 1, -1, -1) if ids[i] in special), 0)
    text = tokenizer.decode(ids[start:])
    if text == text.rstrip() or not text.strip():
        return ids
    return [*ids[:start], *tokenizer.encode(text.rstrip(), add_special_tokens=False)]


def _healed_row(model: Subject, ids: list[int], vocabulary: dict[str, int], pad: int) -> list[int]:
    bias = _continuations(ids[-1], vocabulary)
    if len(ids) == 1 or len(bias) < 2:
        return ids
    start = torch.tensor([ids[:-1]])
    config = GenerationConfig(max_new_tokens=1, pad_token_id=pad, sequence_bias=bias)
    asked = Arguments({"token_healing": False}, Objects(generation_config=config))
    given = PromptValues(input_ids=start, attention_mask=torch.ones_like(start))
    options = read_options(model, asked, None)
    (request,) = prepare(model, options, read_inputs(model, given, options.ends)).requests
    (group,) = finished(Driver(Engine(model.executor(request.needs), Lockstep())), (request,))
    return [*ids[:-1], *results_of(group)[0].tokens.tolist()]


def _continuations(last: int, vocabulary: dict[str, int]) -> dict[tuple[int, ...], float]:
    """Return the bias of every token whose spelling begins with that of `last`."""
    spelling = next((piece for piece, token in vocabulary.items() if token == last), None)
    if spelling is None:
        return {}
    found: dict[tuple[int, ...], float] = {
        (token,): CONTINUES for piece, token in vocabulary.items() if piece.startswith(spelling)
    }
    return {**found, (last,): CONTINUES + STAYS}
