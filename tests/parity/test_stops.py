"""Where stop strings of transformers depend on the padding before a prompt, ours do not."""

from __future__ import annotations

from dataclasses import replace

from tests.parity.draws import Draw
from tests.parity.options import Shape
from tests.parity.sides import ours, plain_reference
from tests.parity.text import own_tokenizer


def test_no_stop_string_begins_in_padding() -> None:
    settings = {"max_new_tokens": 6, "eos_token_id": [38], "pad_token_id": 39}
    shape = Shape("greedy", 40, 2, 4, (38,), 1)
    prompts = ((7, 8, 9, 10), (7,))
    free = Draw(0, "llama-plain", shape, prompts, "left", 12, True, False, settings)
    said = ours(free).result
    string = own_tokenizer(40).decode([12, 7, int(said[1, 4])])
    stopped = replace(free, settings={**settings, "stop_strings": string})
    assert (ours(stopped).result == said).all()
    assert (plain_reference(stopped).result[1, 5:] != said[1, 5:]).any()
