"""`everystep train`: an adapter for a model, learned from the examples of a file."""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import everystep as es
from everystep.cli import command_options as o
from everystep.cli.adapters import AskedAdapter, TrainedAdapter, one_adapter
from everystep.cli.loading import load
from everystep.cli.terminal import is_terminal, note, write_line
from everystep.errors import FileError, FormatError, MissingFileError, RequestError
from everystep.files.opening import is_there
from everystep.files.sources import DEFAULT_MODEL

_SHOWN = 3
_USUAL: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "logging_steps": 5,
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "include_num_input_tokens_seen": "non_padding",
}
"""Choices of a run where neither the command nor the configuration says otherwise."""
_LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
_MERGED = (
    "Write a model with the others in its weights, save_pretrained(folder, adapters=[...]), and "
    "name that folder with -m"
)


@dataclass(frozen=True)
class _Chosen:
    """The parts of a run: arguments of training, of the adapter, and of the form of data."""

    run: dict[str, Any]
    lora: dict[str, Any]
    form: dict[str, Any]


def train(
    context: typer.Context,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Examples: .jsonl or .parquet; without it the dialogues that everystep has.",
        ),
    ] = None,
    evaluated: Annotated[
        Path | None,
        typer.Option("--eval", metavar="FILE", help="Examples that are not trained on."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the adapter is written.")
    ] = Path("trained"),
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="TOML", help="Choices of the run; see the guide."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", metavar="N", help="Rounds over the data.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Steps, in the place of rounds.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Examples of a step.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", metavar="X", help="How far a step goes.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", help="The rank of the adapter.")
    ] = None,
    adapter: TrainedAdapter = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="TARGET",
            help="Write the merged model too: a folder, or a .gguf as in mine.Q4_K_M.gguf.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in DIR.")
    ] = False,
    model: o.Model = DEFAULT_MODEL,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
) -> None:
    """Train an adapter (LoRA) on the examples in FILE, and write it as PEFT does.

    The weights of the model stay as they are stored. The loss on examples that are not trained on
    is shown before and after. `everystep chat --adapter DIR` runs the model with the adapter, and
    `everystep train --adapter DIR` goes on training it, of whatever kind it is.
    Under torchrun several processes train together, and the first of them says how it goes.
    """
    if export is not None and is_there(export):
        raise FileError(f"{export} is there already", do="Give --export a new name")
    given = {
        "num_train_epochs": epochs,
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": learning_rate,
    }
    known = one_adapter(adapter, "one is trained", _MERGED)
    said = {name: one for name, one in given.items() if one is not None}
    chosen = _chosen(config, said, rank, goes_on=known is not None)
    if find_spec("matplotlib") is not None:
        chosen.run.setdefault("report_to", "plot")
    args = es.TrainingArguments(
        output_dir=output, disable_tqdm=not is_terminal(sys.stderr), **chosen.run
    )
    training, held_out = _files(data, evaluated)
    from everystep.train.ranks import Ranks  # imports torch

    ranks = Ranks.met(args.ddp_timeout)
    if device == "cuda" and ranks.count > 1:
        device = f"cuda:{ranks.number_here}"
    tell, say = (write_line, note) if ranks.is_first else (_nothing, _nothing)
    if data is None:
        say("training on the 200 dialogues that everystep has, of the keeper of a lighthouse")
    loaded, tokenizer = load(model, dtype, quantize, None, device, offline or context.obj)
    prompts = _prompts(held_out)
    trainer = es.Trainer(
        loaded,
        args,
        train_dataset=es.read_rows(training, loaded, tokenizer, es.DataForm(**chosen.form)),
        eval_dataset=held_out,
        processing_class=tokenizer,
        **_trained(loaded, known, chosen.lora),
        form=es.DataForm(**chosen.form),
        sample_prompts=prompts,
    )
    tell(repr(trainer.check()))
    say(f"training {trainer.weights.count():,} numbers of an adapter, in {trainer.estimate()}")
    before = trainer.evaluate()["eval_loss"] if held_out and not resume else None
    first = trainer.samples
    result = trainer.train(resume_from_checkpoint=resume)
    folder = trainer.save_model(output)
    rate = result.metrics.get("train_tokens_per_second")
    speed = "" if rate is None else f", {rate:,.0f} tokens per second"
    tell(f"steps: {result.global_step}, mean loss {result.training_loss:.4f}{speed}")
    if held_out:
        after = trainer.evaluate()["eval_loss"]
        told = f"{after:.4f}" if before is None else f"{before:.4f} before, {after:.4f} after"
        perplexity = math.exp(min(after, 700))
        tell(f"eval_loss: {told} (perplexity {perplexity:.3g})")
    if before is not None:
        for prompt, (_, was), (_, now) in zip(prompts, first, trainer.samples, strict=True):
            old, new = (" ".join(text.split()) for text in (was, now))
            tell(f"\n> {prompt[-1]['content']}\nbefore: {old}\nafter:  {new}")
    if export is not None:
        say(f"writing {export}")
        trainer.export(export)
    tell(f"\neverystep chat --adapter {folder}")


