"""Random settings give transformers' results, field by field, in float64.

300 draws by default and 20,000 in all. `python -m tests.parity.shrink NUMBER` shows one of them and
the smallest form in which it still differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.draws import draw
from tests.parity.judge import ROUNDED, Verdict, judge
from tests.parity.models import FURTHER

PER_BLOCK = 25
DEFAULT_BLOCKS = 12
ALL_BLOCKS = 800
BLOCKS = [
    *range(DEFAULT_BLOCKS),
    *(pytest.param(block, marks=pytest.mark.slow) for block in range(DEFAULT_BLOCKS, ALL_BLOCKS)),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_results_are_the_references(
    block: int, record_property: Callable[[str, Any], None]
) -> None:
    numbers = range(block * PER_BLOCK, (block + 1) * PER_BLOCK)
    verdicts = [judge(draw(number)) for number in numbers]
    record_property("parity", _counts(verdicts))
    # A plain dict: workers send properties to each other, and know no subclass of it.
    used = Counter(name for one in verdicts for name in one.draw.used())
    record_property("settings", dict(used))
    assert not any(verdict.problems for verdict in verdicts), _report(verdicts)
    assert sum(verdict.ran for verdict in verdicts) >= 0.9 * len(verdicts), "too many refusals"
    assert sum(ROUNDED in verdict.explained for verdict in verdicts) <= 2, "too much rounding"


@pytest.mark.parametrize(
    "number",
    [
        # Two end tokens are forced and get the same score, after candidates that did not end had
        # scores above 0.
        pytest.param(15920, id="equals, biased"),
        pytest.param(19564, id="equals, marked"),
        # Healing a prompt lost the negative prompt beside it.
        pytest.param(372, id="healed, guided"),
    ],
)
def test_a_draw_that_once_differed_is_equal(number: int) -> None:
    verdict = judge(draw(number))
    assert verdict.ran and not verdict.problems, _report([verdict])


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
)
@pytest.mark.parametrize("family", FURTHER)
def test_results_of_every_family_are_the_references(
    family: str, block: int, record_property: Callable[[str, Any], None]
) -> None:
    verdicts = [judge(draw(number, family)) for number in range(10 * block, 10 * block + 10)]
    record_property("parity", _counts(verdicts))
    assert not any(verdict.problems for verdict in verdicts), _report(verdicts)
    assert sum(verdict.ran for verdict in verdicts) >= 8, "too many refusals"


def _counts(verdicts: list[Verdict]) -> dict[str, int]:
    counts = Counter({"draws": len(verdicts)})
    counts["run on both sides"] = sum(verdict.ran for verdict in verdicts)
    counts["equal"] = sum(not verdict.problems for verdict in verdicts)
    counts["around a defect of transformers"] = sum(bool(one.explained) for one in verdicts)
    return dict(counts)


def _report(verdicts: list[Verdict]) -> str:
    wrong = [verdict for verdict in verdicts if verdict.problems]
    return "\n\n".join(
        "\n".join([str(verdict.draw), *map(str, verdict.problems)]) for verdict in wrong
    )
