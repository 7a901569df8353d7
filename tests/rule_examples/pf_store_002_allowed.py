from dataclasses import replace

from gpuwarden.core.policy import ArtifactStores, Policy
from gpuwarden.rules.facts import SubmitFacts
from rule_kit import submit


def kept(address: str, *stores: str) -> SubmitFacts:
    """Return the facts of a job that keeps its outputs at an address, with these stores allowed."""
    facts = submit()
    spec = facts.spec.model_copy(update={"artifact_store": address})
    return replace(facts, spec=spec, policy=Policy(artifact_stores=ArtifactStores(allowed=stores)))


FIRES = [
    kept("s3://other/x", "s3://runs"),
    kept("s3://runs/team-b", "s3://runs/team"),
    kept("s3://runs", "s3://runs/team"),
    kept("s3://owner/name", "hf://owner/name"),
    kept("hf://datasets/owner/name", "hf://owner/*"),
    kept("hf://other/name", "hf://owner/*", "s3://runs"),
]
SILENT = [
    submit(),
    kept("", "s3://runs"),
    kept("s3://anything/x"),
    kept("s3://runs/team/llama", "hf://owner/*", "s3://runs/team/"),
    kept("s3://runs/team", "s3://runs/team"),
    kept("hf://owner/name/path", "hf://owner/*"),
    kept("hf://datasets/owner/name", "hf://datasets/owner/*"),
    kept("s3://any/runs/a", "s3://*/runs"),
]
