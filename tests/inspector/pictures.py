"""Draws the pictures of the inspector in docs/images: every view, as the default model's records
show it in a real Chromium.

    scripts/pictures
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import everystep as es
from everystep.inspector.page_server import PageServer
from everystep.inspector.sessions import InspectorSession, LiveSession, Reading
from everystep.records import read_record
from tests.docs.test_documents import blocks, run_python
from tests.inspector.browser import Browser
from tests.reading import ROOT

IMAGES = ROOT / "docs" / "images"
PROMPT = "The three primary colours are"
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
LONG: dict[str, Any] = {"max_new_tokens": 40}
READY = "document.querySelectorAll('#step td').length > 0"


@dataclass(frozen=True)
class View:
    """A picture: which session, what is pressed or asked, which part of the page, how wide, and how
    high at most."""

    kind: str
    part: str
    at: int = 6
    line: str | None = None
    width: int = 1100
    dark: bool = False
    height: int = 900


VIEWS: dict[str, View] = {
    "inspect-text": View("sampled", ".tokens, canvas, #ends"),
    "inspect-text-dark": View("sampled", ".tokens, canvas, #ends", dark=True),
    "inspect-narrow": View("sampled", ".controls, .tokens, canvas", width=380),
    "inspect-step": View("sampled", "#step", at=18),
    "inspect-step-dark": View("sampled", "#step", at=18, dark=True),
    "inspect-tree": View("beams", "#tree", at=2),
    "inspect-prompt": View("chat", ".prompt", at=1),
    "inspect-compare": View("two", "#comparison"),
    "inspect-hands": View("live", "#hands, #said", at=3, line="step 4"),
    "inspect-what-if": View("asked", "#said", line="if without=TopP at 6"),
    "inspect-lens": View("asked", "#said", line="lens 6"),
    "wrong-template": View("template", ".prompt", at=1),
    "wrong-grammar": View("city", "#step", at=0),
    "wrong-penalty": View("name", "#step", at=2),
    "wrong-beam": View("sea", "#tree", at=1, height=733),
    "wrong-drafts": View("drafts", "#step, #ends", at=3),
}
GUIDE = ROOT / "docs" / "guide" / "why-it-went-wrong.md"
_BOX = """(() => {{
  const boxes = [...document.querySelectorAll({part})].map((one) => one.getBoundingClientRect());
  const left = Math.min(...boxes.map((one) => one.left)) - 8;
  const top = Math.min(...boxes.map((one) => one.top)) - 8 + window.scrollY;
  const right = Math.max(...boxes.map((one) => one.right)) + 8;
  const bottom = Math.max(...boxes.map((one) => one.bottom)) + 8 + window.scrollY;
  return [Math.max(left, 0), Math.max(top, 0), right - Math.max(left, 0), bottom - top];
}})()"""


def sessions(folder: Path) -> dict[str, Callable[[], InspectorSession]]:
    """What the views look at, made when a view asks for it."""
    model, tokenizer = es.load("smollm2-135m-instruct", dtype=torch.float32)
    files = {name: folder / f"{name}.jsonl" for name in ("one", "two", "beams", "chat", "live")}
    es.generate(model, tokenizer, PROMPT, **LONG, **SAMPLED, seed=1, record=files["one"])
    es.generate(model, tokenizer, PROMPT, **LONG, **SAMPLED, seed=2, record=files["two"])
    es.generate(model, tokenizer, PROMPT, max_new_tokens=12, num_beams=3, record=files["beams"])
    asked = [{"role": "user", "content": "Name a colour."}]
    es.generate(model, tokenizer, asked, max_new_tokens=12, seed=3, record=files["chat"])

    def reading(name: str, *more: Any, rival: str | None = None) -> Reading:
        other = None if rival is None else (rival, read_record(files[rival]))
        return Reading((f"{name}.jsonl", read_record(files[name])), other, *more)

    def live() -> LiveSession:
        given = {**LONG, **SAMPLED, "seed": 1}
        return LiveSession.opened(model, tokenizer, PROMPT, files["live"], "live", **given)

    wrong = run_python(GUIDE, blocks(GUIDE.read_text(encoding="utf-8"), "python"))["folder"]
    files |= {file.stem: file for file in wrong.iterdir()}
    return {
        **{file.stem: partial(reading, file.stem) for file in wrong.iterdir()},
        "sampled": lambda: reading("one"),
        "beams": lambda: reading("beams"),
        "chat": lambda: reading("chat"),
        "two": lambda: reading("one", rival="two"),
        "asked": lambda: reading("one", model, tokenizer),
        "live": live,
    }


def draw(browser: Browser, view: View, session: InspectorSession) -> bytes:
    """The picture of a view, as PNG."""
    browser.show(view.width, 900, dark=view.dark)
    with PageServer(session) as server:
        if view.kind == "live" and view.line is not None:
            session.obey(view.line)
        browser.visit(server.url, READY)
        browser.value("document.getElementById('tokens').focus()")
        browser.press("Home", *["ArrowRight"] * view.at)
        browser.until("!document.querySelector('#step').textContent.includes('being read')")
        if view.line is not None and view.kind == "asked":
            kind = {"if": 0, "lens": 7}[view.line.split(" ")[0]]
            browser.value(f"document.getElementById('what-kind').selectedIndex = {kind}")
            browser.value("document.getElementById('what-value').value = 'TopP'")
            browser.value("document.getElementById('what-ask').click()")
            browser.until("document.getElementById('said').textContent.length > 20")
        left, top, width, height = browser.value(_BOX.format(part=repr(view.part)))
        clip = {"x": left, "y": top, "width": width, "height": min(height, view.height), "scale": 1}
        return base64.b64decode(browser.picture(clip))


def main() -> None:
    """Draw every view."""
    with tempfile.TemporaryDirectory() as folder:
        made = sessions(Path(folder))
        with Browser(Path(folder) / "profile", "--hide-scrollbars") as browser:
            for name, view in VIEWS.items():
                data = draw(browser, view, made[view.kind]())
                assert browser.problems == [], browser.problems
                (IMAGES / f"{name}.png").write_bytes(data)
                print(f"{name}.png {len(data):,} bytes")


if __name__ == "__main__":
    main()
