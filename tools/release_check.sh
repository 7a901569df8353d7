#!/usr/bin/env bash
# Check what a release would publish, without an account: build it twice and compare, check the metadata, install the
# wheel in an empty environment and run the demo there. dist/ then has the two archives, and build/sbom.cdx.json lists
# the packages that the wheel installs. Run it with `make release-check`.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="$PWD/.venv/bin"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)" # the date of all files in the archives
export SOURCE_DATE_EPOCH

for build in first second; do
  "$bin/python" -m hatchling build --target sdist --target wheel --directory "$work/$build"
done
diff --recursive "$work/first" "$work/second"
"$bin/twine" check --strict "$work"/first/*

"$bin/python" -m venv "$work/empty"
"$work/empty/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
  "$work"/first/*.whl
"$bin/cyclonedx-py" environment "$work/empty" --output-format JSON --output-file "$work/sbom.cdx.json"
(cd "$work" && env -i HOME="$work/home" PATH="$PATH" "$work/empty/bin/gpuwarden" demo </dev/null)

rm -rf dist
mkdir -p build
mv "$work/first" dist
mv "$work/sbom.cdx.json" build/
ls -l dist build/sbom.cdx.json
