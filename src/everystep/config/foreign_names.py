"""Names that users of other libraries and engines type: llama.cpp, ollama, vLLM, OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping

SAME: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), "max_new_tokens"),
    **dict.fromkeys(("num_predict", "max_tokens_to_sample", "max_gen_len"), "max_new_tokens"),
    **dict.fromkeys(("stop", "stops", "stop_sequences", "reverse_prompt"), "stop_strings"),
    **dict.fromkeys(("stop_token_ids", "stop_tokens"), "eos_token_id"),
    **dict.fromkeys(("n", "num_samples", "num_completions"), "num_return_sequences"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    **dict.fromkeys(("guided_json", "json_schema", "format_schema"), "schema"),
    **dict.fromkeys(("n_probs", "top_logprobs"), "logprobs"),
    **dict.fromkeys(("mirostat", "mirostat_ent"), "mirostat_tau"),
    "temp": "temperature",
    "min_tokens": "min_new_tokens",
    "typical": "typical_p",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "beam_width": "num_beams",
    "mirostat_lr": "mirostat_eta",
    "samplers": "sampler_order",
    "lora_request": "adapter_names",
    "draft_model": "assistant_model",
}
"""Names of theirs -> our keyword for the same."""

_INT4 = 'Load the model with es.load(path, quantize="int4")'
_INT8 = 'Load the model with es.load(path, quantize="int8")'
_FULL = "Leave it out: the context is as long as the model was made for"
_DEVICE = 'Pass device="cuda" to es.load to have the weights there'
_PICTURES = "Put pictures into messages: {'type': 'image', 'image': ...}"
_SOUNDS = "Call es.transcribe(model, tokenizer, sounds), with a Whisper"
_MESSAGES = "Begin the messages with {'role': 'system', 'content': ...}"
_DTYPE = "Pass dtype=torch.bfloat16, say, to es.load"

ADVICE: Mapping[str, str] = {
    "stream": "Call es.stream, or es.chat(..., stream=True)",
    "use_beam_search": "Pass num_beams=4, say",
    "response_format": "Pass schema=..., a JSON schema",
    "format": "Pass schema=..., a JSON schema",
    "repeat_last_n": "Leave it out: repetition_penalty looks at the whole text",
    "ignore_eos": "Pass eos_token_id=None",
    "echo": "Leave it out, and put the prompt before the text that is returned",
    "keep_alive": "Leave it out: a model stays loaded as long as it is held",
    "tensor_parallel_size": "Leave it out: a model runs on one device",
    "tfs_z": "Pass typical_p or min_p, which cut the tail too",
    "load_in_4bit": _INT4,
    "load_in_8bit": _INT8,
    "quantization_config": f'{_INT4}, or with "int8"',
    "quantization": f'{_INT4}, or with "int8"',
    **dict.fromkeys(("torch_dtype", "dtype"), _DTYPE),
    **dict.fromkeys(("num_ctx", "n_ctx", "ctx_size", "max_model_len"), _FULL),
    **dict.fromkeys(("device_map", "n_gpu_layers", "num_gpu", "gpu_layers", "ngl"), _DEVICE),
    **dict.fromkeys(("image", "images", "mmproj"), _PICTURES),
    **dict.fromkeys(("sound", "sounds", "audio", "audios"), _SOUNDS),
    **dict.fromkeys(("system", "system_prompt"), _MESSAGES),
}
"""Names of theirs that no keyword stands for -> what is to be done instead."""

OPTIONS: Mapping[str, str] = {
    "raw": "`generate` continues the text itself: leave --raw out; --chat is a message.",
    "prompt": "The prompt is an argument: everystep generate TEXT.",
    "interactive": "`everystep chat` talks.",
    "ctx_size": "Leave it out: the context is as long as the model was made for.",
    "n_gpu_layers": "--device cuda has the weights there.",
    "load_in_4bit": "--quantize int4 rounds the weights.",
    "load_in_8bit": "--quantize int8 rounds the weights.",
    "stream": "Text is written as it comes: leave --stream out.",
    "stop_strings": "--stop TEXT ends the answer after it.",
    "system_prompt": "--system TEXT sets the system message.",
    **dict.fromkeys(("sound", "audio"), "`everystep transcribe FILE` writes down what is said."),
}
"""Options of other programs, or of earlier versions, that are spelled so with hyphens -> what is to
be typed."""

COMMANDS: Mapping[str, str] = {
    "run": "`everystep chat --model MODEL` talks to a model, with MESSAGE it answers that.",
    "complete": "`everystep generate TEXT` continues a text.",
    "download": "`everystep pull MODEL` fetches a model.",
    "list": "`everystep models` lists models.",
    "ls": "`everystep models` lists models.",
    "show": "`everystep info MODEL` shows what a model is.",
    "convert": "`everystep quantize` writes a GGUF file.",
    "perplex": "`everystep perplexity FILE` scores a text.",
    "benchmark": "`everystep bench` measures a model.",
}
"""Commands of other programs -> what is to be typed."""

WEIGHTS: Mapping[str, str] = {
    "4bit": "int4",
    "8bit": "int8",
    "nf4": "int4",
    "fp4": "int4",
    "bitsandbytes": "int8",
    "gptq": "int4",
    "awq": "int4",
}
"""Names of quantisations elsewhere -> the nearest that `quantize` takes."""


def advice_on(name: str) -> str | None:
    """Return what to do in the place of a name of another library; None for any other."""
    if name in ADVICE:
        return ADVICE[name]
    return f"Perhaps you meant {SAME[name]} instead of {name}" if name in SAME else None
