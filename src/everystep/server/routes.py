"""The table of routes: which fields each takes, which it ignores, and which it refuses by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from everystep.server.fields import (
    FLAG,
    GENERATE,
    ID,
    IDS,
    MAPPING,
    NOT_ON_THE_WIRE,
    OF_MESSAGES,
    STOP,
    TEXT,
    Json,
    WireField,
    either,
    integer,
    listed,
    number,
    one_of,
    read_fields,
    text,
)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """A route that takes a body: its fields by name, those that mean nothing here, and those that
    are refused, with reasons. `line`: what it does. `also`: what the reference says in place of the
    fields of `generate`, where it does not list them."""

    path: str
    line: str
    fields: Mapping[str, WireField]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    also: str = ""

    def read(self, body: Json) -> dict[str, Json]:
        """Return the fields of a body that are set; RequestError for what the table forbids."""
        return read_fields(self.fields, self.ignored, self.refused, body)


IGNORED: Mapping[str, str] = {
    "user": "who asks at the client's",
    "store": "nothing is kept",
    "metadata": "nothing is kept",
    "service_tier": "there is one",
    "safety_identifier": "who asks at the client's",
    "prompt_cache_key": "what the cache holds is found by its ids",
    "prompt_cache_retention": "what the cache holds is found by its ids",
    "prompt_cache_options": "what the cache holds is found by its ids",
}
"""Fields of OpenAI's that change no answer, each with the reason."""

_OTHERS: Mapping[str, str] = {
    "functions": "has another name here: tools",
    "function_call": "has another name here: tool_choice",
    **dict.fromkeys(("modalities", "audio"), "asks for sounds, and answers are texts"),
    "web_search_options": "asks for a search, and nothing is fetched",
    "reasoning_effort": "is read by no model here",
    "verbosity": "is read by no model here",
    "prediction": "has another name here: prompt_lookup_num_tokens",
    "suffix": "asks to fill in the middle, which no model here does",
    "moderation": "asks for a judge that there is not",
    "guided_json": "has another name here: schema",
    "guided_regex": "has another name here: regex",
    "guided_choice": "has another name here: choices",
    "guided_grammar": "has another name here: grammar",
    "structured_outputs": "has other names here: schema, regex, choices, grammar",
}
_REFUSED = {**{name: f"{why}" for name, why in NOT_ON_THE_WIRE.items()}, **_OTHERS}

_MODEL = WireField("model", text(512, 1), "The model, or the adapter, that answers.", "the first")
_LONGEST = integer(1, 1 << 24)
_BOTH = (
    replace(_MODEL),
    WireField(
        "max_tokens", integer(0, 1 << 24), "Tokens of an answer at most.", "", "max_new_tokens"
    ),
    WireField("n", integer(1, 64), "Answers per prompt.", "1", "num_return_sequences"),
    WireField("stop", STOP, "Texts that end an answer, up to 16.", "", "stop_strings"),
    WireField("stream", FLAG, "Whether the answer comes piece by piece.", "false"),
    WireField(
        "stream_options",
        MAPPING,
        "With stream: `include_usage`, and `include_obfuscation`, which changes nothing.",
    ),
    WireField("stop_token_ids", listed(ID, 64), "Ids that end an answer, beside the model's own."),
    WireField("include_stop_str_in_output", FLAG, "Whether the text keeps what ended it.", "false"),
    WireField("ignore_eos", FLAG, "Whether the model's own ends end nothing.", "false"),
    WireField(
        "priority",
        integer(-100, 100),
        "Of requests that wait, those of a lower number of one key come first.",
        "0",
    ),
    WireField("return_token_ids", FLAG, "Whether choices have the ids of their tokens.", "false"),
)


def _table(*groups: Iterable[WireField]) -> dict[str, WireField]:
    """Return the fields by name; an earlier one goes before a later one of the same name."""
    found: dict[str, WireField] = {}
    for group in groups:
        for one in group:
            found.setdefault(one.name, one)
    return found


