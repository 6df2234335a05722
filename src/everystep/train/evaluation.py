"""Evaluation: the loss of labels, and what the model writes where their text should stand.

Generation runs on the engine, with any strategy, many prompts at a time. Of each example the prompt
is what stands before the first label, and the target is what is labelled from there on. Nothing of
a run changes by it: modes and global generators are as before.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from everystep.api.model import LanguageModel
from everystep.drivers.generated import Generated
from everystep.drivers.session import Session
from everystep.errors import FileError, RequestError
from everystep.files.atomic import write_atomic
from everystep.nn.loss import NO_LABEL
from everystep.outputs import TokenLogprobs
from everystep.requests.prompts import TokenizerLike
from everystep.types import FinishReason

ANSWERS = "answers.jsonl"
_CUT_SHARE = 0.5
"""Above this share of answers that ended by their length there is a warning."""


@final
@dataclass(frozen=True, eq=False)
class EvalPrediction:
    """The argument of a `compute_metrics`.

    `predictions`: (N, T) generated ids, or the logits (N, T, V) where nothing is generated, filled
    up with -100. `label_ids`: (N, T), likewise. Of generation also, per example: `texts`, the
    `target_texts` that should have come, `prompts` as ids, and `generated`, with log-probabilities
    and the reasons why each ended.
    """

    predictions: np.ndarray
    label_ids: np.ndarray
    texts: list[str] | None = None
    target_texts: list[str] | None = None
    prompts: list[list[int]] | None = None
    generated: list[Generated] | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield predictions and labels, as those who unpack it expect."""
        return iter((self.predictions, self.label_ids))


@final
@dataclass(frozen=True)
class PredictionOutput:
    """The result of `Trainer.predict`; `predictions` and `label_ids` as of `EvalPrediction`."""

    predictions: np.ndarray | None
    label_ids: np.ndarray | None
    metrics: dict[str, float]
    texts: list[str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AskedRow:
    """A prompt to be continued, and the ids that should come."""

    prompt: Any
    ids: list[int]
    target: list[int]


def asked_of(row: Mapping[str, Tensor], index: int, source: bool) -> AskedRow:
    """Return what a row asks and what should come; `source`: an encoder reads its ids.

    RequestError where nothing stands before the first label, or there is none, and for a row of
    embeddings without ids.
    """
    if "input_ids" not in row:
        raise RequestError(
            f"evaluation example {index} has no ids, from which an answer could go on",
            wanted="input_ids",
            got=", ".join(row),
            do="Leave predict_with_generate out, or generate from its inputs_embeds yourself",
        )
    ids, labels = row["input_ids"].tolist(), row["labels"]
    wanted = (labels != NO_LABEL).nonzero().flatten().tolist()
    if not wanted:
        raise RequestError(f"evaluation example {index} has no label to compare with")
    if source:
        return AskedRow({**_beside(row, None), "input_ids": ids}, ids, labels[wanted].tolist())
    first = wanted[0]
    if not first:
        raise RequestError(
            f"evaluation example {index} has no prompt: its labels begin with its first id",
            wanted="-100 for what the model is asked",
            do="Leave predict_with_generate out for plain texts",
        )
    beside = _beside(row, first)
    prompt = {**beside, "input_ids": ids[:first]} if beside else ids[:first]
    return AskedRow(prompt, ids[:first], [ids[one] for one in wanted])


def _beside(row: Mapping[str, Tensor], length: int | None) -> dict[str, Any]:
    """Return what a row brings beside ids, of the first positions where it has some for each; a
    mask where it hides one of these."""
    whole = len(row["input_ids"])
    found = {}
    for key, value in row.items():
        if key in ("input_ids", "labels", "position_ids"):
            continue
        if key == "attention_mask" and bool((value[:length] != 0).all()):
            continue
        positions = length is not None and value.dim() and len(value) == whole
        found[key] = value[:length] if positions else value
    return found


def answers_of(
    model: LanguageModel,
    tokenizer: TokenizerLike | None,
    asked: Sequence[AskedRow],
    options: Mapping[str, Any],
    tell: Callable[[int, Generated], None],
) -> list[Generated]:
    """Return the continuation of each prompt; `tell` is told of each, with its number, as it ends.

    Where prompts fail, the error of the first of them is raised when the others have ended.
    """
    given: dict[str, Any] = {"return_dict_in_generate": True, "logprobs": 0, **options}
    seed, prompts = given.pop("seed", None), [one.prompt for one in asked]
    whole = model.gathered()
    session = Session(whole, tokenizer, prompts, None, seed, given, gives_layers=True)
    found: dict[int, Generated] = {}
    errors: dict[int, Exception] = {}
    with closing(session.run(prompts)) as running:
        for number, result, error in running:
            if error is not None:
                errors[number] = error
                continue
            answer: Any = result[0] if isinstance(result, list) else result
            found[number] = answer
            tell(number, answer)
    if errors:
        raise errors[min(errors)]
    return [found[number] for number in range(len(asked))]


@final
class AnswerFile:
    """Answers of evaluations, a line of JSON for each as it ends, in `answers.jsonl` of a folder.

    A line is written at once or not at all, so that whoever follows the file reads whole ones, and
    a process that is killed leaves whole ones. FileError where the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ANSWERS
        self._own: int | None = None  # where the lines of this object begin

    def begin(self, step: int) -> None:
        """Drop what another run has written, but up to this step, which a run goes on from."""
        held = self._path.read_bytes() if self._path.exists() else b""
        if step:
            kept = [one for one in held.splitlines(keepends=True) if 0 <= _step_of(one) <= step]
        else:
            kept = [b"" if self._own is None else held[self._own :]]
        if b"".join(kept) != held:
            write_atomic(self._path, b"".join(kept))
        self._own = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Write one line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        told = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                start = file.tell()
                if self._own is None:
                    self._own = start
                if (written := file.write(told)) < len(told):
                    file.truncate(start)
                    raise OSError(f"{written} of {len(told)} bytes were taken")
        except OSError as error:
            do = "Make room, or choose another output_dir"
            raise FileError(f"{self._path} could not be written", got=error, do=do) from error


def _step_of(line: bytes) -> int:
    """Return the step of a line of answers, -1 where it is none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def in_line(asked: AskedRow, answer: Generated, tokenizer: TokenizerLike | None) -> dict[str, Any]:
    """Return what the file of answers says of one: texts, or ids without a tokenizer."""
    texts = asked.ids, asked.target
    prompt, target = texts if tokenizer is None else map(tokenizer.decode, texts)
    return {
        "prompt": prompt,
        "answer": list(answer.tokens) if tokenizer is None else answer.text,
        "target": target,
        "finish_reason": answer.finish_reason.kind,
    }


def warn_of_cut(answers: Sequence[Generated]) -> None:
    """Warn where most answers ended by their length."""
    cut = sum(one.finish_reason.kind == "length" for one in answers)
    if cut > _CUT_SHARE * len(answers):
        warnings.warn(
            f"{cut} of {len(answers)} answers ended by their length; where the model never learns "
            "an end, look at trainer.check(), else allow more with generation_max_length",
            stacklevel=4,
        )


def as_json(answer: Generated) -> dict[str, Any]:
    """Return an answer as JSON holds it, for another process."""
    reason, likely = answer.finish_reason, answer.logprobs
    matched = reason.matched
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "reason": [reason.kind, matched if isinstance(matched, int | str) else None],
        "score": answer.score,
        "lengths": [answer.prompt_tokens, answer.cached_tokens],
        "logprobs": None
        if likely is None
        else [likely.logprobs.tolist(), likely.top_tokens.tolist(), likely.top_logprobs.tolist()],
    }


