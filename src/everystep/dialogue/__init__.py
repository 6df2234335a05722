"""Calls and thoughts in the text of models: recognised, parsed, written and forced.

`dialect_of(template)` finds the row of the table for a chat template. `Parser(dialect, tools)` is
fed the pieces of an answer and gives events; `close()` ends it. `grammar_for(dialect, tools,
choice)` is the grammar that holds an answer to calls. `read_dialogue` reads the keywords of a call,
which give all of these for one conversation.
"""

from everystep.dialogue.asked import (
    Dialogue,
    Message,
    read_dialogue,
    switches_thoughts,
    thoughts_apart,
)
from everystep.dialogue.dialects import Dialect, dialect_of
from everystep.dialogue.forcing import grammar_for
from everystep.dialogue.parsed import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    DialogueEvent,
    Finish,
    Markup,
    Thought,
    ToolCall,
)
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
    "Dialect",
    "Finish",
    "Markup",
    "Message",
    "Parser",
    "Thought",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "dialect_of",
    "grammar_for",
    "read_choice",
    "read_dialogue",
    "read_tools",
    "switches_thoughts",
    "thoughts_apart",
    "written",
]
