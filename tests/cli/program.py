"""The command as a program of its own, with a fake model: `program.py STAGE ARGUMENT...`.

STAGE is a JSON object with fields of `Stage`.
"""

from __future__ import annotations

import json
import sys

from everystep.cli import main
from tests.cli.fakes import Stage, play

if __name__ == "__main__":
    play(Stage(**json.loads(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
