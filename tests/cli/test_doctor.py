"""`everystep doctor`: each finding, its verdict, and what it says is to be done."""

from __future__ import annotations

import json
import platform
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everystep as es
from everystep.cli import machine, machine_findings, model_findings
from everystep.cli.machine_findings import Finding
from everystep.executors.native.library import Status
from everystep.testing.models import tiny_llama
from tests.cli.running import Caller
from tests.cli.tiny_model import CONFIG, write_tiny_model
from tests.reading import ROOT

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _quick(monkeypatch: Patch) -> None:
    """The memory's speed is known, so that nobody waits for it."""
    monkeypatch.setattr("everystep.memory.memory_speed", lambda size: 10e9)


def found_of(call: Caller, *line: str) -> dict[str, Any]:
    outcome = call("doctor", *line, "--json")
    return {one["what"]: one for one in json.loads(outcome.out)}


def test_a_machine_has_a_finding_of_each_kind(cache: Path, call: Caller) -> None:
    found = found_of(call)
    kinds = {"processor", "threads", "memory", "kernels", "torch", "cache folder", "network"}
    assert kinds | {f"extra {name}" for name in machine.EXTRAS} <= set(found)
    assert found["memory speed"]["found"] == "10.0 GB/s"
    assert found["default model"]["do"] == "everystep pull"  # the cache folder is empty
    assert all(one["do"] for one in found.values() if one["verdict"] == "problem")


def test_a_report_of_a_fault_has_all_versions(call: Caller) -> None:
    found = found_of(call)
    assert list(found)[:3] == ["everystep", "python", "libraries"]
    assert found["everystep"]["found"] == es.__version__
    assert platform.python_version() in found["python"]["found"]
    for name in ("torch", "numpy", "tokenizers", "safetensors"):
        assert f"{name} {metadata.version(name)}" in found["libraries"]["found"]


def test_the_table_has_what_the_document_has(call: Caller) -> None:
    rows = [line.split("\t") for line in call("doctor").out.splitlines()]
    assert [row[1] for row in rows] == list(found_of(call))
    assert {row[0] for row in rows} <= {"ok", "note", "problem"}


def test_the_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        name: tuple(
            one.partition(">")[0].partition("[")[0] for one in extras["optional-dependencies"][name]
        )
        for name in machine.EXTRAS
    }
    assert needed == dict(machine.EXTRAS)


def test_a_missing_extra_has_its_command(call: Caller, monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine_findings, "version_of", lambda name: None)
    missing = found_of(call)["extra sentencepiece"]
    assert missing == {
        "what": "extra sentencepiece",
        "verdict": "note",
        "found": "without sentencepiece, protobuf",
        "do": "pip install 'everystep[sentencepiece]'",
    }


@pytest.mark.parametrize(
    ("status", "compiler", "verdict", "part"),
    [
        (Status("avx2"), None, "ok", ""),
        (Status("plain"), None, "note", "Run python -m everystep.executors.native"),
        (Status(None, "why"), "g++", "problem", "Run python -m everystep.executors.native"),
        (Status(None, "why"), None, "problem", "Install a C++ compiler"),
    ],
)
def test_kernels(
    call: Caller,
    monkeypatch: Patch,
    status: Status,
    compiler: str | None,
    verdict: str,
    part: str,
) -> None:
    monkeypatch.setattr(machine_findings, "status", lambda: status)
    monkeypatch.setattr(machine_findings, "load", lambda: None)
    monkeypatch.setattr(machine_findings, "compiler", lambda: compiler)
    monkeypatch.setattr(machine_findings, "fitting_sets", lambda: ["avx2", "plain"])
    found = found_of(call)["kernels"]
    assert found["verdict"] == verdict and part in found["do"]
    assert call("doctor").code == (1 if verdict == "problem" else 0)


def test_kernels_that_cannot_be_loaded(call: Caller, monkeypatch: Patch) -> None:
    def load() -> None:
        raise OSError("libstdc++.so.6: not found")

    monkeypatch.setattr(machine_findings, "status", lambda: Status("avx2"))
    monkeypatch.setattr(machine_findings, "load", load)
    found = found_of(call)["kernels"]
    assert found["verdict"] == "problem" and "libstdc++" in found["found"]


