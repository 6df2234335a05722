"""A conversation of several turns, each answered after the chat template."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

checkpoint = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(checkpoint, use_fast=True)
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to("cpu").eval()
settings = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=[256, 65])

messages = []
for question in ("Who are you?", "And what can you do?", "Thank you."):
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    outputs = model.generate(**inputs, generation_config=settings)
    answer = tokenizer.decode(outputs[0, inputs["input_ids"].shape[-1] :], skip_special_tokens=True)
    print(f"{question!r} -> {answer!r}")
    messages.append({"role": "assistant", "content": answer})

print(tokenizer.apply_chat_template(messages, tokenize=False).count("<|end|>"))
