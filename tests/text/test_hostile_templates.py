"""Templates that make one operation of Python expensive, which no count of steps can stop.

Every large value meets every operation, in a loop. Each template ends as one of our errors or as a
text, within what its process gets, and after it another chat is rendered as before.
"""

from __future__ import annotations

import resource
from typing import Any

import pytest

from everystep.errors import RequestError, TokenizerError
from everystep.text import ChatTemplate

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
LARGE = {
    "integer": "9 ** 1200",
    "text": "'ab ' * 1000000",
    "numbers": "range(99999) | list",
    "texts": "range(99999) | map('string') | list",
    "nested": "[[[1] * 90] * 90] * 90",
    "pairs": "dict.fromkeys(range(99999), 'x')",
    "namespace": "namespace(a=range(99999) | list)",
}
OPERATIONS = (
    *(
        "x // 3",
        "x % 7",
        "x ** 3",
        "x * x",
        "x * 3",
        "x + x",
        "-x",
        "x == [x]",
        "x < x",
        "x in [x, x]",
    ),
    *(
        "[x, x] == [x, x + x]",
        "{x: x}",
        "x | string",
        "x | list",
        "x | abs",
        "x | float",
        "x | int",
    ),
    *("x | round(99)", "x | tojson(indent=99999)", "x | sort", "x | unique | list", "x | sum"),
    *(
        "x | reverse | list",
        "x | join('ab')",
        "x | map('string') | join",
        "x | groupby(0)",
        "x | max",
    ),
    *("x | batch(7) | list", "x | slice(7) | list", "x | title", "x | wordcount", "x | striptags"),
    *("x | urlencode", "x | indent(99)", "x | replace('a', 'bb')", "x | truncate(9)", "x | escape"),
    *("x.items() | list | string", "x.keys() == x.keys()", "x.split('a')", "x.translate(x)"),
    *("x.encode('punycode')", "x.encode('idna')", "x.count('b' * 999)", "'%s' % [x]"),
    *("'{:,}'.format(x)", "strftime_now(x | string)", "namespace(a=x) | string"),
)
TEMPLATES = {
    f"{operation} of {name}": f"{{% set x = {value} %}}{{% for i in range(99999) %}}"
    f"{{% set y = {operation} %}}{{% endfor %}}"
    for name, value in LARGE.items()
    for operation in OPERATIONS
}
FEW = 19  # one of so many is in the default run


def test_there_are_three_hundred() -> None:
    assert len(TEMPLATES) >= 300


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=() if place % FEW == 0 else pytest.mark.slow)
        for place, (name, source) in enumerate(TEMPLATES.items())
    ],
)
def test_no_operation_hurts_anyone(source: str) -> None:
    sentinel = ChatTemplate("{{ messages[0].role ~ 1 }}")
    before = sentinel.render(CHAT), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        ChatTemplate(source).render(CHAT)
    except (TokenizerError, RequestError) as error:
        assert len(str(error)) < 2000
    assert sentinel.render(CHAT) == before[0]
    # Kilobytes: what the process of a template may use is not used here.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 64 << 10
