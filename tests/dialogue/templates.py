"""Chat templates of our own, one for each form: shorter than those of the models, and written from
their public documentation, so that calls are spelled by somebody else than the code under test."""

from __future__ import annotations

from dataclasses import dataclass

_CALLS = "{% for c in m.tool_calls %}{% set f = c.function %}"
_HERMES = (
    '{{ "<tool_call>\\n" }}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    '{{ "\\n</tool_call>" }}'
)
_TAGS = (
    '{{ "<tool_call>\\n<function=" ~ f.name ~ ">\\n" }}{% for k, v in f.arguments.items() %}'
    '{{ "<parameter=" ~ k ~ ">\\n" }}{{ v if v is string else v | tojson }}'
    '{{ "\\n</parameter>\\n" }}{% endfor %}{{ "</function>\\n</tool_call>" }}'
)
_INVOKED = (
    '{{ "<invoke name=\\"" ~ f.name ~ "\\">\\n" }}{% for k, v in f.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}{{ "</parameter>\\n" }}'
    '{% endfor %}{{ "</invoke>\\n" }}'
)
_DSML = (
    '{{ "<｜DSML｜invoke name=\\"" ~ f.name ~ "\\">\\n" }}{% for k, v in f.arguments.items() %}'
    '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
    '{{ v if v is string else v | tojson }}{{ "</｜DSML｜parameter>\\n" }}{% endfor %}'
    '{{ "</｜DSML｜invoke>\\n" }}'
)
_KEYS = (
    '{{ "<tool_call>" ~ f.name ~ "\\n" }}{% for k, v in f.arguments.items() %}'
    "<arg_key>{{ k }}</arg_key>"
    '{{ "\\n<arg_value>" }}{{ v if v is string else v | tojson }}{{ "</arg_value>\\n" }}'
    "{% endfor %}</tool_call>"
)
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_COMMA = "{% if not loop.last %}, {% endif %}"
_NEXT = '{% if not loop.last %}{{ "\\n" }}{% endif %}'
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={% if v is string %}"
    '"{{ v | replace("\\\\", "\\\\\\\\") | replace("\\"", "\\\\\\"") | replace("\\n", "\\\\n") }}"'
    "{% elif v is boolean or v is none %}{{ v | string }}{% else %}{{ v | tojson }}{% endif %}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_THINK = ("<think>\n", "\n</think>\n\n")


def _braces(quote: str) -> str:
    value = (
        "{%- macro value(v) -%}{%- if v is string -%}Q{{ v }}Q{%- elif v is mapping -%}"
        "{ {%- for k, one in v.items() -%}{{ k }}:{{ value(one) }}{{ ',' if not loop.last }}"
        "{%- endfor -%} }{%- elif v is boolean or v is none or v is number -%}{{ v | tojson }}"
        "{%- else -%}[{%- for one in v -%}{{ value(one) }}{{ ',' if not loop.last }}{%- endfor -%}]"
        "{%- endif -%}{%- endmacro -%}"
    )
    return value.replace("Q", quote)


def _said(text: str) -> str:
    return "{{ " + repr(text) + " }}" if text else ""


@dataclass(frozen=True)
class Form:
    """How one dialect spells calls: `first`, each with what follows it, and `last`; its thoughts;
    and what else marks its templates."""

    dialect: str
    call: str
    first: str = ""
    last: str = ""
    thoughts: tuple[str, str] | None = None
    says: str = ""
    macro: str = ""
    single: bool = False
    end: str = "<|im_end|>"

    @property
    def source(self) -> str:
        """The template."""
        opening, closing = self.thoughts or ("", "")
        thoughts = (
            "{% if m.reasoning_content is string %}OPEN{{ m.reasoning_content }}END{% endif %}"
        )
        thoughts = thoughts.replace("OPEN", _said(opening)).replace("END", _said(closing))
        calls = f"{self.first}{_CALLS}{self.call}{{% endfor %}}{self.last}"
        return (
            f"{self.macro}{{% if tools %}}{{{{ tools | tojson }}}}{self.says}{{% endif %}}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            + (thoughts if self.thoughts else "")
            + "{{ m.content }}{% if m.tool_calls %}"
            + calls
            + "{% endif %}"
            + self.end
            + '{{ "\\n" }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n'
            + "{% if enable_thinking is defined and enable_thinking %}"
            + _said(opening)
            + "{% endif %}{% endif %}"
        )


