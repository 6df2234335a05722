"""The families whose network is the decoder, one file each: configuration and names to a spec.

Source of names and defaults: transformers' classes of the family's name, as `LlamaConfig` and
`LlamaForCausalLM`.
"""
