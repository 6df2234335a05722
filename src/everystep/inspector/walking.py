"""A walk through a record in a terminal, token by token, with arrow keys.

Lines are drawn when they are seen, so that a record of 100,000 steps is as quick as a short one.
"""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from everystep.inspector import views
from everystep.records import Record, RecordedRun

_STYLES = ("", "on #1d3b53", "on #5c4a00 underline", "on #7a3b00 underline", "on #7d1128 bold")
_MEASURES = ("surprise", "entropy", "rank")
_BAR = 12
_LOW = 2
"""The level of surprise that `b` looks for: a share below a tenth."""


class TokenLines(ScrollView, can_focus=False):
    """The tokens of a sequence, a line each, of which those that are seen are drawn."""

    def __init__(self, tokens: list[views.Token]) -> None:
        super().__init__(id="lines")
        self.tokens = tokens
        self.at = 0
        self.measure = 0
        self.drawn = 0
        self.virtual_size = Size(60, len(tokens))

    def render_line(self, y: int) -> Strip:
        """Draw one line of what is seen."""
        at = y + self.scroll_offset.y
        if not 0 <= at < len(self.tokens):
            return Strip.blank(self.size.width)
        self.drawn += 1
        one = self.tokens[at]
        style = Style.parse(_STYLES[views.level(one.surprise)] or "none")
        mark = Style(reverse=True) if at == self.at else Style.null()
        share = "" if one.surprise is None else f"{views.share_of(-one.surprise):7.2%}"
        segments = [
            Segment(f"{at:>7} ", mark),
            Segment(f"{one.text[:20]:20}", style),
            Segment(f" {share:>8} {one.origin[:8]:8} "),
            Segment(views.bar(self._value(one), self._most(), _BAR)),
        ]
        return Strip(segments).adjust_cell_length(self.size.width)

    def _value(self, one: views.Token) -> float | None:
        if one.row is None or self.measure == 0:
            return one.surprise
        if self.measure == 1:
            return one.row.entropies[0]
        return None if one.row.ranks is None else float(one.row.ranks[0])

    def _most(self) -> float:
        """Return what a full bar stands for: 10 nats, or a rank of 20."""
        return 20.0 if self.measure == 2 else 10.0

    def move(self, at: int) -> None:
        """Stand at a token, and see it."""
        self.at = max(0, min(at, len(self.tokens) - 1))
        self.scroll_to_region(Region(0, self.at, 1, 1), animate=False, force=True)
        self.refresh()


class RecordWalk(App[None]):
    """The program: tokens on the left, the choice of one of them on the right."""

    AUTO_FOCUS = ""
    CSS = """
    #lines { width: 62; border-right: solid gray; }
    #choice { padding: 0 1; }
    #find { dock: bottom; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("right", "go(1)", "next"),
        ("left", "go(-1)", "back"),
        ("pagedown", "go(20)", "20 on"),
        ("pageup", "go(-20)", "20 back"),
        ("home", "first", "first"),
        ("end", "last", "last"),
        ("down", "scroll(1)", "candidates"),
        ("up", "scroll(-1)", ""),
        ("e", "measure", "measure"),
        ("b", "low", "next low share"),
        ("slash", "find", "find"),
        ("t", "tree", "tree"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, record: Record, run: RecordedRun, sequence: int) -> None:
        super().__init__()
        self.record, self.run_of = record, run
        self.lines = TokenLines(views.tokens_of(record, run, sequence))
        self.choice = Static(id="text")
        self.searched = Input(placeholder="a text, or #id", id="find")

    def compose(self) -> ComposeResult:
        """Lay the parts out."""
        with Horizontal():
            yield self.lines
            with VerticalScroll(id="choice", can_focus=False):
                yield self.choice
        yield self.searched
        yield Footer()

    def on_mount(self) -> None:
        """Show the first token."""
        self.action_first()

    # --- actions ----------------------------------------------------------------------------------

    def action_go(self, by: int) -> None:
        """Move by so many tokens."""
        self.stand(self.lines.at + by)

    def action_first(self) -> None:
        """Move to the first token."""
        self.stand(0)

    def action_last(self) -> None:
        """Move to the last token."""
        self.stand(len(self.lines.tokens) - 1)

    def action_scroll(self, by: int) -> None:
        """Move along the candidates."""
        self.query_one("#choice").scroll_relative(y=by, animate=False)

    def action_measure(self) -> None:
        """Let the bars show another measure."""
        self.lines.measure = (self.lines.measure + 1) % len(_MEASURES)
        self.lines.refresh()
        self.sub_title = _MEASURES[self.lines.measure]

    def action_low(self) -> None:
        """Move to the next token with a low share."""
        for one in self.lines.tokens[self.lines.at + 1 :]:
            if views.level(one.surprise) >= _LOW:
                self.stand(one.at)
                return
        self.notify("no token below 10 % follows")

    def action_find(self) -> None:
        """Ask for a text to find."""
        self.searched.display = True
        self.searched.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Move to the next place where the text stands."""
        places = views.places_of(self.lines.tokens, event.value)
        after = [at for at in places if at > self.lines.at]
        self.searched.display = False
        self.set_focus(None)
        if places:
            self.stand((after or places)[0])
        else:
            self.notify("it does not stand there")

    def action_tree(self) -> None:
        """Show hypotheses, forks and drafts."""
        self.choice.update(Text("\n".join(views.forest(self.record, self.run_of)[:2000])))

    def stand(self, at: int) -> None:
        """Stand at a token and show its choice."""
        self.lines.move(at)
        self.choice.update(self.said())

    def said(self) -> Table | Text:
        """Return what is to be said of the token."""
        if not self.lines.tokens:
            return Text("the sequence has no tokens")
        one = self.lines.tokens[self.lines.at]
        head = f"token {one.at}: {one.text}\n"
        if one.row is None:
            return Text(f"{head}it was {one.origin}, not chosen")
        titles, rows = views.candidates(self.record, one.row)
        said = [head, *views.about_choice(self.record, one.row)]
        if one.at == len(self.lines.tokens) - 1:
            said += views.ends(self.record, self.run_of)
        table = Table(box=None, title=Text("\n".join(said), justify="left"), title_justify="left")
        for title in titles:
            table.add_column(title)
        for row in rows:
            table.add_row(*map(Text, row))
        return table


def walk(record: Record, run: RecordedRun, sequence: int) -> None:
    """Walk through a sequence of a run until somebody has enough."""
    RecordWalk(record, run, sequence).run()
