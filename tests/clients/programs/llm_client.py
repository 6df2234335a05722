"""The command `llm`, with the server in extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from seen import run, seen

MODEL = "smollm2-135m-instruct"
HOME = Path(tempfile.mkdtemp())


def llm(address: str, *arguments: str) -> str:
    """Return what the command prints."""
    (HOME / "extra-openai-models.yaml").write_text(
        "".join(
            f"- model_id: {name}\n  model_name: {MODEL}\n  api_base: {address}/v1\n"
            f"  can_stream: true\n  supports_schema: true\n  supports_tools: true\n{extra}"
            for name, extra in (("ours", ""), ("plain", "  completion: true\n"))
        )
    )
    known = {"LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "none"}
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **known})
    assert done.returncode == 0, done.stderr
    return done.stdout


ASKED = ("-o", "temperature", "0", "-o", "max_tokens", "24")


@seen("a prompt, streamed and whole alike")
def prompts(address: str) -> None:
    asked = ("-m", "ours", "-s", "You are brief.", "Name a colour.", *ASKED)
    whole = llm(address, *asked, "--no-stream")
    assert whole.strip() and llm(address, *asked) == whole


@seen("a conversation that goes on, with its usage in the log")
def conversations(address: str) -> None:
    llm(address, "-m", "ours", "Name a colour.", *ASKED)
    assert llm(address, "-c", "Another one.", *ASKED).strip()
    (first, last) = json.loads(llm(address, "logs", "-n", "2", "--json"))[-2:]
    assert first["conversation_id"] == last["conversation_id"]
    assert last["input_tokens"] > first["input_tokens"] > 0 and last["output_tokens"] > 0


@seen("a schema")
def schemas(address: str) -> None:
    asked = (
        "-m",
        "ours",
        "--schema",
        "name, age int",
        "Invent a person.",
        "-o",
        "temperature",
        "0",
    )
    found = json.loads(llm(address, *asked, "-o", "max_tokens", "96"))
    assert [*found] == ["name", "age"] and isinstance(found["age"], int)


@seen("tools are sent, and the answer is shown")
def tools(address: str) -> None:
    assert llm(address, "-m", "ours", "-T", "llm_version", "Hello.", *ASKED).strip()


@seen("completions of plain text")
def completions(address: str) -> None:
    text = llm(
        address, "-m", "plain", "The capital of France is", "-o", "max_tokens", "4", *ASKED[:3]
    )
    assert text.startswith(" Paris"), text


run()
