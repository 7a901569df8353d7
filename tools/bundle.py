"""Build the MCPB bundle, which desktop clients install, into FOLDER. Builds of the same checkout are identical.

    python tools/bundle.py FOLDER

The format: https://github.com/modelcontextprotocol/mcpb/blob/main/MANIFEST.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from gpuwarden.interfaces.launch import FROZEN, OWN_ENVIRONMENT, serve
from gpuwarden.interfaces.manifests import ROOT, RUNTIME, TITLE
from gpuwarden.interfaces.variables import SYSTEM, variables

START = "start.py"
# If a field is empty, clients set its variable to an empty string or to the unexpanded placeholder.
PROGRAM = f"""import os
import sys

from gpuwarden.__main__ import main

for name, value in list(os.environ.items()):
    if not value or value.startswith("${{user_config."):
        del os.environ[name]
sys.argv[1:] = {serve("mcpb")[1:]}
main()
"""


def manifest() -> dict[str, Any]:
    """Return the bundle's manifest. Every variable that the server reads is a field of the client's form."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    fields = [v for v in variables() if v.name not in SYSTEM]
    start = ["run", "--project", "${__dirname}", *FROZEN, "python", f"${{__dirname}}/{START}"]
    env = OWN_ENVIRONMENT | {v.name: f"${{user_config.{v.name}}}" for v in fields}
    return {
        "manifest_version": "0.4",
        "name": project["name"],
        "display_name": TITLE,
        "version": project["version"],
        "description": project["description"],
        "author": {"name": f"the {project['name']} authors"},
        "license": project["license"],
        "homepage": project["urls"]["Homepage"],
        "documentation": project["urls"]["Documentation"],
        "server": {
            "type": "uv",
            "entry_point": START,
            "mcp_config": {"command": "uv", "args": start, "env": env},
        },
        "tools_generated": True,
        "compatibility": {"platforms": ["darwin", "linux"], "runtimes": {"python": project["requires-python"]}},
        "user_config": {
            v.name: {
                "type": "string",
                "title": v.name,
                "description": v.meaning,
                "default": "",
                "required": False,
                "sensitive": v.secret,
            }
            for v in fields
        },
    }


def main(folder: Path) -> Path:
    """Write the bundle, which contains the runtime files that git tracks, and return its path."""
    listed = subprocess.run(["git", "ls-files", "-z", *RUNTIME], cwd=ROOT, capture_output=True, check=True).stdout
    files = {name: (ROOT / name).read_bytes() for name in listed.decode().split("\0") if name}
    about = manifest()
    files |= {START: PROGRAM.encode(), "manifest.json": json.dumps(about, indent=2).encode() + b"\n"}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{about['name']}-{about['version']}.mcpb"
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in sorted(files.items()):
            info = zipfile.ZipInfo(name)  # its date is the same in every build
            info.external_attr = 0o100644 << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return target


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
