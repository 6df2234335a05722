"""Names of transformers' Trainer and of its arguments that are none of this one's.

An argument is taken where its value says what happens here anyway, so that a script changes by its
import; any other value is refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from everystep.errors import UnknownArgumentError, UnsupportedError, nearest, shown


class OtherArgument(NamedTuple):
    """An argument of transformers' that is none here.

    `same`: the values that say what happens anyway. `do`: what to do instead of passing another.
    """

    same: tuple[object, ...]
    do: str


_HUB = "Upload the folder of the trained model with huggingface_hub"
_TRACKED = "Pass callbacks=[...] with an on_log of your own, which tells a service what it wants"
_PRECISION = "Pass bf16=True: numbers of 16 bits with the range of float32 need no scaler"
_COMPILED = "Leave it out, or train model.as_module() in a loop of your own under torch.compile"
_LOADED = "Leave it out: rows are made in the process that trains"
_PARALLEL = "Run the script under torchrun, where processes share the rows of batches"
_METRICS = "Write it in compute_metrics, which gets the predictions of the whole evaluation"
_OPTIMIZER = "Pass optimizers=(optimizer, None) to the Trainer"
_LOGS = "Read log.jsonl in output_dir, or trainer.state.log_history"
_ASKED = "Call trainer.train(), trainer.evaluate() or trainer.predict(): no argument asks for them"
_TOGETHER: Mapping[str, OtherArgument] = {
    "fp16 fp16_full_eval": OtherArgument((False,), _PRECISION),
    "bf16_full_eval": OtherArgument((False,), "Load the model with dtype=torch.bfloat16"),
    "tf32": OtherArgument((None,), "Set torch.backends.cuda.matmul.allow_tf32 yourself"),
    "deepspeed accelerator_config parallelism_config": OtherArgument((None, {}), _PARALLEL),
    "fsdp_config": OtherArgument(
        (None, {}), "Pass fsdp=True: layers are gathered one by one when they are used"
    ),
    "ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph": OtherArgument(
        (None,), "Make the process group yourself, with what it needs, before the Trainer"
    ),
    "local_rank": OtherArgument((-1,), _PARALLEL),
    "average_tokens_across_devices": OtherArgument(
        (True,), "Leave it out: a step is divided by the labels of all processes"
    ),
    "push_to_hub hub_always_push": OtherArgument((False,), _HUB),
    "hub_model_id hub_token hub_private_repo hub_revision": OtherArgument((None,), _HUB),
    "hub_strategy": OtherArgument(("every_save",), _HUB),
    "run_name trackio_space_id trackio_bucket_id trackio_static_space_id": OtherArgument(
        (None,), _TRACKED
    ),
    "project": OtherArgument(("huggingface",), _TRACKED),
    "remove_unused_columns": OtherArgument(
        (False,), "Leave it out: what the model does not read is an error by name"
    ),
    "prediction_loss_only": OtherArgument(
        (False,), "Leave compute_metrics out: without it there is the loss alone"
    ),
    "label_names": OtherArgument((None, ["labels"]), "Name the column of labels 'labels'"),
    "length_column_name": OtherArgument(
        ("length",), "Leave it out: the length of a row is the number of its ids"
    ),
    "torch_compile": OtherArgument((False,), _COMPILED),
    "torch_compile_backend torch_compile_mode": OtherArgument((None,), _COMPILED),
    "use_liger_kernel": OtherArgument(
        (False,), "Leave it out: the loss never holds all logits anyway"
    ),
    "liger_kernel_config": OtherArgument((None,), "Leave it out"),
    "neftune_noise_alpha": OtherArgument(
        (None,), "Leave it out, or add noise in a loss of your own (compute_loss)"
    ),
    "torch_empty_cache_steps": OtherArgument(
        (None,), "Call torch.cuda.empty_cache() in a callback's on_step_end"
    ),
    "auto_find_batch_size": OtherArgument(
        (False,), "Read trainer.estimate() and choose a batch size"
    ),
    "activation_checkpointing_kwargs gradient_checkpointing_kwargs": OtherArgument(
        (None, {}, {"use_reentrant": False}), "Leave it out: layers are computed once more as such"
    ),
    "dataloader_num_workers": OtherArgument((0,), _LOADED),
    "dataloader_pin_memory": OtherArgument((False,), _LOADED),
    "dataloader_persistent_workers": OtherArgument((False,), _LOADED),
    "dataloader_prefetch_factor dataloader_multiprocessing_context": OtherArgument(
        (None,), _LOADED
    ),
    "dataloader_in_order": OtherArgument((True,), _LOADED),
    "optim_args optim_target_modules": OtherArgument((None,), _OPTIMIZER),
    "full_determinism": OtherArgument(
        (False, True), "Leave it out: a run on a CPU repeats to the bit by itself"
    ),
    "use_cache": OtherArgument(
        (False,), "Leave it out: training keeps no cache, and generation is not changed by it"
    ),
    "eval_accumulation_steps": OtherArgument((None,), "Pass preprocess_logits_for_metrics"),
    "eval_do_concat_batches": OtherArgument((True,), _METRICS),
    "eval_use_gather_object batch_eval_metrics": OtherArgument((False,), _METRICS),
    "include_for_metrics": OtherArgument(([], ()), _METRICS),
    "save_on_each_node": OtherArgument((False,), "Leave it out: the first process writes"),
    "save_safetensors": OtherArgument((True,), "Leave it out: files are safetensors and JSON"),
    "enable_jit_checkpoint": OtherArgument(
        (False,), "Leave it out: a run that is killed goes on from its newest checkpoint"
    ),
    "restore_callback_states_from_checkpoint": OtherArgument(
        (True,), "Leave it out: callbacks of a resumed run have the state that they had"
    ),
    "log_on_each_node": OtherArgument((False,), "Leave it out: the first process logs"),
    "logging_nan_inf_filter": OtherArgument(
        (False,), "Leave it out: a loss that is no number stops the run"
    ),
    "log_level": OtherArgument(("passive",), _LOGS),
    "log_level_replica": OtherArgument(("warning",), _LOGS),
    "logging_dir": OtherArgument(
        (None,), "TensorBoard's files lie in the folder 'runs' of output_dir"
    ),
    "skip_memory_metrics": OtherArgument((True,), "Read trainer.estimate()"),
    "debug": OtherArgument(("", []), "Write a callback"),
    "do_train do_eval do_predict": OtherArgument((), _ASKED),
    "warmup_ratio": OtherArgument((0, None), "Pass warmup_steps=0.1, a share of all steps"),
    "evaluation_strategy": OtherArgument((), "Pass eval_strategy"),
    "group_by_length": OtherArgument((False,), "Pass train_sampling_strategy='group_by_length'"),
    "overwrite_output_dir": OtherArgument(
        (False,), "Leave it out: checkpoints of another run are never overwritten"
    ),
    "no_cuda": OtherArgument((False,), "Pass use_cpu=True"),
    "adafactor": OtherArgument((False,), _OPTIMIZER),
}
OTHER_ARGUMENTS: Mapping[str, OtherArgument] = {
    name: one for names, one in _TOGETHER.items() for name in names.split()
}
"""Arguments of transformers' `TrainingArguments`, of release 5 and before, that are none here."""

