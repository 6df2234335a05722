"""Which devices weights can lie on, on this machine."""

from __future__ import annotations

import torch

from everystep.errors import RequestError, UnsupportedError, message


def usable_device(device: str | int | torch.device) -> torch.device:
    """The device; RequestError if it is none, UnsupportedError if this machine does not have it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        text = message(
            "device is no device",
            wanted="'cpu', 'cuda', 'cuda:1' or a torch.device",
            got=repr(device),
            do="Pass device='cpu', say",
        )
        raise RequestError(text) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UnsupportedError(
            message(
                f"device {str(found)!r} is not on this machine",
                wanted="a device that torch.cuda sees",
                got=f"{count} of them" if count else "no CUDA device",
                do="Pass device='cpu', or install the driver and a build of torch with CUDA",
            )
        )
    return found
