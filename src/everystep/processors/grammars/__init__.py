"""Grammars: what a text has to follow, from a schema or an expression to a mask of tokens.

The parsing is done by the library llguidance, an extra; it is imported when the first grammar is
compiled.
"""
