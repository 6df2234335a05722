"""The features of the matrix, one line each: the name and the check of its cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.matrix import choices, courses
from tests.matrix.rows import Row

Check = Callable[[Row, Path], None]
COLUMNS: Mapping[str, Check] = {
    "grammar": choices.grammar,
    "processors": choices.processors,
    "log-probabilities": choices.log_probabilities,
    "stop strings": choices.stop_strings,
    "streaming": choices.streaming,
    "quantised cache": choices.quantised_cache,
    "sliding window": choices.sliding_window,
    "recurrent model": choices.recurrent_model,
    "per-row seeds": choices.per_row_seeds,
    "num_return_sequences": choices.several_sequences,
    "embeddings": choices.embeddings,
    "mask with holes": choices.holes,
    "hooks": choices.hooks,
    "save and resume": courses.save_and_resume,
    "fork": courses.fork,
    "trace": courses.trace,
    "continuous batching with preemption": courses.preemption,
    "cancellation": courses.cancellation,
    "speculation": courses.speculation,
    "native executor": choices.native_executor,
    "command line": courses.command_line,
}
