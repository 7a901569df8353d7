"""Patterns for log lines that report progress, the end of a run, a failure or a warning, or that contain a question."""

from __future__ import annotations

import re

SIGNALS = {1: "SIGHUP", 2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
FOLLOWS = frozenset(
    {
        "CalledProcessError",
        "ChildFailedError",
        "DistBackendError",
        "KeyboardInterrupt",
        "ProcessExitedException",
        "ProcessRaisedException",
        "RayTaskError",
        "SignalException",
        "SystemExit",
    }
)
"""Exceptions that are raised because another process failed."""
ENDED = re.compile(
    r"train_runtime|`Trainer\.fit` stopped|(?:exited with|exit) code:? 0\b|CommitInfo\(commit_url="
    r"|(?i:\btraining (?:is )?(?:complete|completed|finished|done)\b|\bfinished training\b)"
)
ODD = re.compile(
    r"(?i)(?:[:=]\s{0,2}|(?:loss|norm)\s)['\"]?[-+]?(?:nan|inf)\b(?!\s?(?:->|\u2192))"
    r"|(?<!\w)['\"]?loss['\"]?\s?[:=]\s?['\"]?0(?:\.0+)?(?![.\d])"
)
"""A metric that is not finite, or a loss of exactly 0."""
ODD_EVALUATION = re.compile(r"(?i)\b(?:eval|val|valid|validation)[_/ ]loss['\"]?\s?[:=]\s?['\"]?nan\b")
"""An evaluation loss of NaN. It indicates a failure even if later training steps are normal."""
EXIT_CODE = re.compile(
    r"(?i)(?:exited with(?: exit)? code|exit ?code\s{0,4}:|\(exitcode:|exit status|non-zero exit status|return code:?)"
    r"\s?(?P<code>-?\d{1,3})\b"
)
SIGNAL = re.compile(r"\b(?:Signal \d{1,2} \(|signal:? |signal )(?P<name>SIG[A-Z]{3,5})")
WARNS = re.compile(r"\w{0,40}Warning: |\bWARN(?:ING)?\b|\[W\w{0,20}[ :]|\bdeprecat|\bwarnings\.warn|^W\d{4} ")
NOISE = re.compile(r"(?i)\b(?:0 errors|no errors?|0 failed|error_?rate|errors?=0)\b|\berror[ =:]+[\d.]+(?:e-?\d+)?\b")
HARD = re.compile(
    r"CUDA error|CUDA out of memory|device-side assert|Assertion .{1,200} failed|\bCU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_"
    r"|NCCL (?:WARN|error)|\bnccl(?:System|Internal|Unhandled|Remote|Invalid)\w+|\bXid\b|Out of memory: Kill|oom-kill"
    r"|oom_reaper|Memory cgroup out of memory|OOMKilled|OutOfMemory|(?:^|[: ])Killed\b|Segmentation fault|Bus error"
    r"|core dumped|Aborted|Fatal Python error|terminate called after|Watchdog caught|watchdog got stuck"
    r"|DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAIL)|command not found|: error: |No space left|Disk quota exceeded"
    r"|(?:slurmstepd|srun|sbatch): error|panicked at|failed \(exitcode|\bEvicted\b|CrashLoopBackOff|ImagePullBackOff"
    r"|ErrImagePull|bad interpreter|Stale file handle|: undefined symbol: "
    r"|(?i:\bloss is [+-]?(?:nan|inf)\w{0,5}, stopping)"
)
"""Messages about failures that can end a run without a Python exception."""
DEVICE = re.compile(
    r"CUDA|NCCL|nccl|\bXid\b|CU(?:BLAS|DNN)_|Out of memory: Kill|oom-kill|oom_reaper|cgroup out of memory|OOMKilled"
)
SAID = re.compile(
    r"(?i)\b(?:\w{0,60}error|\w{0,60}exception|fatal|fail(?:ed|ure|s)?|cannot|could ?n[o']t|can't|unable to|not found"
    r"|denied|refused|timed out|invalid|illegal|missing|abort\w{0,3}|killed|no such|exceeded|unexpected|unsupported"
    r"|not supported|unrecognized)\b"
)
BLAMES = re.compile(r"(?:^|[\s\[(|:])(?:[Ee]rror|ERROR|FATAL|[Ff]atal|CRITICAL|panic|Failed|FAILED)\b")
HARMLESS = re.compile(r"(?i:retry|retries|fall(?:s|ing)? back)|^I\d{4} |^.{0,60}\bINFO\b")
GONE = (
    ("attribute", re.compile(r"'?(?P<owner>[\w.]+)'? object has no attribute '(?P<name>\w+)'")),
    ("attribute", re.compile(r"(?:module|type object) '(?P<owner>[\w.]+)' has no attribute '(?P<name>\w+)'")),
    ("attribute", re.compile(r"(?P<owner>[A-Z]\w+) has no attribute '?(?P<name>\w+)")),
    ("keyword", re.compile(r"(?P<owner>[\w.]*)\(\) got an unexpected keyword argument '(?P<name>\w+)'")),
    (
        "argument",
        re.compile(
            r"(?P<owner>[\w.]*)\(\) missing \d+ required (?:positional|keyword-only) arguments?: '(?P<name>\w+)'"
        ),
    ),
    ("name", re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<owner>[\w.]+)'")),
    ("name", re.compile(r"Can't get attribute '(?P<name>\w+)' on <module '(?P<owner>[\w.]+)'")),
    ("module", re.compile(r"No module named '(?P<owner>)(?P<name>[\w.]+)'")),
)
"""Error messages about a missing name, each with the kind of name."""
CALLED = re.compile(r"\b((?:[a-z_]\w*\.){0,4}[A-Za-z]\w*)\(")
"""A call in a traceback's source line."""
REPORT = re.compile(
    r"^(?:#{1,4} (?=.*[a-z])|- \[[ xX]\]|```)"
    r"|\bI(?:'m|'ve| (?:am|have|want|tr[iy]\w*|g[eo]t|us\w*|run|ran|think|follow\w*|can|need|train\w*|fine|met|start\w*"
    r"|was|found|set))\b"
    r"|(?:^|[^\w'])(?:my|our|me|we|anyone|somebody)\b(?![/=])|\w\?(?:\s|$)"
    r"|[\u6211\u5417\u8bf7\u6c42]|\u600e\u4e48|\u4e3a\u4ec0\u4e48|\u662f\u5426"
)
"""A line from a user's description of a failure: in the first person, with a question, or formatted like an issue."""
LOGGED = re.compile(r".{0,60}\b(?:INFO|DEBUG)\b")
"""A line from a logger. Any question in it is part of a data sample."""
SHAPED = re.compile(
    r"\[?\d{4}-\d\d-\d\d|\[?\d\d:\d\d|.{0,40}\bINFO\b|[IWE]\d{4} |\[\w|\w+:|\d{1,3}%|[{|>=*]|.{0,60}\d\.\d"
)
