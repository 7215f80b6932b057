#!/usr/bin/env bash
# Installs the newest versions that pyproject.toml allows and writes constraints.txt.
# Run the tests afterwards, and commit both or neither.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -m venv --clear .venv
WHEELS="$(.venv/bin/python -m tools.wheelhouse)"
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet --find-links "$WHEELS" --editable '.[dev,journald,dashboards]'
{
    sed -n '/^#/p' constraints.txt
    .venv/bin/python -m pip freeze --exclude-editable | sed 's# @ file://.*llama_cpp_python-\([^-]*\)-.*#==\1#' | grep -v '^pip=='
} >constraints.txt.new
mv constraints.txt.new constraints.txt
