"""Two features at once are what they are in the library, or refused for its reason."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.host import HostedModel
from everystep.server.link import EngineLink, ThreadMooring
from everystep.server.local import listening
from everystep.server.routes import COMPLETIONS
from tests.distributions import own_stages
from tests.server.pairs import (
    BASE,
    PROMPT,
    adapted,
    features,
    in_process,
    over_http,
    pairs,
    require_pair,
)
from tests.server.serving import LIMITS, TOKENIZER, TRIALS, Served

pytestmark = pytest.mark.filterwarnings("ignore")
CHOSEN = (
    ("model", "schema"),
    ("model", "prompt_lookup_num_tokens"),
    ("schema", "prompt_lookup_num_tokens"),
    ("adapters", "num_beams"),
    ("stream", "num_beams"),
    ("echo", "logprobs"),
    ("echo", "prompt_logprobs"),
    ("logprobs", "prompt_logprobs"),
    ("prompt_logprobs", "num_beams"),
    ("prompt_logprobs", "n"),
    ("prompt_logprobs", "stream"),
    ("token_healing", "prompt_logprobs"),
    ("stream", "echo"),
    ("strategy_options", "hooks"),
    ("logits_processor", "num_beams"),
    ("hooks", "stream"),
)
"""Pairs that servers are known to get wrong, and those of what the operator has installed."""


@contextmanager
def served_with_adapter() -> Iterator[Served]:
    """A server over the model of the pairs."""
    model = adapted()
    link = EngineLink(
        ThreadMooring(
            lambda: {"tiny": HostedModel(model, TOKENIZER, LIMITS, trials=TRIALS)}, LIMITS
        )
    )
    front = Front(link, {"tiny": FrontModel(TOKENIZER, model.chat_defaults)})
    with listening(front) as port:
        one = Served(front, port)
        with one.client:
            yield one


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processors and hooks that the operator has."""
    folder = tmp_path_factory.mktemp("installed")
    own_stages(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def server(installed: None) -> Iterator[Served]:
    with served_with_adapter() as one:
        yield one


def test_every_field_is_a_feature() -> None:
    known = features()
    assert len(known) > 90
    for name, body in known.items():
        assert name in body and set(body) <= set(COMPLETIONS.fields)
        assert all(COMPLETIONS.fields[one].kind.accepts(value) for one, value in body.items()), name


def test_some_pairs(server: Served) -> None:
    rng = random.Random(11)
    chosen = [*CHOSEN, *rng.sample(sorted(pairs()), 100)]
    worked = sum(require_pair(server, one, two) for one, two in chosen)
    assert worked > len(chosen) // 3


@pytest.mark.parametrize("third", ["prompt_lookup_num_tokens", "num_beams", "do_sample", "stream"])
def test_an_adapter_with_a_grammar_and_more(server: Served, third: str) -> None:
    known = features()
    body = {"prompt": PROMPT, **BASE, **known["model"], **known["schema"], **known[third]}
    wanted, got = in_process(body), over_http(server, body)
    assert isinstance(wanted, list) and isinstance(got, list)
    assert [one[:2] for one in got] == [one[:2] for one in wanted]


@pytest.mark.slow
def test_all_pairs(server: Served) -> None:
    known = sorted(pairs())
    assert len(known) > 4000
    for one, two in known:
        require_pair(server, one, two)
