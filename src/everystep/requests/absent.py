"""What scripts know from transformers and is not here: why, and what to do instead.

Names to import, arguments of calls, and values of fields. Each is refused by name before anything
is computed, and none is ignored.
"""

from __future__ import annotations

from types import FrameType
from typing import NoReturn

from everystep.config import FIELDS, Effective
from everystep.errors import AbsentAttributeError, AbsentNameError, UnsupportedError, shown

_TOGETHER = {
    """
    AssistantToTargetTranslator AssistantVocabTranslatorCache AssistedCandidateGenerator
    CandidateGenerator DFlashTokenCandidateGenerator EarlyExitCandidateGenerator
    PromptLookupCandidateGenerator
    """: (
        "drafts are made by the engine, not by objects of the caller",
        "Pass assistant_model, or set prompt_lookup_num_tokens or assistant_early_exit",
    ),
    """
    ContinuousBatchingConfig ContinuousBatchingManager ContinuousMixin FIFOScheduler
    PrefillFirstScheduler Scheduler
    """: (
        "the continuous scheduler has no objects to set up",
        "Call everystep.generate(model, tokenizer, prompts), or everystep.stream",
    ),
    "BayesianDetectorConfig BayesianDetectorModel": (
        "detectors are trained and stored by transformers, and any of them is taken",
        "Pass the trained model to SynthIDTextWatermarkDetector, or a WeightedMeanDetector, which "
        "needs no training",
    ),
    """
    BaseQuantizedLayer Fp8QuantizedLayer HQQQuantizedLayer QuantizedLayer QuantoQuantizedLayer
    """: (
        "quantised layers have codes of their own here and need no other library",
        "Use QuantizedCache, or set cache_implementation='quantized'",
    ),
    "DynamicIndexedLayer StaticIndexedLayer": (
        "no model of this version looks positions up by an index",
        "Use DynamicCache or StaticCache",
    ),
    """
    LinearAttentionAndFullAttentionLayer LinearAttentionAndSlidingWindowAttentionLayer
    LinearAttentionAndStaticFullAttentionLayer LinearAttentionAndStaticSlidingWindowAttentionLayer
    LinearAttentionCacheLayerMixin LinearAttentionLayer
    """: (
        "states of recurrent layers are in the engine's rows, and not in cache objects",
        "Call generate without past_key_values, with the whole prompt",
    ),
    "DynamicSlidingWindowLayer": (
        "a DynamicCache makes the layers of windows itself",
        "Make DynamicCache(config=model.config)",
    ),
    "DummyLayer KVSharingDict": (
        "every layer of a cache keeps keys and values of its own",
        "Use DynamicCache",
    ),
    "DFlashCache MtpCache": (
        "no model of this version drafts by diffusion or has heads for several tokens",
        "Pass assistant_model, or set prompt_lookup_num_tokens or assistant_early_exit",
    ),
    "AttentionInterface AttentionMaskInterface": (
        "attention is computed by the executors, and has no implementations to choose from",
        "Set output_attentions=True to see it, or pass transformers' model to everystep.wrap",
    ),
    "AutoFeatureExtractor AutoImageProcessor AutoProcessor ProcessorMixin WhisperProcessor": (
        "pictures are read by a model's tokenizer, and sounds by WhisperFeatureExtractor",
        "Call model, tokenizer = everystep.load(path), then tokenizer(text, images=[...])",
    ),
    """
    AutoModel AutoModelForImageTextToText AutoModelForMultimodalLM AutoModelForSpeechSeq2Seq
    AutoModelForVision2Seq LlamaForCausalLM PreTrainedModel WhisperForConditionalGeneration
    """: (
        "models of every family are of one class, LanguageModel",
        "Load them with AutoModelForCausalLM.from_pretrained or everystep.load_model",
    ),
    "PreTrainedTokenizer PreTrainedTokenizerBase PreTrainedTokenizerFast": (
        "tokenizers of every family are of one class, Tokenizer",
        "Load them with AutoTokenizer.from_pretrained",
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
        "models of other libraries are driven from outside, and inherit nothing",
        "Call everystep.wrap(model), or pass the model to everystep.generate",
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
"""Names -> why they are not here, and what to do."""
ABSENT = {name: why for names, why in _TOGETHER.items() for name in names.split()}


def refuse_name(name: str, asking: FrameType) -> NoReturn:
    """Raise AbsentNameError where a name of transformers is imported, else an AttributeError.

    `asking`: the frame that looks the name up. An import statement puts a text of its own in place
    of any AttributeError, and no class can be both kinds of error.
    """
    if name not in ABSENT:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    why, do = ABSENT[name]
    # Of importlib: what looks up the names of an import statement.
    imported = asking.f_code.co_name == "_handle_fromlist"
    kind = AbsentNameError if imported else AbsentAttributeError
    raise kind(f"everystep has no {name}: {why}", do=do)


_ENCODED = "Declare what encodes them as a PromptInput of that name in model.prompt_inputs"
_EMBEDDED = f"{_ENCODED}, or pass their embeddings among inputs_embeds"
_NOT_YET = "asks for {}, which this version does not have"
_NOT_READ = "asks for {}, which this model does not read"
ARGUMENTS = {
    "cache_params": (
        _NOT_YET.format("a state of recurrent layers"),
        "Pass the whole prompt as input_ids",
    ),
    "pixel_values": (_NOT_READ.format("images"), _EMBEDDED),
    "pixel_values_videos": (_NOT_READ.format("videos"), _EMBEDDED),
    "input_features": (
        _NOT_READ.format("sounds"),
        f"Load a Whisper, or pass the text that was said. {_ENCODED}",
    ),
    "mm_encoder_outputs": (
        _NOT_READ.format("encoded images"),
        "Pass their embeddings among inputs_embeds",
    ),
    "decoder_inputs_embeds": (
        "is not read: the first ids of a decoder stand in what is returned, in transformers too",
        "Pass decoder_input_ids, or call the model itself with decoder_inputs_embeds",
    ),
    "cache_position": (
        "is not read: what comes next is kept behind what is there",
        "Leave it out, or pass position_ids to say where a prompt stands",
    ),
    "token_type_ids": (
        "is not read: no model of this library reads segments",
        "Leave token_type_ids out, or call the tokenizer with return_token_type_ids=False",
    ),
    "trust_remote_code": (
        "is not read: no code of a repository is ever run",
        "Leave it out, and pass a function of your own as custom_generate",
    ),
    "logits_to_keep": (
        "is not read: logits are computed where they are needed and nowhere else",
        "Leave it out, or call the model itself for the logits of every position",
    ),
    "use_model_defaults": (
        "is not read: values that you do not set come from the checkpoint, then from the defaults",
        "Leave it out, and set what is to be different",
    ),
}
"""Names that no call takes of every model -> what is wrong with them, and what to do instead."""
OF_SPEECH = (
    "is not read: transcripts are written by model.generate of a model that listens",
    "Call model.generate(input_features, ...) of a Whisper, or leave it out",
)
"""The same of what only models that listen take."""
_OF_MODEL = ("is not read: times follow from the model", "Leave it out")
SPEECH_LATER = {
    "return_token_timestamps": (
        _NOT_YET.format("times of tokens"),
        "Set return_timestamps=True for the times of segments",
    ),
    "force_unique_generate_call": (
        "is not read: how many windows there are follows from the sounds",
        "Leave return_timestamps out for a single window",
    ),
    "monitor_progress": (
        "is not read: whoever reads the tokens sees the progress",
        "Pass a streamer",
    ),
    "num_segment_frames": (
        "is not read: a window has as many frames as the encoder reads",
        "Leave it out",
    ),
    "time_precision": _OF_MODEL,
    "time_precision_features": _OF_MODEL,
}
"""The same of what transformers' models that listen take."""
REFUSED_FIELDS = {
    "use_mtp": (
        "no model of this library has heads that predict several tokens",
        "Set prompt_lookup_num_tokens or assistant_early_exit, or pass an assistant_model",
    ),
    "speculation_type": (
        "its models that draft by diffusion are read as code of their own, which is never run",
        "Leave it out: an assistant_model drafts token by token",
    ),
    "low_memory": (
        "transformers has given it up, and beams share their prompt's memory",
        "Leave it out",
    ),
    "compile_config": ("forwards are not compiled, and no token depends on that", "Leave it out"),
    "continuous_batching_config": (
        "the scheduler has nothing to set, and no token depends on it",
        "Call everystep.generate(model, tokenizer, prompts), which schedules by itself",
    ),
    "is_assistant": (
        "a model drafts where it is passed as one, and nowhere else",
        "Pass the model as assistant_model to a call of another",
    ),
}
"""Fields that are kept in a configuration and never acted upon -> why, what to do."""
_OF_RECTANGLES = "is part of the output object of model.generate, and not of a text or an event"
_CALL = "Leave {} out, or call model.generate"
ALONE = {
    **dict.fromkeys(
        ("output_scores", "output_logits"),
        (_OF_RECTANGLES, "Call model.generate, or set logprobs=5"),
    ),
    **dict.fromkeys(
        ("output_hidden_states", "output_attentions"),
        (
            "is part of the output object of model.generate and es.generate, and not of an event",
            "Leave {} out, or call es.generate",
        ),
    ),
    "use_cache": ("turns off a cache that many prompts are scheduled by", _CALL),
    "prefill_chunk_size": ("is chosen by the scheduler, for all prompts together", _CALL),
    **dict.fromkeys(
        ("cache_implementation", "cache_config", "max_cache_len"),
        ("chooses the cache that model.generate returns; here none is returned", _CALL),
    ),
}
"""Fields of `model.generate` that texts and events have no place for -> why, and what to do."""


OF_LAYERS = ("output_hidden_states", "output_attentions")
"""Those of them that one result of `es.generate` carries."""
OF_STEPS = ("output_scores", "output_logits", *OF_LAYERS)
"""Those of them that a step of a run carries."""


def refuse_argument(name: str, value: object, why: tuple[str, str] | None = None) -> None:
    """Raise UnsupportedError if the argument of this name asks for something that is not there."""
    if value is None or value is False or (name == "logits_to_keep" and _is_at_hand(value)):
        return
    what, do = ARGUMENTS[name] if why is None else why
    raise UnsupportedError(f"{name} {what}", got=type(value).__name__, do=do)


def _is_at_hand(logits_to_keep: object) -> bool:
    """Return True where a call reads the logits that this number asks for anyway: 0 leaves it to
    the call, 1 is the last position."""
    return isinstance(logits_to_keep, int) and logits_to_keep in (0, 1)


def refuse_fields(effective: Effective) -> None:
    """Raise UnsupportedError if a field that is never acted upon asks for something."""
    for name, (why, do) in REFUSED_FIELDS.items():
        nothing = effective[name] is False or effective[name] == FIELDS[name].default
        if name in effective.caller and not nothing:
            what = f"{name} is not read: {why}"
            raise UnsupportedError(what, got=shown(effective[name]), do=do)


def refuse_rectangular(effective: Effective, carried: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedError if the caller set a field that only `model.generate` can answer to,
    but for those that are `carried`."""
    quantized = effective.cache_implementation == "quantized"
    for name, (why, do) in ALONE.items():
        value = effective[name]
        neutral = (True, None) if name == "use_cache" else (False, None, "dynamic")
        if name in carried or name not in effective.caller or value in neutral:
            continue
        if not (quantized and name in ("cache_implementation", "cache_config")):
            got = f"{name}={shown(value)}"
            raise UnsupportedError(f"{name} {why}", got=got, do=do.format(name))
