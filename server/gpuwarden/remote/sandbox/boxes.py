"""Select the files that a job may access: system programs, its interpreter, the GPUs, and paths from the policy."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from gpuwarden.remote.sandbox.words import Box, Kind, Sandbox, System, below

INIT: Final = Path(__file__).with_name("first.py")

# The files in /etc that programs need. The rest of the folder is hidden, because a sandboxed job that runs as root
# could read /etc/shadow and /etc/ssl/private.
_ETC = (
    "ld.so.cache ld.so.conf ld.so.conf.d passwd group nsswitch.conf hosts host.conf protocols services localtime "
    "timezone ssl/certs ssl/cert.pem ssl/ca-bundle.pem ssl/openssl.cnf pki/ca-trust pki/tls/certs pki/tls/cert.pem "
    "pki/tls/openssl.cnf ca-certificates ca-certificates.conf crypto-policies alternatives mime.types os-release "
    "lsb-release debian_version locale.alias locale.conf default/locale OpenCL vulkan nvidia nvidia-container-runtime "
    "fonts bash.bashrc profile inputrc terminfo python3 magic gai.conf"
)
_SYS = ("bus", "class", "dev", "devices", "module", "fs/cgroup")
_ROOT = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_WHOLE = ("/usr", "/nix/store", "/opt/cuda", "/opt/rocm", "/opt/nvidia", "/opt/conda")
_GPUS = ("/dev/nvidia*", "/dev/nvidia-caps", "/dev/dri", "/dev/kfd", "/dev/dxg", "/dev/accel*")


@cache
def system() -> System:
    """Return the system paths on this machine that every job needs."""
    links, read = [], [path for path in _WHOLE if os.path.isdir(path)]
    for name in _ROOT:
        path = Path("/") / name
        if path.is_symlink():
            links.append((str(path.readlink()), str(path)))
        elif path.is_dir():
            read.append(str(path))
    read += [f"/etc/{name}" for name in _ETC.split() if os.path.exists(f"/etc/{name}")]
    read += [f"/sys/{name}" for name in _SYS if os.path.isdir(f"/sys/{name}")]
    return System(tuple(links), tuple(read))


def gpus() -> tuple[str, ...]:
    """Return the GPUs' device files."""
    return tuple(sorted(path for pattern in _GPUS for path in glob.glob(pattern)))


@dataclass(frozen=True)
class Allowed:
    """The policy's permissions for jobs on this machine, and the paths that are hidden from all jobs."""

    network: bool = False
    caches: bool = True
    paths: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def box_for(
    run_dir: str, env: Mapping[str, str], allowed: Allowed, programs: Sequence[str], machine: Sequence[str] = ()
) -> Box:
    """Return the box for a job that is started with `env`.

    `programs` lists the programs that run the job; `machine` lists a rehearsal's folders. If an earlier job may have
    created a program, the program's environment is not added, because it could contain links to files outside the
    job's box.
    """
    run_dir = os.path.realpath(run_dir)
    hidden, write = (tuple(real(path) for path in paths) for paths in (allowed.hidden, allowed.paths))
    made_by_jobs = (os.path.dirname(run_dir), *hidden, *write, *map(real, machine))
    home = os.path.realpath(env.get("HOME") or "/")
    homeless = home == "/" or below(home, (*system().read, "/proc", "/dev"))
    # The libraries and certificates that the environment variables refer to.
    named = [env.get(name, "") for name in ("CUDA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR")]
    named += env.get("LD_LIBRARY_PATH", "").split(":")
    trusted = [p for p in programs if not any(below(real(at), made_by_jobs) for at in (p, os.path.dirname(p)))]
    read = list(interpreters(sys.executable))
    read += [path for path in interpreters(*trusted) if not below(real(path), hidden)]
    read += [os.path.realpath(path) for path in named if path.startswith("/") and os.path.exists(path) and path != "/"]
    if allowed.caches:  # the Hub cache, but not the token, which is in the parent folder
        hub = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or env.get('HOME', '') + '/.cache'}/huggingface"
        read += [os.path.realpath(f"{hub}/hub")] if hub.startswith("/") and os.path.isdir(f"{hub}/hub") else []
    if allowed.network:  # the resolver's configuration, which is often a link to a file under /run
        resolver = dict.fromkeys(("/etc/resolv.conf", os.path.realpath("/etc/resolv.conf")))
        read += [path for path in resolver if os.path.exists(path)]
    return Box(
        run_dir,
        f"{run_dir}/home" if homeless else home,
        read=tuple(dict.fromkeys(read)),
        write=write,
        hidden=hidden,
        machine=tuple(map(real, machine)),
        devices=gpus(),
        network=allowed.network,
    )


