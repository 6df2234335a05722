"""Strong sentences of the documents name the test that shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.claims import Claim, claimed_documents, claims, missing
from tests.reading import ROOT


@pytest.mark.parametrize("path", claimed_documents(), ids=lambda path: path.name)
def test_strong_sentences_name_tests_that_are_there(path: Path) -> None:
    found = list(claims(path))
    assert [one.sentence for one in found if not one.tests] == []
    assert [name for one in found for name in one.tests if missing(name)] == []


def test_a_claim_is_found_with_the_tests_of_its_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# All of it\n\nIt never fails. So it is\nnot (`tests/docs/claims.py`).\n\n"
        "- the same\n- another\n\n<!-- shown by tests/docs/gone.py, tests/reading.py -->\n\n"
        "```python\nall([])\n```\n\nEvery one.\n"
    )
    assert list(claims(page)) == [
        Claim(page, "It never fails.", ("tests/docs/claims.py",)),
        Claim(page, "- the same", ("tests/docs/gone.py", "tests/reading.py")),
        Claim(page, "Every one.", ()),
    ]
    assert missing("tests/docs/gone.py")
    assert missing("tests/docs/claims.py::gone")
    assert not missing("tests/docs/claims.py::claims")
    assert (ROOT / "tests/docs/claims.py").exists()