_OF_R1 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}"
    '{{ "\\n```json\\n" ~ f.arguments ~ "\\n```" }}<｜tool▁call▁end｜>'
)
FORMS = [
    Form("hermes", _HERMES + _NEXT, thoughts=_THINK),
    Form("hermes", _HERMES + _NEXT),
    Form("qwen3-coder", _TAGS + _NEXT, thoughts=_THINK),
    Form("glm-4.5", _KEYS + _NEXT, thoughts=("<think>", "</think>\n")),
    Form("deepseek-v3", _OF_R1 + _NEXT, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _THINK),
    Form(
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        ("<think>", "</think>"),
    ),
    Form(
        "deepseek-v3.2",
        _DSML,
        '{{ "\\n\\n<｜DSML｜function_calls>\\n" }}',
        "</｜DSML｜function_calls>",
        _THINK,
    ),
    Form(
        "deepseek-v4",
        _DSML,
        '{{ "\\n\\n<｜DSML｜tool_calls>\\n" }}',
        "</｜DSML｜tool_calls>",
        _THINK,
    ),
    Form(
        "kimi-k2",
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _THINK,
    ),
    Form(
        "minimax-m2",
        _INVOKED,
        '{{ "\\n<minimax:tool_call>\\n" }}',
        "</minimax:tool_call>",
        _THINK,
    ),
    Form(
        "seed-oss",
        _TAGS.replace('">\\n" }}{{ v', '">" }}{{ v')
        .replace('"\\n</parameter>', '"</parameter>')
        .replace("tool_call>", "seed:tool_call>")
        + _NEXT,
        thoughts=("<seed:think>", "</seed:think>"),
    ),
    Form(
        "gemma-4",
        "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>",
        macro=_braces('<|"|>'),
        thoughts=("<|channel>thought\n", "\n<channel|>"),
    ),
    Form(
        "function-gemma",
        "<start_function_call>call:{{ f.name }}{{ value(f.arguments) }}<end_function_call>",
        macro=_braces("<escape>"),
    ),
    Form(
        "lfm2",
        _PYTHON + _COMMA,
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        _THINK,
        says="List of tools: ",
    ),
    Form(
        "llama-4",
        _PYTHON + _COMMA,
        "<|python_start|>[",
        "]<|python_end|>",
        says="<|header_start|>",
    ),
    Form("functionary-3.1", "<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    Form(
        "mistral-v11",
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}",
        thoughts=("[THINK]", "[/THINK]"),
    ),
    Form("mistral-v11", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    Form(
        "mistral",
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
        + _COMMA,
        "[TOOL_CALLS] [",
        "]",
    ),
    Form(
        "granite-3",
        _OBJECT + _COMMA,
        "<|tool_call|>[",
        "]",
        ("<think>", "</think>"),
        says="<|start_of_role|>",
    ),
    Form(
        "phi-4-mini",
        _OBJECT + _COMMA,
        "<|tool_call|>[",
        "]<|/tool_call|>",
        says="<|tool|><|/tool|>",
    ),
    Form("functools", _OBJECT + _COMMA, "functools[", "]"),
    Form("nemotron-2", _OBJECT + _COMMA, "<TOOLCALL>[", "]</TOOLCALL>", _THINK),
    Form("apriel", _OBJECT + _COMMA, "<tool_calls>[", "]</tool_calls>"),
    Form(
        "command-r7b",
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}" + _COMMA,
        '{{ "<|START_ACTION|>[\\n" }}',
        '{{ "\\n]" }}<|END_ACTION|>',
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    Form(
        "llama-3",
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        says="<|start_header_id|>",
        single=True,
    ),
    Form(
        "harmony",
        "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
        "{{ f.arguments | tojson }}<|call|>",
        thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        single=True,
        end="",
    ),
]
