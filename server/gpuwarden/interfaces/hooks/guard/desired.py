"""Check programs that stop or delete a resource through the value of an argument, not through a verb.

`kubectl patch` may suspend a job or scale it to zero, a taint may evict a node's pods, an Ansible module may set
a machine to absent, and `rclone sync` from an empty folder deletes everything in the target.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Final

from gpuwarden.interfaces.hooks.guard.files import REMOTE, Files

_PATCH_ENDS: Final = re.compile(
    r"\bsuspend\W{1,6}(?:value\W{1,6})?true\b|\btrue\W{1,6}path\W{1,6}(?:\w+/){0,3}suspend\b"
    r"|\b(?:replicas|parallelism)\W{1,6}(?:value\W{1,6})?0+(?![\d.])"
    r"|\b0+\W{1,6}path\W{1,6}(?:\w+/){0,3}(?:replicas|parallelism)\b"
    r"|\bactiveDeadlineSeconds\b|\bNoExecute\b|\bgpuwarden\.dev(?:/|~1)(?:job|attempt|token|run-folder)\b"
)
"""Match patches that stop an object or hide it from gpuwarden: a merge patch in JSON or YAML, or a list of operations
with `path` and `value` in either order.

A new `activeDeadlineSeconds` can stop a running object. If gpuwarden's label or annotations are removed from an object,
gpuwarden treats the object as deleted.
"""
_OURS: Final = re.compile(r"gpuwarden\.dev/(?:job|attempt|token|run-folder)(?:=.*|-)")
_CLOUD: Final = frozenset({"ec2", "asg", "s3", "bucket", "gcp", "gce", "azure", "droplet", "digitalocean", "ocean",
                           "hcloud", "openstack", "linode", "vultr", "scaleway", "oci", "proxmox", "vmware", "k8s",
                           "kubevirt", "eks", "ecs", "aks", "gke", "rds", "efs", "instance", "server", "vm", "volume",
                           "disk", "cloudformation"})  # fmt: skip
"""Words in the names of Ansible modules that manage machines or stored data."""
_GONE: Final = re.compile(
    r"\bstate[\"']?\s*[=:]\s*[\"']?(?:absent|terminated|stopped|deleted|deallocated|poweredoff)\b"
)
_PATH: Final = re.compile(r"\b(?:path|dest|name)[\"']?\s*[=:]\s*[\"']?([^\s\"',}]+)")
_NOTHING: Final = re.compile(r"(?i)empty|blank|nothing|^/tmp/")


def desired(name: str, args: Sequence[str], files: Files) -> str | None:
    """Return the reason to block a program because of the state that its arguments set."""
    if name in {"kubectl", "oc"} and not any(a.startswith("--dry-run") and a != "--dry-run=none" for a in args):
        for at, verb in enumerate(args):  # options and their values may precede the verb, so every word is checked
            if verb in _CLUSTER and _CLUSTER[verb](args[at + 1 :]):
                return f"this `{name} {verb}` deletes, suspends or hides a resource that gpuwarden guards"
    if name == "ansible" and not {"--check", "-C"} & set(args):
        return ansible_module(args, files)
    if name == "rclone" and "sync" in args and not {"-n", "--dry-run", "-i", "--interactive"} & set(args):
        return rclone_sync(args[args.index("sync") + 1 :], files)
    return None


def _hides(rest: Sequence[str]) -> bool:
    return any(map(_OURS.fullmatch, rest))


_CLUSTER: Final[dict[str, Callable[[Sequence[str]], bool]]] = {
    "patch": lambda rest: bool(_PATCH_ENDS.search(" ".join(rest))),
    "taint": lambda rest: any(word.endswith(":NoExecute") for word in rest),  # a trailing hyphen removes the taint
    "create": lambda rest: _option(rest, "", "--raw").partition("?")[0].rstrip("/").endswith("/eviction"),
    "scale": lambda rest: bool(re.fullmatch(r"[+-]?0[0xXbBoO_]*", _option(rest, "", "--replicas"))),
    "label": _hides,
    "annotate": _hides,
}


def ansible_module(args: Sequence[str], files: Files) -> str | None:
    """Return the reason to block an ad hoc call to an Ansible module."""
    module, given = _option(args, "-m", "--module-name"), _option(args, "-a", "--args")
    if not module or not _GONE.search(given):
        return None
    if set(re.split(r"[._]", module.lower())) & _CLOUD:
        return f"the Ansible module `{module[:60]}` stops or deletes a resource that gpuwarden guards"
    path = _PATH.search(given)
    return files.lost(path[1], deep=True) if path and module.rpartition(".")[2] == "file" else None


def rclone_sync(args: Sequence[str], files: Files) -> str | None:
    """Return the reason to block `rclone sync` if its source is empty or its target contains protected files."""
    ends = [a for a in args if not a.startswith("-")][:2]
    if len(ends) < 2:
        return None
    source, target = ends
    if not REMOTE.match(target):
        return files.removal(target)
    if REMOTE.match(source):
        return None
    entries: list[str] | None = None
    with suppress(OSError, ValueError):
        entries = os.listdir(files.path(source))  # noqa: PTH208 - only names are needed
    if entries == [] or (entries is None and _NOTHING.search(source)):
        return f"`rclone sync` from an empty folder deletes everything in {target[:80]}"
    return None


def _option(args: Sequence[str], short: str, long: str) -> str:
    """Return an option's value, or an empty string if the option is not given."""
    for word, following in pairwise([*args, ""]):
        if word in {short, long}:
            return following
        if word.startswith(f"{long}="):
            return word.partition("=")[2]
        if short and word.startswith(short) and not word.startswith("--"):
            return word[len(short) :]
    return ""
