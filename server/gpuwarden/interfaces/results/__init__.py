"""What a use case answers, in the one form that tools and `--json` share.

Every reply carries `ok` and `code`, because transcript formats lose error flags. Text that somebody else wrote is
fenced and bounded here, on its way out.
"""

from gpuwarden.interfaces.results.alerts import AlertReply, WatchReply, watched
from gpuwarden.interfaces.results.base import (
    ErrorReply,
    FindingReply,
    MeterReply,
    RefusalReply,
    Result,
    WarnedReply,
    error_reply,
    findings,
    warned,
)
from gpuwarden.interfaces.results.check import CheckReply, DiagnosisReply, canceled, checked
from gpuwarden.interfaces.results.copies import (
    FileReply,
    PullReply,
    VerifyReply,
    pulled,
    verified,
)
from gpuwarden.interfaces.results.hub import (
    DatasetsReply,
    ReposReply,
    datasets_found,
    repos_seen,
)
from gpuwarden.interfaces.results.inventory import (
    AccountReply,
    ClockReply,
    InstanceReply,
    InstancesReply,
    listed,
)
from gpuwarden.interfaces.results.submission import SubmitReply, submitted
from gpuwarden.interfaces.results.teardown import TeardownReply, torn_down

__all__ = [
    "AccountReply",
    "AlertReply",
    "CheckReply",
    "ClockReply",
    "DatasetsReply",
    "DiagnosisReply",
    "ErrorReply",
    "FileReply",
    "FindingReply",
    "InstanceReply",
    "InstancesReply",
    "MeterReply",
    "PullReply",
    "RefusalReply",
    "ReposReply",
    "Result",
    "SubmitReply",
    "TeardownReply",
    "VerifyReply",
    "WarnedReply",
    "WatchReply",
    "canceled",
    "checked",
    "datasets_found",
    "error_reply",
    "findings",
    "listed",
    "pulled",
    "repos_seen",
    "submitted",
    "torn_down",
    "verified",
    "warned",
    "watched",
]
