"""The HTTP server: OpenAI's wire over the engine, in two processes.

`fields`, `routes`: the table of what may be asked. `documents`: what the table says to readers.
`messages`: what the two processes tell each other. `host`, `engine_process`: the engine's side.
`link`: the front's. `asking`: from bodies to asks. `answering`: from what comes back to answers.
`application`, `access`, `metrics`, `settings`, `serving`: HTTP.
"""
