"""A stand-in for pip: `python -m pip download ... -d FOLDER REQUIREMENT` without a network.

Run as the package `pip` found first on PYTHONPATH. The environment says what to do: FAKE_PIP_WHEEL
is the file to deliver, or several with the separator of paths, FAKE_PIP_CALLS a file that gets a
line per call, FAKE_PIP_MODE one of deliver, fail, hang, slow, nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

HANG_SECONDS = 60


def main(arguments: list[str]) -> int:
    """Does what the mode says and returns the exit code."""
    mode = os.environ["FAKE_PIP_MODE"]
    wheels = [Path(one) for one in os.environ["FAKE_PIP_WHEEL"].split(os.pathsep)]
    folder = Path(arguments[arguments.index("-d") + 1])
    with Path(os.environ["FAKE_PIP_CALLS"]).open("a") as calls:
        calls.write(f"{os.getpid()} {' '.join(arguments)}\n")
    if mode == "fail":
        print("ERROR: No matching distribution found")
        return 1
    if mode == "hang":
        begun = Path(os.environ["TMPDIR"]) / wheels[0].name
        begun.write_bytes(wheels[0].read_bytes()[:100])
        time.sleep(HANG_SECONDS)
    if mode == "slow":
        time.sleep(1.0)
    if mode != "nothing":
        for wheel in wheels:
            shutil.copy(wheel, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