COMPLETIONS = RouteTable(
    "/v1/completions",
    "Continue one prompt or several.",
    _table(
        (
            WireField(
                "prompt",
                either(TEXT, IDS, listed(either(TEXT, IDS), 1024, 1)),
                "A text, a list of ids, or a list of either.",
                required=True,
            ),
            WireField(
                "logprobs",
                integer(0, 20),
                "The log-probability of every token, and of so many best ones.",
                "",
                "logprobs",
            ),
            WireField("echo", FLAG, "Whether the prompt stands before its answers.", "false"),
        ),
        _BOTH,
        (one for one in GENERATE if one.name not in OF_MESSAGES),
    ),
    IGNORED,
    {**_REFUSED, **dict.fromkeys(OF_MESSAGES, "belongs to messages")},
)

CHAT = RouteTable(
    "/v1/chat/completions",
    "Answer a conversation.",
    _table(
        (
            WireField(
                "messages", listed(MAPPING, 4096, 1), "The conversation, in turn.", required=True
            ),
            WireField("logprobs", FLAG, "Whether tokens have log-probabilities.", "false"),
            WireField("top_logprobs", integer(0, 20), "With logprobs: of so many best ones too."),
            WireField(
                "max_completion_tokens",
                _LONGEST,
                "Tokens of an answer at most; goes before max_tokens.",
                "512",
                "max_new_tokens",
            ),
            WireField(
                "response_format",
                MAPPING,
                "`text`, `json_object`, or `json_schema` with a schema that the answer follows.",
                "text",
            ),
        ),
        _BOTH,
        GENERATE,
    ),
    IGNORED,
    _REFUSED,
)

TOKENIZE = RouteTable(
    "/tokenize",
    "Return the ids of a text or of messages.",
    _table(
        (
            _MODEL,
            WireField("prompt", TEXT, "The text."),
            WireField("messages", listed(MAPPING, 4096, 1), "A conversation, in place of a text."),
            WireField("add_special_tokens", FLAG, "Whether a text begins as prompts do.", "true"),
            WireField("add_generation_prompt", FLAG, "Whether the answer is begun.", "true"),
            WireField("return_token_strs", FLAG, "Whether each token's text is told.", "false"),
        )
    ),
)

DETOKENIZE = RouteTable(
    "/detokenize",
    "Return the text of ids.",
    _table((_MODEL, WireField("tokens", listed(ID, 1 << 20), "The ids.", required=True))),
)

_SCORED = either(TEXT, IDS)
SCORE = RouteTable(
    "/v1/everystep/score",
    "Return how likely texts are, token by token, as `everystep.score` does.",
    _table(
        (
            _MODEL,
            WireField(
                "texts",
                either(_SCORED, listed(_SCORED, 256, 1)),
                "The texts, or lists of ids.",
                required=True,
            ),
            WireField("after", _SCORED, "What stands before each, and is not scored itself."),
            WireField("best", integer(0, 20), "How many of the best tokens are told.", "0"),
        )
    ),
)

ROUTES = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE, SCORE)
"""Every route that answers a body at once."""
BATCHED = tuple(one.path for one in ROUTES)
"""The routes that a line of a batch file may ask."""

BATCHES = RouteTable(
    "/v1/batches",
    "Answer the lines of a file that was sent to /v1/files; needs `--files`.",
    _table(
        (
            WireField("input_file_id", text(100, 1), "The file.", required=True),
            WireField("endpoint", text(100, 1), "The url of every line.", required=True),
            WireField("completion_window", one_of("24h"), "After it, lines expire.", "24h"),
            WireField("metadata", MAPPING, "Texts by name, which are told again."),
        )
    ),
)
_ID = WireField("ids", IDS, "The ids.")
_TEXT = WireField("text", TEXT, "A text, in place of ids.")
_RUN = "/v1/everystep/runs"
_ALONE = (
    *("stream", "stream_options", "return_token_ids", "priority"),
    *(
        one.name
        for one in GENERATE
        if one.name in OF_MESSAGES and one.name != "add_generation_prompt"
    ),
)
_OF_GENERATE = _table(
    (one for one in (*_BOTH, *GENERATE) if one.name not in (*_ALONE, "model", "logprobs")),
)
_SET = {name: one for name, one in _OF_GENERATE.items() if name != "add_generation_prompt"}
_AND = "The fields of `/v1/completions` that `generate` has are fields here too."


