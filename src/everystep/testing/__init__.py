"""What tests of your own strategies, processors and executors need, and this library's tests too.

The hash model forgives no misuse and needs no weights. The tiny models and the tiny tokenizer are
real in every part, made in memory, and the same on every machine.
"""

from everystep.testing.hash_model import HashExecutor

__all__ = ["HashExecutor"]
