"""The rules that every test runs under, and the options --all, --loaded and --shard.

Warnings are errors (pyproject.toml). Operations of torch are deterministic and memory that nobody
wrote is filled with NaN. Every test starts from the same seeds. No test reaches the network. What
is left out is said in the header line, never silently; with --all nothing may be skipped.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import ipaddress
import os
import random
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from everystep.errors import EverystepError
from everystep.executors.native.library import status
from everystep.files.sources import DEFAULT_MODEL, resolve_source
from tests.loaded import LoadedPackages

SHELLS = ("bash", "zsh", "fish")
OTHERS = ("gradio", "langchain_huggingface", "llm", "lm_eval", "outlines")
_SHOWN = 2000  # characters of a failure that are shown at once

# --- once per process -----------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("everystep")
    group.addoption("--all", action="store_true", help="run slow and model tests; a skip fails")
    told = "add the packages that the tests load to a file"
    group.addoption("--loaded", metavar="FILE", type=Path, help=told)
    group.addoption("--shard", metavar="I/N", type=_shard, help="run the I-th of N parts")


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--shard wants I/N with 1 <= I <= N, got {text!r}")
    return int(part), int(parts)


def pytest_configure(config: pytest.Config) -> None:
    forbid_network()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A script that runs tests in its background has them ignore Ctrl-C, and they would inherit
        # that, with every process that they start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports a compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    else:
        config.pluginmanager.register(ShownAtOnce())
    steps_here = "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None)
    if steps_here and (path := config.getoption("loaded")) is not None:
        config.pluginmanager.register(LoadedPackages(path))
    # A failure that nobody else can see again is of no use, so examples are always the same ones.
    hypothesis.settings.register_profile(
        "everystep", deadline=None, derandomize=True, database=None, print_blob=True
    )
    hypothesis.settings.load_profile("everystep")


def pytest_report_header(config: pytest.Config) -> list[str]:
    everything = config.getoption("all")
    lines = [f"everystep: {'everything' if everything else 'without slow tests (--all runs them)'}"]
    if not torch.cuda.is_available():
        lines.append("everystep: without cuda tests, as there is no CUDA device")
    if absent := [name for name in SHELLS if shutil.which(name) is None]:
        lines.append(f"everystep: without tests in {' and '.join(absent)}, which are not installed")
    if missing_others():
        lines.append("everystep: without other programs (scripts/others runs them)")
    if (shard := config.getoption("shard")) is not None:
        lines.append(f"everystep: part {shard[0]} of {shard[1]}")
    return lines


class NetworkInTest(RuntimeError):
    """A test tried to leave this machine. Not an OSError, which would pass for being offline."""


def is_local(host: object) -> bool:
    """Whether `host` names this machine without asking anybody."""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def forbid_network() -> None:
    """Makes every way out of this machine raise NetworkInTest, in this process."""
    connect, connect_ex, lookup = (
        socket.socket.connect,
        socket.socket.connect_ex,
        socket.getaddrinfo,
    )

    def check(host: object) -> None:
        if not is_local(host):
            raise NetworkInTest(f"a test tried to reach {host!r}")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            check(address[0])
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        if self.family != socket.AF_UNIX:
            check(address[0])
        return connect_ex(self, address)

    def guarded_lookup(host: Any, *arguments: Any, **options: Any) -> Any:
        check(host)
        return lookup(host, *arguments, **options)

    socket.socket.connect = guarded_connect  # type: ignore[method-assign]
    socket.socket.connect_ex = guarded_connect_ex  # type: ignore[method-assign]
    socket.getaddrinfo = guarded_lookup


# --- which tests run ------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_a_few(items)
    kept, left = [], []
    for item in items:
        (kept if _is_wanted(item, config) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
    if not config.getoption("all"):
        _skip(items, "model", missing_model)
        _skip(items, "native", missing_library)


def _leave_a_few(items: list[pytest.Item]) -> None:
    """Mark those cases as slow that a test of many cases needs only with --all.

    One in n is kept along diagonals, so that each value of each parameter is met.
    """
    before: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("few")
        if marker is None:
            continue
        (share,) = marker.args
        name = item.nodeid.partition("[")[0]
        number, before[name] = before[name], before[name] + 1
        if (number + number // share) % share:
            item.add_marker("slow")


def _skip(items: list[pytest.Item], marker: str, missing: Callable[[], str | None]) -> None:
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and (reason := missing()) is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _is_wanted(item: pytest.Item, config: pytest.Config) -> bool:
    if item.get_closest_marker("slow") and not config.getoption("all"):
        return False
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        return False
    if item.get_closest_marker("others") and missing_others():
        return False
    if item.get_closest_marker("clients") and "clients" not in config.getoption("-m"):
        return False
    if (shell := item.get_closest_marker("shell")) and shutil.which(shell.args[0]) is None:
        return False
    shard = config.getoption("shard")
    return shard is None or part_of(item.nodeid, shard[1]) == shard[0]


def part_of(nodeid: str, parts: int) -> int:
    """Which of `parts` parts, from 1, a test belongs to: by its name alone, on every machine."""
    digest = hashlib.sha256(nodeid.encode()).digest()
    return int.from_bytes(digest[:8], "big") % parts + 1


@functools.cache
def missing_others() -> tuple[str, ...]:
    """The modules of other programs that are not installed."""
    return tuple(name for name in OTHERS if importlib.util.find_spec(name) is None)


def missing_model() -> str | None:
    """Why the default model cannot be used, with the path of its file; None when it can."""
    try:
        resolve_source(DEFAULT_MODEL, offline=True)
    except EverystepError as error:
        return str(error)
    return None


def missing_library() -> str | None:
    """Why the native executor cannot be used; None when it can."""
    found = status()
    return None if found.instructions else f"no native executor: {found.reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if item.config.getoption("all"):
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    if collector.config.getoption("all"):
        _forbid_skip(report)
    return report


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --all does not allow: {report.longrepr}"


class ShownAtOnce:
    """Prints each failure when it happens: a run that is cut short has shown its own."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = str(report.longrepr)
            print(f"\n!!! {report.nodeid} ({report.when})\n{text[-_SHOWN:]}", flush=True)


# Properties that tests record as counts -> what is printed before their sums.
COUNTED = {
    "coverage": "laws",
    "continuous": "continuous against offline",
    "parity": "parity",
    "settings": "parity, draws away from a default",
    "mutations": "broken files",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what all tests together have covered or found, where they recorded it."""
    stats = terminalreporter.stats
    reports = [*stats.get("passed", []), *stats.get("failed", [])]
    recorded = [one for report in reports for one in report.user_properties]
    for subject, title in COUNTED.items():
        total: Counter[str] = Counter()
        for counts in (value for name, value in recorded if name == subject):
            total.update(counts)
        counted = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in total.items())
        if counted:
            terminalreporter.write_line(f"{title}: {counted}")
    for text in (value for name, value in recorded if name == "finding"):
        terminalreporter.write_line(text)


# --- for each test --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Every test starts from the same state of the global generators, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file in the cache folder; only for tests marked `model`."""
    return resolve_source(DEFAULT_MODEL, offline=True)
