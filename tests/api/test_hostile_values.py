"""Any value in any place: it is taken, or is one of our errors; nobody else is harmed by it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from everystep.errors import EverystepError
from tests.api.hostile_places import PLACES, generate
from tests.api.hostile_values import OWN, VALUES, OwnError

EACH = 6
"""Every so many values are tried in each place, others in the next one; all of them when slow."""
CALLERS_OWN = {("generate(custom_generate=)", "the model")}
"""What is called as it was asked, and fails by itself."""


def sentinel() -> torch.Tensor:
    """What a well-meant request gets."""
    scored = {"return_dict_in_generate": True, "output_scores": True}
    return generate(do_sample=True, seed=1, top_k=5, **scored).scores[-1]


BEFORE = sentinel()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model, in which whatever is written lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()


def tried(place: str, values: Iterable[str]) -> None:
    """Each of the values is taken, or is an error of ours."""
    for name in values:
        if (place, name) in CALLERS_OWN:
            continue
        try:
            PLACES[place](VALUES[name]())
        except EverystepError as error:
            assert 10 < len(str(error)) < 2000, (place, name)
        except BaseException as error:
            raise AssertionError(f"{place} of {name}: {type(error).__name__}: {error}") from error
        assert torch.equal(sentinel(), BEFORE), (place, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_a_value_is_taken_or_is_one_of_our_errors(place: str) -> None:
    first = list(PLACES).index(place) % EACH
    tried(place, list(VALUES)[first::EACH])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_every_value_is_taken_or_is_one_of_our_errors(place: str) -> None:
    tried(place, VALUES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_what_the_code_of_a_caller_raises_reaches_him_and_harms_nobody(place: str) -> None:
    for name, make in OWN.items():
        try:
            PLACES[place](make())
        except (EverystepError, OwnError):
            pass
        except ValueError as error:
            assert "__len__() should return >= 0" in str(error)
        assert torch.equal(sentinel(), BEFORE), (place, name)
