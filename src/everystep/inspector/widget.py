"""The page in a notebook, with the modules of the page itself: a record, or a run in hands.

Without the extra, records, runs and steps show themselves as plain HTML.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from everystep.errors import EverystepError, MissingExtraError, RequestError
from everystep.inspector.page import asset
from everystep.inspector.sessions import InspectorSession, Known, LiveSession, Reading
from everystep.records import Record
from everystep.runs.run import Run

try:
    import anywidget
except ImportError as error:
    raise MissingExtraError.of("a page in a notebook", "anywidget", "notebook") from error


class InspectorWidget(anywidget.AnyWidget):
    """A cell that shows a session; what its page asks is answered in a thread, in order."""

    _esm = f"{asset('page.js')}\n{asset('widget.js')}"
    _css = asset("page.css")

    def __init__(self, session: InspectorSession) -> None:
        super().__init__()
        self.session = session
        self._order = threading.Lock()
        self.on_msg(self._heard)

    def _heard(self, _: object, content: Mapping[str, Any], buffers: object) -> None:
        """Answer a message of the page; a run may take its time, and the kernel stays free."""
        if content.get("what") == "halt":
            self.session.halt()
            self.send({"id": content.get("id"), "value": {"said": ["It halts after this step."]}})
            return
        threading.Thread(target=self._answer, args=(dict(content),), daemon=True).start()

    def _answer(self, asked: Mapping[str, Any]) -> None:
        with self._order:
            try:
                answer: dict[str, object] = {"value": self._value(asked)}
            except EverystepError as error:
                answer = {"error": str(error)}
            self.send({"id": asked.get("id"), **answer})

    def _value(self, asked: Mapping[str, Any]) -> object:
        what = asked.get("what")
        if what == "document":
            return self.session.document()
        if what == "steps":
            place = [asked.get(name) for name in ("run", "first", "count")]
            if not all(type(one) is int for one in place):
                raise RequestError("run, first and count are whole numbers")
            return self.session.steps(*place)  # type: ignore[arg-type]
        if what == "obey":
            known = Known.read(asked.get("known"))
            return self.session.answered(str(asked.get("line")), asked.get("run"), known)
        raise RequestError("there is no such question", got=str(what)[:40])


def show(
    shown: Record | Run, other: Record | None = None, *, model: Any = None, tokenizer: Any = None
) -> InspectorWidget:
    """Return a cell with a record, two records that are compared, or a run that is driven by hand.

    `model`, `tokenizer`: for questions about a record, those that it was made with.
    """
    if isinstance(shown, Run):
        if other is not None or model is not None or tokenizer is not None:
            what = "a run has its model, and is not compared"
            raise RequestError(what, do="Pass the run alone, or its record: run.inspect()")
        return InspectorWidget(LiveSession(shown.model, shown.tokenizer, shown, "run"))
    rival = None if other is None else ("other", other)
    return InspectorWidget(Reading(("record", shown), rival, model, tokenizer))