def of_json(told: Mapping[str, Any]) -> Generated:
    """Return the answer that another process told."""
    likely, tokens = None, told["tokens"]
    if told["logprobs"] is not None:
        own, top, best = told["logprobs"]
        shape = (len(tokens), len(top[0]) if top else 0)
        likely = TokenLogprobs(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(own, dtype=torch.float32),
            torch.tensor(top, dtype=torch.int64).view(shape),
            torch.tensor(best, dtype=torch.float32).view(shape),
        )
    read, cached = told["lengths"]
    reason, score = FinishReason(*told["reason"]), told["score"]
    return Generated(told["text"], tuple(tokens), reason, score, read, cached, likely)


def predicted(
    asked: Sequence[AskedRow], answers: Sequence[Generated], tokenizer: TokenizerLike | None
) -> EvalPrediction:
    """Return what a metric is given of generated answers."""
    targets = [one.target for one in asked]
    texts = None if tokenizer is None else [one.text for one in answers]
    told = None
    if tokenizer is not None:
        told = [tokenizer.decode(one, skip_special_tokens=True) for one in targets]
    return EvalPrediction(
        filled([list(one.tokens) for one in answers]),
        filled(targets),
        texts,
        told,
        [one.ids for one in asked],
        list(answers),
    )


def filled(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return rows of ids (N, T), filled up with -100."""
    length = max((len(row) for row in rows), default=0)
    found = np.full((len(rows), length), NO_LABEL, dtype=np.int64)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found


def stacked(parts: Sequence[Tensor]) -> np.ndarray:
    """Return batches (B, T, ...) below each other, filled up with -100 along T."""
    length = max(one.shape[1] for one in parts)
    whole = []
    for one in parts:
        values = one.detach().cpu()
        if values.is_floating_point():
            values = values.to(torch.promote_types(values.dtype, torch.float32))
        missing = length - one.shape[1]
        if missing:
            shape = (one.shape[0], missing, *one.shape[2:])
            values = torch.cat([values, values.new_full(shape, NO_LABEL)], dim=1)
        whole.append(values.numpy())
    return np.concatenate(whole)
