"""Draws the newest results of `peers` and `lengths`.

    scripts/bench plot

Writes PNG and SVG files to bench/results/, and prints the tables for docs/benchmarks.md.
"""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from parts.report import RESULTS, latest
from parts.tables import ENGINES, OURS, by_case, limit, newest_peers, shown, speeds

SPEEDS = ((1, "32"), (8, "32"), (32, "32"), (32, "8-200"))
OWN, PEER, LIMIT = "#c2410c", "#94a3b8", "#0f172a"
STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


def draw_peers(results: dict[str, dict[str, Any]]) -> Figure:
    """A panel of bars per format and case: decoded tokens per second, and reading prompts."""
    rows = len(SPEEDS) + 1
    figure, panels = plt.subplots(
        rows, len(results), figsize=(3.2 * len(results), 1.5 * rows), squeeze=False
    )
    for column, (format, result) in enumerate(results.items()):
        cases = dict(by_case(result["rows"]))
        for line, case in enumerate(SPEEDS):
            found = speeds(cases.get(case, {}))
            panel = panels[line][column]
            _bars(panel, found, f"{format}, {case[0]} rows after {case[1]}")
            if case[0] == 1 and OURS in found:
                bound = limit(result, cases[case][OURS])
                panel.axvline(bound, color=LIMIT, linestyle="--", linewidth=1)
        reading = {name: 512 / row["first_s"] for name, row in cases.get((1, "512"), {}).items()}
        _bars(panels[-1][column], reading, f"{format}, reading a prompt of 512")
    figure.suptitle("tokens per second; the dashed line is what the memory's speed allows one row")
    figure.tight_layout()
    return figure


def _bars(panel: Axes, speeds: dict[str, float], title: str) -> None:
    names = [name for name in reversed(ENGINES) if name in speeds]
    values = [speeds[name] for name in names]
    bars = panel.barh(names, values, color=[OWN if name == OURS else PEER for name in names])
    panel.bar_label(bars, fmt="%.0f", padding=2)
    panel.margins(x=0.2)
    panel.set_title(title, fontsize=8, loc="left")


def draw_lengths(result: dict[str, Any]) -> Figure:
    """Cost of a token over length and batch, beside the model of bytes and operations."""
    curves = list(dict.fromkeys(row["curve"] for row in result["rows"]))
    figure, panels = plt.subplots(1, len(curves), figsize=(3.8 * len(curves), 3), squeeze=False)
    for panel, curve in zip(panels[0], curves, strict=True):
        rows = [row for row in result["rows"] if row["curve"] == curve]
        at = [row["at"] for row in rows]
        panel.loglog(at, [row["model_s"] * 1e6 for row in rows], color=LIMIT, linestyle="--")
        panel.loglog(at, [row["token_s"] * 1e6 for row in rows], color=OWN, marker=".")
        panel.set_title(curve, fontsize=8, loc="left")
        panel.set_xlabel("rows" if "batch" in curve else "tokens of the prompt")
        panel.set_ylabel("µs per token")
    panels[0][0].legend(["bytes and operations", "measured"], frameon=False)
    figure.tight_layout()
    return figure


def save(figure: Figure, name: str) -> None:
    """PNG and SVG in bench/results/; the same data give the same files."""
    figure.savefig(RESULTS / f"{name}.png", dpi=110, metadata={"Software": None})
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Draws what there is."""
    plt.rcParams.update({**STYLE, "svg.hashsalt": "everystep"})
    results = newest_peers()
    if results:
        save(draw_peers(results), "peers")
    lengths = latest("lengths-Q4_1")
    if lengths is not None:
        save(draw_lengths(lengths), "lengths")
    print("\n\n".join(shown()))


if __name__ == "__main__":
    main()
