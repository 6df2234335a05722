"""Memory stays bounded, whatever is asked: measured in a process of its own, by what it holds."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.reading import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system says it otherwise")

BEGIN = """
import asyncio, resource
from pathlib import Path
import torch
torch.set_num_threads(1)
import everystep as es
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

def held(kind):
    return int(Path("/proc/self/statm").read_text().split()[kind]) * 4096
"""

LIKELIHOODS = """
import sys
BUDGET = int(sys.argv[1])
ROWS, IDS, VOCABULARY, ROOM = 4, 1800, 16384, 128 << 20
assert ROWS * IDS * VOCABULARY * 4 > 3 * ROOM  # the logits of all of it
model = tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=4096)

async def main():
    async with es.AsyncEngine(model, tiny_tokenizer(320), token_budget=BUDGET) as engine:
        async def ask(count):
            ids = [(7 * place) % VOCABULARY for place in range(count)]
            return await engine.generate(
                ids, prompt_logprobs=20, max_new_tokens=1, return_dict_in_generate=True
            )
        await asyncio.gather(*(ask(40) for _ in range(ROWS)))
        limit = held(0) + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        found = await asyncio.gather(*(ask(IDS) for _ in range(ROWS)))
        for one in found:
            assert one.prompt_logprobs.top_tokens.shape == (IDS - 1, 20)

asyncio.run(main())
"""

GRAMMARS = """
import sys
from everystep.processors.grammars.grammar import compiled
from everystep.processors.grammars.trials import GrammarTrials, on_trial
from everystep.processors.grammars.vocabulary import vocabulary_of
own = vocabulary_of(tiny_tokenizer(), len(tiny_tokenizer()))
trials, count = GrammarTrials(), int(sys.argv[1])

def tried_by():
    return sum(
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in trials.processes
    )

with on_trial(trials):
    for number in range(count):
        name = f"a{number}"
        schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        compiled(trials.read("schema", schema, own), own)
        if number == count // 4:
            before = held(1), tried_by()
assert len(trials.processes) == 1 and trials.count == count
grown = held(1) - before[0], tried_by() - before[1]
assert max(grown) < 12 << 20, grown
trials.close()
"""


def ran(program: str, *words: Any) -> str:
    """What a program says on its error output is wrong, nothing where all is right."""
    line = [sys.executable, "-c", BEGIN + program, *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=500)
    return done.stderr[-3000:] if done.returncode else ""


def test_likelihoods_of_long_prompts_need_no_more_than_a_step() -> None:
    assert ran(LIKELIHOODS, 128) == ""
    assert "alloc" in ran(LIKELIHOODS, 10_000), "and the whole at once would need more"


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_new_grammar_with_each_request_leaves_memory_as_it_is(count: int) -> None:
    assert ran(GRAMMARS, count) == ""
