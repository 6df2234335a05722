"""Models of the Hugging Face hub, through its own client and into its own cache.

Only data is fetched: JSON, safetensors, tokenizer files, chat templates, or one named GGUF file.
Code and pickles of a repository are never downloaded. This file does not look into what it fetched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from everystep.errors import DownloadError, EverystepError, MissingExtraError, MissingFileError
from everystep.files.gguf_parts import part_names

ALLOWED = (
    "*.json",
    "model.safetensors",
    "model-*.safetensors",
    "adapter_model.safetensors",
    "*.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
)
# The hub's patterns cross folders ("*.json" matches "onnx/config.json"); models lie at the top.
IGNORED = ("*/*", "*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5")

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_ID = re.compile(rf"(?P<repository>{_PART}/{_PART})(?::(?P<file>[A-Za-z0-9._/-]+\.gguf))?")


@dataclass(frozen=True)
class HubId:
    """A repository of the hub, and the GGUF file in it if one is named."""

    repository: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}:{self.file}" if self.file else self.repository


def parse_hub_id(text: str) -> HubId | None:
    """Reads `org/name` or `org/name:file.gguf`; None when the text is neither."""
    match = _HUB_ID.fullmatch(text)
    if match is None or ".." in text or "//" in text or "--" in match["repository"]:
        return None
    return HubId(match["repository"], match["file"])


@dataclass(frozen=True)
class HubAccess:
    """The way to read a hub repository.

    `revision`: a branch, tag or commit. `cache_dir`: a folder instead of the hub's own cache.
    `token`: for gated models; True for the stored one. `weights`: False for the small files alone.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | bool | None = field(default=None, repr=False)
    weights: bool = True


DEFAULT_ACCESS = HubAccess()


def fetch_from_hub(hub_id: HubId, access: HubAccess, *, offline: bool) -> Path:
    """Returns the local folder (or GGUF file) of a hub model, downloading what is not there.

    Raises MissingFileError offline when it was never fetched, DownloadError when fetching fails.
    """
    snapshot_download = _client().snapshot_download
    if hub_id.file is not None:
        if (names := _parts(hub_id.file)) is None:
            return fetch_file(hub_id, hub_id.file, access, offline=offline)
        # Together, so that all are of one revision.
        fetch = partial(snapshot_download, allow_patterns=names)
        return _fetched(fetch, hub_id, access, offline) / hub_id.file
    patterns = {
        "allow_patterns": list(ALLOWED),
        "ignore_patterns": [*IGNORED, *([] if access.weights else ["*.safetensors"])],
    }
    folder = _fetched(partial(snapshot_download, **patterns), hub_id, access, offline)
    if access.weights and not any(folder.glob("*.safetensors")):
        raise MissingFileError(
            f"the hub repository {hub_id} holds no safetensors weights",
            do=f"If it holds GGUF files name one as {hub_id}:FILE.gguf; pickled weights "
            "must be converted to safetensors by somebody who trusts them",
        )
    return folder


def _parts(file: str) -> list[str] | None:
    """Return all parts of the split model that a file belongs to; None for a whole one."""
    folder, slash, name = file.rpartition("/")
    names = part_names(name)
    return None if names is None else [f"{folder}{slash}{one}" for one in names]


def fetch_file(hub_id: HubId, name: str, access: HubAccess, *, offline: bool) -> Path:
    """Returns the local path of one file of a repository, with the errors of `fetch_from_hub`."""
    return _fetched(_client().hf_hub_download, hub_id, access, offline, name)


def _client() -> Any:
    """Import the hub's own client, which takes a second; MissingExtraError without it."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError.of("a model of the hub", "huggingface-hub", "hub") from error
    return huggingface_hub


def _fetched(
    fetch: Callable[..., str], hub_id: HubId, access: HubAccess, offline: bool, *file: str
) -> Path:
    # The client's errors come from several libraries without a common base of their own.
    try:
        path = fetch(
            hub_id.repository,
            *file,
            revision=access.revision,
            cache_dir=access.cache_dir,
            token=access.token,
            local_files_only=offline,
        )
    except Exception as error:
        token = access.token if isinstance(access.token, str) else None
        shown = _hub_error(hub_id, offline, _without(token, error))
        # A traceback shows causes too, and is often logged.
        raise shown from (None if token and token in str(error) else error)
    return Path(path)


def _without(token: str | None, error: Exception) -> str:
    """Return the kind and first line of an error; what follows is the client's own advice."""
    first = next(iter(str(error).strip().splitlines()), "no reason given")
    text = f"{type(error).__name__}: {first}"
    return text.replace(token, "(token)") if token else text


def _hub_error(hub_id: HubId, offline: bool, cause: str) -> EverystepError:
    if offline:
        return MissingFileError(
            f"{hub_id} is not in the hub's cache on this machine and the library is offline",
            do="Fetch it once with a network, or give the path of a local copy",
        )
    return DownloadError(
        f"{hub_id} could not be fetched from the hub",
        got=cause,
        do="Check the name, the network, and that you may read it (HF_TOKEN for gated models)",
    )


def cached_repositories() -> list[str]:
    """Return the repositories `org/name` of which the hub's own cache has something, by name."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*--*")
    names = (folder.name.removeprefix("models--").replace("--", "/") for folder in folders)
    return sorted(name for name in names if parse_hub_id(name) is not None)


def has_token() -> bool:
    """Return True if the hub's own client would send a token for gated models."""
    from huggingface_hub import get_token

    return get_token() is not None
