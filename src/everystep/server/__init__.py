"""The HTTP server: OpenAI's wire over the engine, in two processes.

`fields`, `routes`: the table of what may be asked. `documents`: what the table says to readers.
`messages`: what the two processes tell each other. `host`, `engine_process`: the engine's side.
`link`: the front's. `asking`, `answering`: from bodies to asks, and from what comes back to answers.
`application`, `serving`: HTTP.
"""
