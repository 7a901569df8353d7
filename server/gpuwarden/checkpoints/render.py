"""A report as lines that a person reads, and as an exit code."""

from __future__ import annotations

from gpuwarden.checkpoints.anatomy import short
from gpuwarden.core.models import FileEvidence, Report, Verdict

EXIT = {Verdict.PROVEN: 0, Verdict.REFUTED: 1, Verdict.UNKNOWN: 2}
_WORDS = {Verdict.PROVEN: "proven", Verdict.REFUTED: "REFUTED", Verdict.UNKNOWN: "could not tell"}


def lines(report: Report, limit: int = 40) -> list[str]:
    """The verdict, what speaks against it, the checkpoints, the files, what was not checked. At most ~`limit` files.

    What is wrong comes first and is never cut away by what is fine.
    """
    size = f"{len(report.files):,} files, {report.bytes:,} bytes"
    out = [f"{_WORDS[report.verdict]} at level {report.level}: {short(report.path)} ({size})"]
    out += [f"  problem: {p}" for p in report.problems] + [f"  unknown: {d}" for d in report.doubts]
    for c in report.checkpoints[:limit]:
        step = "" if c.step is None else f", step {c.step:,}"
        out.append(f"  checkpoint {short(c.path)}: {_WORDS[c.verdict]}{step}")
        out += [f"    {word}: {t}" for word, texts in (("problem", c.problems), ("unknown", c.doubts)) for t in texts]
        out += [f"    resume: {t}" for t in c.resume]
    worst_first = sorted(report.files, key=lambda f: (f.verdict is Verdict.PROVEN, f.path))
    for f in worst_first[:limit]:
        out += _file(f)
    if len(worst_first) > limit:
        out.append(f"  and {len(worst_first) - limit:,} files more")
    out += [f"  warning: {w}" for w in report.warnings]
    if report.newest:
        out.append(f"  newest whole checkpoint: {short(report.newest)}, step {report.step}")
    return out + [f"  not checked: {n}" for n in report.not_checked]


def _file(f: FileEvidence) -> list[str]:
    said = "; ".join(f.proved) if f.verdict is Verdict.PROVEN else "; ".join((*f.problems, *f.doubts))
    out = [f"  {short(f.path)} [{f.format}] {_WORDS[f.verdict]}: {said or 'nothing to show'}"]
    return out + [f"    warning: {w}" for w in f.warnings]