def _run_table(verb: str, line: str, *fields: WireField, own: bool = False) -> RouteTable:
    """Return the table of what is done to a run; `own`: it takes fields of `generate` too."""
    known = _table(fields, _SET.values() if own else ())
    return RouteTable(f"{_RUN}/{{id}}/{verb}", line, known, {}, {}, _AND if own else "")


RUN_OPEN = RouteTable(
    _RUN,
    "Open a run, as `everystep.open` does; GET lists those that are open.",
    _table(
        (
            replace(_MODEL),
            WireField("prompt", either(TEXT, IDS), "A text or a list of ids."),
            WireField("messages", listed(MAPPING, 4096, 1), "A conversation, in place of a text."),
            WireField("logprobs", integer(0, 20), "As of `/v1/completions`.", "", "logprobs"),
        ),
        _OF_GENERATE.values(),
    ),
    IGNORED,
    {**_REFUSED, **dict.fromkeys(_ALONE, "has no place in a run")},
    _AND,
)
RUN_STEP = _run_table(
    "step",
    "Take steps, at most so many, and tell each.",
    WireField("steps", integer(1, 4096), "How many.", "1"),
    WireField("best", integer(0, 20), "Of so many tokens the logit and the score, in each row."),
    WireField("stream", FLAG, "Whether steps come one by one, as events.", "false"),
)
RUN_RESULT = _run_table("result", "Take all steps that are left, and tell the results.")
RUN_MORE = _run_table(
    "more",
    "The best hypotheses of a beam search that were not told yet.",
    WireField("n", integer(1, 64), "How many.", "10"),
)
RUN_SEND = _run_table("send", "Add ids, and go on after them.", _ID, _TEXT)
RUN_EDIT = _run_table(
    "edit",
    "Put ids in the place of as many others.",
    WireField("position", integer(0, 1 << 24), "Of the first.", required=True),
    _ID,
    _TEXT,
)
RUN_REWIND = _run_table(
    "rewind", "Take the last ids back.", WireField("n", integer(0, 1 << 24), "How many.", "1")
)
RUN_SET = _run_table("set", "Set other values from the next choice on.", own=True)
RUN_FORK = _run_table("fork", "Open a run that is as this one, with other values set.", own=True)
RUN_EXPLAIN = _run_table(
    "explain",
    "The reasons for a token.",
    WireField("position", integer(-(1 << 24), 1 << 24), "After the prompt.", required=True),
    WireField("rivals", integer(0, 64), "How many other tokens are told.", "5"),
    WireField("index", integer(0, 63), "Of which sequence.", "0"),
)
RUN_SAVE = _run_table(
    "save", f"The bytes of the run; send them to `{_RUN}/resume?model=NAME` to go on from them."
)
RUNS = (
    *(RUN_OPEN, RUN_STEP, RUN_RESULT, RUN_MORE, RUN_SEND, RUN_EDIT, RUN_REWIND, RUN_SET),
    *(RUN_FORK, RUN_EXPLAIN, RUN_SAVE),
)
MANAGED = (BATCHES, *RUNS)
"""Routes with a body that begin something."""

READ_ONLY: Mapping[str, str] = {
    "/v1/models": "The models and adapters, each with its context.",
    "/v1/files": "The files that were sent as multipart `file`, with `purpose` batch.",
    "/v1/files/{id}": "A file; DELETE removes it.",
    "/v1/files/{id}/content": "The bytes of a file.",
    "/v1/everystep/runs/{id}": "A run as it stands; DELETE ends it.",
    "/v1/batches/{id}": "A batch; POST to `/v1/batches/{id}/cancel` ends it.",
    "/health": "200 while the engine lives, else 503.",
    "/ready": "200 while requests are taken, else 503.",
    "/metrics": "Counters and histograms, as Prometheus reads them.",
    "/openapi.json": "This table as an OpenAPI document.",
    "/version": "The version of everystep.",
}
"""Routes without a body."""

LEAST_DEADLINE = number(0.001, 86400.0)
