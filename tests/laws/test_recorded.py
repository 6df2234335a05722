"""A record is true, and to write it changes nothing: on random mixes of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep.errors import InvariantError
from everystep.records import read_record
from tests.judges.drive import hash_executor, run_scheduled
from tests.judges.mixes import random_mix
from tests.judges.recorded import NOT_OF_PROCESSORS, check, watched

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


@pytest.mark.parametrize(
    "seeds",
    [*BLOCKS, *(pytest.param(block, marks=pytest.mark.slow) for block in MORE_BLOCKS)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_a_record_is_true_and_changes_nothing(seeds: range, tmp_path: Path) -> None:
    seen: dict[str, int] = {}
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
        for one in read_record(file).runs.values():
            found = plain.results[str(one.about["request"])]
            assert [one.tokens.get(i, []) for i in range(len(found))] == [
                list(hypothesis.tokens) for hypothesis in found
            ]
            assert [end.kind for end in sorted(one.ends, key=lambda end: end.index)] == [
                hypothesis.reason for hypothesis in found
            ]
    assert "unknown" not in seen
    assert seeds.start or seen.keys() >= STAGES


@pytest.mark.parametrize("planted", ["logits", "values", "earlier values", "removed", "draw"])
def test_a_wrong_number_is_noticed(planted: str, tmp_path: Path) -> None:
    import json

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
