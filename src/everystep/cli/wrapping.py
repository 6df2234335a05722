"""Text on its way to a terminal, in lines that end between words.

A terminal itself breaks a line at its last column, wherever that is in a word. Text arrives in
pieces, so the word that a piece ends in is held back until it is whole.
"""

from __future__ import annotations

from rich.cells import cell_len

_TAB = 8


class Wrapped:
    """Pieces of a text go in, and what can be shown of them comes out, with line breaks in the
    place of spaces where a word would not fit into `columns` cells."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._column = 0  # cells of the line that were shown
        self._space = ""
        self._word = ""

    def __call__(self, piece: str) -> str:
        """Return what can be shown now."""
        return "".join(map(self._after, piece))

    def rest(self) -> str:
        """Return what was held back; from now on nothing is."""
        return self._placed()

    def _after(self, character: str) -> str:
        """Return what one more character makes visible."""
        if character == "\n":
            shown = self._placed() if self._word else ""
            self._column, self._space = 0, ""
            return f"{shown}\n"
        if character in " \t":
            shown = self._placed() if self._word else ""
            self._space += character
            return shown
        if cell_len(character) > 1:  # scripts without spaces break between any two characters
            shown = self._placed() if self._word else ""
            self._word = character
            return shown + self._placed()
        self._word += character
        # A word that is longer than a line cannot be kept whole.
        return self._placed() if cell_len(self._word) >= self._columns else ""

    def _placed(self) -> str:
        """Return the spaces and the word, on the next line if this one has no room for them."""
        space, word = self._space, self._word
        self._space = self._word = ""
        width = cell_len(word)
        for one in space:
            width += 1 if one == " " else _TAB - (self._column + width) % _TAB
        if self._column and self._column + width > self._columns:
            self._column = cell_len(word)
            return f"\n{word}"
        self._column += width
        return space + word
