"""Names of strategies: what an unknown one is answered with."""

from __future__ import annotations

import pytest

from everystep.config.named_strategies import NAMED, unknown_strategy


@pytest.mark.parametrize(
    ("name", "near"),
    [("beems", "beam"), ("Best-off", "best_of"), ("lookfar", "lookfar2"), ("zzzz", None)],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_with_all(
    name: str, near: str | None
) -> None:
    error = unknown_strategy(name, ["lookfar2"])
    text = str(error)
    assert text.startswith(f"no strategy is called {name!r}")
    assert ", ".join(sorted([*NAMED, "lookfar2"])) in text
    wanted = "Install the package that has it" if near is None else f"Perhaps you meant {near}"
    assert text.rstrip(".").endswith(wanted)
