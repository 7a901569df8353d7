"""A temporary Slurm cluster on loopback: a separate munge key, one controller, two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from doors import TRAIN
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import JobSpec, Place
from gpuwarden.core.policy import Local, Policy
from gpuwarden.data import data_dir
from gpuwarden.lifecycle.context import Context
from lifecycle_kit import open_house
from real_parts import need
from sshd import free_port
from waiting import eventually

CONFIG = """\
ClusterName=probe
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{accounting}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
KillWait=5
MinJobAge=3600
MessageTimeout=5
SlurmctldTimeout=300
SlurmdTimeout=300
InactiveLimit=0
JobRequeue=1
MaxArraySize=101
EnforcePartLimits=NO
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port={range} CPUs=4 RealMemory=4000
PartitionName=low Nodes={names} Default=YES MaxTime=2:00:00 State=UP PriorityTier=1 GraceTime=10
PartitionName=high Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=closed Nodes={names} MaxTime=INFINITE State=DOWN
"""
NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge/munge.sock
AccountingStorageEnforce=associations,limits,qos"""
DATABASE = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
CommunicationParameters=NoInAddrAny
"""
COMMANDS = ("squeue", "sbatch", "scancel", "scontrol", "sacct", "sinfo", "sacctmgr")


ACCOUNTS = (
    "add cluster probe",
    "add account science Description=x Organization=x GrpTRES=node=1 GrpTRESMins=cpu=100000",
    "add account nlp parent=science Description=x Organization=x GrpSubmitJobs=40 GrpWall=30:00:00",
    "add account vision Description=x Organization=x",
    "add qos short MaxWall=00:10:00 MaxSubmitJobsPerUser=3 MaxTRESPerJob=cpu=3",
    "add qos none MaxJobsPerUser=0",
    "add qos spent GrpWall=00:12:00",
    "add user root account=nlp QOS=normal,short,none,spent DefaultQOS=normal",
    "modify user root set DefaultAccount=nlp",
    "modify user root where account=nlp set MaxSubmitJobs=6 MaxJobs=2 MaxWall=01:00:00 MaxTRES=cpu=4",
    "modify user root where account=nlp set MaxTRESMins=cpu=200",
)
"""The accounts and their limits. All values differ, so that a test can identify the limit that was read."""


@dataclass
class Cluster:
    """One cluster. `shims` is a folder on the PATH before Slurm's commands, in which a test may put replacements."""

    folder: Path
    names: tuple[str, ...] = ("n0", "n1")
    shims: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.shims = self.folder / "bin"
        self.log = self.folder / "asked"

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.shims), "/usr/local/sbin", "/usr/sbin", os.environ.get("PATH", "")))
        return {"PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> Cluster:
        for name in ("slurmctld", "slurmd", "munged", *COMMANDS):
            need(name, shutil.which(name, path=self.env["PATH"]) is not None)
        need("root, which Slurm's daemons run as here", os.geteuid() == 0)
        munge = self.folder / "munge"
        spools = [self.folder / f"spool-{name}" for name in self.names]
        for path in (munge, self.folder / "state", *spools, self.shims):
            path.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        munge.chmod(0o711)
        key = munge / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        ports = _ports()
        host, names = socket.gethostname().split(".")[0], ",".join(self.names)
        listen = f"[{ports[1]}-{ports[2]}]" if len(self.names) == 2 else str(ports[1])
        text = CONFIG.format(
            host=host, user="root", folder=self.folder, ports=ports, names=names, range=listen,
            accounting=self.accounting(),
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        self._run(
            "munged", f"--key-file={key}", f"--socket={munge}/munge.sock", f"--pid-file={self.folder}/munged.pid",
            f"--log-file={munge}/munged.log", f"--seed-file={munge}/munged.seed", "--num-threads=2", "--force",
        )  # fmt: skip
        self.keep_accounts()
        conf = str(self.folder / "slurm.conf")
        self._run("slurmctld", "-f", conf, "-c")
        for node in self.names:
            self._run("slurmd", "-f", conf, "-N", node)
        idle = ("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D")
        eventually(lambda: self._run(*idle).strip() == str(len(self.names)), every=0.1)
        self._count()
        return self

    def accounting(self) -> str:
        """Return the configuration's accounting lines."""
        return NO_ACCOUNTING

    def keep_accounts(self) -> None:
        """Start the accounting daemons, before the controller connects to them."""

    def stop(self) -> None:
        """End the daemons and all processes on the nodes."""
        with suppress(AssertionError, OSError, subprocess.SubprocessError):
            self._run("scancel", "--signal=KILL", "--full", "-u", "root")
            self._run("scancel", "-u", "root")
        for name in (*(f"slurmd-{name}" for name in self.names), "slurmctld", "munged"):
            with suppress(OSError, ValueError):
                pid = int((self.folder / f"{name}.pid").read_text())
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)

    def run(self, *argv: str) -> str:
        """Run a Slurm command."""
        return self._run(*argv)

    def _run(self, *argv: str) -> str:
        env = {**os.environ, **self.env}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout} {done.stderr}"
        return done.stdout

    def _count(self) -> None:
        """Put a script before the real `squeue` that counts the calls."""
        real = shutil.which("squeue", path=os.environ.get("PATH"))
        self.shim("squeue", f'echo "$$" >> {self.log}\nexec {real} "$@"')

    def shim(self, name: str, text: str) -> None:
        """Replace one of Slurm's commands."""
        path = self.shims / name
        part = self.shims / f".{name}"
        part.write_text(f"#!/bin/sh\n{text}\n")
        part.chmod(0o755)
        part.replace(path)

    def unshim(self, *names: str) -> None:
        """Remove replacements of commands."""
        for name in names:
            (self.shims / name).unlink(missing_ok=True)
        self._count()

    def pid(self) -> int:
        return int((self.folder / "slurmctld.pid").read_text())

    def jobs(self, stem: str) -> list[str]:
        """Return the ids of the jobs whose names start with `stem`."""
        rows = self._run("squeue", "-h", "-t", "all", "-o", "%i %j").splitlines()
        return [row.split()[0] for row in rows if row.split()[1].startswith(stem)]


