"""A batch of prompts of different lengths, greedy and sampled, and several answers to each."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

checkpoint = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype="auto")

prompts = ["A list of colors: red, blue", "Portugal is", "Once upon a time, in a land"]
model_inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
print(model_inputs.input_ids.shape, model_inputs["attention_mask"].sum(dim=-1).tolist())

model.generation_config.pad_token_id = tokenizer.pad_token_id
generated_ids = model.generate(**model_inputs, max_new_tokens=12)
for text in tokenizer.batch_decode(generated_ids, skip_special_tokens=True):
    print(repr(text))

set_seed(42)
sampled = model.generate(
    **model_inputs,
    do_sample=True,
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    repetition_penalty=1.1,
    num_return_sequences=2,
    max_new_tokens=10,
)
new_tokens = sampled[:, model_inputs["input_ids"].shape[1] :]
for i, text in enumerate(tokenizer.batch_decode(new_tokens, skip_special_tokens=True)):
    print(i // 2, i % 2, repr(text))

single = tokenizer.encode("The end", return_tensors="pt")
print(model.generate(single, max_length=20, min_new_tokens=4).tolist())
