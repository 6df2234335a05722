"""What an error is on the wire: its status, its code, and when it is worth another try."""

from __future__ import annotations

from dataclasses import dataclass

from everystep.errors import CapacityError, EverystepError, OversizeError, RequestError
from everystep.server.asking import UnknownModelError
from everystep.server.batch_desk import UnknownBatchError
from everystep.server.exchange import TOO_LONG, HttpError
from everystep.server.file_store import UnknownFileError
from everystep.server.link import EngineGone
from everystep.server.live_runs import BusyRunError, TooManyRunsError, UnknownRunError
from everystep.server.quotas import QuotaError


@dataclass(frozen=True, slots=True)
class Fault:
    """The answer to errors of a kind; `retry`: seconds after which to come again."""

    status: int
    code: str | None = None
    retry: int | None = None


_FAULTS: tuple[tuple[type[EverystepError], Fault], ...] = (
    (UnknownModelError, Fault(404, "model_not_found")),
    (UnknownRunError, Fault(404, "run_not_found")),
    (UnknownFileError, Fault(404)),
    (UnknownBatchError, Fault(404)),
    (BusyRunError, Fault(409, "run_busy")),
    (OversizeError, Fault(400, TOO_LONG)),  # which comes again however long one waits
    (RequestError, Fault(400)),
    (QuotaError, Fault(429, "quota")),
    (TooManyRunsError, Fault(429, "too_many_runs", retry=30)),
    (CapacityError, Fault(429, retry=60)),
    (EngineGone, Fault(503, retry=2)),
    (EverystepError, Fault(400)),
)
"""The first kind that fits counts."""


def as_http_error(error: Exception) -> HttpError | None:
    """Return the answer to an error of this library; None for any other, which is a defect."""
    if isinstance(error, HttpError):
        return error
    for kind, fault in _FAULTS:
        if isinstance(error, kind):
            retry = error.seconds if isinstance(error, QuotaError) else fault.retry
            return HttpError(fault.status, str(error), code=fault.code, retry=retry)
    return None
