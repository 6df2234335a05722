"""Models of documents: a page's patches and the boxes of its lines, read by a Llama.

Source: Liao et al. 2024 (DocLayLLM, arXiv 2408.15045), whose modelling code is not published with
its repository. What its demonstration shows is certain: the placeholders, the order of a prompt,
the preparation of a page. Which weights there are, and their names, is a reconstruction from the
LayoutLMv3 embedders that it says it uses.
"""
