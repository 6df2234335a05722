"""Model files: where they come from, what is in them, and nothing about what it means.

`resolve_source` turns what a user gives into a path; `open_folder` and `read_gguf` open what lies
there. All readers share one rule: a file is checked against itself before anything is allocated for
it, and what is wrong is said with the file's name.
"""
