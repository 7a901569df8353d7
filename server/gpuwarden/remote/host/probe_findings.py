"""Convert a probe's output to findings with advice. Pure functions. The output is untrusted and parsed leniently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuwarden.core.guidance import steps
from gpuwarden.core.rules import Finding, Severity

GIB = 1 << 30
LOW_DISK = 10 * GIB
NO_DISK = 1 * GIB
FULL_INODES = 0.95
SKEW_S = 60.0
HOT_C = 85
ZOMBIE_MIB = 1024

# Xid codes after which, according to NVIDIA's Xid catalog, the GPU must be replaced.
DEAD_XIDS = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "the GPU's firmware timed out",
    120: "the GPU's firmware failed",
}
THROTTLES = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
# The first CUDA version that supports a compute capability.
CUDA_FOR_CAP = (((10, 0), (12, 8)), ((9, 0), (11, 8)), ((8, 9), (11, 8)), ((8, 6), (11, 1)), ((8, 0), (11, 0)))
RENT_ANOTHER = "Pull the outputs, release this machine, and rent another one."


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _Part(_Lenient):
    why: str | None = None


class _Gpu(_Lenient):
    index: int
    name: str
    driver: str = ""
    bus: str = ""
    used_mib: float | None = None
    util: float | None = None
    temperature: float | None = None
    compute_cap: str = ""
    ecc_uncorrected: float | None = None
    remap_pending: float | None = None
    remap_failure: float | None = None
    throttle: float | None = None


class _Gpus(_Part):
    list: tuple[_Gpu, ...] = ()
    cuda: str | None = None
    processes: int = 0


class _Xid(_Lenient):
    bus: str
    code: int


class _Xids(_Part):
    list: tuple[_Xid, ...] = ()


class _Torch(_Part):
    version: str | None = None
    cuda: str | None = None


class _Disk(_Lenient):
    path: str
    mount: str
    fs: str
    read_only: bool = False
    writable: bool = True
    free: int
    inodes_free: int = 0
    inodes: int = 0


class _Disks(_Part):
    list: tuple[_Disk, ...] = ()


class _Limits(_Part):
    cpus: int | None = None
    cpus_usable: int | None = None
    cpu_quota: float | None = None
    memory_max: int | None = None
    memory_total: int | None = None
    oom_kills: int | None = None
    shm: int | None = None


class _Reach(_Lenient):
    url: str
    ok: bool
    why: str = ""
    date: str | None = None


class _Web(_Part):
    list: tuple[_Reach, ...] = ()


class Facts(_Lenient):
    """The output of a probe."""

    now: float
    gpus: _Gpus = _Gpus()
    xids: _Xids = _Xids()
    torch: _Torch = _Torch()
    disks: _Disks = _Disks()
    limits: _Limits = _Limits()
    web: _Web = _Web()


@dataclass(frozen=True)
class ProbeContext:
    """The context of a probe. `run_root` and `durable` are paths on the machine; `metered` is true if the machine is
    billed. `sent` and `received` are the times of the request and the reply, on the local clock.
    """

    run_root: str
    durable: Sequence[str] = ()
    metered: bool = False
    sent: float = 0.0
    received: float = 0.0


def judge(answer: Mapping[str, Any], context: ProbeContext) -> list[Finding]:
    """Return all findings. Invalid probe output results in one UNKNOWN finding."""
    try:
        facts = Facts.model_validate(dict(answer))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        return [_unknown("PF-HOST-002", f"invalid probe output at {where}", "Probe again.")]
    parts = (_gpu, _xid, _cuda, _disk, _limit, _clock, _web)
    return [finding for part in parts for finding in part(facts, context)]


def _finding(rule: str, severity: Severity, message: str, fix: str = "") -> Finding:
    return Finding(rule=rule, severity=severity, message=message, fix=steps(fix))


def _unknown(rule: str, message: str, fix: str = "") -> Finding:
    return _finding(rule, Severity.UNKNOWN, message, fix)


def _gpu(facts: Facts, context: ProbeContext) -> Iterator[Finding]:
    if not facts.gpus.list:
        worst = Severity.ERROR if context.metered else Severity.INFO
        why = facts.gpus.why or "nvidia-smi lists none"
        yield _finding("PF-GPU-001", worst, f"no usable GPU: {why}", RENT_ANOTHER if context.metered else "")
        return
    names = ", ".join(g.name for g in facts.gpus.list)
    yield _finding(
        "PF-GPU-001",
        Severity.INFO,
        f"GPUs: {len(facts.gpus.list)} ({names}); driver {facts.gpus.list[0].driver}",
    )
    for gpu in facts.gpus.list:
        yield from _health(gpu, facts.gpus.processes)


def _health(gpu: _Gpu, processes: int) -> Iterator[Finding]:
    what = f"GPU {gpu.index} ({gpu.name})"
    if gpu.ecc_uncorrected or gpu.remap_failure:
        yield _finding("PF-GPU-002", Severity.ERROR, f"{what} has uncorrected memory errors", RENT_ANOTHER)
    elif gpu.remap_pending:
        yield _finding("PF-GPU-002", Severity.WARNING, f"{what} needs a reset to remap faulty memory", RENT_ANOTHER)
    reasons = [why for bit, why in THROTTLES.items() if int(gpu.throttle or 0) & bit]
    if reasons:
        fix = (
            "Jobs run slower on this machine and therefore cost more; rent another machine if the throttling persists."
        )
        yield _finding("PF-GPU-003", Severity.WARNING, f"{what} is throttled: {', '.join(reasons)}", fix)
    elif (gpu.temperature or 0) >= HOT_C:
        yield _finding(
            "PF-GPU-003", Severity.WARNING, f"{what} is at {gpu.temperature:g} degrees Celsius before any job runs"
        )
    if (gpu.used_mib or 0) > ZOMBIE_MIB and not processes and not gpu.util:
        message = f"{what} has {gpu.used_mib:,.0f} MiB in use, but no process is listed and its utilization is 0"
        fix = "A dead process or another container uses it. Run `fuser -v /dev/nvidia*`, then restart the container."
        yield _finding("PF-GPU-004", Severity.WARNING, message, fix)


def _xid(facts: Facts, context: ProbeContext) -> Iterator[Finding]:
    ours = {_card(g.bus) for g in facts.gpus.list}
    for code in sorted({x.code for x in facts.xids.list}):
        cards = {x.bus for x in facts.xids.list if x.code == code}
        buses = ", ".join(sorted(cards))
        if not {_card(b) for b in cards} & ours:
            message = f"the kernel log contains Xid {code} for {buses}, which belongs to another GPU on this host"
            yield _finding("PF-GPU-005", Severity.INFO, message)
        elif code in DEAD_XIDS:
            message = f"the kernel log contains Xid {code} ({DEAD_XIDS[code]}) for {buses}"
            yield _finding("PF-GPU-005", Severity.ERROR, message, RENT_ANOTHER)
        else:
            message = f"the kernel log contains Xid {code} for {buses}; a program error often causes this code"
            yield _finding("PF-GPU-005", Severity.INFO, message)
    if facts.xids.why and facts.gpus.list:
        message = f"the kernel log can't be read ({facts.xids.why}), so earlier GPU faults are unknown"
        yield _finding("PF-GPU-005", Severity.INFO, message)


def _card(bus: str) -> str:
    """Normalize a GPU's address: the kernel writes `0000:3b:00`, but nvidia-smi writes `00000000:3B:00.0`."""
    return ":".join(bus.lower().partition(".")[0].split(":")[-2:])


