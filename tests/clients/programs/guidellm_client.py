"""guidellm as a load generator: a profile of several streams, and one after another."""

import json
import os
import subprocess
import sys
from pathlib import Path

from seen import run, seen

PROGRAM = str(Path(sys.executable).with_name("guidellm"))


def load(address: str, form: str, *profile: str) -> dict:
    """Return the figures of 12 requests of 32 tokens for 16 each; the tokenizer lies beside."""
    report = Path.cwd() / "guidellm.json"
    command = [
        PROGRAM, "run", "--disable-console",
        "--backend", f"kind=openai_http,target={address},request_format={form}",
        "--profile", *profile, "--constraint", "kind=max_requests,count=12",
        "--tokenizer", f"kind=huggingface_auto,model={Path.cwd() / 'tokenizer'}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    found = benchmark["metrics"]
    assert found["request_totals"]["successful"] == 12, found["request_totals"]
    assert found["output_token_count"]["successful"]["mean"] == 16
    assert found["inter_token_latency_ms"]["successful"]["mean"] > 0
    return found


@seen("chat, 4 streams: each request answered, 16 tokens each as asked, times between tokens")
def chats(address: str) -> None:
    load(address, "/v1/chat/completions", "kind=concurrent,streams=4")


@seen("completions, one after another")
def completions(address: str) -> None:
    load(address, "/v1/completions", "kind=synchronous")


run()
