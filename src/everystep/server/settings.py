"""The settings of a server: from a TOML file, and from the command line, which goes before it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from everystep.adapters import adapter_contents, read_vectors
from everystep.config import chat_defaults_of
from everystep.errors import (
    FormatError,
    MissingFileError,
    RequestError,
    UnknownArgumentError,
    nearest,
)
from everystep.files.gguf import read_gguf
from everystep.files.sources import DEFAULT_MODEL, resolve_source
from everystep.images import PictureTokenizer, read_picture_settings
from everystep.server.access import Hosts, Keys, RecordFolder, digest_of, is_loopback, read_keys
from everystep.server.asking import FrontModel
from everystep.server.engine_process import EngineOrders
from everystep.server.exchange import FrontSettings
from everystep.server.link import HANG_SECONDS, QueueLimits
from everystep.server.pictures import PictureLimits
from everystep.server.presence import IdleLimits
from everystep.server.quotas import Quota, QuotaBook, read_key_quotas
from everystep.server.service import ServedBeside
from everystep.server.tracing import Tracing, require_otel
from everystep.server.transcriptions import MOST_SECONDS
from everystep.text import Tokenizer


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of `everystep serve`; a TOML file has them by these names.

    `model`: what is served; `models`: further ones by name; `adapters`: folders by name, of the
    first model, and `steer`: files of vectors that requests may be steered by, likewise.
    `key_files`: digests of keys, a line each. `public_without_key`: serve everybody on a public
    address. `drain_seconds`: what a stop waits for. `hang_seconds`: of silence, or in one step,
    after which an engine is ended and started again; 0 for never. `idle_minutes`: after which a
    model that nobody asked for is put away until somebody does, None for never; `load_seconds`:
    that a request waits for it then. `files`: the folder of batch
    files. `record_dir`: where the steps of what `record_keys` ask for are written, without texts if
    they are `record_redacted`, without what each processor did unless they have `record_stages`.
    `max_picture_pixels`: of all pictures of a request, as they are
    sent. `max_pixels`: of a picture as it is read, None for what the model's files say.
    `max_sound_seconds`: of a sound that is written down. `vllm_metrics`: metrics have vLLM's names
    too. `otlp_endpoint`: where spans of requests are sent. `quota`: that of keys without one of
    their own; `quotas`: by name or digest of a key.

    `replicas`: engines on Ray Serve, None for one engine without Ray; up to `max_replicas` of them
    where load asks for more. `replica_load`: prompts at work in each that are aimed at, None for
    half of `max_rows`. `scale_up_seconds`, `scale_down_seconds`: for which load has to ask for more
    replicas, or for fewer. `affinity_tokens`: ids of a prompt, after which the same replica is
    looked for, 0 for any. `merge_seconds`: for which a replica gathers tokens of a stream.
    `ray_address`: of a cluster that is there, None for one of this machine alone.
    `ray_application`: the name of the replicas on it, None for one that no other server has.
    """

    model: str = DEFAULT_MODEL
    models: dict[str, str] = {}
    adapters: dict[str, str] = {}
    steer: dict[str, str] = {}
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    uds: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    api_keys: list[str] = []
    key_files: list[str] = []
    allow_hosts: list[str] = []
    allow_origins: list[str] = []
    public_without_key: bool = False
    max_rows: int = 32
    token_budget: int = 1024
    max_positions: int | None = None
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    deadline: float | None = None
    drain_seconds: float = 30.0
    hang_seconds: Annotated[float, msgspec.Meta(ge=0)] = HANG_SECONDS
    idle_minutes: Annotated[float, msgspec.Meta(gt=0)] | None = None
    load_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    quantize: str | None = "auto"
    cache_dtype: str | None = None
    threads: int | None = None
    offline: bool = False
    vllm_metrics: bool = False
    otlp_endpoint: str | None = None
    files: str | None = None
    max_picture_pixels: int = 40_000_000
    max_pixels: int | None = None
    max_sound_seconds: float = MOST_SECONDS
    record_dir: str | None = None
    record_keys: list[str] = []
    record_redacted: bool = False
    record_stages: bool = True
    quota: Quota | None = None
    quotas: dict[str, Quota] = {}
    replicas: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_replicas: Annotated[int, msgspec.Meta(ge=1)] | None = None
    replica_load: Annotated[float, msgspec.Meta(gt=0)] | None = None
    scale_up_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    scale_down_seconds: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    affinity_tokens: Annotated[int, msgspec.Meta(ge=0)] = 32
    merge_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.025
    ray_address: str | None = None
    ray_application: str | None = None

    @property
    def has_keys(self) -> bool:
        """True if the server opens to keys alone."""
        return bool(self.api_keys or self.key_files)

    def sources(self) -> dict[str, str]:
        """Return what is served, by name: the model first, by the last part of its source."""
        if self.models and self.model == DEFAULT_MODEL:
            return dict(self.models)
        name = self.model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
        return {name or self.model: self.model, **self.models}

    def orders(self, sources: Mapping[str, str]) -> EngineOrders:
        """Return what the engine is told."""
        return EngineOrders(
            models=dict(sources),
            adapters=self.adapters,
            steer=self.steer,
            quantize=self.quantize,
            cache_dtype=self.cache_dtype,
            offline=self.offline,
            threads=self.threads,
            max_rows=self.max_rows,
            token_budget=self.token_budget,
            max_positions=self.max_positions,
        )

    def require_possible(self) -> None:
        """Raise an error for whatever is wrong before a model is asked: a public address without a
        key, bounds, files of keys, adapters and vectors. Files of replicas on a cluster are not
        judged, since they are on its nodes."""
        self.front()
        self.book()
        self.pictures()
        self.beside()
        self.idle()
        if self.ray_address is not None:
            return
        for folder in self.adapters.values():
            adapter_contents(folder)
        for file in self.steer.values():
            read_vectors(Path(file))

    def queue(self) -> QueueLimits:
        """Return how much may wait."""
        return QueueLimits(self.max_waiting, self.max_waiting_tokens)

    def idle(self) -> IdleLimits:
        """Return when a model is put away; RequestError where replicas have the models."""
        if self.idle_minutes is None:
            return IdleLimits(None, self.load_seconds)
        if self.replicas is not None:
            what = "idle_minutes is about the models of one engine, and there are replicas"
            raise RequestError(what, do="Leave it out, or lower replicas")
        return IdleLimits(self.idle_minutes * 60, self.load_seconds)

    def book(self) -> QuotaBook:
        """Return what keys may use; RequestError for the quota of a key that there is not."""
        own: dict[str, Quota] = {}
        names: dict[str, str] = {digest: digest for digest in map(digest_of, self.api_keys)}
        for path in self.key_files:
            for digest, (name, quota) in read_key_quotas(Path(path)).items():
                names |= {digest: digest, name or digest: digest}
                own |= {} if quota is None else {digest: quota}
        for name, quota in self.quotas.items():
            if name not in names:
                wanted = "a name that a file of keys gives with name=, or a digest"
                raise RequestError(
                    "a quota is for a key that there is not", wanted=wanted, got=name
                )
            own[names[name]] = quota
        return QuotaBook(self.quota, own)

    def pictures(self) -> PictureLimits:
        """Return how large pictures may be; RequestError for a bound below any picture."""
        for name in ("max_picture_pixels", "max_pixels"):
            value = getattr(self, name)
            if value is not None and value < 1024:
                raise RequestError(f"{name} is impossible", wanted="at least 1024", got=value)
        return PictureLimits(self.max_picture_pixels, self.max_pixels)

    def tracing(self) -> Tracing | None:
        """Return where spans of requests go, None for nowhere; a thread sends them."""
        return None if self.otlp_endpoint is None else Tracing.exporting(self.otlp_endpoint)

    def beside(self) -> ServedBeside:
        """Return what is served beside generating."""
        most = self.max_sound_seconds
        if not 0 < most <= MOST_SECONDS:
            wanted = f"up to {MOST_SECONDS:g}"
            raise RequestError("max_sound_seconds is impossible", wanted=wanted, got=most)
        files = None if self.files is None else Path(self.files)
        return ServedBeside(files, sound_seconds=most)

    def front(self) -> FrontSettings:
        """Return how the front serves; RequestError where everybody could ask unasked."""
        digests = [digest_of(key) for key in self.api_keys]
        digests += [digest for path in self.key_files for digest in read_keys(Path(path))]
        public = self.uds is None and not is_loopback(self.host)
        if public and not digests and not self.public_without_key:
            raise RequestError(
                "the address is public, and there is no key",
                wanted="a key, or an address of this machine alone",
                got=f"host {self.host}",
                do="Give --api-key or --key-file, or --public-without-key if everybody may ask",
            )
        if self.otlp_endpoint is not None:
            require_otel(self.otlp_endpoint)
        if (self.record_dir is None) != (not self.record_keys):
            raise RequestError(
                "records need a folder and a key of their own",
                wanted="record_dir and record_keys",
                got="one of the two",
                do="Give --record-dir and --record-key",
            )
        recorded = [digest_of(key) for key in self.record_keys]
        if {*recorded} & {*digests}:
            what = "a key that others ask with cannot be the key of records"
            raise RequestError(what, do="Give --record-key another one")
        return FrontSettings(
            records=self._records(),
            recorded=Keys(recorded),
            keys=Keys(digests),
            hosts=Hosts(self.allow_hosts),
            origins=tuple(self.allow_origins),
            deadline=self.deadline,
            vllm_metrics=self.vllm_metrics,
        )

    def _records(self) -> RecordFolder | None:
        """Return where requests are recorded; RequestError for what is left out of no record."""
        if self.record_dir is not None:
            left_out = {"redacted": self.record_redacted, "stages": self.record_stages}
            return RecordFolder(Path(self.record_dir), **left_out)
        if self.record_redacted or not self.record_stages:
            name = "record_redacted" if self.record_redacted else "record_stages"
            what = f"{name} is about records, and none are asked for"
            raise RequestError(what, do="Give --record-dir and --record-key")
        return None


