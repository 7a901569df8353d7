"""Facts from the Hub for a job that has not started: the repos that the job uses, and the token's account."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuwarden.core.models import Answer, Frozen, Known
from gpuwarden.core.repos import Config, Repo
from gpuwarden.static_analysis.estimate.shape import Shape
from gpuwarden.static_analysis.hub_references import RepoUse


class Account(Frozen):
    """A token's account, and the namespaces that the token can write to. `role` is read, write or fineGrained."""

    name: str
    role: str
    orgs: tuple[str, ...] = ()
    pays: bool | None = None

    def may_write(self, owner: str) -> bool | None:
        """Return whether the token can write to a namespace; None if unknown, as for a fine-grained token."""
        if self.role == "read" or owner not in {self.name, *self.orgs}:
            return False
        return None if self.role == "fineGrained" else True


@dataclass(frozen=True)
class RepoFact:
    """One use of a repo, and the repo as the Hub describes it. `shape` is set if the job trains the model."""

    use: RepoUse
    repo: Repo
    shape: Shape | None = None

    @property
    def parameters(self) -> int | None:
        """Return the number of parameters, as counted by the Hub or, for quantized weights, computed from `shape`."""
        counted, shape = self.repo.params, self.shape
        if shape is None:
            return counted
        return round(shape.parameters) if not counted or shape.bits else shape.held(counted)

    @property
    def where(self) -> str:
        """Return the repo's type and id and the line that uses it, for a message."""
        return f"{self.use.type} {self.use.id}" + (f" (line {self.use.line})" if self.use.line else "")

    @property
    def config(self) -> Config | None:
        """Return the config that the job reads: the one it specifies, the only one, the dataset card's default, or
        `default`.
        """
        configs = self.repo.structure.configs if self.repo.structure else ()
        if "config" in self.use.unknown and len(configs) > 1:
            return None
        name = self.use.config or (configs[0].name if len(configs) == 1 else self.repo.default_config or "default")
        return next((c for c in configs if c.name == name), None)


@dataclass(frozen=True)
class HubFacts:
    """The facts from the Hub. `job_token` is true if the job gets HF_TOKEN. `account` is None if not requested."""

    repos: tuple[RepoFact, ...] = ()
    account: Answer[Account] | None = None
    job_token: bool = False

    @property
    def data(self) -> tuple[RepoFact, ...]:
        """Return the datasets whose rows the job reads."""
        return tuple(f for f in self.repos if f.use.role == "data" and f.repo.exists)

    @property
    def model(self) -> RepoFact | None:
        """Return the model to train, which is passed to a trainer or loaded with a head; None unless there is exactly
        one.
        """
        models = [f for f in self.repos if f.use.type == "model" and f.use.trains and f.repo.exists]
        return models[0] if len({f.use.id for f in models}) == 1 else None

    @property
    def watched(self) -> dict[str, Any]:
        """Return the facts that a receipt depends on. If one of them changes, the job must pass the gate again."""
        repos = {f"{f.use.type} {f.use.id}": [f.repo.status, f.repo.sha] for f in self.repos}
        columns = {
            f"columns of {f.use.id}": sorted(f.config.column_names) for f in self.data if f.config and f.config.columns
        }
        account = {"account": self.account.value.name} if isinstance(self.account, Known) else {}
        return repos | columns | account
