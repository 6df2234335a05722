"""Bodies that are almost JSON: refused with a short error, and the next request is served."""

from __future__ import annotations

import pytest

from tests.server.serving import Served
from tests.server.test_strangers import HELLO

DIGITS = b"9" * 5000
TEXT = '{"prompt": "x", "max_tokens": 1}'
BODIES = {
    "a count of 5,000 digits": b'{"prompt": "x", "max_tokens": ' + DIGITS + b"}",
    "a seed of 5,000 digits": b'{"prompt": "x", "max_tokens": 1, "seed": -' + DIGITS + b"}",
    "an id of 5,000 digits": b'{"max_tokens": 1, "prompt": [5, ' + DIGITS + b"]}",
    "a float of 5,000 digits": b'{"prompt": "x", "temperature": ' + DIGITS + b".5}",
    "an exponent of 5,000 digits": b'{"prompt": "x", "temperature": 1e' + DIGITS + b"}",
    "a mark of the order of bytes": b"\xef\xbb\xbf" + TEXT.encode(),
    "utf-16": TEXT.encode("utf-16"),
    "utf-16, little end first": TEXT.encode("utf-16-le"),
    "utf-16, big end first": TEXT.encode("utf-16-be"),
    "utf-32": TEXT.encode("utf-32"),
    "latin-1": '{"prompt": "ü", "max_tokens": 1}'.encode("latin-1"),
    "two values": (TEXT + TEXT).encode(),
    "junk behind": (TEXT + " x").encode(),
    "a comma too many": b'{"prompt": "x", "max_tokens": 1,}',
    "a comment": b'{"prompt": "x", /* one */ "max_tokens": 1}',
    "single quotes": b"{'prompt': 'x'}",
    "a name without quotes": b'{prompt: "x"}',
    "an infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "a leading zero": b'{"prompt": "x", "max_tokens": 01}',
    "a hexadecimal number": b'{"prompt": "x", "max_tokens": 0x1}',
    "a line inside of a text": b'{"prompt": "x\ny", "max_tokens": 1}',
    "a key twice": b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2}',
    "a key twice, once with an escape": b'{"prompt": "x", "max_tokens": 1, "\\u0070rompt": "y"}',
    "a key twice, inside": b'{"prompt": "x", "max_tokens": 1, "logit_bias": {"5": 1, "5": 2}}',
    "a key twice, far inside": b'{"messages": [{"role": "user", "role": "system"}]}',
    "blanks alone": b"   ",
    "null": b"null",
    "a text": b'"prompt"',
}


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-16"])
@pytest.mark.parametrize("name", BODIES)
def test_what_is_almost_json_is_refused(server: Served, name: str, kind: str) -> None:
    headers = {"content-type": kind}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
        answer = server.client.post(path, content=BODIES[name], headers=headers)
        assert answer.status_code == 400, answer.text
        assert len(answer.content) < 4096 and answer.json()["error"]["message"]
    assert server.completion(**HELLO)
