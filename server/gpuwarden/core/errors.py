"""Exceptions that gpuwarden raises on purpose.

```
WardenError              code, message, next_steps, retry
├── Refused              a gate refused the request; contains the findings
│   └── NoSandbox        a job would run unconfined on this machine, and the policy does not allow it
├── BadRequest           the arguments are invalid
├── NotFound             the job, ticket, profile or file does not exist
├── Conflict             the state has changed: invalid transition, used approval, lock held by another process
├── AuthFailed           a key or token is missing, wrong or too weak
├── NoCapacity           the platform currently has no capacity for the request
├── RateLimited          too many requests
├── Unreachable          no response arrived, so the outcome is unknown
├── NotSupported         this platform or build does not support the operation
├── BadReply             a response has an unknown format, so no conclusion is drawn from it
├── LedgerError          the ledger can't be read or written
├── DiskError            one of gpuwarden's other files can't be read or written
└── Internal             a bug; completed actions are in the ledger
```

A message describes the failure and its cause. `next_steps` are values that each interface renders in its own words.
`retry` is true if the same call may succeed later without any change.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from gpuwarden.core.guidance import Action, Hint, do, steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuwarden.core.rules import Finding


class WardenError(Exception):
    """Base class of all errors: `str(error)` is the message, and `next_steps` are the steps that fix the problem.

    A `hint` that is a plain sentence becomes one manual step.
    """

    code: ClassVar[str] = "error"
    retry: ClassVar[bool] = False

    def __init__(self, message: str, hint: Hint = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_steps = steps(hint)
        self.unsent = False
        """True if no request that could have rented a machine was sent, so no second check is needed."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form for programs. `interfaces.results` defines the form for replies."""
        steps = [step.as_dict() for step in self.next_steps]
        return {"ok": False, "code": self.code, "message": self.message, "next": steps, "retry": self.retry}


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Mark errors as unsent in a block that only prepares to rent a machine, such as an offer search."""
    try:
        yield
    except WardenError as error:
        error.unsent = True
        raise


class Refused(WardenError):
    """A gate refused the request. `findings` name the rules, the reasons and the fixes."""

    code = "refused"

    def __init__(self, message: str, hint: Hint = "", findings: Sequence[Finding] = ()) -> None:
        super().__init__(message, hint)
        self.findings = tuple(findings)


class NoSandbox(Refused):
    """A job would run on this machine without a sandbox, and the policy does not allow it."""

    code = "no_sandbox"


class BadRequest(WardenError):
    """The arguments are invalid."""

    code = "bad_request"


class NotFound(WardenError):
    """The named object does not exist; all possible places were searched."""

    code = "not_found"


class Conflict(WardenError):
    """The state has changed since the caller read it."""

    code = "conflict"


class AuthFailed(WardenError):
    """A key or token is missing, wrong or too weak."""

    code = "auth_failed"


class NoCapacity(WardenError):
    """The platform currently has no capacity for the request."""

    code = "no_capacity"
    retry = True


class RateLimited(WardenError):
    """Too many requests; `after_s` is the number of seconds to wait, or None if the service does not report it."""

    code = "rate_limited"
    retry = True

    def __init__(self, message: str, hint: Hint = "", after_s: float | None = None) -> None:
        super().__init__(message, hint)
        self.after_s = after_s


class Unreachable(WardenError):
    """No response arrived. The request may still have been carried out."""

    code = "unreachable"
    retry = True


class NotSupported(WardenError):
    """The platform or this build does not support the operation."""

    code = "not_supported"


class BadReply(WardenError):
    """A response has an unknown format, so no conclusion is drawn from it."""

    code = "bad_reply"


class LedgerError(WardenError):
    """The ledger can't be read or written. The call did not launch anything, and no data was lost."""

    code = "ledger_error"


class DiskError(WardenError):
    """One of gpuwarden's files can't be read or written: a full or read-only disk, or missing permissions."""

    code = "disk_error"

    @classmethod
    def of(cls, error: OSError) -> DiskError:
        """Return the `DiskError` for an `OSError`."""
        what = f"{error.filename} can't be used" if error.filename else "a file can't be used"
        return cls(f"{what}: {error.strerror or error}", ("Free some space or fix the permissions.", do(Action.RETRY)))


class Internal(WardenError):
    """Unexpected internal error. Completed actions are in the ledger."""

    code = "internal"

    def __init__(self) -> None:
        super().__init__(
            "gpuwarden failed with an internal error; completed actions are in the ledger",
            (do(Action.LIST_INSTANCES), do(Action.RETRY), "GPUWARDEN_DEBUG=1 shows the traceback."),
        )


def as_warden_error(error: BaseException) -> WardenError:
    """Return any exception as a `WardenError`; an unexpected exception becomes `Internal`."""
    if isinstance(error, WardenError):
        return error
    return DiskError.of(error) if isinstance(error, OSError) else Internal()
