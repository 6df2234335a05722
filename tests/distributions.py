"""Distributions as an installer leaves them: a module, and beside it what names its classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

STAGES = '''
"""A processor and a hook of a distribution of its own."""

from dataclasses import dataclass

import everystep as es


@dataclass(frozen=True)
class Favour:
    """Adds to the scores of some ids."""

    ids: tuple = (90,)
    by: float = 4.0

    def __post_init__(self):
        if self.by > 1000:
            raise ValueError("more than anybody wants")

    def __call__(self, input_ids, scores):
        scores[:, list(self.ids)] += self.by
        return scores


class Insert(es.Hook):
    """Forces ids after so many tokens, and remembers how many there were."""

    def __init__(self, ids, after=1):
        self.ids, self.after = list(ids), after

    def on_prompt(self, moment):
        return 0

    def after_step(self, step):
        force = self.ids if step.memory + 1 == self.after else None
        return es.Next(memory=step.memory + 1, force=force)


class Failing:
    """Cannot be called with scores."""

    def __call__(self, input_ids, scores):
        raise RuntimeError("the operator's own")
'''
GROUPS = {
    "everystep.processors": {
        "favour": "everystep_own_stages:Favour",
        "failing": "everystep_own_stages:Failing",
        "lost": "everystep_own_stages:Lost",
        "no processor": "everystep_own_stages:Insert",
    },
    "everystep.hooks": {
        "insert": "everystep_own_stages:Insert",
        "no hook": "everystep_own_stages:Favour",
    },
}


def distribution(
    folder: Path, module: str, source: str, groups: Mapping[str, Mapping[str, str]]
) -> None:
    """Write a distribution of one module into a folder, with what its groups name."""
    (folder / f"{module}.py").write_text(source)
    about = folder / f"{module}-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    lines = []
    for group, named in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in named.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")


def own_stages(folder: Path) -> None:
    """Write a distribution with a processor and a hook."""
    distribution(folder, "everystep_own_stages", STAGES, GROUPS)
