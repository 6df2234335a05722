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

from everystep import config as own
from tests.parity.defects import met
from tests.parity.draws import Draw, Earlier
from tests.parity.models import fresh_reference, pair, subject
from tests.parity.parts import CRITERIA, PROCESSORS, allowed_tokens, only
from tests.parity.text import own_tokenizer, their_tokenizer

transformers.logging.set_verbosity(logging.CRITICAL)

# Either side's way of saying no; anything else is a defect and is not caught.
REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError, IndexError, KeyError)
# What static caches of earlier calls have room for.
ROOM = 80
# What is read as text.
SPELLED = {"stop_strings", "token_healing"}


@dataclass(frozen=True, eq=False)
class Outcome:
    """A result, or the error that stood in its place."""

    result: Any = None
    error: Exception | None = None


Side = Callable[[Draw], Outcome]


def reference(draw: Draw) -> Outcome:
    """transformers on the left-padded prompts, asked around its known defects."""
    defects = met(draw)
    for defect in defects:
        draw = defect.ask(draw)
    answer = plain_reference(draw)
    for defect in defects:
        answer = answer if answer.result is None else Outcome(defect.read(answer.result))
    return answer


def plain_reference(draw: Draw) -> Outcome:
    """transformers on the left-padded prompts, as it is."""

    def call() -> Any:
        model = fresh_reference(draw.model)
        # An encoder that is told of its padding takes it on either side.
        padding = draw.padding if draw.shape.encodes else "left"
        given = arguments(draw, padding, transformers, model)
        processors = transformers.LogitsProcessorList(given.pop("logits_processor"))
        criteria = transformers.StoppingCriteriaList(given.pop("stopping_criteria"))
        return model.generate(logits_processor=processors, stopping_criteria=criteria, **given)

    return _run(call, draw.seed)


def ours(draw: Draw) -> Outcome:
    """This library on the same prompts, padded on the draw's side."""

    def call() -> Any:
        model = subject(draw.model)
        return model.generate(**arguments(draw, draw.padding, own, model))

    return _run(call, draw.seed)


def arguments(
    draw: Draw, padding: Literal["left", "right"], library: Any, model: Any
) -> dict[str, Any]:
    """The call's keyword arguments; objects of the caller are new ones each time. `library`: where
    the classes of configurations are."""
    settings = dict(draw.settings)
    if "keys" in (mark := settings.get("watermarking_config", {})):
        settings["watermarking_config"] = library.SynthIDTextWatermarkingConfig(**mark)
    given = _prompts(draw, padding, model)
    if (negative := settings.pop("negative_prompt_ids", None)) is not None:
        given["negative_prompt_ids"] = torch.tensor(negative)
        given["negative_prompt_attention_mask"] = torch.ones_like(given["negative_prompt_ids"])
    given |= (
        {"generation_config": library.GenerationConfig(**settings)} if draw.as_config else settings
    )
    given["logits_processor"] = [PROCESSORS[name]() for name in draw.processors]
    given["stopping_criteria"] = [CRITERIA[name]() for name in draw.criteria]
    if draw.prefix:
        given["prefix_allowed_tokens_fn"] = allowed_tokens(draw.shape.vocabulary)
    if not SPELLED.isdisjoint(settings):
        tokenizer = own_tokenizer if library is own else their_tokenizer
        given["tokenizer"] = tokenizer(draw.shape.vocabulary)
    return given


def _prompts(draw: Draw, padding: Literal["left", "right"], model: Any) -> dict[str, Any]:
    """What the model reads, as the draw says that it is passed."""
    ids, mask = rectangle(draw, padding)
    given: dict[str, Any] = {"attention_mask": mask} if draw.masked or draw.embedded else {}
    if draw.begun:
        given["decoder_input_ids"] = torch.tensor(draw.begun)
    if draw.unsaid:
        return given
    if draw.embedded:
        return given | {"inputs_embeds": embeddings(draw, ids)}
    if (earlier := draw.earlier) is None:
        return given | {"input_ids": ids}
    given["past_key_values"] = _past(earlier, ids, mask, model, _copies(draw))
    return given | {"input_ids": ids[:, earlier.cached :] if earlier.apart else ids}


def _past(earlier: Earlier, ids: Tensor, mask: Tensor, model: Any, copies: int) -> Any:
    """The cache of a call that read some columns of the prompts and generated further ones."""
    static = {"cache_implementation": "static", "max_cache_len": ROOM}
    result = model.generate(
        input_ids=ids[:, : earlier.read],
        attention_mask=mask[:, : earlier.read],
        prefix_allowed_tokens_fn=only(ids),
        max_new_tokens=earlier.cached - earlier.read + 1,
        return_dict_in_generate=True,
        **(static if earlier.kind == "static" else {}),
    )
    cache = result.past_key_values
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


def _copies(draw: Draw) -> int:
    """How many rows stand for a prompt."""
    return max(int(draw.settings.get(name, 1)) for name in ("num_beams", "num_return_sequences"))


def rectangle(draw: Draw, padding: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Ids and mask of the prompts, (batch, width) each."""
    ids = torch.full((len(draw.prompts), draw.span), draw.fill)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(draw.prompts):
        first = draw.span - len(prompt) if padding == "left" else 0
        ids[row, first : first + len(prompt)] = torch.tensor(prompt)
        mask[row, first : first + len(prompt)] = 1
    return ids, mask


def embeddings(draw: Draw, ids: Tensor) -> Tensor:
    """What the model itself would look up for these ids."""
    known = pair(draw.model)
    table: Tensor = known.weights[known.tiny.table]
    return table[ids]


def _run(call: Callable[[], Any], seed: int) -> Outcome:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            return Outcome(call())
        except REFUSALS as error:
            return Outcome(error=error)