OTHER_PARTS: Mapping[str, str] = {
    "tokenizer": "Pass processing_class",
    "model_init": "Make the model, and pass it",
    "optimizer_cls_and_kwargs": "Pass optimizers=(optimizer, None)",
}
"""Arguments of transformers' `Trainer` that are none here."""

OTHER_METHODS: Mapping[str, str] = {
    "compute_loss": "Pass compute_loss or compute_loss_func to the Trainer",
    "create_optimizer": "Read trainer.optimizer after train() has begun, or pass optimizers=",
    "create_optimizer_and_scheduler": "Pass optimizers=(optimizer, schedule) to the Trainer",
    "create_scheduler": "Pass optimizers=(None, schedule) to the Trainer",
    "evaluation_loop": "Call trainer.evaluate() or trainer.predict()",
    "get_eval_dataloader": "Read rows with es.read_rows, and put them into batches by a collator",
    "get_train_dataloader": "Read rows with es.read_rows, and put them into batches by a collator",
    "hyperparameter_search": "Make a Trainer for each choice",
    "is_world_process_zero": "Read trainer.state.is_world_process_zero",
    "log": "Write a callback with on_log, or read trainer.state.log_history",
    "log_metrics": "Print the metrics that train(), evaluate() and predict() return",
    "prediction_step": "Call trainer.predict()",
    "push_to_hub": _HUB,
    "save_metrics": "Write the metrics that train(), evaluate() and predict() return as JSON",
    "save_state": "Leave it out: each checkpoint holds the state of the run",
    "tokenizer": "Read trainer.processing_class",
    "training_step": "Pass compute_loss to the Trainer, or write a loop with model.as_module()",
}
"""Methods of transformers' `Trainer` that are none here."""


def without_others(given: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return arguments without those that say what happens anyway.

    UnsupportedError for one that asks for something else, UnknownArgumentError for an unknown name.
    """
    for name in given.keys() - known:
        if name not in OTHER_ARGUMENTS:
            near = nearest(name, known)
            do = f"Perhaps you meant {near}" if near else "See help(everystep.TrainingArguments)"
            raise UnknownArgumentError(f"TrainingArguments knows no {name!r}", do=do)
        other = OTHER_ARGUMENTS[name]
        if not any(_is(given[name], one) for one in other.same):
            raise UnsupportedError(
                f"{name} is no choice of this Trainer",
                wanted=" or ".join(map(shown, other.same)) if other.same else None,
                got=shown(given[name]),
                do=other.do,
            )
    return {name: value for name, value in given.items() if name in known}


def _is(value: object, other: object) -> bool:
    """Return whether two values are the same; a flag is no number."""
    plain = getattr(value, "value", value)  # of an enumeration
    return isinstance(plain, bool) == isinstance(other, bool) and bool(plain == other)
