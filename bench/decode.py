"""How fast does decoding run on plain torch operators, compared with transformers?

    scripts/bench decode [--quick] [--only TEXT] [--model PATH] [--threads 2] [--out NAME]

Both use the float32 weights of the default model. Every case runs in a process of its own, ours and
the peer's in turn: greedy and four beams, several batches and prompt lengths, and a ragged batch
whose rows end early. Prints, and writes to bench/results/, the medians of load time, time to the
first token, decoded tokens per second and peak memory, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from parts.models import Models
from parts.report import options, write


@dataclass(frozen=True)
class Case:
    """`tokens`: new tokens per row; `ragged`: every 16th id ends a row."""

    batch: int
    prompt: int
    beams: int = 1
    tokens: int = 48
    ragged: bool = False

    @property
    def name(self) -> str:
        kind = f"{self.beams} beams" if self.beams > 1 else "greedy"
        return f"b{self.batch} p{self.prompt} {kind}" + (" ragged" if self.ragged else "")


CASES = (
    Case(1, 32),
    Case(8, 32),
    Case(32, 32, tokens=32),
    Case(1, 512),
    Case(8, 512, tokens=32),
    Case(32, 512, tokens=16),
    Case(1, 32, beams=4),
    Case(8, 32, beams=4, tokens=32),
    Case(32, 32, beams=4, tokens=16),
    Case(1, 512, beams=4),
    Case(32, 32, ragged=True, tokens=96),
)
QUICK = (Case(1, 32, tokens=24), Case(8, 32, tokens=16), Case(1, 32, beams=4, tokens=16))


def measure(engine: str, case: Case, path: str, threads: int, repeats: int) -> dict[str, float]:
    """One process: loads, warms up, then times; seconds, tokens per second, MiB."""
    import torch

    torch.set_num_threads(threads)
    start = time.perf_counter()
    model, vocabulary = _load(engine, path)
    load = time.perf_counter() - start
    generator = torch.Generator().manual_seed(case.batch * 1000 + case.prompt)
    ids = torch.randint(vocabulary // 2, (case.batch, case.prompt), generator=generator)
    eos = [i for i in range(vocabulary) if i % 16 == 0] if case.ragged else None
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = 1
    options = {"do_sample": False, "num_beams": case.beams, "attention_mask": torch.ones_like(ids)}

    def run(tokens: int) -> tuple[float, float, int]:
        """Seconds to the first step's end, seconds from there to the last one's, useful tokens."""
        ends: list[float] = []

        def clock(input_ids, scores, **_):  # type: ignore[no-untyped-def]
            ends.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        begin = time.perf_counter()
        out = model.generate(ids, max_new_tokens=tokens, stopping_criteria=[clock], **options)
        return ends[0] - begin, ends[-1] - ends[0], _useful(out[:, case.prompt :], eos)

    run(2)
    firsts, rests, counts = zip(*(run(case.tokens + 1) for _ in range(repeats)), strict=True)
    return {
        "load_s": load,
        "first_token_s": statistics.median(firsts),
        "decode_tokens_per_s": (counts[0] - case.batch) / statistics.median(rests),
        "tokens": counts[0],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _useful(new, eos) -> int:  # type: ignore[no-untyped-def]
    """Tokens up to and including each row's end token."""
    if not eos:
        return new.numel()
    total = 0
    for row in new.tolist():
        ends = [i for i, token in enumerate(row) if token % 16 == 0]
        total += (ends[0] + 1) if ends else len(row)
    return total


def _load(engine: str, path: str):  # type: ignore[no-untyped-def]
    import torch

    if engine == "everystep":
        import everystep

        model = everystep.load_model(path, dtype=torch.float32, executor="torch")
        return model, model.vocab_size
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), model.config.vocab_size


def main() -> None:
    """Runs every case for both engines in turn and writes a dated file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        order = json.loads(args.one)
        case = Case(**order["case"])
        print(json.dumps(measure(order["engine"], case, order["path"], args.threads, args.repeats)))
        return
    folder = args.model or str(Models.default().float32())
    rows = []
    chosen = [case for case in (QUICK if args.quick else CASES) if args.only in case.name]
    for case in chosen:
        pair = {e: _child(e, case, folder, args) for e in ("everystep", "transformers")}
        rows.append({"case": case.name, **pair})
        _print_row(case, pair)
    write("decode", args, {"rows": rows}, packages=("transformers",))


def _child(engine: str, case: Case, path: str, args: argparse.Namespace) -> dict[str, float]:
    order = json.dumps({"engine": engine, "case": asdict(case), "path": path})
    command = [sys.executable, __file__, "--one", order, "--threads", str(args.threads)]
    command += ["--repeats", str(args.repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} failed on {case.name}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _print_row(case: Case, pair: dict[str, dict[str, float]]) -> None:
    ours, peer = pair["everystep"], pair["transformers"]
    speed = ours["decode_tokens_per_s"] / peer["decode_tokens_per_s"]
    print(
        f"{case.name:24} decode {ours['decode_tokens_per_s']:8.1f} vs "
        f"{peer['decode_tokens_per_s']:8.1f} tok/s = {speed:4.2f} x   first "
        f"{ours['first_token_s']:6.3f} vs {peer['first_token_s']:6.3f} s   load "
        f"{ours['load_s']:5.2f} vs {peer['load_s']:5.2f} s   peak "
        f"{ours['peak_mib']:6.0f} vs {peer['peak_mib']:6.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
