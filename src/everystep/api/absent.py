"""Names that scripts take from the reference and that are not here: why, and what to do instead.

Asked for one of them, the package says so at once, when it is imported and not in mid-run. What a
name that is here does is no business of this file.
"""

from __future__ import annotations

from types import FrameType
from typing import NoReturn

from everystep.errors import AbsentAttributeError, AbsentNameError, message

_DRAFTS = (
    "drafts are made by the engine's strategies, not by objects of the caller",
    "Set prompt_lookup_num_tokens in the call",
)
_SCHEDULING = (
    "the continuous scheduler has no objects to set up",
    "Call everystep.generate(model, tokenizer, prompts), or everystep.stream",
)
_TRAINED = (
    "the trained SynthID detector waits for a later version",
    "Give SynthIDTextWatermarkDetector a WeightedMeanDetector, which needs no training",
)
_LAYER_CODES = (
    "quantised layers have codes of their own here, and no library behind them",
    "Use QuantizedCache, or set cache_implementation='quantized'",
)
_INDEXED = (
    "no model of this version looks positions up by an index",
    "Use DynamicCache or StaticCache",
)
_ONE_CLASS = (
    "models of every family are of one class, LanguageModel",
    "Load them with AutoModelForCausalLM.from_pretrained or everystep.load_model",
)
_ONE_TOKENIZER = (
    "tokenizers of every family are of one class, Tokenizer",
    "Load them with AutoTokenizer.from_pretrained",
)

ABSENT: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "AssistedCandidateGenerator",
            "CandidateGenerator",
            "DFlashTokenCandidateGenerator",
            "EarlyExitCandidateGenerator",
            "PromptLookupCandidateGenerator",
        ),
        _DRAFTS,
    ),
    **dict.fromkeys(
        (
            "ContinuousBatchingConfig",
            "ContinuousBatchingManager",
            "ContinuousMixin",
            "FIFOScheduler",
            "PrefillFirstScheduler",
            "Scheduler",
        ),
        _SCHEDULING,
    ),
    **dict.fromkeys(("BayesianDetectorConfig", "BayesianDetectorModel"), _TRAINED),
    **dict.fromkeys(
        ("Fp8QuantizedLayer", "HQQQuantizedLayer", "QuantoQuantizedLayer"), _LAYER_CODES
    ),
    **dict.fromkeys(("DynamicIndexedLayer", "StaticIndexedLayer"), _INDEXED),
    **dict.fromkeys(("AutoModel", "LlamaForCausalLM", "PreTrainedModel"), _ONE_CLASS),
    **dict.fromkeys(
        ("PreTrainedTokenizer", "PreTrainedTokenizerBase", "PreTrainedTokenizerFast"),
        _ONE_TOKENIZER,
    ),
    "BaseWatermarkingConfig": (
        "there are two kinds of watermark, and no base to make further ones from",
        "Pass a logits processor of your own",
    ),
    "BitsAndBytesConfig": (
        "weights are quantised without other libraries",
        "Call everystep.load(path, quantize='int8'), or 'int4'",
    ),
    "CacheLayerMixin": (
        "the engine reads no layers of other kinds than its own",
        "Ask for DynamicLayer or StaticLayer",
    ),
    "GenerationMixin": (
        "models of other libraries do not generate with this version",
        "Load the checkpoint with AutoModelForCausalLM.from_pretrained",
    ),
    "TextDiffusionStreamer": (
        "no model of this version generates by diffusion",
        "Use TextStreamer or TextIteratorStreamer",
    ),
    "pipeline": (
        "there are no pipelines",
        "Call everystep.load, then everystep.generate or everystep.chat",
    ),
}
"""Name -> why it is not here, and what to do."""


def refuse_name(name: str, asking: FrameType) -> NoReturn:
    """Raises AbsentNameError where a name of the reference is imported, else an AttributeError.

    `asking`: the frame that looks the name up. An import statement puts a text of its own in place
    of any AttributeError, and no class can be both kinds of error.
    """
    if name not in ABSENT:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    why, do = ABSENT[name]
    imported = asking.f_code.co_name == _IMPORT
    kind = AbsentNameError if imported else AbsentAttributeError
    raise kind(message(f"everystep has no {name}: {why}", do=do))


_IMPORT = "_handle_fromlist"  # of importlib: what looks up the names of an import statement