def _cuda(facts: Facts, context: ProbeContext) -> Iterator[Finding]:
    built, driver = _version(facts.torch.cuda), _version(facts.gpus.cuda)
    if built and driver and built[0] > driver[0]:
        build = f"torch {facts.torch.version} is built for CUDA {facts.torch.cuda}"
        message = f"{build}; the driver supports CUDA up to {facts.gpus.cuda}"
        yield _finding("PF-CUDA-001", Severity.ERROR, message, "Use an image or torch build for an older CUDA version.")
    if facts.gpus.list and facts.torch.version and not facts.torch.cuda:
        message = f"torch {facts.torch.version} is built without CUDA; training would run on the CPU"
        yield _finding("PF-CUDA-001", Severity.ERROR, message, "Install a CUDA build of torch.")
    for gpu in facts.gpus.list:
        needed = next((cuda for cap, cuda in CUDA_FOR_CAP if (_version(gpu.compute_cap) or (0, 0)) >= cap), None)
        if built and needed and built < needed:
            message = (
                f"{gpu.name} needs CUDA {needed[0]}.{needed[1]}; torch {facts.torch.version} uses {facts.torch.cuda}"
            )
            fix = "This torch build has no kernels for the GPU ('no kernel image is available'). Install a newer torch."
            yield _finding("PF-CUDA-002", Severity.ERROR, message, fix)
            return


