"""Build kube-apiserver and kube-controller-manager once, from Debian's source package, and print their folder.

    python tools/kube_apiserver.py

The programs are not available in any registry that this project uses. Debian 12 provides their complete source
(Kubernetes 1.20, which is unsupported: use it only for tests on loopback) and a Go version that builds it offline, in
about ten minutes. The folder is in ~/.cache, and later calls reuse it. The machine's package lists are not changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path.home() / ".cache/gpuwarden-kube"
PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager")
NEEDED: Final = {"go": "golang-go", "dpkg-source": "dpkg-dev", "etcd": "etcd-server", "openssl": "openssl"}
ROOT: Final = "k8s.io/kubernetes"
GENERATED: Final = f"{ROOT}/pkg/generated/openapi"
OTHERS: Final = re.compile("vendor/k8s.io/(code-generator|sample-apiserver|kube-openapi|kube-scheduler)/")


def main() -> None:
    """Build the missing programs; progress goes to stderr."""
    target = FOLDER / "bin"
    missing = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if missing:
        raise SystemExit(f"Install first: apt-get install --no-install-recommends {' '.join(missing)}")
    if not all((target / program).exists() for program in PROGRAMS):
        target.mkdir(parents=True, exist_ok=True)
        build(fetch(FOLDER), target)
    print(target)


def fetch(folder: Path) -> Path:
    """Return the folder with the unpacked source, downloaded from this machine's package sources."""
    found = sorted(path for path in folder.glob("kubernetes-*") if path.is_dir())
    if found:
        return found[-1]
    (folder / "sources").mkdir(exist_ok=True)
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    system = Path("/etc/apt")
    for file in (system / "sources.list", *system.glob("sources.list.d/*")):
        if file.suffix in {".list", ".sources"} and file.exists():
            text = re.sub(
                r"(?m)^deb(?= )|^(Types:).*", lambda m: f"{m[1]} deb-src" if m[1] else "deb-src", file.read_text()
            )
            (folder / "sources" / file.name).write_text(text)
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": folder / "sources",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder,
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    run([*apt, "update"], folder)
    run([*apt, "source", "kubernetes"], folder)
    return fetch(folder)


def build(source: Path, target: Path) -> None:
    """Build the programs in a Go workspace inside the folder. This works offline, because the modules are vendored."""
    workspace = FOLDER / "go"
    link = workspace / "src" / ROOT
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(source)
    env = {
        "GOPATH": workspace,
        "GOCACHE": FOLDER / "gocache",
        "GO111MODULE": "off",
        "GOPROXY": "off",
        "CGO_ENABLED": "0",
    }
    go = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o"]
    run([*go, target / "openapi-gen", f"{ROOT}/vendor/k8s.io/kube-openapi/cmd/openapi-gen"], link, env)
    described = {
        str(Path(folder).relative_to(source))
        for top in ("pkg", "vendor/k8s.io", "plugin", "cmd")
        # vendor/k8s.io contains symbolic links to staging
        for folder, _, names in os.walk(source / top, followlinks=True)
        if "testdata" not in folder
        and not OTHERS.search(f"{folder}/")
        and any(name.endswith(".go") and b"+k8s:openapi-gen=" in Path(folder, name).read_bytes() for name in names)
    }
    # Generate the OpenAPI description of the API server's types, as Debian's package build does.
    run(
        [
            target / "openapi-gen", "--logtostderr", "-i", ",".join(f"{ROOT}/{name}" for name in sorted(described)),
            "-p", GENERATED, "-O", "zz_generated.openapi", "-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt",
            "-r", FOLDER / "violations", "--output-base", workspace / "src",
        ],
        link, env,
    )  # fmt: skip
    for program in PROGRAMS:
        run([*go, target / program, f"{ROOT}/cmd/{program}"], link, env)


def run(command: list[str | Path], folder: Path, env: dict[str, str | Path] | None = None) -> None:
    """Run a command with its output on stderr. Raises SystemExit if it fails."""
    given = {**os.environ, "PWD": str(folder), **{name: str(value) for name, value in (env or {}).items()}}
    if subprocess.run(command, cwd=folder, env=given, stdout=sys.stderr, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))[:300]}")


if __name__ == "__main__":
    main()
