"""The same model in transformers: what ours is compared with, where that is installed."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everystep.errors import FormatError, MissingExtraError


class Reference:
    """A checkpoint as transformers reads it, in float32 on the CPU.

    MissingExtraError without transformers, FormatError where it cannot read the checkpoint.
    """

    def __init__(self, path: Path, *, pair: bool) -> None:
        try:
            library: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise MissingExtraError.of("a comparison", "transformers", "transformers") from error
        self.version = str(library.__version__)
        shown = library.utils.logging.is_progress_bar_enabled()
        library.utils.logging.disable_progress_bar()
        kind = library.AutoModelForSeq2SeqLM if pair else library.AutoModelForCausalLM
        folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        try:
            # Never the network, a pickle or code of the folder, whatever its files say.
            model = kind.from_pretrained(
                str(folder),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                **file,
            )
        except Exception as error:  # of many libraries
            what = "transformers cannot read this model"
            got = f"{type(error).__name__}: {error}"
            raise FormatError(what, got=got, do="Compare the folder it was made from") from error
        finally:
            if shown:
                library.utils.logging.enable_progress_bar()
        self.model: nn.Module = model.eval()

    def adapt(self, folder: Path) -> None:
        """Let it compute with the adapter in a folder of safetensors, as PEFT reads it.

        MissingExtraError without PEFT, FormatError where it cannot read the adapter.
        """
        try:
            library: Any = importlib.import_module("peft")
        except ImportError as error:
            raise MissingExtraError.of(
                "a comparison of adapters", "PEFT", "transformers"
            ) from error
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what it saves, not of what it computes
                model = library.PeftModel.from_pretrained(
                    self.model, str(folder), local_files_only=True
                )
        except Exception as error:  # of many libraries
            got = f"{type(error).__name__}: {error}"
            raise FormatError("PEFT cannot read this adapter", got=got) from error
        self.model = model.eval()

    def logits(self, ids: Tensor, source: Tensor | None = None) -> Tensor:
        """Return (T, V) after each of (T,) ids; `source`: (S,) what an encoder reads."""
        given = {"input_ids": ids[None]}
        if source is not None:
            given = {"input_ids": source[None], "decoder_input_ids": ids[None]}
        with torch.no_grad():
            found: Tensor = self.model(**given, use_cache=False).logits[0]
        return found

    def greedy(self, ids: Tensor, count: int) -> list[int]:
        """Return the `count` likeliest tokens, one after the other, after (T,) ids."""
        generate: Any = self.model.generate
        out = generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
        )
        tokens: list[int] = out[0, -count:].tolist()
        return tokens
