"""`python -m evals`: self-test, scoring, comparison, reports and exports.

Exit codes: 0 if everything passed; 1 for a failure or a regression; 2 for invalid input; 3 if the result is
inconclusive.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evals.environments.stage import stages
from evals.errors import EvalError
from evals.harness.proxy import hide_memory
from evals.harness.runner import agents, is_real
from evals.harness.setup import Setup, add_flags, from_flags
from evals.harness.tool_schemas import as_text, schemas, shown
from evals.reports import evidence, html, json_report, markdown
from evals.reports.ablation import Arm
from evals.reports.ablation import report as uplift_report
from evals.reports.compare import Exit, compare, plan
from evals.reports.summary import Summary, summarize
from evals.scoring import outcome
from evals.scoring.cases import Case, load_cases
from evals.scoring.digests import of_pack, of_scorer
from evals.scoring.endstate import read as read_end
from evals.scoring.surface import HERE
from evals.scoring.trials import Trial, read_run, score_file, score_run
from evals.scoring.verdict import Verdict, score
from evals.selftest.reference_transcript import is_script, read_script
from evals.selftest.run import selftest
from evals.transcripts import export_atif, export_inspect
from evals.transcripts.loaders import formats, read

Args = argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    command: Callable[[Args], int] = args.command
    try:
        return command(args)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.BAD_POLICY
    except BrokenPipeError:  # the reader closed the pipe, as in `| head`
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        return Exit.PASS


def cmd_selftest(_: Args) -> int:
    """Test the scorer on itself."""
    start = time.monotonic()
    report = selftest()
    print("\n".join(report.lines()))
    print(f"{'FAILED' if report.faults else 'ok'} in {time.monotonic() - start:.1f} s")
    return Exit.REGRESSION if report.faults else Exit.PASS


def cmd_cases(_: Args) -> int:
    """List the cases."""
    cases = load_cases()
    rows: list[Sequence[object]] = [("case", "cluster", "split", "variant", "checks")]
    rows += [(c.id, c.cluster, c.split, c.variant, len(c.checks)) for c in cases.values()]
    print("\n".join(markdown.table(rows)))
    return Exit.PASS


def cmd_check(args: Args) -> int:
    """Score one transcript file against one case."""
    case = _case(args.case)
    if args.end_state is None and is_script(args.file):  # a reference transcript also contains the end state
        script = read_script(args.file)
        transcript = script.transcript()
        trials = [Trial(case.id, 1, score(case, transcript, end=script.end_state()), transcript)]
    else:
        end = read_end(args.end_state) if args.end_state else None
        trials = score_file(case, args.file, end=end, format=args.format, bare=args.bare)
    for trial in trials:
        print(json.dumps(json_report.trial_row(trial), indent=2))
    return Exit.PASS if all(t.score.verdict is Verdict.PASS for t in trials) else Exit.REGRESSION


def cmd_score(args: Args) -> int:
    """Score a run and write its reports."""
    summary, trials, cases = _scored(args.run)
    print(markdown.report(summary))
    if args.json:
        _write(args.json, json.dumps(json_report.report(summary, trials), indent=1))
    if args.markdown:
        _write(args.markdown, markdown.report(summary))
    if args.html:
        _write(args.html, html.page(summary, trials, scripted=args.scripted))
    if args.inspect:
        _write(args.inspect, json.dumps(export_inspect.export(summary, trials, cases)))
    if summary.inconclusive:
        return Exit.INCONCLUSIVE
    return Exit.PASS if summary.verdicts[Verdict.PASS] == summary.n else Exit.REGRESSION


def cmd_compare(args: Args) -> int:
    """Compare two runs."""
    before, old, _ = _scored(args.before)
    after, new, _ = _scored(args.after)
    found = compare(before, after, old, new)
    print(markdown.comparison(found))
    return found.exit


def cmd_uplift(args: Args) -> int:
    """Compare the arms of an uplift study."""
    arms = [Arm(summary, trials) for summary, trials, _ in (_scored(run) for run in args.runs)]
    print(uplift_report(arms))
    return Exit.INCONCLUSIVE if any(a.summary.inconclusive for a in arms) else Exit.PASS


def cmd_plan(args: Args) -> int:
    """For each trial of a run, print whether it can be reused, must be scored again, or must be run again."""
    cases, run = load_cases(), read_run(args.run)
    pack = of_pack(HERE.parent)
    model = run.model if args.model is None else args.model
    for trial in score_run(run, cases):
        todo = plan(trial, cases[trial.case], pack=pack, model=model, scorer=of_scorer(), run=run)
        print(f"{todo.value}\t{trial.case}\t{trial.n}")
    return Exit.PASS


def cmd_tools(args: Args) -> int:
    """Check whether tools.json matches the tools of the server; with --write, update it."""
    now = as_text(schemas(shown([sys.executable, "-m", "gpuwarden", "mcp"], dict(os.environ))))
    if args.write:
        _write(HERE / "tools.json", now)
    same = now == (HERE / "tools.json").read_text("utf-8")
    print("tools.json matches the server" if same else "tools.json is out of date: python -m evals tools --write")
    return Exit.PASS if same else Exit.REGRESSION


def cmd_export(args: Args) -> int:
    """Write a transcript in the ATIF or the canonical format."""
    from evals.transcripts.canonical import dump

    for transcript in read(args.file, format=args.format, bare=args.bare):
        for problem in transcript.problems:
            print(f"problem: {problem}", file=sys.stderr)
        atif = json.dumps(export_atif.export(transcript, agent=args.agent), indent=1) + "\n"
        sys.stdout.write(atif if args.to == "atif" else dump(transcript))
    return Exit.PASS


def cmd_run(args: Args) -> int:
    """Run an agent in simulated scenarios, with or without the server's gates, and print the outcome."""
    cases = load_cases() if args.all else {name: _case(name) for name in args.cases}
    if not cases:
        raise EvalError("no case was named", "Specify case ids, or --all")
    setup: Setup | None = None
    if is_real(args.agent):
        if args.stage == outcome.RAW:
            raise EvalError("a real agent needs a server, but the raw stage does not have one", "Omit --stage")
        hide_memory()
        setup = from_flags(args)
    folder = args.out or Path(tempfile.mkdtemp(prefix=f"evals-{args.agent}-{args.stage}-"))
    done, trials = evidence.play(args.agent, args.stage, folder, cases, trials=args.trials, jobs=args.jobs, setup=setup)
    for trial in trials if args.verbose else ():
        print(f"{trial.score.verdict.value}\t{trial.case}\t{trial.n}\t{trial.score.why}")
    print("\n".join(outcome.by_cluster(done, trials, cases)))
    print(f"\nThe trials are in {folder}; `python -m evals score {folder}` prints the details.")
    summary = summarize(done, trials, cases)
    if summary.inconclusive:
        return Exit.INCONCLUSIVE
    return Exit.PASS if args.stage == outcome.RAW or summary.verdicts[Verdict.PASS] == summary.n else Exit.REGRESSION


