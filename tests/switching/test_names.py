"""Every name that transformers exports for generation is here, or says why it is not."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest
import transformers
from transformers import cache_utils, generation

import everystep as es
from everystep.errors import AbsentNameError, EverystepError
from everystep.requests.absent import ABSENT, ARGUMENTS, REFUSED_FIELDS, SPEECH_LATER
from tests.switching.guide import refused

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


def is_exported(name: str) -> bool:
    """Whether a script that generates takes this name from transformers: from its top level, where
    it belongs to generation or caches, from `generation`, or as a class of caches or their layers.
    """
    cached = getattr(cache_utils, name, None)
    if inspect.isclass(cached) and cached.__module__ == cache_utils.__name__:
        return True
    if (getattr(getattr(transformers, name, None), "__module__", None) or "").startswith(HOMES):
        return True
    inside = name in dir(generation) and name[0] != "_"
    return name in FURTHER or (inside and not isinstance(getattr(generation, name), ModuleType))


# Those of all its names alone that are ours: asking for the others imports every model.
SHARED = sorted(filter(is_exported, es.__all__))


def test_every_name_is_here_or_absent_for_a_reason() -> None:
    names = {*dir(cache_utils), *dir(transformers), *dir(generation), *FURTHER}
    exported = {*filter(is_exported, names)}
    assert len(exported) > 90
    assert exported - set(es.__all__) == set(ABSENT)


TABLES = {
    "Names": ABSENT,
    "Arguments": {**ARGUMENTS, **SPEECH_LATER},
    "Fields": REFUSED_FIELDS,
}


@pytest.mark.parametrize("title", TABLES)
def test_the_guide_lists_what_is_refused_and_why(title: str) -> None:
    listed = {
        name: rest for names, *rest in refused(title) for name in re.findall("`(.+?)`", names)
    }
    assert listed == {name: [*why] for name, why in TABLES[title].items()}


def test_the_guide_lists_the_members_that_classes_lack() -> None:
    """Of the highest class that lacks one."""
    pairs = {name: (there_of(name), getattr(es, name)) for name in SHARED}
    pairs = {name: pair for name, pair in pairs.items() if all(map(inspect.isclass, pair))}
    pairs["LanguageModel"] = (transformers.GenerationMixin, es.LanguageModel)
    lacked = {name: public(theirs) - public(own) for name, (theirs, own) in pairs.items()}
    wanted = set()
    for name, (theirs, _) in pairs.items():
        above = {one for one, (other, _) in pairs.items() if other in theirs.__mro__[1:]}
        wanted |= {(name, one) for one in lacked[name] - {m for one in above for m in lacked[one]}}
    listed = [
        (name, member)
        for names, members, _ in refused("Members")
        for name in re.findall("`(.+?)`", names)
        for member in re.findall("`(.+?)`", members)
        if name != "GenerationMixin"
    ]
    assert len(listed) == len({*listed}) and {*listed} == wanted


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if name[0] != "_"}


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
    own, there = parameters(getattr(es, name)), parameters(there_of(name))
    assert own[: len(there)] == there


def there_of(name: str) -> Any:
    """What transformers has under the name."""
    return next(
        getattr(home, name)
        for home in (generation, transformers, cache_utils)
        if hasattr(home, name)
    )


@pytest.mark.parametrize("name", [name for name in SHARED if inspect.isclass(there_of(name))])
def test_methods_have_the_references_parameters(name: str) -> None:
    there, own = there_of(name), getattr(es, name)
    for method in sorted(public(there) & public(own)):
        theirs, mine = getattr(there, method), getattr(own, method)
        if inspect.isroutine(theirs) and method in vars(there) and callable(mine):
            assert {*parameters(theirs)} <= {*parameters(mine)}, method


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
