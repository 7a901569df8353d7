"""Replies: the result of a use case in the form that tools and `--json` share.

Every reply carries `ok` and `code`, because transcript formats lose error flags. Foreign text is fenced and bounded
here. Next steps are values until `worded` renders them for one interface.
"""

from gpuwarden.interfaces.results.alerts import AlertReply, WatchReply, watched
from gpuwarden.interfaces.results.base import (
    ErrorReply,
    FindingReply,
    MeterReply,
    RefusalReply,
    Result,
    WarnedReply,
    Words,
    error_reply,
    findings,
    warned,
    worded,
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
    "Words",
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
    "worded",
]
