"""Finds sentences of the documents that claim something of every case, and the tests they name.

    python -m tests.docs.claims [DOCUMENT ...]

lists those that name none. A claim is a sentence with one of the words of `STRONG`. It names a test
in its own block (a paragraph, a list or a table), or in a comment that is the next block:

    <!-- shown by tests/engine/test_schedule.py, tests/laws/test_mixes.py::test_the_laws_hold -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.reading import ROOT

STRONG = re.compile(r"\b(every|all|never|same|exactly)\b", re.IGNORECASE)
NAMED = re.compile(r"tests/[\w/]+(?:\.py(?:::(\w+))?)?")
_CODE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- shown by (.*?)-->", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n(?=\s*(?:[-*|]|\d+\.) )|\s\|\s")


@dataclass(frozen=True)
class Claim:
    """A sentence of a document, and the tests that its block or the comment after it names."""

    path: Path
    sentence: str
    tests: tuple[str, ...]


def claimed_documents() -> list[Path]:
    """Return the documents whose claims are looked at."""
    guides = sorted((ROOT / "docs" / "guide").glob("*.md"))
    return [
        ROOT / "README.md",
        *guides,
        ROOT / "docs" / "laws.md",
        ROOT / "docs" / "reliability.md",
    ]


def claims(path: Path) -> Iterator[Claim]:
    """Yield the claims of a document."""
    text = _CODE.sub("", path.read_text(encoding="utf-8"))
    blocks = [one.strip() for one in re.split(r"\n\s*\n", text) if one.strip()]
    for block, following in zip(blocks, [*blocks[1:], ""], strict=True):
        if block.startswith(("#", "<!--")):
            continue
        comment = _COMMENT.match(following)
        told = block + (comment.group(1) if comment else "")
        tests = tuple(one.group() for one in NAMED.finditer(told))
        for sentence in _SENTENCE.split(block):
            if STRONG.search(sentence):
                yield Claim(path, " ".join(sentence.split()), tests)


def missing(name: str) -> bool:
    """Return whether there is no such test, file of tests or folder of them."""
    path, _, function = name.partition("::")
    file = ROOT / path
    if not file.exists():
        return True
    return bool(function) and f"def {function}(" not in file.read_text(encoding="utf-8")


def main(names: list[str]) -> int:
    """List the claims that name no test, or one that is not there; 1 if there are any."""
    documents = [Path(name).resolve() for name in names] or claimed_documents()
    found = 0
    for path in documents:
        for claim in claims(path):
            gone = [name for name in claim.tests if missing(name)]
            if gone or not claim.tests:
                found += 1
                why = f"names {', '.join(gone)}, which is not there" if gone else "names no test"
                print(f"{path.relative_to(ROOT)}: {why}: {claim.sentence}")
    print(f"{found} claims without a test")
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
