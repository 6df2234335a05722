"""Programs that ask servers of OpenAI's wire: which release of each, in which environment, and what
it is seen to do.

A client has a program beside this file, `programs/NAME.py`, whose functions are noted with `seen`
and say what they show. Environments are made in build/clients, once for each set of pins.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.reading import ROOT

PROGRAMS = Path(__file__).with_name("programs")
FOLDER = ROOT / "build" / "clients"
LONGEST = 900


@dataclass(frozen=True)
class Client:
    """A program, its release, and what is installed for it, from `pins`; without any its calls are
    written again with Python's own library. `beside`: the packages of this environment are seen
    from its own, so that torch is not installed again."""

    name: str
    release: str
    program: str
    pins: tuple[str, ...] = ()
    beside: bool = False

    @property
    def path(self) -> Path:
        """The file of its program."""
        return PROGRAMS / f"{self.program}.py"

    def shown(self) -> list[str]:
        """Return what its program is to show, in order."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        return [
            ast.literal_eval(one.args[0])
            for function in tree.body
            if isinstance(function, ast.FunctionDef)
            for one in function.decorator_list
            if isinstance(one, ast.Call) and getattr(one.func, "id", "") == "seen"
        ]

    def python(self) -> str:
        """Return the Python of its environment, which is made where it is not there."""
        if not self.pins:
            return sys.executable
        home = FOLDER / self.program
        python, stamp = home / "bin" / "python", home / "installed.txt"
        if not stamp.exists() or stamp.read_text() != "\n".join(self.pins):
            venv.create(home, with_pip=True, clear=True)
            if self.beside:
                own = sysconfig.get_path("purelib", vars={"base": str(home)})
                Path(own, "beside.pth").write_text(sysconfig.get_path("purelib"))
            quiet = ("--quiet", "--disable-pip-version-check")
            subprocess.run([python, "-m", "pip", "install", *quiet, *self.pins], check=True)
            stamp.write_text("\n".join(self.pins))
        return str(python)

    def require_shown(self, address: str, folder: Path) -> None:
        """Run its program in a folder; it has to show all that it says."""
        done = subprocess.run(
            [self.python(), "-W", "ignore", str(self.path), address],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST,
        )
        seen = re.findall(r"^seen: (.*)$", done.stdout, re.M)
        assert (done.returncode, seen) == (0, self.shown()), done.stdout[-8000:]


CLIENTS = (
    Client("openai", "3.57.0", "openai_client", ("openai==3.57.0",)),
    Client("anthropic", "2.14.0", "anthropic_client", ("anthropic==2.14.0",)),
    Client(
        "langchain-openai",
        "1.7.4",
        "langchain_client",
        ("langchain-openai==1.7.4", "openai==3.57.0"),
    ),
    Client("llm", "0.36", "llm_client", ("llm==0.36", "openai==3.57.0")),
    Client("litellm", "1.110.2", "litellm_client", ("litellm==1.110.2", "openai==3.57.0")),
    Client("instructor", "1.17.0", "instructor_client", ("instructor==1.17.0", "openai==3.3.0")),
    Client("lm-eval", "0.4.13", "lm_eval_client", ("lm-eval[api]==0.4.13", "datasets==5.2.0")),
    Client("Open WebUI (its calls, replayed)", "0.12.4", "open_webui_calls"),
    Client("guidellm", "0.8.1", "guidellm_client", ("guidellm==0.8.1",), beside=True),
    Client("aiperf", "0.13.0", "aiperf_client", ("aiperf==0.13.0",)),
)
