"""What a type checker must refuse: a mistake at the end of every line that says so.

The word after `# wrong:` names the mistake; `test_types.py` finds one error in each of those lines
and none elsewhere.
"""

from __future__ import annotations

import torch

import everystep as es


def mistakes(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """Every call of this function is wrong."""
    ids = torch.tensor([[1, 2]])
    es.generate(model, tokenizer, "x", max_new_token=8)  # wrong: misspelt
    es.generate(model, tokenizer, "x", max_new_tokens="8")  # wrong: value
    es.generate(model, tokenizer, "x", max_new_tokens=8) + 1  # wrong: result
    print(es.generate(model, tokenizer, "x", return_dict_in_generate=True).txt)  # wrong: missing
    es.generate(model, tokenizer, "x", streamer=None)  # wrong: of_another_call
    es.stream(model, tokenizer, "x", temprature=0.5)  # wrong: misspelt_in_stream
    print(next(es.stream(model, tokenizer, "x")).tokn)  # wrong: event_field
    es.chat(model, tokenizer, 5)  # wrong: conversation
    print(es.chat(model, tokenizer, "x").tokens)  # wrong: text_for_result
    es.open(model, tokenizer, "x", seed="3")  # wrong: seed
    es.open(model, tokenizer, "x").set(top_k=0.5)  # wrong: change
    es.open(model, tokenizer, "x").tokens + "x"  # wrong: text_for_ids
    model.generate(ids, eos_token_id="2")  # wrong: text_for_id
    model.generate(ids, trim_stop_strings=True)  # wrong: of_prompts
    model.generate(ids, early_stopping="always")  # wrong: name
    model.generate("Once")  # wrong: text_for_tensor
    es.GenerationConfig(top_q=0.5)  # wrong: misspelt_field
    es.GenerationConfig(do_sample="yes")  # wrong: field_value
    es.GenerationConfig().max_new_tokens.upper()  # wrong: attribute
    print(es.score(model, tokenizer, "x").totl)  # wrong: score_field
    print(es.score(model, tokenizer, ["x", "y"]).total)  # wrong: score_of_several
    es.prefill(model, tokenizer, "x", max_new_tokens=5)  # wrong: choice_in_prefill
    es.AsyncEngine(model).stream("x", top_p="high")  # wrong: value_in_engine
    es.load(quantize="int3")  # wrong: format
    es.verify(dtype="float32")  # wrong: text_for_dtype
    es.verify(quantise=None)  # wrong: misspelt_in_verify
