"""Calls and thoughts in the text of models: recognised, parsed, written and forced.

`family_of(template)` finds the row of the table for a chat template. `Parser(family, tools)` is fed
the pieces of an answer and gives events; `close()` ends it. `grammar_for(family, tools, choice)` is
the grammar that holds an answer to calls.
"""
