"""Training: from examples to rows, from rows to batches, and what is checked before the first
step."""
