"""`python -m everystep.executors.parallel` holds a part of a model for the process that starts it,
which says on the standard input which part and where they meet."""

from __future__ import annotations

import json
import sys

from everystep.executors.parallel.loading import serve_parent

serve_parent(json.loads(sys.stdin.read()))
