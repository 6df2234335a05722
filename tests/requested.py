"""The requests that a call makes, for tests that run them on an engine of their own."""

from __future__ import annotations

from typing import Any

from everystep.api.model import LanguageModel
from everystep.drivers.rectangle import call_inputs
from everystep.requests.door import sort
from everystep.requests.prepare import prepare
from everystep.requests.reading import read_options
from everystep.types import Request


def requested(model: LanguageModel, keywords: dict[str, Any]) -> tuple[Request, ...]:
    """What `model.generate` asks of its engine for these keywords, a request for each row."""
    given = sort("rectangle", model, keywords)
    options = read_options(model, given, given.beside.tokenizer)
    inputs, _ = call_inputs(model, given, options)
    return prepare(model, options, inputs).requests
