#!/usr/bin/env bash
# Install the vendors' own clients, which tests run against the emulated platforms, each in an environment of its own.
# Usage: tools/install_clients.sh FOLDER. Tests find them through GPUWARDEN_CLIENTS=FOLDER.
set -euo pipefail

folder="${1:?usage: install_clients.sh FOLDER}"
mkdir -p "$folder"

venv() { # NAME PIP-ARGUMENTS...: packages into the environment FOLDER/NAME
  local name="$1"
  shift
  [ -x "$folder/$name/bin/python" ] || python3 -m venv "$folder/$name"
  "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

rented() { # Vast.ai and RunPod, with the provisioning code of dstack and SkyPilot but not what that doesn't import
  venv rented "vastai==1.9.1" "runpod==1.11.0"
  venv rented --no-deps "dstack==0.22.5" "gpuhunt==0.1.34" "skypilot==0.14.1"
}

huggingface() { # Hugging Face's client for JavaScript; its command line is among gpuwarden's own packages
  npm install --silent --no-audit --no-fund --prefix "$folder/huggingface" "@huggingface/hub@2.17.5"
}

prime() { # Prime Intellect's command line
  venv prime "prime==0.18.0"
}

lambda_cloud() { # a client generated from Lambda's description; it wants pydantic 1
  venv lambda "lambda-cloud-client==1.0.0"
}

rented
prime
lambda_cloud
huggingface
