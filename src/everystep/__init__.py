"""Text generation you can see, steer and trust at every step.

The public names, sorted, and nothing else; each is documented where it is defined. A name is
imported when it is first used, so that `import everystep` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from everystep._version import __version__

if TYPE_CHECKING:
    from everystep.api.load import load, load_model
    from everystep.api.model import LanguageModel
    from everystep.api.session import Generated, Stream
    from everystep.api.text import chat, generate, stream
    from everystep.config import GenerationConfig
    from everystep.errors import EverystepError
    from everystep.text import Tokenizer
    from everystep.types import Event, FinishReason

_HOME = {
    "Event": "types",
    "EverystepError": "errors",
    "FinishReason": "types",
    "Generated": "api.session",
    "GenerationConfig": "config",
    "LanguageModel": "api.model",
    "Stream": "api.session",
    "Tokenizer": "text",
    "chat": "api.text",
    "generate": "api.text",
    "load": "api.load",
    "load_model": "api.load",
    "stream": "api.text",
}
"""Public name -> the module that defines it."""

__all__ = [
    "Event",
    "EverystepError",
    "FinishReason",
    "Generated",
    "GenerationConfig",
    "LanguageModel",
    "Stream",
    "Tokenizer",
    "__version__",
    "chat",
    "generate",
    "load",
    "load_model",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"everystep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