def real(path: str) -> str:
    """Return an absolute path without symbolic links; `~` expands to the user's home folder."""
    return os.path.realpath(os.path.expanduser(path))


def environment(sandbox: Sandbox, box: Box) -> dict[str, str]:
    """Return the variables to add to a job's environment: private folders and, without a network, offline mode."""
    mounts = sandbox.kind is Kind.BUBBLEWRAP
    own = {"HOME": box.home, "TMPDIR": "/tmp"} if mounts else {"HOME": box.own_home, "TMPDIR": box.own_home}  # noqa: S108
    return own if box.network else {**own, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def prepare(box: Box) -> None:
    """Create the paths that the sandbox mounts: the job's working folder, its home, and its metrics file."""
    for folder in (box.work, box.own_home):
        Path(folder).mkdir(mode=0o700, exist_ok=True)
    os.close(os.open(box.metrics, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))


def init_source() -> tuple[str, bytes]:
    """Return the file name and the content of the first program that runs in the sandbox."""
    content = INIT.read_bytes()
    return f"sandbox-{hashlib.sha256(content).hexdigest()[:12]}.py", content


# ------------------------------------------------------------------------------------------------------- interpreters


def interpreters(*programs: str) -> tuple[str, ...]:
    """Return the folders that Python programs need: those of their environments and of their base interpreters."""
    found = dict.fromkeys(path for program in programs for path in _prefixes(program))
    return tuple(path for path in found if not below(path, ("/usr", "/bin", "/lib")))


def _prefixes(program: str) -> Iterator[str]:
    """Yield the folders of a program's Python or conda environment, or the program itself if it has none."""
    for path in dict.fromkeys((program, os.path.realpath(program))):
        prefix = os.path.dirname(os.path.dirname(path))
        marks = (Path(prefix, "pyvenv.cfg"), Path(prefix, "conda-meta"), *Path(prefix).glob("lib/python3.*/os.py"))
        in_bin = os.path.basename(os.path.dirname(path)) == "bin" and prefix != "/"
        if in_bin and any(mark.exists() for mark in marks):
            yield from _parts(prefix)
            yield from _base_of(prefix)
        elif os.path.isfile(path) and os.access(path, os.X_OK):
            yield path


def _base_of(prefix: str) -> Iterator[str]:
    """Yield the folders of an environment's base Python."""
    try:
        lines = Path(prefix, "pyvenv.cfg").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    home = next((line.partition("=")[2].strip() for line in lines if line.partition("=")[0].strip() == "home"), "")
    base = os.path.dirname(home)
    if home.startswith("/") and not below(home, ("/usr",)) and any(Path(base).glob("lib*/py*3.*/os.py")):
        yield from (p for top in dict.fromkeys((base, os.path.realpath(base))) for p in _parts(top))


def _parts(prefix: str) -> Iterator[str]:
    """Yield the folders and files of an environment.

    Other files are not included, because a project folder may also be an environment. Links to paths outside the
    environment are not included either.
    """
    names = ("bin", "lib", "lib64", "include", "share", "libexec", "ssl", "pyvenv.cfg", "conda-meta")
    top = (os.path.realpath(prefix),)
    yield from (p for name in names if os.path.exists(p := f"{prefix}/{name}") and below(os.path.realpath(p), top))
