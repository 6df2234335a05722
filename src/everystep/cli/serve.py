"""`everystep serve`: models over HTTP, on OpenAI's wire."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import command_options as o
from everystep.cli.adapters import ServedAdapters, named_adapters
from everystep.cli.terminal import is_terminal, note, write_line
from everystep.errors import MissingExtraError, RequestError
from everystep.files.sources import DEFAULT_MODEL

_NEXT = """serving {model} on {address}

  curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\
    {header}-d '{{"messages": [{{"role": "user", "content": "Name a colour."}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{address}/v1", api_key="{key}")

  a page to talk on: {address}/ - every field: {address}/openapi.json - Ctrl-C ends it"""

_LIBRARIES = ("starlette", "uvicorn", "msgspec", "prometheus_client", "python_multipart")
_access = "Who may ask"
_load = "Load"
_seen = "What operators see"
Named = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", metavar="NAME=SOURCE", help="Serve a further model. Repeatable."),
]
Steering = Annotated[
    list[str] | None,
    typer.Option(
        "--steer", metavar="NAME=FILE", help="Vectors that requests may ask for. Repeatable."
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", metavar="KEY", help="Open to this key. Repeatable.", rich_help_panel=_access
    ),
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="Open to keys whose SHA-256 the file has, one a line. Repeatable.",
        rich_help_panel=_access,
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="A name it is called by. Repeatable.",
        rich_help_panel=_access,
    ),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="ORIGIN",
        help="Pages of this origin may ask. Repeatable.",
        rich_help_panel=_access,
    ),
]

_replicas = "Replicas"
Replicas = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Engines, on Ray.", rich_help_panel=_replicas),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="Of a Ray cluster; by default one of this machine alone.",
        rich_help_panel=_replicas,
    ),
]


def serve(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A name, a folder, a .gguf file or a hub id."),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            "--settings", metavar="FILE", help="Settings as TOML; options go before them."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="By default 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="By default 8000; 0: any.")] = None,
    uds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A unix socket in place of a port.")
    ] = None,
    model: Named = None,
    adapter: ServedAdapters = None,
    steer: Steering = None,
    *,
    api_key: Keys = None,
    key_file: KeyFiles = None,
    allow_host: Hosts = None,
    allow_origin: Origins = None,
    public_without_key: Annotated[
        bool,
        typer.Option("--public-without-key", help="Let everybody ask.", rich_help_panel=_access),
    ] = False,
    max_rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rows at once.", rich_help_panel=_load)
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Requests in line at most.", rich_help_panel=_load),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds for a request.", rich_help_panel=_load),
    ] = None,
    idle_minutes: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Put a model away that nobody asked for so long.",
            rich_help_panel=_load,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of the engine.", rich_help_panel=_load)
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Take batch files, and keep them in this folder."),
    ] = None,
    vllm_metrics: Annotated[
        bool,
        typer.Option("--vllm-metrics", help="Metrics by vLLM's names too.", rich_help_panel=_seen),
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Send spans of requests there, by OTLP.", rich_help_panel=_seen
        ),
    ] = None,
    record_dir: Annotated[
        Path | None,
        typer.Option(
            "--record-dir",
            metavar="DIR",
            help="Record what --record-key asks for, in this folder.",
            rich_help_panel=_seen,
        ),
    ] = None,
    record_key: Annotated[
        list[str] | None,
        typer.Option(
            "--record-key",
            metavar="KEY",
            help="A key whose requests are recorded. Repeatable.",
            rich_help_panel=_seen,
        ),
    ] = None,
    record_redacted: Annotated[
        bool,
        typer.Option(
            "--record-redacted",
            help="Leave texts out of these records.",
            rich_help_panel=_seen,
        ),
    ] = False,
    no_record_stages: Annotated[
        bool,
        typer.Option(
            "--no-record-stages",
            help="Leave what each processor did out of them.",
            rich_help_panel=_seen,
        ),
    ] = False,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    offline: o.Offline = False,
    replicas: Replicas = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="As load asks for them.", rich_help_panel=_replicas),
    ] = None,
    ray_address: RayAddress = None,
) -> None:
    """Serve MODEL over HTTP, on OpenAI's wire; by default on this machine alone.

    SIGTERM or Ctrl-C takes no further requests, waits for those under way, and ends.
    """
    said: dict[str, Any] = {
        "model": source,
        "models": pairs(model, "--model"),
        "adapters": named_adapters(adapter),
        "steer": pairs(steer, "--steer"),
        "host": host,
        "port": port,
        "uds": None if uds is None else str(uds),
        "api_keys": api_key,
        "key_files": [str(one) for one in key_file or ()],
        "allow_hosts": allow_host,
        "allow_origins": allow_origin,
        "public_without_key": public_without_key or None,
        "max_rows": max_rows,
        "max_waiting": max_waiting,
        "deadline": deadline,
        "idle_minutes": idle_minutes,
        "threads": threads,
        "files": None if files is None else str(files),
        "vllm_metrics": vllm_metrics or None,
        "otlp_endpoint": otlp_endpoint,
        "record_dir": None if record_dir is None else str(record_dir),
        "record_keys": record_key,
        "record_redacted": record_redacted or None,
        "record_stages": False if no_record_stages else None,
        "quantize": None if quantize is None else quantize.value,
        "cache_dtype": None if cache_dtype is None else cache_dtype.value,
        "offline": offline or context.obj or None,
        "replicas": replicas,
        "max_replicas": max_replicas,
        "ray_address": ray_address,
    }
    require_server()
    from everystep.server.request_log import write_log
    from everystep.server.serving import listening_socket
    from everystep.server.serving import serve as run
    from everystep.server.settings import read_settings

    given = {name: value for name, value in said.items() if value not in (None, [], {})}
    read = read_settings(settings, given)
    require_replicas(read.replicas, read.ray_address, read.max_replicas)
    read.require_possible()
    write_log(sys.stderr, as_json=not is_terminal(sys.stderr))

    def tell(address: str, name: str) -> None:
        key = "KEY" if read.has_keys else "none"
        header = "-H 'Authorization: Bearer KEY' " if read.has_keys else ""
        write_line(_NEXT.format(address=address, model=name, header=header, key=key))

    with listening_socket(read) as listening:  # an address that others have is told at once
        note(f"loading {read.model if read.model != DEFAULT_MODEL else next(iter(read.sources()))}")
        asyncio.run(run(read, listening, tell))


def require_server(command: str = "everystep serve") -> None:
    """Raise MissingExtraError where a library of the server is not installed."""
    for library in _LIBRARIES:
        try:
            import_module(library)
        except ImportError as error:
            raise MissingExtraError.of(command, library, "server") from error


def require_replicas(replicas: int | None, address: str | None, most: int | None = None) -> None:
    """Raise RequestError for settings of replicas where there are none, MissingExtraError where
    there are some and Ray is not installed."""
    if replicas is None:
        if address is not None or most is not None:
            what = "--ray-address and --max-replicas are for replicas, and there are none"
            raise RequestError(what, do="Give --replicas too")
        return
    if most is not None and most < replicas:
        raise RequestError("--max-replicas is too low", wanted=f"at least {replicas}", got=most)
    try:
        import_module("ray.serve")
        import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError.of("--replicas", "ray", "ray") from error


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """Return NAME=VALUE by name."""
    found = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"{one!r} is spelled wrong; wanted {option} NAME=VALUE")
        if name in found:
            raise typer.BadParameter(f"{option} {name} is given twice")
        found[name] = value
    return found
