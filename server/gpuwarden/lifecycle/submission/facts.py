"""Gather the facts that the submit rules need about the script, the Hub, the price, the machine and the secrets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import anyio
import anyio.to_thread

from gpuwarden.backends.base import LimitedBackend, Optioned, ReadinessBackend
from gpuwarden.core.engine import EngineLimits
from gpuwarden.core.errors import AuthFailed, NotFound, NotSupported, WardenError
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.leaks import forms_of, spelled, spelled_in, spelled_in_script
from gpuwarden.core.models import Answer, JobSpec, Known, Quote, Unknown, digest
from gpuwarden.core.profile import Profile
from gpuwarden.core.readiness import Needs, Readiness
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.sanitize import SECRET_NAME, TOKEN
from gpuwarden.core.states import Job
from gpuwarden.core.store_address import StoreAddress
from gpuwarden.core.task_groups import first_error
from gpuwarden.hub.client import HubConfig
from gpuwarden.hub.facts import HubFacts
from gpuwarden.hub.preflight_facts import hub_facts
from gpuwarden.hub.scripts import fetch_script
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.bootstrap import pin_host_key, probe_host
from gpuwarden.lifecycle.execution.provisioning import wanted
from gpuwarden.lifecycle.offers import ask_offer
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.bundling import started_program
from gpuwarden.lifecycle.submission.inputs import Inputs, list_inputs
from gpuwarden.lifecycle.submission.local_modules import local_modules
from gpuwarden.lifecycle.submission.needs import local_files, needs_of_job
from gpuwarden.lifecycle.submission.rehearsing import rehearsed
from gpuwarden.providers.base import account_key_values, account_keys
from gpuwarden.rules.catalog import rules_of, unusable_rules
from gpuwarden.rules.facts import Leak, SubmitFacts
from gpuwarden.static_analysis.script import ScriptFacts, read_command, read_script
from gpuwarden.static_analysis.shipped_trainers import shipped_scripts

OWN_VARIABLES = "GPUWARDEN_"


async def gather(ctx: Context, spec: JobSpec, *, tasks: int = 1, elsewhere: SubmitFacts | None = None) -> SubmitFacts:
    """Gather the facts for the submit rules. `tasks` is the number of jobs like this one in one array.

    `elsewhere` contains the facts about the same job on another platform; its script and Hub facts are reused.
    """
    try:
        profile: Profile | None = ctx.profile(spec.platform)
    except NotFound:
        profile = None
    config = cache(partial(HubConfig.from_env, ctx.env))  # called only if needed, because it imports huggingface_hub
    inputs = await _inputs(ctx, spec, profile)
    program = started_program(ctx.cwd or Path.cwd(), spec.command, inputs.files)
    script: ScriptFacts | None
    if elsewhere is None:
        script, script_url = await read_spec(spec, config, [f.path for f in inputs.files], program)
    else:
        script, script_url = elsewhere.script, elsewhere.script_url
    replies = await _ask(ctx, spec, profile, lambda: hub_facts(script, spec, config, clock=ctx.clock), elsewhere)
    unusable = _unusable(ctx, profile, spec.platform)
    backend = None if profile is None or unusable else ctx.backend(profile.backend)
    root = ctx.cwd or Path.cwd()
    modules = await anyio.to_thread.run_sync(local_modules, root, spec, script, inputs.files)
    looked = await _platform_findings(ctx, profile, spec.platform)
    needs = needs_of_job(spec, script, inputs.files, modules)
    leaks = tuple(find_leaks(spec, ctx))
    return SubmitFacts(
        spec=spec,
        policy=ctx.policy,
        profile=profile,
        platforms=() if profile else tuple(ctx.platforms()),
        script=script,
        quote=replies.quote,
        unusable=unusable,
        leaks=leaks,
        unset_secrets=tuple(name for name in spec.secrets if not ctx.env.get(name)),
        account_secrets=_account_secrets(ctx, spec),
        unsold=replies.unsold,
        unusable_rules=unusable_rules(),
        hub=replies.hub,
        script_url=script_url,
        rehearsed=rehearsed(ctx, spec, {f.path: f.sha256 for f in inputs.files}) if spec.script is not None else None,
        proven_script=spec.script is not None and _is_proven(ctx, spec.script),
        looked=looked,
        readiness=None
        if profile is None or profile.meter.metered or leaks  # don't send leaked secrets
        else await _readiness(ctx, backend, spec, needs, looked),
        engine=None if leaks else await _limits(ctx, backend, spec, tasks),
        inputs=inputs.files,
        inputs_left_out=inputs.left_out,
        input_leaks=inputs.leaks,
        artifact_store=replies.store,
        local_modules=modules,
        files_here=local_files(root, spec, inputs.files) if backend is None or backend.takes_inputs else None,
        unset_store_keys=tuple(n for n in StoreAddress.parse(spec.artifact_store).secrets if not ctx.env.get(n))
        if spec.artifact_store
        else (),
        attempts=backend.attempts(spec) if isinstance(backend, Optioned) else 1,
    )


@dataclass
class _Replies:
    """The replies from the platform, the Hub and the artifact store."""

    quote: Answer[Quote] | None = None
    unsold: str = ""
    hub: HubFacts | None = None
    store: Answer[str] | None = None


async def _ask(
    ctx: Context,
    spec: JobSpec,
    profile: Profile | None,
    ask_hub: Callable[[], Awaitable[HubFacts | None]],
    elsewhere: SubmitFacts | None,
) -> _Replies:
    """Concurrently query the platform, the artifact store and, unless `elsewhere` contains its facts, the Hub."""
    found = _Replies(hub=elsewhere.hub if elsewhere else None)

    async def price() -> None:
        if profile is None or not profile.meter.metered:
            return
        try:
            offer = await ask_offer(ctx, spec.platform, wanted(spec))
        except WardenError as error:  # the platform has no provider; another rule reports this
            found.quote = Unknown(error.message)
            return
        found.quote = offer.quote
        if refusal := offer.refusal:
            found.unsold = f"{refusal.message}. {manual_text(refusal.next_steps)}".strip()

    async def hub() -> None:
        if elsewhere is None:
            found.hub = await ask_hub()

    async def store() -> None:
        if spec.artifact_store and profile is not None:
            found.store = await _store(ctx, profile, spec)

    with first_error():
        async with anyio.create_task_group() as group:
            for ask in (store, price, hub):
                group.start_soon(ask)
    return found


async def _limits(ctx: Context, backend: object, spec: JobSpec, tasks: int) -> Answer[EngineLimits] | None:
    """Return a platform engine's limits for a job; None if the platform has no engine."""
    if not isinstance(backend, LimitedBackend):
        return None
    try:
        place = await pin_host_key(ctx, ctx.owned_place(spec.platform))
        limits = await backend.limits(spec, place)
        return Known(limits.model_copy(update={"request": limits.request.model_copy(update={"tasks": tasks})}))
    except WardenError as error:
        return Unknown(f"{error.message}. {manual_text(error.next_steps)}".strip())


