"""A model with its tokenizer, as the functions of the package take them."""

from __future__ import annotations

from typing import cast

from torch import nn

from everystep.api.model import LanguageModel
from everystep.api.objects import require
from everystep.api.wrapped import wrap
from everystep.errors import ModelClassError


def paired(model: object, tokenizer: object) -> LanguageModel:
    """The model, wrapped if it is one of another library.

    ModelClassError, RequestError: unless these are a model and a tokenizer, in this order."""
    if isinstance(model, nn.Module):
        model = wrap(model)
    require_pair(model, tokenizer)
    return cast(LanguageModel, model)


def require_pair(model: object, tokenizer: object) -> None:
    """ModelClassError, RequestError: unless these are a model and a tokenizer, in this order."""
    if not isinstance(model, LanguageModel):
        swapped = isinstance(tokenizer, LanguageModel | nn.Module)
        raise ModelClassError(
            "model and tokenizer are in each other's place" if swapped else "this is no model",
            wanted="the model first, then its tokenizer",
            got=f"{type(model).__name__} first",
            do="Call es.load, which returns (model, tokenizer), and pass them in that order",
        )
    require("tokenizer", tokenizer, "encode", "decode")
