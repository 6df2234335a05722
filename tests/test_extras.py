"""What happens without the libraries of an extra, and what the extras are."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import everystep as es
from everystep.bridge.reference import Reference
from everystep.cli import machine
from everystep.cli.inspect import require_textual
from everystep.cli.serve import require_replicas, require_server
from everystep.errors import MissingExtraError
from everystep.files.hub import DEFAULT_ACCESS, HubId, fetch_file
from everystep.files.picture_files import require_pillow
from everystep.processors.grammars.vocabulary import library
from everystep.server.tracing import require_otel
from everystep.text.sentencepiece_model import read_pieces as read_piece_file
from tests import conftest
from tests.reading import ROOT, nodes, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"test", "packages", "dev", "bench", "docs", "others"}


def read_music(folder: Path) -> None:
    (folder / "a.mp3").write_bytes(b"no WAV")
    es.read_sound(folder / "a.mp3")


def read_pieces(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"pieces")
    read_piece_file(folder / "tokenizer.model")


def show_progress(folder: Path) -> None:
    from everystep.shown import progress_bar

    with progress_bar(True, [], "prompts"):
        pass


def show_cell(folder: Path) -> None:
    sys.modules.pop("everystep.inspector.widget", None)
    importlib.import_module("everystep.inspector.widget")


def read_columns(folder: Path) -> None:
    (folder / "data.parquet").write_bytes(b"PAR1")
    es.read_examples(folder / "data.parquet")


NEEDS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "rich": ("cli", "progress=True", show_progress),
    "huggingface_hub": (
        "hub",
        "a model of the hub",
        lambda _: fetch_file(HubId("a/b"), "c", DEFAULT_ACCESS, offline=True),
    ),
    "transformers": ("transformers", "a comparison", lambda path: Reference(path, pair=False)),
    "llguidance": ("grammar", "a call with schema", lambda _: library()),
    "PIL": ("vision", "a picture", lambda _: require_pillow()),
    "sentencepiece": ("sentencepiece", "a folder without tokenizer.json", read_pieces),
    "soundfile": ("audio", "a.mp3", read_music),
    "pyarrow.parquet": ("train", "data.parquet", read_columns),
    "uvicorn": ("server", "everystep serve", lambda _: require_server()),
    "opentelemetry.sdk.trace": (
        "otel",
        "--otlp-endpoint",
        lambda _: require_otel("http://localhost:4318"),
    ),
    "ray.serve": ("ray", "--replicas", lambda _: require_replicas(1, None)),
    "textual": ("tui", "everystep inspect --tui", lambda _: require_textual()),
    "anywidget": ("notebook", "a page in a notebook", show_cell),
}


@pytest.mark.parametrize("module", NEEDS)
def test_an_error_names_the_extra(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extra, what, ask = NEEDS[module]
    for name in [one for one in sys.modules if one.startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        ask(tmp_path)
    assert what in str(caught.value)
    assert f"pip install 'everystep[{extra}]'" in str(caught.value)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_names_its_extra(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from everystep.cli import main; "
        "sys.exit(main(['--version']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout == ""
    for part in ("the command line needs", missing, "pip install 'everystep[cli]'"):
        assert part in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_every_extra_of_an_error_exists_and_is_tested() -> None:
    named = {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r"everystep\[(\w+)\]", path.read_text())
    }
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        named |= set(re.findall(r'MissingExtraError\.of\([^)]*?"(\w+)"(?:, do=\w+)?\)', text))
    assert named == {extra for extra, _, _ in NEEDS.values()}


def test_all_is_every_extra_of_a_user() -> None:
    (every,) = EXTRAS["all"]
    listed = set(re.fullmatch(r"everystep\[(.*)\]", every)[1].split(","))
    assert listed == set(EXTRAS) - FOR_DEVELOPERS - {"all"}
    assert listed == {extra for extra, _, _ in NEEDS.values()}


def test_the_tables_of_extras_have_each_with_what_it_installs() -> None:
    tables = {}
    for name in ("README.md", "docs/guide/install.md"):
        text = (ROOT / name).read_text(encoding="utf-8").split("| extra |")[1].split("\n\n")[0]
        rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
        tables[name] = {one: row[1] for row in rows for one in re.findall(r"`(\w+)`", row[0])}
    wanted = set(EXTRAS) - FOR_DEVELOPERS
    assert set(tables["README.md"]) == wanted
    assert set(tables["docs/guide/install.md"]) == wanted - {"all"}
    for extra, packages in tables["docs/guide/install.md"].items():
        assert packages.split(", ") == [re.split(r"[><=[]", one)[0] for one in EXTRAS[extra]]


def installed_by(extra: str) -> set[str]:
    """The packages that an extra names, by itself and through other extras."""
    found = set()
    for line in EXTRAS[extra]:
        name, *inner = re.split(r"[\[\],]", re.split("[><=]", line)[0].strip())
        found |= {name} | {one for part in inner if name == "everystep" and part
                           for one in installed_by(part)}  # fmt: skip
    return found


def imported_in(folder: str) -> set[str]:
    """The modules that the scripts of a folder import, but for Python's and one another."""
    scripts = sources(folder)
    names = set()
    for node in (node for text in scripts.values() for node in nodes(text)):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {Path(name).stem for name in scripts}


def test_the_extra_of_the_site_has_what_its_scripts_import() -> None:
    assert imported_in("docs/site") == {"everystep", "mkdocs", "typer"}
    assert imported_in("docs/site") <= installed_by("docs")
    assert "ruff" in installed_by("docs"), "it lays out signatures"


def test_the_extra_of_other_programs_has_what_their_page_imports() -> None:
    modules = {name.replace("-", "_") for name in installed_by("others")}
    assert set(conftest.OTHERS) <= modules


def test_the_doctor_looks_for_every_extra_but_its_own() -> None:
    assert set(machine.EXTRAS) == {extra for extra, _, _ in NEEDS.values()} - {"cli"}
    for extra, libraries in machine.EXTRAS.items():
        named = {re.split(r"[><=[]", one)[0] for one in EXTRAS[extra]}
        assert named == set(libraries)