async def _readiness(
    ctx: Context, backend: object, spec: JobSpec, needs: Needs, looked: Sequence[Finding]
) -> Answer[Readiness] | None:
    """Return a job's needs that an existing machine does not meet; None if it has no needs or they can't be checked."""
    if not isinstance(backend, ReadinessBackend) or not needs.any:
        return None
    if silent := next((f for f in looked if f.blocks), None):  # a second connection would fail as well
        return Unknown(silent.message)
    try:
        place = await pin_host_key(ctx, ctx.owned_place(spec.platform))
        return Known(await backend.readiness(place, needs))
    except WardenError as error:
        return Unknown(error.message)


async def _inputs(ctx: Context, spec: JobSpec, profile: Profile | None) -> Inputs:
    """Return the job's input files. Raises NotSupported if the platform does not support inputs."""
    if not spec.inputs:
        return Inputs()
    if (
        profile is not None
        and not _unusable(ctx, profile, spec.platform)
        and not ctx.backend(profile.backend).takes_inputs
    ):
        raise NotSupported(
            f"{spec.platform} does not support inputs, because it can't copy files to a job; nothing was launched",
            "Upload the data to a dataset on the Hub and load it by its id, or include the data in the script.",
        )
    return await anyio.to_thread.run_sync(
        lambda: list_inputs(ctx.cwd or Path.cwd(), spec.inputs, _own_secrets(ctx), ctx.protected_paths)
    )


async def _store(ctx: Context, profile: Profile, spec: JobSpec) -> Answer[str]:
    """Return the reason why a job's artifact store is not usable; empty if it is usable, or if a rule refuses it
    without this check.
    """
    if not ctx.policy.artifact_stores.allows(spec.artifact_store):
        return Known("")  # PF-STORE-002 refuses this store, and no credentials are sent to it
    if not _unusable(ctx, profile, spec.platform) and not ctx.backend(profile.backend).seals:
        return Known(f"jobs on {spec.platform} run without gpuwarden's runner, which is needed to upload the outputs")
    try:
        given = StoreAddress.parse(spec.artifact_store).handed(ctx.env)
    except AuthFailed as error:
        return Known(error.message)
    if set(given.values()) & set(account_key_values(ctx.env).values()):
        return Known("its credentials belong to an account that rents machines, so no machine may receive them")
    from gpuwarden.lifecycle.artifacts.store_copy import reachable  # slow import

    return await reachable(ctx, spec.artifact_store)


async def read_spec(
    spec: JobSpec,
    config: Callable[[], HubConfig],
    files: Sequence[str] = (),
    program: tuple[str, tuple[str, ...]] | None = None,
) -> tuple[ScriptFacts, Answer[str]]:
    """Analyze the script from its text or its URL; for other commands, analyze their flags.

    `files` lists the inputs in the working folder. If the command starts an input, `program` is its text and arguments.
    """
    if spec.script is not None:
        # run in a thread, because a one-megabyte script takes seconds of CPU time
        return await anyio.to_thread.run_sync(read_script, spec.script, spec.env, spec.args, files), Known("")
    if program is not None:
        read = await anyio.to_thread.run_sync(read_script, program[0], spec.env, program[1], files)
        # Only uv installs the packages in a script's header; other commands use the machine's packages.
        return read if spec.command[0] == "uv" else replace(read, header=None, third_party=()), Known("")
    fetched = await fetch_script(spec.command, config())
    if isinstance(fetched, Known) and fetched.value.text:
        text = fetched.value.text
        return replace(read_script(text, spec.env, spec.command, files), fetched=digest(text)), Known("")
    trouble = fetched if isinstance(fetched, Unknown) else Known(fetched.value.trouble if fetched else "")
    return read_command(spec.command, spec.env), trouble


