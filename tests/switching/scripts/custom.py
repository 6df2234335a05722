"""A processor and a stopping criterion of one's own, beside those of the library."""

import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)


class OnlyLetters(LogitsProcessor):
    """Lets letters through, and remembers how often it was called."""

    def __init__(self, allowed):
        self.allowed = torch.tensor(allowed)
        self.calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls += 1
        mask = torch.full_like(scores, -float("inf"))
        mask[:, self.allowed] = 0
        return scores + mask


class StopAfterTwo(StoppingCriteria):
    """Ends a row that holds an id twice among its new ones."""

    def __init__(self, prompt_length):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs):
        new = input_ids[:, self.prompt_length :].tolist()
        return torch.tensor([len(row) != len(set(row)) for row in new])


checkpoint = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(checkpoint)
inputs = tokenizer(["one, two,", "a longer prompt, with more"], padding=True, return_tensors="pt")
letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
length = inputs["input_ids"].shape[1]

processor = OnlyLetters(letters)
processors = LogitsProcessorList([processor])
processors.append(MinNewTokensLengthLogitsProcessor(length, 3, tokenizer.eos_token_id))
criteria = StoppingCriteriaList([StopAfterTwo(length)])
for options in ({}, {"num_beams": 3}):
    processor.calls = 0
    outputs = model.generate(
        **inputs,
        max_new_tokens=30,
        logits_processor=processors,
        stopping_criteria=criteria,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    print(processor.calls, len(outputs.scores), outputs.sequences[:, length:].tolist())

scores = torch.zeros(1, len(tokenizer))
print(processors(inputs["input_ids"][:1], scores).isfinite().sum().item())
stops = StoppingCriteriaList([MaxLengthCriteria(max_length=length)])
print(stops(inputs["input_ids"], scores).tolist(), stops.max_length)