def read_settings(path: Path | None, said: Mapping[str, Any]) -> ServeSettings:
    """Return the settings of a file, and before them those that were said."""
    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise MissingFileError(f"there is no file {path}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"{path} is no TOML", got=str(error)) from error
    known = ServeSettings.__struct_fields__
    for name in found:
        if name not in known:
            near = nearest(name, known)
            do = f"Perhaps you meant {near}" if near else f"Settings are {', '.join(known)}"
            raise UnknownArgumentError(f"{path} has an unknown setting {name!r}", do=do)
    try:
        return msgspec.convert({**found, **said}, ServeSettings)
    except msgspec.ValidationError as error:
        raise RequestError("a setting is impossible", got=str(error)) from error


def front_model(source: str, pictures: PictureLimits, *, offline: bool) -> FrontModel:
    """Return what the front has of a model: its tokenizer alone is read, and how pictures are
    prepared."""
    local = resolve_source(source, offline=offline)
    if not local.is_dir():
        tokenizer = Tokenizer.from_gguf(read_gguf(local).metadata)
    elif read_picture_settings(local) is None:
        tokenizer = Tokenizer.from_folder(local)
    else:
        tokenizer = _seeing(local)
    return FrontModel(tokenizer, chat_defaults_of(source), pictures)


def _seeing(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder that says how pictures are prepared; a plain one where its
    vocabulary has no place for them, as the model does not read them then."""
    try:
        return PictureTokenizer.from_folder(folder)
    except FormatError:
        return Tokenizer.from_folder(folder)
