"""aiperf as a load generator, of chat, completions and the responses API."""

import json
import subprocess
import sys
from pathlib import Path

from seen import run, seen

PROGRAM = str(Path(sys.executable).with_name("aiperf"))
MODEL = "smollm2-135m-instruct"


def load(address: str, kind: str, *arguments: str) -> dict:
    """Return the figures of 12 requests of 32 tokens, 4 at once; the tokenizer lies beside."""
    folder = Path.cwd() / f"aiperf-{kind}"
    command = [
        PROGRAM, "profile", "--model", MODEL, "--url", address, "--endpoint-type", kind,
        "--streaming", "--concurrency", "4", "--request-count", "12", "--ui", "none",
        "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16",
        "--tokenizer", str(Path.cwd() / "tokenizer"), "--artifact-dir", str(folder), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 12 and not found.get("error_summary"), found
    assert found["inter_token_latency"]["avg"] > 0
    return found


COUNTED = ("--use-server-token-count", "--per-chunk-usage")


@seen("chat, 4 streams, with the server's count of tokens in each chunk, 16 tokens each as asked")
def chats(address: str) -> None:
    found = load(address, "chat", "--extra-inputs", "ignore_eos:true", *COUNTED)
    assert found["output_sequence_length"]["avg"] == 16, found["output_sequence_length"]


@seen("completions, 4 streams, and the server's /metrics")
def completions(address: str) -> None:
    load(address, "completions", "--extra-inputs", "ignore_eos:true")
    folder = Path.cwd() / "aiperf-completions"
    assert "everystep" in (folder / "server_metrics_export.json").read_text()


run()
