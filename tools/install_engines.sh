#!/usr/bin/env bash
# Install the engines that tests start on loopback, each in an environment of its own: Ray, SkyPilot, dstack's server.
# Usage: tools/install_engines.sh FOLDER [ENGINE...]; without a name, all. Tests find FOLDER/ray/bin/ray through
# GPUWARDEN_RAY, FOLDER/sky/bin/python through GPUWARDEN_SKY_PYTHON, FOLDER/dstack/bin/dstack through GPUWARDEN_DSTACK.
set -euo pipefail

folder="${1:?usage: install_engines.sh FOLDER [ray|sky|dstack]...}"
shift
mkdir -p "$folder"

venv() { # NAME PIP-ARGUMENTS...: packages into the environment FOLDER/NAME
  local name="$1"
  shift
  [ -x "$folder/$name/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder/$name"
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || {
    rm -rf "${folder:?}/$name" # a part of it would look like all of it
    return 1
  }
}

[ $# -gt 0 ] || set -- ray sky dstack
for engine in "$@"; do
  case "$engine" in
    ray) venv ray "ray[default]==2.60.0" ;;
    sky) venv sky "skypilot==0.14.1" "python-hostlist" "uv" ;; # these two for clusters on Slurm
    dstack) venv dstack "dstack[server]==0.22.5" ;;
    *) echo "unknown engine: $engine" >&2 && exit 2 ;;
  esac
done