def _trained(
    model: es.LanguageModel, known: AskedAdapter | None, lora: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a Trainer for what it trains: a known adapter, or a new one."""
    if known is None:
        return {"peft_config": es.LoraConfig(**lora)}
    model.load_adapter(known.folder, known.name, is_trainable=True)
    return {"adapter_name": known.name}


def _nothing(_: str = "") -> None:
    """Say nothing, where another process says it."""


def _files(data: Path | None, evaluated: Path | None) -> tuple[Any, Any]:
    """Return the examples to train on and those to evaluate with, or None."""
    own = files("everystep.train")
    if data is None:
        if evaluated is not None:
            raise RequestError("--eval has no effect without --data", do="Pass --data FILE too")
        return Path(str(own / "dialogues.jsonl")), Path(str(own / "held_out_dialogues.jsonl"))
    return data, evaluated


def _chosen(
    config: Path | None, given: Mapping[str, Any], rank: int | None, *, goes_on: bool
) -> _Chosen:
    """Return the choices of a run: what the command says, then what the file says, then ours.

    `goes_on`: whether an adapter goes on learning, which has its own form.
    """
    told = {} if config is None else _read(config)
    lora, form = (told.pop(name, {}) for name in ("lora", "data"))
    for name, one in (("lora", lora), ("data", form)):
        if not isinstance(one, dict):
            raise FormatError(f"{config}: [{name}] is no table", got=type(one).__name__)
    _require_known(config, "lora", lora, es.LoraConfig)
    _require_known(config, "data", form, es.DataForm)
    for name, is_given in (("--rank", rank is not None), (f"[lora] of {config}", bool(lora))):
        if goes_on and is_given:
            raise RequestError(
                f"{name} has no effect beside --adapter: that adapter has its rank and its modules",
                do="Leave it out, or leave --adapter out for a new adapter",
            )
    run = {**_USUAL, **told, **given}
    if "num_train_epochs" in given:
        if "max_steps" in given:
            do = "Pass one of them"
            raise RequestError("--epochs and --steps are two lengths of a run", do=do)
        run["max_steps"] = -1  # a file may say how many steps
    return _Chosen(run, {**_LORA, **lora, **({} if rank is None else {"r": rank})}, form)


def _require_known(config: Path | None, name: str, given: Mapping[str, Any], kind: Any) -> None:
    known = {one.name for one in fields(kind)}
    unknown = [one for one in given if one not in known]
    if unknown:
        wanted = ", ".join(sorted(known))
        raise FormatError(f"{config}: [{name}] knows no {unknown[0]!r}", wanted=wanted)


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{config} is not there", do="Give the path of a TOML file"
        ) from error
    except (OSError, ValueError) as error:
        raise FormatError(f"{config} is no TOML file", got=error) from error


def _prompts(held_out: Any) -> list[list[dict[str, str]]]:
    """Return the first questions of held-out dialogues, to be answered before and after."""
    if held_out is None:
        return []
    examples = es.read_examples(held_out)
    found = []
    for number in range(min(_SHOWN, len(examples))):
        example: Any = examples[number]
        messages = example.get("messages") if isinstance(example, Mapping) else None
        if messages:
            found.append(list(messages[:-1]))
    return found
