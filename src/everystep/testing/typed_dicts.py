"""Source that type checkers and editors read, written from the tables of fields and keywords.

`scripts/keywords` compares the files with this, and writes them on demand.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from everystep.config.fields import FIELDS, META
from everystep.requests.door import KEYWORDS, Keyword

PACKAGE = Path(__file__).parent.parent
_RESULTS = ("num_return_sequences", "return_dict_in_generate")
"""Fields that decide how many results there are, or of which class."""
_OF_RESULTS = ("n_best", "strategy", "strategy_options")
_SPELLED = (
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model"),
)
"""What the signature of `model.generate` spells out."""
_SPELLED_ALONE = (
    *("inputs", "streamer", "custom_generate", "synced_gpus"),
    *("negative_prompt_ids", "negative_prompt_attention_mask"),
)
"""What it spells out and no other call takes."""
_WRITTEN = "Written by `scripts/keywords` from"

_OPTIONS = f'''"""The fields of a generation configuration, as keywords, for type checkers.

{_WRITTEN} `fields.py`. `None` stands for what a field
has where nothing was said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from everystep.config.nested import CompileConfig, Watermark
'''
_ATTRIBUTES = f'''"""The fields of a generation configuration as its attributes, None where unsaid.

{_WRITTEN} `fields.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from everystep.config.nested import CompileConfig, Watermark


class FieldAttributes:
    """The attributes of a configuration, for type checkers."""

'''
_KEYWORDS = f'''"""The keywords of every public call, for type checkers and editors.

{_WRITTEN} the table of `door.py`. Inputs that a model or
a caller declares under other names are passed as `**inputs`, a `dict[str, Any]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

import numpy as np
from torch import Tensor

from everystep.config.config_fields import ConfigOptions, FieldOptions
from everystep.engine import Corpus
from everystep.processors.allowed import AllowedSequences
from everystep.requests.options import Prefix
from everystep.requests.subject import Subject
from everystep.types.hooks import Hook
from everystep.types.request import Strategy

Numbers = Tensor | np.ndarray | Sequence[object]
"""A tensor, or what one can be made of."""
'''

Row = tuple[str, str, str]
"""Name, type and line of a keyword."""


def files() -> dict[Path, str]:
    """Return what each of the files is to hold."""
    texts = {
        "config/config_fields.py": _OPTIONS + _option_classes(),
        "config/attributes.py": _ATTRIBUTES + _attributes(),
        "requests/keywords.py": _KEYWORDS + _keyword_classes(),
    }
    return {PACKAGE / name: _formatted(text) for name, text in texts.items()}


def _formatted(text: str) -> str:
    """Return the source as the formatter has it."""
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "100", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def _attributes() -> str:
    return "".join(f"    {one.name}: {one.type}\n" for one in FIELDS.values())


def _class(name: str, bases: Sequence[str], says: str, rows: Iterable[Row]) -> str:
    """Return the source of a typed dict."""
    head = f'\n\nclass {name}({", ".join(bases)}, total=False):\n    """{says}"""\n\n'
    lines = (f'    {name}: {kind}\n    """{line}"""\n' for name, kind, line in rows)
    return head + "".join(lines)


def _option_classes() -> str:
    every = [(one.name, one.type, one.line) for one in FIELDS.values()]
    plain = [row for row in every if row[0] not in (*_RESULTS, *META)]
    results = [row for row in every if row[0] in _RESULTS]
    stored = [row for row in every if row[0] in META]
    left = "The fields that leave open neither how many results there are nor of which class."
    whole = "Everything that a configuration holds, where it comes from included."
    return (
        _class("FieldOptions", ["TypedDict"], left, plain)
        + _class(
            "ConfigOptions", ["FieldOptions"], "Every field that says how to generate.", results
        )
        + _class("StoredOptions", ["ConfigOptions"], whole, stored)
    )


_CLASSES: tuple[tuple[str, list[str], str], ...] = (
    (
        "CallOptions",
        ["FieldOptions"],
        "The keywords that every call takes beside fields of a configuration.",
    ),
    (
        "ResultOptions",
        ["ConfigOptions"],
        "The keywords that decide how many results there are, or of which class.",
    ),
    (
        "ObjectOptions",
        ["CallOptions"],
        "Objects of the caller's that every call takes; `model.generate` spells them out.",
    ),
    (
        "PlainTextOptions",
        ["ObjectOptions"],
        "The keywords of a call about prompts that gives one text for each.",
    ),
    (
        "TextOptions",
        ["PlainTextOptions", "ResultOptions"],
        "The keywords of calls about prompts: `es.generate`, `es.stream`, `es.open`, `es.chat`.",
    ),
    (
        "PromptOptions",
        ["TextOptions"],
        "The same with a seed, for calls about one prompt that do not spell it out.",
    ),
    (
        "PromptInputs",
        ["TypedDict"],
        "The inputs that a model reads of a prompt, and encoders of what stands beside it.",
    ),
    ("SpeechOptions", ["TypedDict"], "The keywords of a model that transcribes."),
    (
        "ModelOptions",
        ["CallOptions", "ResultOptions", "PromptInputs", "SpeechOptions"],
        "The keywords of `model.generate` beside what its signature spells out.",
    ),
    (
        "RectangleOptions",
        ["ModelOptions", "ObjectOptions"],
        "The same with what the signature of `model.generate` spells out, but for `tokenizer`.",
    ),
)


def _home(row: Keyword) -> tuple[str, ...]:
    """Return the classes that a keyword stands in."""
    named = {
        "seed": ("PromptOptions", "ModelOptions"),
        "generation_config": ("TextOptions", "RectangleOptions"),
        **dict.fromkeys(_OF_RESULTS, ("ResultOptions",)),
        **dict.fromkeys(_SPELLED, ("ObjectOptions",)),
        **dict.fromkeys(_SPELLED_ALONE, ("RectangleOptions",)),
        **dict.fromkeys(("tokenizer", "text", "messages"), ()),
    }
    if row.name in named:
        return named[row.name]
    if row.owner in ("object", "speech"):
        return ("CallOptions",) if row.owner == "object" else ("SpeechOptions",)
    if row.owner == "media" or "prompt" in row.calls:
        return ("PromptInputs",)
    return ("PlainTextOptions",) if row.calls == ("texts",) else ("ModelOptions",)


def _keyword_classes() -> str:
    rows = [row for row in KEYWORDS.values() if row.owner not in ("field", "absent")]
    return "".join(
        _class(name, bases, says, [(r.name, r.type, r.line) for r in rows if name in _home(r)])
        for name, bases, says in _CLASSES
    )


def main(arguments: Sequence[str]) -> str | None:
    """Compare the files with the tables, or write them; return what is wrong."""
    if arguments == ["--write"]:
        for path, text in files().items():
            path.write_text(text)
        return None
    if arguments != ["--check"]:
        return "keywords: wanted --check or --write"
    wrong = [str(path) for path, text in files().items() if path.read_text() != text]
    return f"keywords: run scripts/keywords --write for {', '.join(wrong)}" if wrong else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
