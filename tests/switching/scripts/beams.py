"""Beams with the scores of their tokens, added up to the scores of the sequences."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

checkpoint = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint)
inputs = tokenizer(["Today is"], return_tensors="pt")

outputs = model.generate(
    **inputs, max_new_tokens=5, return_dict_in_generate=True, output_scores=True
)
transition_scores = model.compute_transition_scores(
    outputs.sequences, outputs.scores, normalize_logits=True
)
input_length = 1 if model.config.is_encoder_decoder else inputs.input_ids.shape[1]
generated_tokens = outputs.sequences[:, input_length:]
for tok, score in zip(generated_tokens[0], transition_scores[0], strict=True):
    print(f"| {tok:5d} | {tokenizer.decode(tok)!r:8s} | {score:.3f} | {torch.exp(score):.1%}")

outputs = model.generate(
    **inputs,
    max_new_tokens=8,
    num_beams=4,
    num_return_sequences=4,
    length_penalty=0.7,
    early_stopping=True,
    no_repeat_ngram_size=2,
    return_dict_in_generate=True,
    output_scores=True,
)
print(type(outputs).__name__, list(outputs.keys()), len(outputs.scores), outputs[0].shape)
transition_scores = model.compute_transition_scores(
    outputs.sequences, outputs.scores, outputs.beam_indices, normalize_logits=False
)
output_length = (transition_scores < 0).sum(dim=1)
reconstructed_scores = transition_scores.sum(dim=1) / (output_length**0.7)
print(torch.allclose(outputs.sequences_scores, reconstructed_scores))
for sequence, score in zip(outputs.sequences, outputs["sequences_scores"], strict=True):
    print(f"{score:.3f} {tokenizer.decode(sequence, skip_special_tokens=True)!r}")
