"""Results of `peers` and `decode` as Markdown, as docs/benchmarks.md shows them.

Knows the form of the results and nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from parts.report import latest

Row = dict[str, Any]
OURS = "everystep"
FORMATS = ("F32", "Q8_0", "Q4_1", "Q4_0")
ENGINES = (OURS, "llama.cpp", "openvino-genai", "onnxruntime-genai", "ctranslate2", "transformers")


def newest_peers() -> dict[str, Row]:
    """Format -> the newest result of `peers`, of formats that have one."""
    found = {format: latest(f"peers-{format}") for format in FORMATS}
    return {format: result for format, result in found.items() if result is not None}


def shown() -> Iterator[str]:
    """The tables of docs/benchmarks.md, of the newest results."""
    peers, decode = newest_peers(), latest("decode")
    if peers:
        yield from (table(peers) for table in (speed_table, start_table, busy_table))
    if decode is not None:
        yield decode_table(decode)


def limit(result: Row, row: Row) -> float:
    """Tokens per second that the memory would allow one row: its speed over the bytes of a step.

    Its speed is that beside the case; older results have one for the whole run.
    """
    about, speed = result["about"][OURS], row.get("bytes_per_s") or result["bytes_per_s"]
    seen = int(row["prompt"]) + row["tokens"] / 2
    return speed / (about["weight_bytes"] + seen * about["position_bytes"])


def by_case(rows: Iterable[Row]) -> Iterator[tuple[tuple[int, str], dict[str, Row]]]:
    """(batch, prompt) and its rows by engine, in the order in which they were measured."""
    found: dict[tuple[int, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["batch"], row["prompt"]), {})[row["engine"]] = row
    yield from found.items()


def speeds(rows: dict[str, Row]) -> dict[str, float]:
    """Engine -> decoded tokens per second, where they are known."""
    found = {engine: row["tokens_per_s"] for engine, row in rows.items()}
    return {engine: speed for engine, speed in found.items() if speed is not None}


def speed_table(results: dict[str, Row]) -> str:
    """Decoded tokens per second of every engine; ours over those of the best peer of the same
    precision, and over the limit."""
    lines = [("file", "batch, prompt", *ENGINES, "of the best peer", "of the limit")]
    for format, result in results.items():
        for (batch, prompt), rows in by_case(result["rows"]):
            found = speeds(rows)
            cells = [f"{found[engine]:.0f}" if engine in found else "" for engine in ENGINES]
            share = ""
            if batch == 1 and OURS in found:
                share = f"{found[OURS] / limit(result, rows[OURS]):.0%}"
            ratio = _over_best(rows)
            lines.append((format, f"{batch}, {prompt}", *cells, ratio, share))
    return _markdown(lines)


def start_table(results: dict[str, Row]) -> str:
    """Milliseconds to the first token after 32 tokens and of 512, and the peak memory so far."""
    lines = [("file", "engine", "first token of 32", "prompt of 512", "peak memory")]
    for format, result in results.items():
        cases = dict(by_case(result["rows"]))
        short, long = cases.get((1, "32"), {}), cases.get((1, "512"), {})
        for engine in (engine for engine in ENGINES if engine in short):
            rate = f"{512 / long[engine]['first_s']:.0f} tokens/s" if engine in long else ""
            first, peak = short[engine]["first_s"] * 1e3, short[engine]["peak_mib"]
            lines.append((format, engine, f"{first:.0f} ms", rate, f"{peak:.0f} MiB"))
    return _markdown(lines)


def busy_table(results: dict[str, Row]) -> str:
    """Tokens per second with a busy neighbour, and what is kept of the speed without."""
    lines = [("file", "batch, prompt", "engine", "alone", "beside a busy process", "kept")]
    for format, result in results.items():
        alone = dict(by_case(result["rows"]))
        for case, rows in by_case(result["busy"]):
            for engine, row in rows.items():
                before, now = alone[case][engine]["tokens_per_s"], row["tokens_per_s"]
                cells = f"{before:.0f}", f"{now:.0f}", f"{now / before:.0%}"
                lines.append((format, f"{case[0]}, {case[1]}", engine, *cells))
    return _markdown(lines)


def decode_table(result: Row) -> str:
    """Both engines of `decode`: tokens per second, seconds to the first token, the peak memory."""
    lines = [("batch, prompt", OURS, "transformers", "ratio", "first token", "peak memory")]
    for row in result["rows"]:
        ours, peer = row[OURS], row["transformers"]
        rates = ours["decode_tokens_per_s"], peer["decode_tokens_per_s"]
        firsts = _seconds(ours["first_token_s"]), _seconds(peer["first_token_s"])
        lines.append(
            (
                _case(row["case"]),
                f"{rates[0]:.0f} tokens/s",
                f"{rates[1]:.0f}",
                f"{rates[0] / rates[1]:.2f}",
                " to ".join(firsts),
                f"{ours['peak_mib']:.0f} to {peer['peak_mib']:.0f} MiB",
            )
        )
    return _markdown(lines)


def _case(name: str) -> str:
    """`b8 p512 4 beams ragged` in words."""
    batch, prompt, rest = name.split(maxsplit=2)
    more = {"greedy": "", "4 beams": ", four beams", "greedy ragged": ", rows end early"}[rest]
    return f"{batch[1:]}, {prompt[1:]}{more}"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.1f} s"


def _over_best(rows: dict[str, Row]) -> str:
    found = speeds({name: row for name, row in rows.items() if row["like"]})
    ours = found.pop(OURS, None)
    return f"{ours / max(found.values()):.2f}" if found and ours is not None else ""


def _markdown(lines: list[tuple[str, ...]]) -> str:
    head, *body = lines
    rule = ("---",) * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))