def _version(text: str | None) -> tuple[int, int] | None:
    try:
        major, _, minor = (text or "").partition(".")
        return int(major), int(minor.partition(".")[0] or 0)
    except ValueError:
        return None


def _disk(facts: Facts, context: ProbeContext) -> Iterator[Finding]:
    if facts.disks.why:
        yield _unknown("PF-DISK-001", f"the disks could not be read: {facts.disks.why}")
    for disk in facts.disks.list:
        if disk.path != context.run_root and disk.path not in context.durable:
            continue
        if disk.read_only or not disk.writable:
            message = f"{disk.path} can't be written to ({'mounted read-only' if disk.read_only else 'no permission'})"
            yield _finding(
                "PF-DISK-001", Severity.ERROR, message, "If the disk became read-only, it has failed: " + RENT_ANOTHER
            )
        if disk.free < LOW_DISK:
            worst = Severity.ERROR if disk.free < NO_DISK else Severity.WARNING
            message = f"{disk.path} has {disk.free / GIB:.1f} GiB free"
            fix = "The job needs space for the checkpoints that it keeps, plus one more."
            yield _finding("PF-DISK-002", worst, message, fix)
        if disk.inodes and disk.inodes_free < disk.inodes * (1 - FULL_INODES):
            message = (
                f"{disk.path} has {disk.inodes_free:,} of {disk.inodes:,} inodes free, so few more files can be created"
            )
            yield _finding(
                "PF-DISK-003", Severity.WARNING, message, "Run `df -i`, and remove caches with many small files."
            )
    for disk in facts.disks.list:
        if disk.path in context.durable and disk.mount == "/":
            message = (
                f"{disk.path} should be on storage that outlives the machine, but nothing is mounted there: "
                "the folder is on the container's own disk and is lost with it"
            )
            yield _finding(
                "PF-DISK-004", Severity.ERROR, message, "Attach the volume, or rent an instance that has it attached."
            )


def _limit(facts: Facts, context: ProbeContext) -> Iterator[Finding]:
    seen = facts.limits
    memory = min((m for m in (seen.memory_max, seen.memory_total) if m), default=None)
    cpus = min((c for c in (seen.cpu_quota, seen.cpus_usable) if c), default=None)
    if memory and cpus:
        message = f"the job may use {memory / GIB:.0f} GiB of memory and {cpus:g} CPUs"
        limited = seen.memory_max is not None or seen.cpu_quota is not None
        more = "; the host has more, so nproc and free report values that are too high" if limited else ""
        yield _finding("PF-HOST-003", Severity.INFO, message + more)
    if seen.oom_kills:
        message = f"{seen.oom_kills} processes ran out of memory and were killed since the container started"
        yield _finding("PF-HOST-003", Severity.WARNING, message, "Use fewer data workers, or a larger machine.")
    if seen.shm is not None and seen.shm < GIB:
        message = f"shared memory is {seen.shm >> 20} MiB; data loaders with workers may crash with a bus error"
        yield _finding("PF-HOST-004", Severity.WARNING, message, "Set a larger shm size, or num_workers=0.")


def _clock(facts: Facts, context: ProbeContext) -> Iterator[Finding]:
    if not context.received:
        return
    off = max(context.sent - facts.now, facts.now - context.received, 0.0)
    ours_is_wrong = False
    for reach in facts.web.list:  # the date from the first web server shows which of the two clocks is wrong
        with suppress(ValueError, TypeError):
            if reach.date:
                ours_is_wrong = abs(parsedate_to_datetime(reach.date).timestamp() - facts.now) < SKEW_S
            break
    if off > SKEW_S and not ours_is_wrong:
        message = (
            f"the machine's clock is off by {off:,.0f} s: certificates and tokens may be rejected, "
            "and file times are wrong"
        )
        yield _finding(
            "PF-HOST-005", Severity.WARNING, message, "Set its clock (chronyd, ntpdate), or rent another machine."
        )


def _web(facts: Facts, context: ProbeContext) -> Iterator[Finding]:
    for reach in facts.web.list:
        if not reach.ok:
            message = f"the machine can't reach {reach.url}: {reach.why}"
            fix = "Set HF_ENDPOINT to a mirror that the machine can reach, or upload the model and data."
            yield _finding("PF-NET-001", Severity.WARNING, message, fix)
