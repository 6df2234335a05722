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
    SEED,
    STOP,
    TEXT,
    Json,
    WireField,
    either,
    generate_field,
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
    fields of `generate`, where it does not list them. `is_form`: the body is multipart, and has a
    `file`."""

    path: str
    line: str
    fields: Mapping[str, WireField]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    also: str = ""
    is_form: bool = False

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
_REFUSED = {**NOT_ON_THE_WIRE, **_OTHERS}

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
        "With stream: `include_usage` adds a last chunk with the usage, `continuous_usage_stats`"
        " tells it in each chunk, and `include_obfuscation` changes nothing.",
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
    WireField(
        "skip_special_tokens",
        FLAG,
        "false: texts have special tokens too, but for the id that ends an answer, unless"
        " `include_stop_str_in_output` keeps it.",
        "true",
    ),
    WireField(
        "explain",
        either(FLAG, integer(0, 64)),
        "Whether choices have `explanations`, of each token what a run's `explain` tells, with so"
        " many rivals; true: 5.",
        "false",
    ),
    WireField(
        "seed",
        either(SEED, listed(SEED, 64, 1)),
        "Of the draws; or one for each of `n` answers, which are as those of a request each.",
        "another each time",
        "seed",
    ),
    WireField(
        "timings",
        FLAG,
        "Whether the answer, or the last chunk of a stream, has `timings`: `prompt_seconds`,"
        " `decode_seconds` and `total_seconds`.",
        "false",
    ),
)


_TEMPLATE = WireField(
    "chat_template_kwargs",
    MAPPING,
    "Variables of the chat template, by name; one that it does not read is an error.",
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
                "continue_final_message",
                FLAG,
                "Whether the answer goes on with the text of the last message.",
                "false",
            ),
            WireField(
                "response_format",
                MAPPING,
                "`text`, `json_object`, or `json_schema` with a schema that the answer follows.",
                "text",
            ),
            _TEMPLATE,
        ),
        _BOTH,
        GENERATE,
    ),
    IGNORED,
    _REFUSED,
)

_ONE_MESSAGE = "asks for several answers, and here is one"
_NO_LOGPROBS = "has no place in an answer of this wire"
_MESSAGES_REFUSED = {
    **_REFUSED,
    **dict.fromkeys(("num_return_sequences", "n_best"), _ONE_MESSAGE),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _NO_LOGPROBS),
    "parallel_tool_calls": "has another name here: tool_choice",
    **dict.fromkeys(("enable_thinking", "thinking_budget"), "has another name here: thinking"),
    **dict.fromkeys(("max_new_tokens", "max_length"), "has another name here: max_tokens"),
    "add_generation_prompt": "follows from the last message here",
    "stop_strings": "has another name here: stop_sequences",
    "mcp_servers": "asks for servers, and nothing is fetched",
    "container": "asks for a machine, and there is none",
    "context_management": "changes what was sent, and nothing here does",
}
_MESSAGES_IGNORED = {
    "metadata": "who asks at the client's",
    "service_tier": "there is one",
    "cache_control": "what the cache holds is found by its ids",
    "inference_geo": "there is one place",
    "speed": "there is one",
    "user_profile_id": "who asks at the client's",
    "betas": "they are asked for field by field",
}
_CONVERSATION = (
    _MODEL,
    WireField(
        "messages", listed(MAPPING, 4096, 1), "The conversation, in blocks or texts.", required=True
    ),
    WireField("system", either(TEXT, listed(MAPPING, 4096, 1)), "What instructs the model."),
    WireField(
        "tools",
        listed(MAPPING, 128),
        "Functions that the model may call, each with `name`, `description`, `input_schema`.",
    ),
    WireField(
        "tool_choice",
        MAPPING,
        "`auto`, `any`, `none`, or `tool` with a name, and `disable_parallel_tool_use`.",
        "auto",
    ),
    WireField(
        "thinking",
        MAPPING,
        "`enabled` with `budget_tokens`, `disabled`, or `adaptive`: as the model does.",
        "adaptive",
    ),
    WireField("output_config", MAPPING, "`format`: a `json_schema` that the answer follows."),
)

MESSAGES = RouteTable(
    "/v1/messages",
    "Answer a conversation on Anthropic's wire.",
    _table(
        _CONVERSATION,
        (
            WireField(
                "max_tokens",
                _LONGEST,
                "Tokens of an answer at most; the context may end it before.",
                keyword="max_new_tokens",
                required=True,
            ),
            WireField(
                "stop_sequences",
                listed(text(256, 1), 16),
                "Texts that end an answer, up to 16.",
                keyword="stop_strings",
            ),
            WireField("stream", FLAG, "Whether the answer comes as events.", "false"),
        ),
        (one for one in GENERATE if one.name not in _MESSAGES_REFUSED),
    ),
    _MESSAGES_IGNORED,
    _MESSAGES_REFUSED,
)

COUNT_TOKENS = RouteTable(
    "/v1/messages/count_tokens",
    "Return how many tokens the prompt of a conversation has, on Anthropic's wire.",
    _table(_CONVERSATION),
    _MESSAGES_IGNORED,
)

_RESPONSES_REFUSED = {
    **_REFUSED,
    **dict.fromkeys(("num_return_sequences", "n_best"), _ONE_MESSAGE),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "has another name here: include"),
    "enable_thinking": "has another name here: reasoning",
    **dict.fromkeys(("max_new_tokens", "max_length"), "has another name here: max_output_tokens"),
    "add_generation_prompt": "is always so here",
    "conversation": "has another name here: previous_response_id",
    "prompt": "names a text that is stored elsewhere",
    "schema": "has another name here: text",
    "context_management": "changes what was sent, and nothing here does",
}
_RESPONSES_IGNORED = {
    **{name: why for name, why in IGNORED.items() if name not in ("store", "metadata")},
    "max_tool_calls": "it is about tools that a server runs, and there are none",
}
_ITEMS = (
    _MODEL,
    WireField(
        "input", either(TEXT, listed(MAPPING, 4096)), "A text, or the items of a conversation."
    ),
    WireField("instructions", TEXT, "What instructs the model, in this response alone."),
    WireField(
        "previous_response_id", text(128, 1), "The response that the conversation goes on from."
    ),
    WireField("tools", listed(MAPPING, 128), "Functions that the model may call."),
    WireField(
        "tool_choice",
        either(text(128, 1), MAPPING),
        "`auto`, `required`, `none`, or `function` with a name.",
        "auto",
    ),
    WireField("parallel_tool_calls", FLAG, "Whether there may be several calls.", "true"),
    WireField("reasoning", MAPPING, "`effort`: `none` ends thoughts, where the model can."),
    WireField(
        "text", MAPPING, "`format`: `text`, `json_object` or `json_schema`, its fields flat."
    ),
    WireField("truncation", one_of("disabled"), "What is too long is an error.", "disabled"),
)

RESPONSES = RouteTable(
    "/v1/responses",
    "Answer a conversation of items, which is kept for a while.",
    _table(
        _ITEMS,
        (
            WireField("max_output_tokens", _LONGEST, "Tokens of an answer at most.", "512"),
            WireField(
                "include",
                listed(text(100), 16),
                "`message.output_text.logprobs`: the log-probability of every token of a text.",
            ),
            WireField("top_logprobs", integer(0, 20), "With include: of so many best ones too."),
            WireField("store", FLAG, "Whether the response can be gone on with.", "true"),
            WireField("metadata", MAPPING, "What the response repeats."),
            WireField("background", FLAG, "false: an answer comes in its own exchange.", "false"),
            WireField("stream", FLAG, "Whether the answer comes as events.", "false"),
            WireField("stream_options", MAPPING, "`include_obfuscation`, which changes nothing."),
        ),
        (one for one in GENERATE if one.name not in _RESPONSES_REFUSED),
    ),
    _RESPONSES_IGNORED,
    _RESPONSES_REFUSED,
)

INPUT_TOKENS = RouteTable(
    "/v1/responses/input_tokens",
    "Return how many tokens the prompt of a response has.",
    _table(_ITEMS),
)

_WAITING = (
    next(one for one in GENERATE if one.name == "timeout"),
    next(one for one in _BOTH if one.name == "priority"),
)
"""Fields of what waits in line and generates nothing."""

EMBEDDINGS = RouteTable(
    "/v1/embeddings",
    "Return a vector of each text, made of the last hidden states.",
    _table(
        (
            WireField(
                "input",
                either(TEXT, IDS, listed(either(TEXT, IDS), 1024, 1)),
                "A text, a list of ids, or a list of either.",
                required=True,
            ),
            _MODEL,
            WireField(
                "pooling",
                one_of("mean", "last"),
                "The mean over all positions, or the state of the last one.",
                "mean",
            ),
            WireField("normalize", FLAG, "Whether vectors have the length 1.", "true"),
            WireField(
                "encoding_format",
                one_of("float", "base64"),
                "Numbers, or float32 with the least byte first in base64.",
                "float",
            ),
            WireField("dimensions", _LONGEST, "Refused: a model's vectors have one size."),
        ),
        _WAITING,
    ),
    {"user": IGNORED["user"]},
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
            WireField(
                "continue_final_message", FLAG, "Whether the last message stays open.", "false"
            ),
            WireField("return_token_strs", FLAG, "Whether each token's text is told.", "false"),
            _TEMPLATE,
        ),
        (one for one in GENERATE if one.name in OF_MESSAGES),
    ),
)

APPLY_TEMPLATE = RouteTable(
    "/apply-template",
    "Return the text of a conversation as the chat template writes it.",
    _table(
        (
            _MODEL,
            WireField(
                "messages", listed(MAPPING, 4096, 1), "The conversation, in turn.", required=True
            ),
            WireField("add_generation_prompt", FLAG, "Whether the answer is begun.", "true"),
            WireField(
                "continue_final_message", FLAG, "Whether the last message stays open.", "false"
            ),
            _TEMPLATE,
        ),
        (one for one in GENERATE if one.name in OF_MESSAGES),
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
            generate_field("steer"),
        ),
        _WAITING,
    ),
)

TRANSCRIPTIONS = RouteTable(
    "/v1/audio/transcriptions",
    "Write down what is said in a sound: a form, whose `file` is WAV, or what `everystep[audio]` "
    "reads, at the rate that the model hears, mostly 16,000.",
    _table(
        (
            replace(_MODEL, line="The model, which listens.", default="the first that listens"),
            WireField("language", text(40, 1), "What is spoken.", "what is heard"),
            WireField("prompt", text(4096), "What was said before, in the language of the sound."),
            WireField(
                "response_format",
                one_of("json", "text", "srt", "verbose_json", "vtt"),
                "The form of the answer.",
                "json",
            ),
            WireField("temperature", number(0.0, 1.0), "0: the likeliest tokens.", "0"),
            WireField("seed", SEED, "Of the draws, at a temperature.", "another each time"),
            WireField(
                "timestamp_granularities",
                listed(one_of("segment", "word"), 2, 1),
                "With verbose_json: `segment`; words have no times.",
                "segment",
            ),
            WireField("stream", FLAG, "false: the answer comes whole.", "false"),
        )
    ),
    {},
    {
        "include": "asks for log-probabilities, which a transcript does not tell",
        "chunking_strategy": "asks for cuts: a sound of any length is heard by windows",
        **dict.fromkeys(
            ("known_speaker_names", "known_speaker_references"),
            "asks who speaks, which nobody hears",
        ),
    },
    is_form=True,
)

ROUTES = (
    COMPLETIONS,
    CHAT,
    MESSAGES,
    COUNT_TOKENS,
    RESPONSES,
    INPUT_TOKENS,
    EMBEDDINGS,
    TOKENIZE,
    DETOKENIZE,
    APPLY_TEMPLATE,
    SCORE,
    TRANSCRIPTIONS,
)
"""Every route that answers a body at once."""

BATCHED = tuple(one.path for one in ROUTES if not one.is_form)
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
    *("stream", "stream_options", "return_token_ids", "priority", "timings"),
    *("skip_special_tokens", "explain"),
    *(
        one.name
        for one in GENERATE
        if one.name in OF_MESSAGES and one.name != "add_generation_prompt"
    ),
)
_OF_GENERATE = _table(
    (one for one in (*_BOTH, *GENERATE) if one.name not in (*_ALONE, "model", "logprobs", "seed")),
    (generate_field("seed"),),
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
    "/v1/responses/{id}": "A response that was kept; DELETE forgets it.",
    "/tokenizer_info": "Special tokens and chat template of a model, `?model=` or the first.",
    "/v1/files": "The files that were sent as multipart `file`, with `purpose` batch.",
    "/v1/files/{id}": "A file; DELETE removes it.",
    "/v1/files/{id}/content": "The bytes of a file.",
    "/v1/everystep/runs/{id}": "A run as it stands; DELETE ends it.",
    "/v1/batches/{id}": "A batch; POST to `/v1/batches/{id}/cancel` ends it.",
    "/": "A page for people: a conversation, the models, the load and the replicas.",
    "/v1/everystep/load": "Asks that run and wait, rows, tokens made since the start, and "
    "where each model is.",
    "/v1/everystep/replicas": "Where each replica is, its models, work, cache hits and age.",
    "/health": "200 while the engine lives, else 503.",
    "/ready": "200 while requests are taken, and where each model is; else 503.",
    "/metrics": "Counters and histograms, as Prometheus reads them.",
    "/openapi.json": "This table as an OpenAPI document.",
    "/version": "The version of everystep.",
}
"""Routes without a body."""

LEAST_DEADLINE = number(0.001, 86400.0)
