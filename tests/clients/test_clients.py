"""Programs of others against the real server: `scripts/clients` runs all of them."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import everystep as es
from tests.cli.running import everystep
from tests.clients.client import CLIENTS, Client
from tests.clients.page import table, written
from tests.reading import ROOT

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of `everystep serve` with the default model."""
    command = everystep("serve", MODEL, "--port", "0", "--threads", "1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", program.stdout.readline())
        assert found is not None
        threading.Thread(target=program.stdout.read, daemon=True).start()
        yield found[0]
        program.terminate()
    assert program.returncode == 0


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.program)
def test_a_client_is_seen_to_do_what_the_page_says(
    client: Client, address: str, tmp_path: Path
) -> None:
    model, tokenizer = es.load(MODEL)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    client.require_shown(address, tmp_path)
    if client.name == "lm-eval":
        require_likelihoods(model, tokenizer, json.loads((tmp_path / "found.json").read_text()))


def require_likelihoods(model: Any, tokenizer: Any, found: dict[str, Any]) -> None:
    """What lm-eval found over the wire is, to the bit, what the model gives in this process."""

    def known(ids: list[int], after: int) -> tuple[float, bool]:
        scores = es.score(model, tokenizer, ids, best=1)
        rows = scores.logprobs.tolist()[after - 1 :], scores.top_logprobs.tolist()[after - 1 :]
        return sum(rows[0]), all(one == best[0] for one, best in zip(*rows, strict=True))

    for context, continuation, likelihood, greedy in found["choices"]:
        whole = tokenizer.encode(context + continuation, add_special_tokens=False)
        before = len(tokenizer.encode(context, add_special_tokens=False))
        assert known(whole, before) == (likelihood, greedy), (context, continuation)
    first = tokenizer.bos_token_id or tokenizer.eos_token_id
    for text, likelihood in found["texts"]:
        ids = [first, *tokenizer.encode(text, add_special_tokens=False)]
        assert known(ids, 1)[0] == likelihood, text
    stops = ["\n\n", ".", "!", "?", ";", tokenizer.eos_token]
    for prompt, text in found["generate"]:
        asked = {"max_new_tokens": 16, "stop_strings": stops, "trim_stop_strings": True}
        wanted = es.generate(model, tokenizer, prompt, do_sample=False, **asked)
        assert text == wanted, prompt


def test_the_page_says_what_the_programs_show() -> None:
    assert written() == table(), "Run: scripts/clients"
    for one in CLIENTS:
        assert one.shown()
        assert not one.pins or any(pin.endswith(f"=={one.release}") for pin in one.pins)


def test_the_clients_of_the_tests_are_of_the_releases_in_the_table() -> None:
    for name in ("openai", "anthropic"):
        (one,) = [client for client in CLIENTS if client.name == name]
        assert version(name) == one.release and one.pins == (f"{name}=={one.release}",)
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        assert f"{name}=={one.release}" in wanted["project"]["optional-dependencies"]["test"]
