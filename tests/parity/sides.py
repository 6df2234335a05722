"""Running a draw on either side: what is passed, what comes back, what was refused."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from everystep.config import GenerationConfig
from tests.parity.defects import met
from tests.parity.draws import Draw
from tests.parity.models import CATALOGUE, fresh_reference, pair, subject
from tests.parity.parts import CRITERIA, PROCESSORS, allowed_tokens

transformers.logging.set_verbosity(logging.CRITICAL)

# Either side's way of saying no; anything else is a defect and is not caught.
REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError, IndexError, KeyError)


@dataclass(frozen=True, eq=False)
class Outcome:
    """A result, or the error that stood in its place."""

    result: Any = None
    error: Exception | None = None


Side = Callable[[Draw], Outcome]


def reference(draw: Draw) -> Outcome:
    """The reference on the left-padded prompts, asked around its known defects."""
    defects = met(draw)
    for defect in defects:
        draw = defect.ask(draw)
    answer = plain_reference(draw)
    for defect in defects:
        answer = answer if answer.result is None else Outcome(defect.read(answer.result))
    return answer


def plain_reference(draw: Draw) -> Outcome:
    """The reference on the left-padded prompts, as it is."""

    def call() -> Any:
        given = arguments(draw, "left", transformers.GenerationConfig)
        processors = transformers.LogitsProcessorList(given.pop("logits_processor"))
        criteria = transformers.StoppingCriteriaList(given.pop("stopping_criteria"))
        model = fresh_reference(draw.model)
        return model.generate(logits_processor=processors, stopping_criteria=criteria, **given)

    return _run(call, draw.seed)


def ours(draw: Draw) -> Outcome:
    """This library on the same prompts, padded on the draw's side."""

    def call() -> Any:
        return subject(draw.model).generate(**arguments(draw, draw.padding, GenerationConfig))

    return _run(call, draw.seed)


def arguments(draw: Draw, padding: Literal["left", "right"], config: type) -> dict[str, Any]:
    """The call's keyword arguments; objects of the caller are new ones each time."""
    ids, mask = rectangle(draw, padding)
    settings = dict(draw.settings)
    given: dict[str, Any] = {"attention_mask": mask} if draw.masked or draw.embedded else {}
    given |= {"inputs_embeds": embeddings(draw, ids)} if draw.embedded else {"input_ids": ids}
    if (negative := settings.pop("negative_prompt_ids", None)) is not None:
        given["negative_prompt_ids"] = torch.tensor(negative)
        given["negative_prompt_attention_mask"] = torch.ones_like(given["negative_prompt_ids"])
    given |= {"generation_config": config(**settings)} if draw.as_config else settings
    given["logits_processor"] = [PROCESSORS[name]() for name in draw.processors]
    given["stopping_criteria"] = [CRITERIA[name]() for name in draw.criteria]
    if draw.prefix:
        given["prefix_allowed_tokens_fn"] = allowed_tokens(CATALOGUE[draw.model].vocabulary)
    return given


def rectangle(draw: Draw, padding: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Ids and mask of the prompts, (batch, width) each."""
    width = draw.shape.width
    ids = torch.full((len(draw.prompts), width), draw.fill)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(draw.prompts):
        first = width - len(prompt) if padding == "left" else 0
        ids[row, first : first + len(prompt)] = torch.tensor(prompt)
        mask[row, first : first + len(prompt)] = 1
    return ids, mask


def embeddings(draw: Draw, ids: Tensor) -> Tensor:
    """What the model itself would look up for these ids."""
    table: Tensor = pair(draw.model).weights["model.embed_tokens.weight"]
    return table[ids]


def _run(call: Callable[[], Any], seed: int) -> Outcome:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            return Outcome(call())
        except REFUSALS as error:
            return Outcome(error=error)
