#!/usr/bin/env bash
# Everything that continuous integration checks, in the order of its cost. Arguments go to pytest; --no-pytest leaves it out.
# The environment is made by scripts/setup.sh test.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
echo "== ruff";     ruff check
echo "== mypy";     mypy
echo "== imports";  lint-imports --no-logo
[ "${1:-}" != --no-pytest ] || exit 0
echo "== pytest"
# no_skips: where CI is set, a test that is skipped has failed.
export PYTHONPATH=tests/plugins
# Two processes, a file in one: most tests wait more than they work. Each has parts of its own. `-n 0` runs all in this one.
exec python -m pytest -p no_skips -n 2 --dist loadfile "$@"
