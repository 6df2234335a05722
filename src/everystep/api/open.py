"""The beginning of a run: from a prompt, or from the file that another one was saved to."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from everystep.api.model import LanguageModel, paired
from everystep.engine.explained import Again
from everystep.errors import RequestError
from everystep.files.opening import as_path
from everystep.requests.door import lists_options
from everystep.requests.prompts import PromptLike, TokenizerLike, messages_of
from everystep.runs.hands import Asked
from everystep.runs.run import Run
from everystep.runs.saved import read_run

if TYPE_CHECKING:
    from everystep.requests.keywords import TextOptions

_ONCE = ("timeout", "max_time", "record", "return_dict_in_generate")
"""Keywords that say nothing of which tokens are chosen while there is time."""


def taken_again(
    model: LanguageModel,
    tokenizer: TokenizerLike | None,
    prompt: PromptLike,
    options: Mapping[str, object],
    seed: int | None,
) -> Again:
    """Return how what became of a prompt is explained: by a run that is asked for the same."""
    said: Any = {name: one for name, one in options.items() if name not in (*_ONCE, "seed")}
    return Again(lambda: open(model, tokenizer, prompt, seed=seed, **said))


@lists_options("texts")
def open(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None = None,
    prompt: PromptLike | None = None,
    *,
    seed: int | None = None,
    **options: Unpack[TextOptions],
) -> Run:
    """Return a run of the prompt, which has not taken its first step.

    `prompt`, `options`, `seed`: as for `es.generate` with one prompt, everything about them is
    checked here, before any compute. Without a seed one is taken from torch's global generator.

    Example:

        >>> run = es.open(model, tokenizer, "Once", max_new_tokens=4)
        >>> step = next(run)
        >>> len(run.tokens)
        1
    """
    if prompt is None:
        raise RequestError("there is no prompt to open a run with", do="Pass a text or ids")
    model = paired(model, tokenizer)
    seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
    chat = None if messages_of(prompt) is None else model.chat_defaults
    asked = Asked(options, seed, chat)
    return Run.begun(model, tokenizer, prompt, asked)


@lists_options("texts")
def resume(
    path: str | PathLike[str],
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None = None,
    **again: Unpack[TextOptions],
) -> Run:
    """Return the run of a file that `run.save` or `everystep generate --save` wrote, ready for its
    next step; it ends as it would have without the interruption.

    `again`: keywords of `es.open` whose values cannot be written, such as `logits_processor`,
    `hooks` and `prefix`, under the same names. FormatError: the file is damaged, or of a newer
    version. RequestError: another model, tokenizer, prefix or version of everystep, or a keyword
    that is missing.

    Example:

        >>> run = es.open(model, tokenizer, "Once", max_new_tokens=4)
        >>> run.save(folder / "run.es")
        >>> es.resume(folder / "run.es", model, tokenizer).result() == run.result()
        True
    """
    file, model = as_path(path), paired(model, tokenizer)  # what is wrong with the path comes first
    return Run.restored(model, tokenizer, read_run(file, model, tokenizer, again))
