"""Writes the table of docs/guide/models.md from the code: `python -m tests.models.page`."""

from __future__ import annotations

from everystep.executors.native import spec_obstacles
from everystep.models import complete_config
from everystep.models.families import MODULES, find_family
from everystep.models.gguf_architectures import ARCHITECTURES
from tests.reading import ROOT

PAGE = ROOT / "docs" / "guide" / "models.md"
_FIRST = "<!-- from here to the next such line: python -m tests.models.page -->"
# The text of the smallest checkpoint; the defaults of transformers' classes do not fit together.
_TEXT = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
_LAST = "<!-- end of what is generated -->"


def with_table(text: str) -> str:
    """The text of the page with the table as it should be."""
    before, _, rest = text.partition(_FIRST)
    _, _, after = rest.partition(_LAST)
    return f"{before}{_FIRST}\n\n{_table()}\n\n{_LAST}{after}"


def _table() -> str:
    heads = ("`model_type`", "folder, read and saved", "GGUF file", "native executor", "torch")
    lines = [_row(*heads), _row(*["---"] * len(heads))]
    return "\n".join([*lines, *map(_line, sorted(MODULES))])


def _line(kind: str) -> str:
    own = [f"`{file}`" for file, one in ARCHITECTURES.items() if one.family == kind]
    config = {"model_type": kind, "text_config": _TEXT} if "_vl" in kind else {"model_type": kind}
    spec = find_family(kind).read_spec(complete_config(config))
    native = "no" if spec_obstacles(spec) else "yes"
    return _row(f"`{kind}`", "yes", ", ".join(own) or "no", native, "yes")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
