"""Chat templates: what they print, as in transformers, and what they are kept from doing."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from everystep.errors import RequestError, TokenizerError, UnknownArgumentError, UnsupportedError
from everystep.testing.tokenizer import CHATML, tiny_tokenizer
from everystep.text import ChatTemplate, Tokenizer
from everystep.text.gguf import surrounding

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi  "},
    {"role": "assistant", "content": "Hello "},
]
QUESTION = CHAT[:2]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": [1, None, True]}}}]
DOCUMENTS = [{"title": "T<i>", "text": "ü"}]


def tiny(template: str = CHATML) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def reference(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        padding_side="left",
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim + eos_token }}{% endfor %}",
    "{%- for m in messages %}\n    {{- loop.index ~ '/' ~ loop.length ~ m.role }}\n{%- endfor %}\n",
    "{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}x",
    "{% for d in documents %}{{ d.title }}: {{ d.text }}{{ d | tojson }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'user' %}{% continue %}{% endif %}{{ ns.n }}{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% macro f(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "{% set roles = messages | map(attribute='role') | list %}{{ roles | join(', ') }}",
    "{% set x %}{{ messages | length }}{% endset %}{{ x }}{{ 'a' * 3 + 'b' }}{{ '%s'|format(1) }}",
    "{{ messages[0].content.upper().replace('BE', 'x').split(' ') }}{{ 'a{}'.format(2) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[-1:] }}",
    "{{ unknown }}{{ messages[0].nothing }}{% if nothing is defined %}x{% endif %}{{ none }}",
    "{% for n in range(3) %}{{ n }}{% endfor %}{{ dict(a=1) }}{{ 7 // 2 }}{{ 2 ** 3 }}",
    "{{ extra_variable | default('none') }}{{ add_generation_prompt }}",
    "{% for m in messages recursive %}{{ m.role }}{{ loop(m.parts or []) }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_prints_what_it_prints_in_transformers(template: str) -> None:
    given = {"tools": TOOLS, "documents": DOCUMENTS, "extra_variable": "E"}
    options = {name: value for name, value in given.items() if name in template}
    options["tokenize"] = False
    ours, theirs = tiny(template), reference(tiny(template))
    assert ours.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(CHAT, **options)


CALLS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"return_dict": False},
    {"return_dict": False, "return_tensors": "np"},
    {"tokenize": False},
    {"truncation": True, "max_length": 5},
    {"padding": "max_length", "max_length": 90},
    {"chat_template": "{{ messages[0].content }}"},
    {"continue_final_message": True, "tokenize": False},
    {"continue_final_message": "content"},
]


@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize(
    "template", [CHATML, CHATML.replace("message.content", "message.content|trim")]
)
def test_a_call_gives_what_transformers_gives(template: str, options: dict[str, Any]) -> None:
    ours = tiny(template).apply_chat_template(CHAT, **options)
    theirs = reference(tiny(template)).apply_chat_template(CHAT, **options)
    if isinstance(ours, (str, list)):
        assert ours == theirs
    elif options.get("return_tensors"):
        assert ours.tolist() == theirs.tolist()
    else:
        assert dict(ours) == dict(theirs)


def test_several_chats_are_padded_together() -> None:
    options: dict[str, Any] = {"padding": True, "add_generation_prompt": True}
    ours = tiny().apply_chat_template([CHAT, QUESTION], **options)
    assert dict(ours) == dict(reference(tiny()).apply_chat_template([CHAT, QUESTION], **options))


def test_no_bos_is_added_to_the_templates() -> None:
    tokenizer = tiny("{{ bos_token }}{{ messages[0].content }}")
    tokenizer.backend.post_processor = surrounding(("<bos>", 1), ("<eos>", 2))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "a"]


GENERATION = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("options", [{}, {"padding": True}, {"truncation": True, "max_length": 12}])
def test_the_assistants_tokens_are_marked_as_in_transformers(options: dict[str, Any]) -> None:
    chats = [[*CHAT, *QUESTION, CHAT[2]], CHAT]
    options = {"return_assistant_tokens_mask": True, **options}
    ours = tiny(GENERATION).apply_chat_template(chats, **options)
    theirs = reference(tiny(GENERATION)).apply_chat_template(chats, **options)
    assert ours["input_ids"] == theirs["input_ids"]
    if "padding" not in options:  # transformers does not shift the mask of a padded row
        assert ours["assistant_masks"] == theirs["assistant_masks"]
    for ids, mask in zip(ours["input_ids"], ours["assistant_masks"], strict=True):
        assert len(ids) == len(mask)
    whole = tiny(GENERATION).apply_chat_template(CHAT, return_assistant_tokens_mask=True)
    marked = [id for id, on in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if on]
    assert tiny().decode(marked) == "Hello "


def test_rendering_says_where_the_generations_are() -> None:
    rendered = ChatTemplate(GENERATION).render(CHAT)
    (start, end), *rest = rendered.generations
    assert (rendered.text[start:end], rest) == ("Hello ", [])


@pytest.mark.parametrize("content", ["Hello ", " Hello", [{"type": "text", "text": "Hello "}]])
@pytest.mark.parametrize("shape", ["m.content", "m.content | trim", "'<' + m.content"])
def test_a_message_in_a_generation_block_is_continued_as_in_transformers(
    content: Any, shape: str
) -> None:
    if isinstance(content, list):
        shape = shape.replace("content", "content[0].text")
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
        f"{{{{ {shape} }}}}<eos>{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
        "{% endfor %}end"
    )
    chat = [*QUESTION, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"continue_final_message": True}
    ours, theirs = tiny(template), reference(tiny(template))
    assert dict(ours.apply_chat_template(chat, **options)) == dict(
        theirs.apply_chat_template(chat, **options)
    )
    rendered = ChatTemplate(template).render(chat, **options)
    ((start, end),) = rendered.generations
    assert (rendered.text[start:end], end) == (rendered.text[start:], len(rendered.text))
    assert "Hello" in rendered.text[start:]


TUPLES = ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
PRINTED = "{{ messages }}{{ documents }}{{ messages[0].n | tojson }}"
JOINED = "{% for part in messages[-1].content %}{{ part.text }}{% endfor %}{{ documents[0].text }}"


@pytest.mark.parametrize("template", [PRINTED, JOINED, PRINTED.replace(" | tojson", "[1:]")])
def test_tuples_stay_tuples_as_in_transformers(template: str) -> None:
    numbers = (1, (), [2, ("x" * 20_000, None)])
    keyed = ("tojson", {(1, ("a",)): [()], "\ufdd2tuple": 1})
    options: dict[str, Any] = {"documents": ({"title": ("t",), "text": ("u", 2)},)}
    ours, theirs = tiny(template), reference(tiny(template))
    for value in (numbers, keyed):
        if value is keyed and "tojson" in template:  # JSON has no such keys
            continue
        chat = ({"role": "user", "content": TUPLES, "n": value},)
        expected = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.apply_chat_template(chat, tokenize=False, **options) == expected
        ids = ours.apply_chat_template(chat, **options)["input_ids"]
        assert ours.decode(ids) == expected


def test_what_is_written_in_tuples_stays_text_and_is_continued() -> None:
    parts = ({"text": "<eos>"}, {"text": "b<eos>"})
    chat = ({"role": "user", "content": parts},)
    options: dict[str, Any] = {"continue_final_message": True, "documents": [{"text": "!"}]}
    ours, theirs = tiny(JOINED), reference(tiny(JOINED))
    expected = theirs.apply_chat_template(chat, tokenize=False, **options)
    assert ours.apply_chat_template(chat, tokenize=False, **options) == expected == "<eos>b<eos>"
    ids = ours.apply_chat_template(chat, **options)["input_ids"]
    assert ours.eos_token_id not in ids
    assert ours.decode(ids) == expected


def test_objects_become_plain_values() -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: Any

    class Image:
        def save(self, path: str) -> str:
            return "written"

    template = "{{ messages[0].content }}{{ messages[0].content.save }}"
    assert ChatTemplate(template).render([Message("user", Image())]).text == "<Image>"


def test_reasoning_is_found_under_each_name() -> None:
    message = {"role": "assistant", "content": "a", "reasoning": "why", "tool_calls": None}
    rendered = ChatTemplate("{{ messages[0] }}").render([message]).text
    theirs = reference(tiny("{{ messages[0] }}"))
    assert rendered == theirs.apply_chat_template([message], tokenize=False)


def test_the_messages_are_not_changed() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    template = "{{ messages[0].content[0].text }}!"
    assert ChatTemplate(template).render(chat, continue_final_message=True).text == "a"
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_the_date_is_available() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m') }}").render(CHAT).text
    assert re.fullmatch(r"\d{4}-\d{2}", text)


def test_the_template_for_tools_serves_requests_with_tools() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "A", "tool_use": "B{{ tools | length }}", "other": "C"}
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "A"
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False) == "B1"
    assert tokenizer.apply_chat_template(CHAT, chat_template="other", tokenize=False) == "C"


REFUSED: list[tuple[str, Any, dict[str, Any], type[Exception], str]] = [
    ("{{ raise_exception('no system') }}", CHAT, {}, RequestError, "refuses.*no system"),
    ("a\n{{ messages[0].x.y }}", CHAT, {}, TokenizerError, "Line 2 of the chat template fails"),
    ("a\n\n{{ 1 / 0 }}", CHAT, {}, TokenizerError, "Line 3 .*ZeroDivisionError"),
    ("a\n{% if %}", CHAT, {}, TokenizerError, "Line 2 of the chat template is wrong"),
    ("{{ x | pprint }}", CHAT, {}, TokenizerError, "No filter named 'pprint'"),
    ("{% include 'a' %}", CHAT, {}, TokenizerError, "fails; got TypeError"),
    (CHATML, [], {}, RequestError, "conversation has no message"),
    (CHATML, "Hi", {}, RequestError, "A conversation is a list of messages"),
    (CHATML, CHAT[0], {}, RequestError, "A conversation is a list of messages"),
    (CHATML, ["Hi"], {}, RequestError, "A message is not an object"),
    (
        CHATML,
        CHAT,
        {"tools": [len], "chat_template": "{{ tools }}"},
        RequestError,
        "A tool is neither a JSON schema nor a function",
    ),
    (
        CHATML,
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        RequestError,
        "continue_final_message leaves",
    ),
    ("x", CHAT, {"continue_final_message": True}, RequestError, "does not read 'content'"),
    (CHATML, CHAT, {"continue_final_message": "plan"}, RequestError, "nothing to continue"),
    (
        "{{ messages[0].content }}",
        CHAT,
        {"continue_final_message": True},
        RequestError,
        "cannot be continued",
    ),
    (GENERATION, [{"role": "assistant", "content": "\ufdd1"}], {}, RequestError, "reserved"),
    ("{{ tools }}", CHAT, {"tools": {"a": 1}}, RequestError, "tools are no list"),
]


@pytest.mark.parametrize(("template", "chat", "options", "error", "what"), REFUSED)
def test_what_cannot_be_rendered_is_refused(
    template: str, chat: Any, options: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        tiny(template).apply_chat_template(chat, tokenize=False, **options)


def test_a_tokenizer_without_a_template_says_so() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TokenizerError, match=r"no chat template to use.*chat_template="):
        tokenizer.apply_chat_template(CHAT)


UNREAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"add_generation_promt": True}, UnknownArgumentError, "perhaps 'add_generation_prompt'"),
    ({"enable_thinking": False}, UnknownArgumentError, "'enable_thinking' is neither an argument"),
    ({"messages": []}, UnknownArgumentError, "The messages are the first argument"),
    ({"tools": TOOLS}, UnsupportedError, "does not read tools"),
    ({"documents": DOCUMENTS}, UnsupportedError, "does not read documents"),
]


@pytest.mark.parametrize(("options", "error", "what"), UNREAD)
def test_what_the_template_would_ignore_is_refused(
    options: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        tiny().apply_chat_template(CHAT, **options)
