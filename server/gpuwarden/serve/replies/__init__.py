"""What a use case answers, in the one form that tools and `--json` share.

Every reply carries `ok` and `code`, because transcript formats lose error flags. Text that somebody else wrote is
fenced and bounded here, on its way out.
"""

from gpuwarden.serve.replies.alerts import AlertReply, WatchReply, watched
from gpuwarden.serve.replies.base import (
    ErrorReply,
    FindingReply,
    MeterReply,
    RefusalReply,
    Reply,
    error_reply,
    findings,
)
from gpuwarden.serve.replies.check import CheckReply, DiagnosisReply, canceled, checked
from gpuwarden.serve.replies.copies import FileReply, PullReply, VerifyReply, pulled, verified
from gpuwarden.serve.replies.hub import DatasetsReply, ReposReply, datasets_found, repos_seen
from gpuwarden.serve.replies.inventory import AccountReply, ClockReply, InstanceReply, InstancesReply, listed
from gpuwarden.serve.replies.submission import SubmitReply, submitted
from gpuwarden.serve.replies.teardown import TeardownReply, torn_down

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
    "Reply",
    "ReposReply",
    "SubmitReply",
    "TeardownReply",
    "VerifyReply",
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
    "watched",
]