@dataclass
class Accounted(Cluster):
    """A cluster with accounting: slurmdbd over a MariaDB on a Unix socket, and the accounts of `ACCOUNTS`."""

    port: int = field(default_factory=free_port)
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def accounting(self) -> str:
        return ACCOUNTING.format(port=self.port, folder=self.folder)

    def keep_accounts(self) -> None:
        for name in ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb-admin"):
            need(name, shutil.which(name, path=self.env["PATH"]) is not None)
        data, sock = f"--datadir={self.folder}/db", f"--socket={self.folder}/db.sock"
        own = ("--no-defaults", "--user=root", data)
        self._run("mariadb-install-db", *own, "--auth-root-authentication-method=normal", "--skip-test-db")
        self._daemon(
            "mariadbd", *own, sock, "--skip-networking", "--innodb-buffer-pool-size=16M", "--performance-schema=OFF",
            "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self._until("mariadb-admin", "--no-defaults", sock, "ping")
        text = DATABASE.format(folder=self.folder, port=self.port, host=socket.gethostname().split(".")[0])
        path = self.folder / "slurmdbd.conf"
        path.write_text(text)
        path.chmod(0o600)
        self.serve_accounts()
        for words in ACCOUNTS:
            self._run("sacctmgr", "-i", *words.split())

    def serve_accounts(self) -> None:
        """Start slurmdbd."""
        self._daemon("slurmdbd", "-D")
        self._until("sacctmgr", "-n", "show", "cluster")

    def _daemon(self, *argv: str) -> None:
        env = {**os.environ, **self.env, "MYSQL_UNIX_PORT": f"{self.folder}/db.sock"}
        with (self.folder / f"{argv[0]}.out").open("ab") as out:
            path = shutil.which(argv[0], path=self.env["PATH"])
            self.daemons.append(subprocess.Popen([str(path), *argv[1:]], env=env, stdout=out, stderr=out))

    def _until(self, *argv: str) -> None:
        """Poll until a daemon answers; fail if it has ended."""
        env = {**os.environ, **self.env}

        def answered() -> bool:
            said = "".join(path.read_text(errors="replace") for path in self.folder.glob("*.out"))
            assert all(daemon.poll() is None for daemon in self.daemons), said
            return not subprocess.run(argv, env=env, capture_output=True, timeout=300, check=False).returncode

        eventually(answered, 60, every=0.1)  # MariaDB creates its first tables

    @contextmanager
    def without_accounts(self) -> Iterator[None]:
        """Stop slurmdbd temporarily: the controller continues with its cached data."""
        self.daemons[-1].terminate()
        self.daemons.pop().wait(60)
        try:
            yield
        finally:
            self.serve_accounts()

    def stop(self) -> None:
        super().stop()
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(60)


def _ports() -> list[int]:
    """Return a free port and two consecutive free ports."""
    for _ in range(100):
        first = free_port()
        with socket.socket() as sock, suppress(OSError, OverflowError):
            sock.bind(("127.0.0.1", first + 1))
            return [free_port(), first, first + 1]
    raise AssertionError("no two free ports in a row")


class SlurmEngine:
    """The cluster as the engine of the backend contract."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def job(self, text: str, **fields: object) -> JobSpec:
        given = {"platform": "slurm/local", "command": ["sh", "-c", text], "timeout_s": 600}
        return JobSpec.model_validate({**given, **fields})

    @contextmanager
    def _shimmed(self, texts: Mapping[str, str]) -> Iterator[None]:
        for name, text in texts.items():
            self.cluster.shim(name, text)
        try:
            yield
        finally:
            self.cluster.unshim(*texts)

    def cut(self) -> object:
        """Lose the reply after the controller has accepted a job."""
        real = shutil.which("sbatch")
        late = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
        return self._shimmed({"sbatch": f'{real} "$@" >/dev/null; {late}'})

    @contextmanager
    def down(self) -> Iterator[None]:
        """Suspend the controller: its port stays open, but no process answers."""
        os.kill(self.cluster.pid(), signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.cluster.pid(), signal.SIGCONT)

    def odd(self) -> object:
        return self._shimmed(dict.fromkeys(COMMANDS, 'echo \'{"welcome": "to the cluster"}\''))

    def array_limit(self) -> int:
        return 101

    def questions(self) -> int:
        return len(self.cluster.log.read_text().splitlines()) if self.cluster.log.exists() else 0


@pytest.fixture(scope="session", name="clusters")
def clusters_fixture() -> Iterator[dict[str, Cluster]]:
    """Keep each module's cluster while tests from several modules alternate, because starting one is slow."""
    clusters: dict[str, Cluster] = {}
    yield clusters
    for cluster in clusters.values():
        cluster.stop()


@pytest.fixture(scope="module", name="cluster")
def cluster_fixture(
    request: pytest.FixtureRequest, clusters: dict[str, Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    """One cluster for the tests of a module."""
    module = request.node.nodeid
    if module not in clusters:
        cluster = Cluster(tmp_path_factory.mktemp("slurm"))
        try:
            clusters[module] = cluster.start()
        except BaseException:
            cluster.stop()
            raise
    return clusters[module]


@pytest.fixture(scope="module", name="accounted")
def accounted_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accounted]:
    """One cluster with accounting for the tests of a module."""
    cluster = Accounted(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def place_of(cluster: Cluster, folder: Path, host: str | None = None) -> Place:
    """Return a place on the cluster whose run folders are below `folder`."""
    return Place(platform=f"slurm/{host or 'local'}", host=host, run_root=str(folder / "runs"), env=cluster.env)


def own_profiles(folder: Path) -> Path:
    """Write a Slurm profile whose run folders are below `folder`; return the profile's folder."""
    profiles = folder / "profiles"
    profiles.mkdir()
    text = (data_dir("profiles") / "slurm.md").read_text("utf-8")
    runs = "run_root: ~/.local/share/gpuwarden/runs"
    assert runs in text
    text = text.replace(runs, f"run_root: {folder}/far").replace("path: /tmp", "path: /var/tmp")  # tests are in /tmp
    (profiles / "slurm.md").write_text(text, "utf-8")
    return profiles


def login_node(folder: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Open a state folder on the login node, whose user lets jobs run there without a sandbox."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    ctx = open_house(folder / "home", SystemClock(), policy=Policy(local=Local(unsandboxed=True)))
    ctx.own_profiles = own_profiles(folder)
    return ctx


def train(**changes: object) -> JobSpec:
    """Return a job that trains for some seconds and saves."""
    given = {"platform": "slurm/local", "script": TRAIN, "outputs": ("out",), "timeout_s": 600, "name": "tiny"}
    return JobSpec.model_validate({**given, **changes})
