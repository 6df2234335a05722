"""What the hub's client is asked for, and how its failures are told."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from everystep.errors import DownloadError, MissingFileError
from everystep.files.hub import ALLOWED, IGNORED, HubAccess, HubId, fetch_from_hub

MODEL = HubId("org/name")
WANTED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
]
UNWANTED = [
    "modeling_custom.py",
    "pytorch_model.bin",
    "model.pt",
    "model-Q8_0.gguf",
    "onnx/config.json",
    "original/consolidated.safetensors",
    "consolidated.safetensors",
    "README.md",
    "tokenizer.py",
    "training_args.bin",
]


class Client:
    """The two functions of the hub's client that are used, and what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def snapshot_download(self, repository: str, **options: Any) -> str:
        return self._answer(repository, options)

    def hf_hub_download(self, repository: str, file: str, **options: Any) -> str:
        return self._answer(f"{repository}:{file}", options)

    def _answer(self, what: str, options: dict[str, Any]) -> str:
        self.calls.append((what, options))
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    (tmp_path / "model.safetensors").touch()
    client = Client(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", client.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", client.hf_hub_download)
    return client


def test_only_data_of_a_repository_is_wanted() -> None:
    patterns = {"allow_patterns": list(ALLOWED), "ignore_patterns": list(IGNORED)}
    assert list(filter_repo_objects(WANTED + UNWANTED, **patterns)) == WANTED


def test_a_repository_is_asked_for_with_the_patterns(client: Client, tmp_path: Path) -> None:
    assert fetch_from_hub(MODEL, HubAccess("v1"), offline=False) == tmp_path
    ((what, options),) = client.calls
    assert (what, options["revision"], options["local_files_only"]) == ("org/name", "v1", False)
    assert options["allow_patterns"] == list(ALLOWED)


def test_one_gguf_file_is_asked_for_alone(client: Client) -> None:
    fetch_from_hub(HubId("org/name", "m.gguf"), HubAccess(), offline=False)
    assert [what for what, _ in client.calls] == ["org/name:m.gguf"]


def test_all_parts_of_a_split_file_are_asked_for_together(client: Client, tmp_path: Path) -> None:
    file = HubId("org/name", "Q4_K_M/m-00002-of-00003.gguf")
    assert fetch_from_hub(file, HubAccess(), offline=False) == tmp_path / str(file.file)
    ((what, options),) = client.calls
    names = [f"Q4_K_M/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert (what, options["allow_patterns"]) == ("org/name", names)


@pytest.mark.parametrize("hub_id", [MODEL, HubId("org/name", "m.gguf")])
def test_offline_is_passed_on(client: Client, hub_id: HubId) -> None:
    fetch_from_hub(hub_id, HubAccess(), offline=True)
    assert client.calls[0][1]["local_files_only"] is True


@pytest.mark.parametrize(
    "error", [OSError("no route"), ValueError("no route"), KeyError("no route")]
)
def test_a_failure_is_reported_with_its_reason(client: Client, error: Exception) -> None:
    client.error = error
    with pytest.raises(DownloadError, match=r"org/name could not be fetched.*no route.*HF_TOKEN"):
        fetch_from_hub(MODEL, HubAccess(), offline=False)


def test_no_error_shows_a_token(client: Client) -> None:
    client.error = OSError("401 for https://user:hf_secret@hub")
    access = HubAccess(token="hf_secret")
    with pytest.raises(DownloadError, match=r"user:\(token\)@hub") as raised:
        fetch_from_hub(MODEL, access, offline=False)
    assert "hf_secret" not in "".join(traceback.format_exception(raised.value)) + repr(access)


def test_what_is_not_cached_is_missing_offline(client: Client) -> None:
    client.error = OSError("not cached")
    with pytest.raises(MissingFileError, match=r"org/name is not in the hub's cache.*offline"):
        fetch_from_hub(MODEL, HubAccess(), offline=True)


def test_an_interruption_is_not_an_error_of_the_hub(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(repository: str, **options: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_from_hub(MODEL, HubAccess(), offline=False)


def test_a_repository_without_safetensors_says_what_to_do(client: Client, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"no safetensors.*org/name:FILE\.gguf.*converted"):
        fetch_from_hub(MODEL, HubAccess(), offline=False)


def test_small_files_alone_are_fetched_without_weights(client: Client, tmp_path: Path) -> None:
    access = HubAccess(cache_dir=tmp_path, token="secret", weights=False)
    assert fetch_from_hub(MODEL, access, offline=False) == tmp_path
    ((_, options),) = client.calls
    assert (options["cache_dir"], options["token"]) == (tmp_path, "secret")
    assert "*.safetensors" in options["ignore_patterns"]