def test_kernels_that_were_switched_off(call: Caller, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EVERYSTEP_INSTRUCTIONS", "none")
    monkeypatch.setattr(machine_findings, "status", lambda: Status(None, "it is none"))
    assert found_of(call)["kernels"]["do"] == "Unset EVERYSTEP_INSTRUCTIONS"


@pytest.mark.parametrize(
    ("threads", "verdict", "part"), [(4, "ok", ""), (9, "problem", "=4"), (1, "note", "=4")]
)
def test_threads(call: Caller, monkeypatch: Patch, threads: int, verdict: str, part: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    monkeypatch.setattr(machine_findings, "threads", lambda: threads)
    monkeypatch.setattr(machine_findings, "usable_processors", lambda: 4)
    found = found_of(call)["threads"]
    assert found["verdict"] == verdict and part in found["do"]
    assert found["found"] == f"{threads} for 4 processors (OMP_NUM_THREADS=9)"


@pytest.mark.parametrize(("left", "verdict"), [(None, "note"), (5 << 30, "ok"), (5 << 20, "note")])
def test_memory(call: Caller, monkeypatch: Patch, left: int | None, verdict: str) -> None:
    monkeypatch.setattr(machine_findings, "memory_left", lambda: left)
    assert found_of(call)["memory"]["verdict"] == verdict


def test_a_cache_folder_that_cannot_be_written_to(call: Caller, monkeypatch: Patch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    found = found_of(call)["cache folder"]
    assert found["verdict"] == "problem" and "XDG_CACHE_HOME" in found["do"]


def test_a_full_disk(call: Caller, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert found_of(call)["cache folder"]["verdict"] == "note"


def test_a_network_that_is_never_used(call: Caller, monkeypatch: Patch) -> None:
    assert found_of(call, "--offline")["network"]["verdict"] == "note"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found_of(call)["network"]["verdict"] == "note"


def test_a_token_is_never_shown(call: Caller, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    outcome = call("doctor", "--json")
    assert "hf_secret" not in outcome.out + outcome.err
    (found,) = [one for one in json.loads(outcome.out) if one["what"] == "token of the hub"]
    assert found["found"] == "there is one"


def test_a_model_has_its_weights_memory_and_limit(tmp_path: Path, call: Caller) -> None:
    found = found_of(call, str(write_tiny_model(tmp_path / "tiny")))
    weights = 4 * (259 * 16 + 16 + 2 * (2 * 256 + 2 * 128 + 3 * 512 + 32))
    assert found["weights"]["found"] == f"float32 {weights / 1e6:.1f} MB"
    assert "for 512 positions" in found["model's memory"]["found"]
    limit = f"{10e9 / weights:.0f} tokens a second for one row"
    assert limit in found["speed limit"]["found"]
    assert found["executor"]["verdict"] in ("ok", "problem")


def test_a_table_that_is_no_head_is_not_read(
    tmp_path: Path, call: Caller, monkeypatch: Patch
) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path / "tiny")
    tied = found_of(call, str(folder))["speed limit"]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    assert found_of(call, str(folder))["speed limit"] == tied


def test_a_model_on_torch_operators_is_told_why(
    tmp_path: Path, call: Caller, monkeypatch: Patch
) -> None:
    model = SimpleNamespace(runs_on="torch (it was not compiled)")
    monkeypatch.setattr(model_findings, "status", lambda: Status(None, "it was not compiled"))
    found = model_findings._executor(model)
    assert found == Finding("executor", "problem", model.runs_on, "See kernels above")
    monkeypatch.setattr(model_findings, "status", lambda: Status("avx2"))
    found = model_findings._executor(SimpleNamespace(runs_on="torch (it is float64)"))
    assert found.verdict == "note" and "models.md" in found.do


def test_a_row_that_does_not_fit(tmp_path: Path, call: Caller, monkeypatch: Patch) -> None:
    monkeypatch.setattr(model_findings, "memory_left", lambda: 1000)
    found = found_of(call, str(write_tiny_model(tmp_path / "tiny")))["model's memory"]
    assert found["verdict"] == "note" and "--cache-dtype" in found["do"]


def test_a_model_that_cannot_be_loaded_is_a_problem(tmp_path: Path, call: Caller) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03")
    outcome = call("doctor", str(tmp_path / "a.gguf"), "--json")
    found = {one["what"]: one for one in json.loads(outcome.out)}
    assert outcome.code == 1 and found["model"]["verdict"] == "problem"


def test_a_model_that_is_not_there_is_a_wrong_call(call: Caller) -> None:
    outcome = call("doctor", "./absent")
    assert outcome.code == 1 and outcome.out == "" and "./absent" in outcome.err


@pytest.fixture
def adapted(tmp_path: Path) -> Path:
    """A whole tiny model, an adapter that runs natively and one that does not, as PEFT has them."""
    folder = write_tiny_model(tmp_path / "tiny")
    model = es.load_model(folder)
    lora = es.LoraConfig(r=4, target_modules=["q_proj"])
    for name, config in (
        ("plain", lora),
        ("norms", replace(lora, modules_to_save=["norm"])),
    ):
        model.add_adapter(name, config)
        model.save_adapter(tmp_path / name, name)
    return folder


def test_an_adapter_is_what_its_folder_holds(adapted: Path, call: Caller) -> None:
    found = found_of(call, "--adapter", str(adapted.parent / "plain"))["adapter plain"]
    numbers = 2 * 4 * (16 + 16)
    assert found["found"].startswith(f"LoRA, {numbers} numbers in 4 tensors, rank 4, for ")
    assert found["verdict"] == "note" and "everystep doctor MODEL --adapter" in found["do"]
    unknown = adapted.parent / "plain" / "adapter_config.json"
    unknown.write_text(json.dumps({**json.loads(unknown.read_text()), "peft_type": "BOFT"}))
    outcome = call("doctor", "--json", "--adapter", str(adapted.parent / "plain"))
    found = {one["what"]: one for one in json.loads(outcome.out)}["adapter plain"]
    assert outcome.code == 1 and found["verdict"] == "problem" and "BOFT" in found["found"]


def test_a_model_says_how_it_runs_an_adapter(
    adapted: Path, call: Caller, monkeypatch: Patch
) -> None:
    beside = adapted.parent
    asked = ("--adapter", str(beside / "plain"), "--adapter", f"other={beside / 'norms'}")
    found = found_of(call, str(adapted), *asked)
    assert found["adapter plain"]["verdict"] == "ok"
    native = found["executor"]["found"]
    assert found["adapter plain runs on"] == {
        "what": "adapter plain runs on",
        "verdict": "ok",
        "found": native,
        "do": "",
    }
    if native.startswith("native"):
        told = found["adapter other runs on"]
        assert (told["verdict"], told["found"]) == ("note", "torch (it has no changed norms)")
        assert "docs/guide/adapters.md" in told["do"]
    other = tiny_llama()
    other.add_adapter("plain", es.LoraConfig(r=4, target_modules=["q_proj"]))
    other.save_adapter(beside / "plain", "plain")
    outcome = call("doctor", str(adapted), "--json", *asked)
    told = {one["what"]: one for one in json.loads(outcome.out)}["adapter plain runs on"]
    assert outcome.code == 1 and told["verdict"] == "problem"
    assert "this model cannot run it" in told["found"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("plain@0.5",), "what is checked is the whole of it"),
        (("a/x", "b/x"), "two adapters one name"),
    ],
)
def test_adapters_that_cannot_be_checked(asked: tuple[str, ...], told: str, call: Caller) -> None:
    outcome = call("doctor", *(part for one in asked for part in ("--adapter", one)))
    assert outcome.code == 2 and told in outcome.err


def test_a_folder_without_an_adapter_is_a_problem(tmp_path: Path, call: Caller) -> None:
    outcome = call("doctor", "--json", "--adapter", str(tmp_path))
    (found,) = [one for one in json.loads(outcome.out) if one["what"].startswith("adapter")]
    assert outcome.code == 1 and "adapter_config.json" in found["found"]