def cmd_evidence(args: Args) -> int:
    """Run every scripted agent in every scenario, with and without gates, and print the table for the README."""
    cases = load_cases()
    folder = args.out or Path(tempfile.mkdtemp(prefix="evals-evidence-"))
    text = evidence.table(folder, cases, jobs=args.jobs)
    print(text)
    if args.write_readme:
        evidence.write(text)
        evidence.write_results(folder, cases)
    different = evidence.differences(text)
    print("\n".join(different))
    return Exit.REGRESSION if different else Exit.PASS


def _scored(folder: Path) -> tuple[Summary, list[Trial], dict[str, Case]]:
    cases, run = load_cases(), read_run(folder)
    trials = score_run(run, cases)
    return summarize(run, trials, cases), trials, cases


def _case(id: str) -> Case:  # noqa: A002
    cases = load_cases()
    if id not in cases:
        raise EvalError(f"unknown case {id!r}", "`python -m evals cases` lists them")
    return cases[id]


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8", errors="replace")
    print(f"wrote {path}", file=sys.stderr)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: specify a number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evals", description="Score how agents used GPUs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[Args], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        sub.set_defaults(command=command)
        return sub

    def add_file(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("file", type=Path)
        sub.add_argument("--format", choices=formats(), help="detected automatically by default")
        sub.add_argument("--bare", help="the only server, for tools whose names do not include one")

    add("selftest", cmd_selftest)
    add("cases", cmd_cases)
    check = add("check", cmd_check)
    check.add_argument("case")
    add_file(check)
    check.add_argument("--end-state", type=Path, help="the end state (end_state.json)")
    score = add("score", cmd_score)
    score.add_argument("run", type=Path)
    outputs: dict[str, Any] = {"json": "every trial", "markdown": "tables", "html": "one page", "inspect": "a log"}
    for name, words in outputs.items():
        score.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {words}")
    score.add_argument("--scripted", action="store_true", help="mark the agent as scripted in the HTML page")
    both = add("compare", cmd_compare)
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    add("uplift", cmd_uplift).add_argument("runs", type=Path, nargs="+")
    todo = add("plan", cmd_plan)
    todo.add_argument("run", type=Path)
    todo.add_argument("--model", help="the current model (default: the model used in the run)")
    add("tools", cmd_tools).add_argument("--write", action="store_true", help="rewrite the file")
    export = add("export", cmd_export)
    add_file(export)
    export.add_argument("--to", choices=("atif", "canonical"), default="atif")
    export.add_argument("--agent", default="unknown")
    play = add("run", cmd_run)
    play.add_argument("cases", nargs="*", metavar="CASE")
    play.add_argument("--agent", required=True, choices=agents())
    play.add_argument("--stage", choices=stages(), default="gated", help="raw: without gates")
    play.add_argument("--all", action="store_true", help="every case")
    play.add_argument("--trials", type=_count, default=1, metavar="N", help="trials of each case")
    play.add_argument("-v", "--verbose", action="store_true", help="print a line for each trial")
    add_flags(play.add_argument_group("real agents", "claude, codex and endpoint; see README.md, 'Agents'"))
    proof = add("evidence", cmd_evidence)
    proof.add_argument(
        "--write-readme",
        action="store_true",
        help="write the table to README.md and each trial to evals/evidence.jsonl",
    )
    for sub in (play, proof):
        sub.add_argument("--jobs", type=_count, default=1, metavar="N", help="number of concurrent trials")
        sub.add_argument("--out", type=Path, metavar="DIR", help="the run's folder; an existing run in it is resumed")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
