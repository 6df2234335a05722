"""What chat templates are kept from doing: leaving the sandbox, and using much of anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from everystep.errors import RequestError, TokenizerError
from everystep.testing.tokenizer import CHATML
from everystep.text import ChatTemplate, TemplateLimits

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi  "},
    {"role": "assistant", "content": "Hello "},
]

# Ways out of a sandbox that have worked somewhere; CANARY is a file that they would write.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [1]|map('attr', '__class__')|first }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['time'] }}",
    "{{ strftime_now['__globals__'] }}",
    "{{ range.__self__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ ''.format.__self__.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{0.__class__}'|attr('format')(1) }}",
    "{{ '%s'.__mod__.__self__ }}",
    "{{ ('{0.__class__}'.format)(messages) }}",
    "{{ {'a': '{0.__class__}'.format}.a(1) }}",
    "{{ ['{0.__class__}'.format]|map('call', 1)|list }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace(__call__=range) %}{{ ns() }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].pop('role') }}",
    "{% set _ = messages.sort() %}",
    "{{ loop.__class__ }}{% for m in messages %}{{ loop._iterable.__class__ }}{% endfor %}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% extends '/etc/passwd' %}",
    "{% generation %}{{ caller.__class__ }}{% endgeneration %}",
    "{{ environment.call }}{{ _each.__globals__ }}{{ (1).__class__ }}",
    "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{% trans %}{{ x.__class__ }}{% endtrans %}",
    "{{ messages|groupby('__class__') }}",
    "{{ messages|sum(attribute='__class__', start='') }}",
]
LEAKS = re.compile(r"<class|<module|<built-in|<function|__main__|root:|mappingproxy|<bound")


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_gets_out(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chat = [dict(message) for message in CHAT]
    try:
        text = ChatTemplate(source).render(chat).text
    except (TokenizerError, RequestError):
        text = ""
    assert LEAKS.search(text) is None
    assert (list(tmp_path.iterdir()), chat) == ([], CHAT)


BOMBS = [
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'|center(10000000000) }}",
    "{{ '1'.zfill(10000000000) }}",
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * 'x' }}",
    "{{ [1] * 10000000000 }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10000000000) }}",
    "{{ '{0:>{1}}'.format('a', 10000000000) }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000).join(['a'] * 100000) }}",
    "{{ (['a'] * 100000)|join('x' * 1000000) }}",
    "{{ (range(100000)|map('string'))|join('x' * 1000000) }}",
    "{{ ('\n' * 1000000)|indent(1000000) }}",
    "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ [1]|batch(10000000000, 'x')|list }}",
    "{{ [1]|slice(10000000000)|list }}",
    "{{ [['x' * 1000000] * 1000000]|string }}",
    "{{ [[1] * 1000000] * 1000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{{ range(100000)|list|length }}{% endfor %}",
    "{% for i in range(100000) %}{{ range(100000)|map('string')|sort|first }}{% endfor %}",
    "{% for i in range(100000) %}{{ 'x' in range(100000)|map('string') }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [range(9)] recursive %}{{ loop([range(9)]) }}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(64) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s }}",
    "{% set x = 'x' * 1000 %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = 'x' %}" + "{% set x = d(x) %}" * 40,
    "{% set n = namespace(s=[]) %}{% for i in range(99999) %}{% set n.s = n.s + [1] %}{% endfor %}",
    "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "not " * 20000 + "1 }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{{ messages }}" * 20_000,
]


@pytest.mark.parametrize("source", BOMBS)
def test_no_template_uses_much(source: str) -> None:
    with pytest.raises((TokenizerError, RequestError)):
        ChatTemplate(source).render(CHAT)


def test_after_a_bomb_the_next_rendering_works() -> None:
    with pytest.raises(TokenizerError, match="Line 2 of the chat template exceeds its limits"):
        ChatTemplate("a\n{{ 'x' * 10000000000 }}").render(CHAT)
    assert ChatTemplate("{{ 'x' * 3 }}").render(CHAT).text == "xxx"


def test_long_chats_are_within_the_limits() -> None:
    long = [{"role": "user", "content": "word " * 2000}] * 300
    text = ChatTemplate(CHATML).render(long).text
    assert len(text) > 3_000_000
    joined = "{{ messages | map(attribute='content') | join('\n') }}"
    assert len(ChatTemplate(joined).render(long).text) > 2_999_000


COUNTED = [
    "{% for i in range(2000) %}{% endfor %}",
    "{% for i in [1] recursive %}{% if loop.depth == 1 %}{{ loop(range(2000)) }}{% endif %}"
    "{% endfor %}",
    "{% macro f() %}{% endmacro %}" + "{{ f() }}" * 2000,
    "{{ range(2000) | map('string') | join }}",
    "{{ 'x' * 1000000 }}",
]


@pytest.mark.parametrize("source", COUNTED)
def test_steps_are_counted_without_a_clock(source: str) -> None:
    with pytest.raises(TokenizerError, match="more than 1000 steps"):
        ChatTemplate(source, TemplateLimits(steps=1000, seconds=1e9)).render(CHAT)


def test_limits_can_be_chosen() -> None:
    limits = TemplateLimits(text_characters=10)
    assert ChatTemplate("{{ 'x' * 10 }}", limits).render(CHAT).text == "x" * 10
    with pytest.raises(TokenizerError, match="more than 10 characters"):
        ChatTemplate("{{ 'x' * 11 }}", limits).render(CHAT)
    with pytest.raises(TokenizerError, match="chat template is too long"):
        ChatTemplate("x" * 11, TemplateLimits(source_characters=10))
