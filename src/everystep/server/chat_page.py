"""The page at `/`, for people: a conversation, models, load and replicas, over the same wire.

Its script makes all text by `textContent`, asks this server alone, and keeps nothing: neither the
conversation nor the key outlives the tab.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

from everystep.server.page_headers import page_headers

_HEADERS = page_headers("data:", "no-cache")
_SAMPLING = "sample best_of beam_sample"
"""Strategies beside which a temperature means something."""
_ALONE = "greedy beam diverse_beam contrastive dola"
STRATEGIES = (*_SAMPLING.split(), *_ALONE.split())
"""Strategies that the page offers: those that need no further field."""
_OF_REPLICA = (
    *("node and process", "age", "at work", "in line", "rows", "tokens made"),
    *("prompts from cache", "engine restarts", "models"),
)
_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>everystep</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="chat.css">
</head>
<body>
<header>
<h1>everystep</h1>
<p id="load" role="status">Asking for the load.</p>
</header>
<main>
<form id="opening" hidden>
<label for="key">This server is open to keys. Yours is kept until the tab closes.</label>
<span><input id="key" type="password" autocomplete="off" required> <button>Use it</button></span>
</form>
<section id="talk" role="log" aria-label="Conversation" tabindex="0"></section>
<p id="error" role="alert"></p>
<form id="ask">
<label for="text">Message</label>
<textarea id="text" rows="3" required autofocus></textarea>
<p class="buttons">
<button id="send">Send</button>
<button id="stop" type="button" disabled>Stop</button>
<button id="fresh" type="button">New conversation</button>
<span class="quiet">Enter sends, Shift and Enter begin a line.</span>
</p>
</form>
<details id="settings">
<summary>Settings</summary>
<div class="fields">
<label>Model <select id="model"></select></label>
<label>Strategy <select id="strategy">
<option value="">as the model does</option>
{"".join(f"<option>{one}</option>" for one in STRATEGIES)}
</select></label>
<label>Temperature <input id="temperature" type="number" min="0" max="10" step="any"
placeholder="as the model does"></label>
<label>Longest answer, in tokens <input id="most" type="number" min="1" step="1"
placeholder="512"></label>
<label>Seed <input id="seed" type="number" step="1" placeholder="another each time"></label>
</div>
</details>
<section aria-labelledby="models-title">
<h2 id="models-title">Models</h2>
<div class="wide" tabindex="0" role="region" aria-labelledby="models-title">
<table>
<thead><tr><th scope="col">name</th><th scope="col">context</th><th scope="col">adapter of</th>
<th scope="col">where</th></tr></thead>
<tbody id="models"></tbody>
</table>
</div>
</section>
<section id="replicas" aria-labelledby="replicas-title" hidden>
<h2 id="replicas-title">Replicas</h2>
<p id="replicas-told" class="quiet"></p>
<div class="wide" tabindex="0" role="region" aria-labelledby="replicas-title">
<table>
<thead><tr>{"".join(f'<th scope="col">{name}</th>' for name in _OF_REPLICA)}</tr></thead>
<tbody id="states"></tbody>
</table>
</div>
</section>
<section aria-labelledby="inside-title">
<h2 id="inside-title">Inside of an answer</h2>
<p>The inspector shows each step of a generation, and what was chosen from what. It is a command of
its own, on the machine where the model is:</p>
<pre id="inspect" tabindex="0" aria-label="Command">everystep inspect --prompt "Hello" --web</pre>
</section>
</main>
<noscript><p>This page needs its script.</p></noscript>
<script src="chat.js"></script>
</body>
</html>
"""
_ASSETS = {
    "/": ("text/html", None),
    "/chat.js": ("text/javascript", "chat.js"),
    "/chat.css": ("text/css", "chat.css"),
}
PAGE_PATHS = tuple(_ASSETS)
"""What a browser loads before it asks anything; it says nothing, and needs no key."""


def page_response(path: str) -> Response:
    """Return one of the parts of the page."""
    kind, name = _ASSETS[path]
    text = _PAGE if name is None else (files("everystep.server") / name).read_text("utf-8")
    return Response(text, headers=_HEADERS, media_type=f"{kind}; charset=utf-8")
