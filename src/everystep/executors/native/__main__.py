"""`python -m everystep.executors.native` compiles the kernels.

The package imports `build`, so that Python would warn of running that module as a program.
"""

from __future__ import annotations

import sys

from everystep.executors.native.build import main

sys.exit(main())
