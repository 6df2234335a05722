"""A record is true, and to write it changes nothing: on random mixes of requests."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from everystep.errors import InvariantError
from everystep.records import read_record
from tests.judges.drive import hash_executor, run_scheduled, run_together
from tests.judges.mixes import Mix, random_mix
from tests.judges.recorded import NOT_OF_PROCESSORS, check, watched
from tests.judges.replays import replay_whole

BLOCKS = [range(60)]
MORE_BLOCKS = [range(first, first + 44) for first in range(60, 500, 44)]
STAGES = {
    "all",
    "log_softmax",
    "guidance",
    "dola",
    "contrast",
    "hooks",
    "HammingDiversityLogitsProcessor",
}
CHOSEN_AGAIN = {
    *("Beam", "DiverseBeam", "ConstrainedBeam", "Contrastive"),
    *("BestOf by score", "BestOf by likelihood", "BestOf by majority"),
}
"""Strategies that choose among several: whole runs of each are chosen again from their numbers."""


@pytest.mark.parametrize(
    "seeds",
    [*BLOCKS, *(pytest.param(block, marks=pytest.mark.slow) for block in MORE_BLOCKS)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_a_record_is_true_and_changes_nothing(seeds: range, tmp_path: Path) -> None:
    seen: dict[str, int] = {}
    again = Counter[str]()
    for seed in seeds:
        mix, file = random_mix(seed), tmp_path / f"{seed}.jsonl"
        rows = mix.schedule.max_rows
        plain = run_scheduled(mix.requests, mix.schedule, hash_executor(mix, rows))
        own = watched(mix.requests, file, stages=seed % 4 > 0)
        run = run_scheduled(own, mix.schedule, hash_executor(mix, rows))
        assert run.results == plain.results, seed
        assert run.events == plain.events, seed
        for name, count in check(mix, file).items():
            seen[name] = seen.get(name, 0) + count
        again += replay_whole(mix, file)
        for one in read_record(file).runs.values():
            found = plain.results[str(one.about["request"])]
            assert [one.tokens.get(i, []) for i in range(len(found))] == [
                list(hypothesis.tokens) for hypothesis in found
            ]
            assert [end.kind for end in sorted(one.ends, key=lambda end: end.index)] == [
                hypothesis.reason for hypothesis in found
            ]
    assert "unknown" not in seen
    assert seeds.start or (seen.keys() >= STAGES and again.keys() >= CHOSEN_AGAIN)


@pytest.mark.parametrize("planted", ["logits", "values", "earlier values", "removed", "draw"])
def test_a_wrong_number_is_noticed(planted: str, tmp_path: Path) -> None:
    mix, file = random_mix(9 if planted == "earlier values" else 3), tmp_path / "a.jsonl"
    run_scheduled(watched(mix.requests, file), mix.schedule, hash_executor(mix, None))
    check(mix, file)
    lines, spoilt = [], 0
    for text in file.read_text().splitlines():
        line = json.loads(text)
        for row in line.get("rows", ()):
            if planted == "logits":
                row["logits"][0], spoilt = row["logits"][0] + 1.0, spoilt + 1
            elif planted == "values" and row["stages"]:
                values = row["stages"][-1]["values"]
                at = next(i for i, value in enumerate(values) if value is not None)
                values[at], spoilt = values[at] + 1.0, spoilt + 1
            elif planted == "earlier values":
                for stage in row["stages"][:-1]:
                    if stage["name"] in NOT_OF_PROCESSORS:
                        continue
                    at = next(i for i, value in enumerate(stage["values"]) if value is not None)
                    stage["values"][at], spoilt = stage["values"][at] + 1.0, spoilt + 1
            elif planted == "removed" and row["stages"]:
                row["stages"][-1]["removed"], spoilt = row["stages"][-1]["removed"] + 1, spoilt + 1
            elif planted == "draw" and "draw" in row and row["draw"][2] < 0.9:
                row["draw"][0], spoilt = row["draw"][2] + 0.05, spoilt + 1
        lines.append(json.dumps(line))
    assert spoilt
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(InvariantError):
        check(mix, file)


def _spoil_value(step: dict[str, Any]) -> bool:
    """A candidate that was not chosen has a higher score."""
    for row in step["rows"]:
        values = row["stages"][-1]["values"] if row["stages"] else row["logits"]
        for at, id in enumerate(row["ids"]):
            if id != row.get("chosen") and values[at] is not None:
                values[at] += 30.0
                return True
    return False


def _spoil_child(step: dict[str, Any]) -> bool:
    """Another candidate goes on, with the score that it would have."""
    rows = {row["of"]: row for row in step["rows"]}
    taken = {(child[0], *child[2]) for child in step["children"]}
    for child in step["children"]:
        row = rows[child[0]]
        scores = row["stages"][-1]["values"] if row["stages"] else row["logits"]
        known = dict(zip(row["ids"], scores, strict=True))
        for id, value in known.items():
            mine = known.get(child[2][0]) if child[2] else None
            if value is not None and mine is not None and (child[0], id) not in taken:
                child[2], child[3] = [id], child[3] + value - mine
                return True
    return False


def _spoil_score(step: dict[str, Any]) -> bool:
    """A hypothesis has another score."""
    for child in step["children"]:
        if child[4] is None and child[3] > -1e6:
            child[3] -= 0.3
            return True
    return False


def _spoil_sum(step: dict[str, Any]) -> bool:
    """A row says another sum of what came before it."""
    for row in step["rows"]:
        if row.get("score", -1e9) > -1e6:
            row["score"] -= 1.0
            return True
    return False


def _spoil_draw(step: dict[str, Any]) -> bool:
    """A number lies elsewhere."""
    for row in step["rows"]:
        if row["draw"][2] < 0.9:
            row["draw"][0] = row["draw"][2] + 0.05
            return True
    return False


def _spoil_part(step: dict[str, Any]) -> bool:
    """The part of a token lies elsewhere, with the number in it."""
    for row in step["rows"]:
        number, low, high = row["draw"]
        if low > 0.3:
            row["draw"] = [number - low, 0.0, high - low]
            return True
    return False


def _spoil_surprise(step: dict[str, Any]) -> bool:
    """The likely are unlikely."""
    for row in step["rows"]:
        row["surprise"] = -row["surprise"]
    return True


SPOILT = {
    "value": _spoil_value,
    "child": _spoil_child,
    "score": _spoil_score,
    "sum": _spoil_sum,
    "draw": _spoil_draw,
    "part": _spoil_part,
    "surprise": _spoil_surprise,
}
SEARCHES = [
    (strategy, seed, planted)
    for strategy, seed in (("DiverseBeam", 4), ("ConstrainedBeam", 13))
    for planted in ("value", "child", "score", "sum", "tokens", "end")
]
OTHERS = [
    *(("Contrastive", 13, planted) for planted in ("value", "child", "score", "tokens", "end")),
    *(("BestOf", 10, planted) for planted in ("value", "child", "draw", "tokens")),
    *(("BestOf", 23, planted) for planted in ("surprise", "child", "draw", "end")),
    *(("BestOf", 50, planted) for planted in ("child", "draw", "part", "tokens")),
]


@pytest.mark.parametrize(("strategy", "seed", "planted"), [*SEARCHES, *OTHERS])
def test_a_wrong_number_of_a_choice_among_several_is_noticed(
    strategy: str, seed: int, planted: str, tmp_path: Path
) -> None:
    mix, texts = _recorded(seed, strategy)
    lines, own, spoilt = [], set[str](), 0
    asked = {one.request_id: type(one.strategy).__name__ for one in mix.requests}
    for text in texts:
        line = json.loads(text)
        if line["type"] == "run" and asked[line["request"]] == strategy:
            own.add(line["run"])
        mine = line.get("run") in own
        if mine and line["type"] == "step" and line.get("rows") and planted in SPOILT:
            spoilt += SPOILT[planted](line)
        elif mine and line["type"] == "tokens" and planted == "tokens":
            line["ids"][0], spoilt = line["ids"][0] ^ 1, spoilt + 1
        elif mine and line["type"] == "end" and planted == "end":
            line["kind"] = "criteria" if line["kind"] != "criteria" else "stop"
            spoilt += 1
        lines.append(json.dumps(line))
    assert spoilt
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(InvariantError):
        replay_whole(mix, file)


@cache
def _recorded(seed: int, strategy: str) -> tuple[Mix, list[str]]:
    """The requests of a mix that have this strategy, with the lines of their record."""
    mix = random_mix(seed)
    own = tuple(one for one in mix.requests if type(one.strategy).__name__ == strategy)
    mix = replace(mix, requests=own[:1])
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.jsonl"
        run = run_together(watched(mix.requests, file), hash_executor(mix))
        assert run.results
        assert any(name.startswith(strategy) for name in +replay_whole(mix, file))
        return mix, file.read_text().splitlines()
