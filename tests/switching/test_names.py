"""Every name that transformers exports for generation is here, or says why it is not."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from transformers import generation

import everystep as es
from everystep.errors import AbsentNameError, EverystepError
from everystep.requests.absent import ABSENT, REFUSED_FIELDS

GUIDE = Path(__file__).parents[2] / "docs/guide/switching.md"
HOMES = ("transformers.generation", "transformers.cache_utils")
# What else a script that generates takes from there.
FURTHER = {
    "AssistantToTargetTranslator",
    "AssistantVocabTranslatorCache",
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoConfig",
    "AutoFeatureExtractor",
    "AutoImageProcessor",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForVision2Seq",
    "AutoProcessor",
    "AutoTokenizer",
    "BatchEncoding",
    "BitsAndBytesConfig",
    "LlamaForCausalLM",
    "PreTrainedModel",
    "PreTrainedTokenizer",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "ProcessorMixin",
    "WhisperForConditionalGeneration",
    "WhisperProcessor",
    "pipeline",
    "set_seed",
}


def exported() -> Iterator[str]:
    """What transformers' top level has of generation and caches, and what `generation` has."""
    for name in dir(transformers):
        if (getattr(getattr(transformers, name, None), "__module__", None) or "").startswith(HOMES):
            yield name
    for name in dir(generation):
        if name[0] != "_" and not isinstance(getattr(generation, name), types.ModuleType):
            yield name


EXPORTED = {*exported(), *FURTHER}
SHARED = sorted(EXPORTED & set(es.__all__))


def test_every_name_is_here_or_absent_for_a_reason() -> None:
    assert len(EXPORTED) > 90
    assert EXPORTED - set(es.__all__) == set(ABSENT)


def test_the_guide_lists_what_is_refused_and_why() -> None:
    text = GUIDE.read_text().partition("## Refused, and why")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.+) \|$", text, re.MULTILINE)
    listed = {name: why for names, why in rows for name in re.findall("`(.+?)`", names)}
    assert listed == {name: why for name, (why, _) in {**ABSENT, **REFUSED_FIELDS}.items()}


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_an_absent_name_says_why_and_what_to_do(name: str) -> None:
    why, do = ABSENT[name]
    for ask in (lambda: getattr(es, name), lambda: exec(f"from everystep import {name}")):
        with pytest.raises(EverystepError) as caught:
            ask()
        assert all(part in str(caught.value) for part in (name, why, do))


def test_an_import_of_an_absent_name_is_an_import_error() -> None:
    with pytest.raises(AbsentNameError, match="there are no pipelines") as caught:
        from everystep import pipeline  # type: ignore[attr-defined]  # noqa: F401
    assert isinstance(caught.value, ImportError)


def test_a_script_may_ask_whether_an_absent_name_is_here() -> None:
    assert not hasattr(es, "pipeline")
    assert getattr(es, "GenerationMixin", None) is None
    with pytest.raises(AttributeError, match="there are no pipelines"):
        _ = es.pipeline


def test_an_unknown_name_is_no_attribute() -> None:
    assert not hasattr(es, "GreedyGoblin")
    with pytest.raises(ImportError, match="GreedyGoblin"):
        from everystep import GreedyGoblin  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("name", SHARED)
def test_arguments_have_the_references_names_and_order(name: str) -> None:
    there = getattr(generation, name, None) or getattr(transformers, name)
    own = parameters(getattr(es, name))
    assert own[: len(parameters(there))] == parameters(there)


def parameters(value: object) -> list[str]:
    """The names of the parameters that have one."""
    found = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in found if one.kind not in anything]


def test_criteria_are_completed_by_a_limit() -> None:
    free, limited = es.StoppingCriteriaList(), es.StoppingCriteriaList([es.MaxLengthCriteria(5)])
    completed = es.validate_stopping_criteria(free, 7)
    assert (free.max_length, completed.max_length) == (None, 7)
    assert es.validate_stopping_criteria(limited, 5) == limited
    with pytest.warns(UserWarning, match=r"5 ids.*max_length=7"):
        assert es.validate_stopping_criteria(limited, 7).max_length == 5
