"""Calls and thoughts in the text of models: recognised, parsed, written and forced.

`family_of(template)` finds the row of the table for a chat template. `Parser(family, tools)` is fed
the pieces of an answer and gives events; `close()` ends it. `grammar_for(family, tools, choice)` is
the grammar that holds an answer to calls.
"""

from everystep.dialogue.asked import Dialogue, Message, read_dialogue
from everystep.dialogue.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    DialogueEvent,
    Finish,
    Mark,
    Thought,
    ToolCall,
)
from everystep.dialogue.families import Family, family_of
from everystep.dialogue.grammar import grammar_for
from everystep.dialogue.parser import Parser
from everystep.dialogue.tools import Tool, ToolChoice, read_choice, read_tools
from everystep.dialogue.writing import written

__all__ = [
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Dialogue",
    "DialogueEvent",
    "Family",
    "Finish",
    "Mark",
    "Message",
    "Parser",
    "Thought",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "family_of",
    "grammar_for",
    "read_choice",
    "read_dialogue",
    "read_tools",
    "written",
]
