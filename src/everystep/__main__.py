"""`python -m everystep` is the command `everystep`."""

from __future__ import annotations

import sys

from everystep.cli import main

if __name__ == "__main__":
    sys.exit(main())
