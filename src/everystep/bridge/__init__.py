"""Models of transformers and PEFT as executors: their forwards, their caches, our engine.

`foreign.py` calls the module and leaves it as it was, `sheets.py` keeps rows in its cache objects,
`executor.py` runs works on both, `trial.py` finds out what the module can do, and `core.py` shows
it as the core of a language model. Nothing here imports the other library: the module brings it.
"""
