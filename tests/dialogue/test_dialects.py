"""Dialects are told by their templates, and what such a template writes is read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everystep.dialogue import dialect_of
from everystep.dialogue.dialects import ROWS
from everystep.errors import UnsupportedError
from everystep.testing.tokenizer import CHATML
from everystep.text import ChatTemplate
from tests.dialogue.calls import CALLS, TOOLS, parsed, parts
from tests.dialogue.templates import FORMS, Form

IDS = [f"{form.dialect}-{n}" for n, form in enumerate(FORMS)]
QUESTION = [{"role": "user", "content": "What is it like?"}]


def rendered(form: Form, count: int, said: str, thought: str | None, **how: Any) -> tuple[str, str]:
    """The prompt, and the answer with so many calls, as the form's template writes both."""
    template, dialect = ChatTemplate(form.source), dialect_of(form.source)
    calls = [
        {
            "id": f"abcdefgh{n}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(given) if dialect.as_text else given,
            },
        }
        for n, (name, given) in enumerate(CALLS[:count])
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": said, "tool_calls": calls}
    if thought is not None:
        answer["reasoning_content"] = thought
    given = {"tools": TOOLS, "variables": {name: v for name, v in how.items() if v is not None}}
    prompt = template.render(QUESTION, add_generation_prompt=True, **given).text
    whole = template.render([*QUESTION, answer], **given).text
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix("\n").removesuffix(form.end)


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_a_call_that_a_template_writes_is_read_back(form: Form) -> None:
    dialect = dialect_of(form.source)
    assert dialect.name == form.dialect
    for count in (1,) if form.single else (1, 2):
        prompt, text = rendered(form, count, "", None)
        events = parsed(dialect, text)
        assert parts(events) == ("", "", [(*call, True) for call in CALLS[:count]])
        assert "".join(one.raw for one in events) == text
        assert not dialect.thinks_after(prompt)


@pytest.mark.parametrize("form", [one for one in FORMS if one.thoughts], ids=lambda f: f.dialect)
def test_thoughts_stand_apart_also_where_the_prompt_has_begun_them(form: Form) -> None:
    dialect = dialect_of(form.source)
    _, text = rendered(form, 1, "", "Hm: what\n\nnow?")
    assert parts(parsed(dialect, text)) == ("", "Hm: what\n\nnow?", [(*CALLS[0], True)])
    if form.dialect == "harmony":
        return  # its prompts begin no thought
    prompt, text = rendered(form, 1, "", "Hm", enable_thinking=True)
    assert dialect.thinks_after(prompt)
    assert parts(parsed(dialect, text, thinks=True)) == ("", "Hm", [(*CALLS[0], True)])


@pytest.mark.parametrize("form", [one for one in FORMS if not one.single], ids=lambda f: f.dialect)
def test_what_is_said_before_a_call_is_content(form: Form) -> None:
    dialect = dialect_of(form.source)
    _, text = rendered(form, 1, "Let me see.", None)
    content, _, calls = parts(parsed(dialect, text))
    if dialect.bare:  # a call that has its mark is one, wherever it stands
        text = text.replace(dialect.opening, "")
        assert parts(parsed(dialect, text))[0].startswith("Let me see.")
    assert (content, calls) == ("Let me see.", [(*CALLS[0], True)])


def test_every_form_of_the_table_has_a_template_here() -> None:
    named = {row.name for row in ROWS if row.form is not None}
    assert named - {form.dialect for form in FORMS} == {"smollm2"}  # which is asked without one


def test_named_templates_are_looked_through_for_the_one_with_tools() -> None:
    named = {"default": CHATML, "tool_use": FORMS[1].source}
    assert dialect_of(named).name == "hermes"


@pytest.mark.parametrize("template", [CHATML, "", None, {}, {"other": FORMS[0].source}])
def test_an_unknown_template_is_refused(template: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"known form.*wanted.*hermes"):
        dialect_of(template)


def test_a_model_that_only_thinks_has_no_calls() -> None:
    dialect = dialect_of("{% if x %}<think>{{ x }}</think>{% endif %}")
    assert (dialect.name, dialect.form) == ("thinking", None)
    text = "<think>\nso\n</think>\n\nYes: <tool_call>"
    assert parts(parsed(dialect, text)) == ("Yes: <tool_call>", "so", [])
