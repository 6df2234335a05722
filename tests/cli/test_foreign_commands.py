"""Options and commands of other programs: each is answered with what is to be typed here."""

from __future__ import annotations

import pytest

from everystep.config.foreign_names import COMMANDS, OPTIONS
from tests.cli.running import Caller


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (("generate", "--temp", "1", "x"), "--temperature is the option here."),
        (("generate", "--n-predict", "3", "x"), "--max-new-tokens is the option here."),
        (("chat", "--temp", "1"), "--temperature is the option here."),
        (("generate", "--image", "a.png", "x"), "there is no picture 'a.png'"),
        (("generate", "--stop-sequences", "a", "x"), "--stop is the option here."),
        (("generate", "--draft-model", "a", "x"), "--assistant is the option here."),
        (("generate", "--mirostat-ent", "2", "x"), "es.generate(..., mirostat_tau=) takes it"),
        (("chat", "--dola-layers", "low"), "es.generate(..., dola_layers=) takes it"),
        (("serve", "--temp", "1"), "`everystep generate` has the option --temperature."),
        *((("generate", f"--{one.replace('_', '-')}"), text) for one, text in OPTIONS.items()),
        *(((name,), text) for name, text in COMMANDS.items()),
    ],
)
def test_the_command_line_answers_them(line: tuple[str, ...], told: str, call: Caller) -> None:
    found = call(*line)
    assert found.code == 2 and told in found.err
