"""What is written for an agent is read by a person as commands, on a screen and in `--json` alike."""

from __future__ import annotations

import pytest

from gpuwarden.core.errors import Refused
from gpuwarden.core.rules import Finding
from gpuwarden.interfaces.cli.words import COMMANDS, OPTIONS, in_commands, said
from gpuwarden.interfaces.results import CheckReply, RefusalReply, SubmitReply, error_reply


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ("Call check_job; it does not wait.", "Run `gpuwarden check j1`; it does not wait."),
        ("Call verify_checkpoint with this job_id.", "Run `gpuwarden verify j1`."),
        ("Look with check_job or list_instances, then call again.",
         "Look with `gpuwarden check j1` or `gpuwarden instances`, then run this again."),
        ("Set max_cost_usd, or lower timeout_s.", "Set --max-cost, or lower --timeout."),
        ("Call this again.", "Run this again."),
        ("To launch, submit the same arguments again with this receipt.",
         "To launch, run the same command again with --receipt r2."),
        ("Look it up with hub_repo_details or dataset_search, and use an id that exists.",
         "Look it up on huggingface.co, and use an id that exists."),
        ("Put it into `outputs`, or leave it out of `env`.", "Put it with --output, or leave it out of --env."),
        ("hub_repo_details shows more.", "huggingface.co shows more."),
        ("per_job_usd is the user's", "per_job_usd is the user's"),
    ],
)  # fmt: skip
def test_a_sentence(told: str, read: str) -> None:
    assert said(told, job_id="j1", receipt="r2") == read


def test_every_command_and_option_that_is_named_is_there() -> None:
    from gpuwarden.interfaces.cli.main import cli

    assert set(COMMANDS.values()) <= set(cli.commands)
    options = {name for p in cli.commands["submit"].params for name in p.opts}
    assert {o for o in OPTIONS.values() if o.startswith("--")} <= options


def test_only_our_own_sentences_are_worded_anew() -> None:
    reply = in_commands(
        CheckReply(job_id="j1", state="failed", why="no check_job", hint="Call check_job.", log="check_job")
    )
    assert (reply.why, reply.log, reply.hint) == ("no check_job", "check_job", "Run `gpuwarden check j1`.")
    assert in_commands(SubmitReply(receipt=None, hint="Call check_job.")).hint == "Run `gpuwarden check`."


def test_a_refusal_is_worded_with_its_findings() -> None:
    finding = Finding(rule="TD-COPY-001", severity="error", message="nothing is here", fix="Call pull_artifacts.")
    reply = in_commands(error_reply(Refused("no", "Call pull_artifacts.", [finding])))
    assert isinstance(reply, RefusalReply)
    assert (reply.hint, reply.findings[0].fix) == ("Run `gpuwarden pull`.",) * 2


def test_the_help_cuts_no_sentence_off() -> None:
    import click

    from gpuwarden.interfaces.cli.base import GroupedCommands
    from gpuwarden.interfaces.cli.main import cli

    shown = {name: command for name, command in cli.commands.items() if not command.hidden}
    context = click.Context(cli, info_name="gpuwarden", terminal_width=80)
    text = cli.get_help(context)
    assert "..." not in text.replace("t...", "").replace("r...", "").replace("[ARGS]...", "")
    assert all(f"  {name} " in text for name in shown), "every command stands under a heading"
    assert all(f"{heading}:" in text for heading in GroupedCommands.rooms.values())
    bare = [
        (name, option.opts) for name, command in shown.items()
        for option in command.params if isinstance(option, click.Option) and not option.help
    ]  # fmt: skip
    assert not bare, "every option says what it is for"