def _is_proven(ctx: Context, script: str) -> bool:
    """Return whether this exact script is a bundled trainer, or has succeeded before with any arguments."""
    alike = ctx.ledger.jobs_of_script(digest(script), Job.SUCCEEDED)
    if any(read_job(ctx.ledger, s.removeprefix("job/")).spec.script == script for s in alike):
        return True
    return script in shipped_scripts()


async def _platform_findings(ctx: Context, profile: Profile | None, platform: str) -> tuple[Finding, ...]:
    """Return the backend's findings about an owned machine, or the provider's findings about a rented platform's
    account.
    """
    if profile is None or _unusable(ctx, profile, platform):
        return ()
    known = {r.id for r in rules_of("submit")}
    look, fallback = (
        (ctx.provider(platform).check(), "PF-ACCT-001")
        if profile.meter.metered
        else (probe_host(ctx, ctx.owned_place(platform)), "PF-PLACE-001")
    )
    try:
        found = await look
    except WardenError as error:
        return (Finding(rule=fallback, severity=Severity.UNKNOWN, message=error.message, fix=error.next_steps),)
    return tuple(f if f.rule in known else f.model_copy(update={"rule": fallback}) for f in found)


def _unusable(ctx: Context, profile: Profile | None, platform: str) -> str:
    """Return the reason why this installation can't run jobs on a platform; empty if it can."""
    if profile is None:
        return ""
    try:
        ctx.backend(profile.backend)
        if profile.meter.metered:
            ctx.provider(platform)
    except (NotFound, NotSupported) as error:
        return f"{error.message}. {manual_text(error.next_steps)}".strip()
    return ""


def _account_secrets(ctx: Context, spec: JobSpec) -> tuple[str, ...]:
    """Return the named secrets that no job may have: account keys under any name, and gpuwarden's own variables."""
    keys, values = account_keys(), set(account_key_values(ctx.env).values())
    held = {name for name in spec.secrets if any(value in ctx.env.get(name, "") for value in values)}
    named = {name for name in spec.secrets if name.upper() in keys or name.upper().startswith(OWN_VARIABLES)}
    return tuple(name for name in spec.secrets if name in held | named)


def _own_secrets(ctx: Context) -> dict[str, str]:
    """Return this process's secrets by name, from its environment and from the key files that its environment names."""
    named = {name: value for name, value in ctx.env.items() if len(value) >= 8 and SECRET_NAME.search(name)}
    return account_key_values(ctx.env) | named


def find_leaks(spec: JobSpec, ctx: Context) -> list[Leak]:
    """Find the secrets in a spec: values of known secrets, text in a token format, and values whose name indicates a
    secret.
    """
    ours = [(name, form) for name, value in _own_secrets(ctx).items() for form in forms_of(value)]
    texts = [(f"command[{n}]", word) for n, word in enumerate(spec.command)]
    texts += [(f"args[{n}]", word) for n, word in enumerate(spec.args)]
    texts += [(f"env.{name}", value) for name, value in spec.env.items()]
    texts += [
        ("the script", spec.script or ""),
        ("name", spec.name),
        ("gpu", spec.gpu or ""),
        ("artifact_store", spec.artifact_store),
    ]
    texts += [("platform", spec.platform), *(("a name in env or secrets", name) for name in (*spec.env, *spec.secrets))]
    texts += [(f"options.{name}", json.dumps(value, ensure_ascii=False)) for name, value in spec.options.items()]
    texts += [(f"outputs[{n}]", path) for n, path in enumerate(spec.outputs)]
    texts += [(f"inputs[{n}]", path) for n, path in enumerate(spec.inputs)]
    leaks = []
    for where, text in texts:
        known = next((name for name, form in ours if form in text), None)
        if known:
            leaks.append(Leak(where, f"the value of {known}"))
        elif TOKEN.search(text):
            leaks.append(Leak(where, "a token or a private key"))
        elif where.startswith("env.") and SECRET_NAME.search(where[4:]) and len(text) >= 8:
            leaks.append(Leak(where, "a secret, judging by its name"))
    # Find values after a flag, a variable or a header whose name indicates a secret. Report at most one per field.
    named = [(f"command[{n}]", what) for n, what in spelled(spec.command)]
    named += [(f"args[{n}]", what) for n, what in spelled(spec.args)]
    named += [(f"env.{name}", what) for name, value in spec.env.items() for what in spelled_in(f"{name}={value}")]
    named += [("the script", what) for what in spelled_in_script(spec.script or "")]
    seen = {leak.where for leak in leaks}
    return leaks + [Leak(where, what) for where, what in dict(reversed(named)).items() if where not in seen]
