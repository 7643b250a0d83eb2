#!/usr/bin/env bash
# Rewrite the lock files: full pins with hashes, no registry addresses. Run it when a pin has to move, then run the tests.
set -euo pipefail
cd "$(dirname "$0")"
for version in 0.5.17 0.5.23; do
    uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url \
        --override overrides.txt "sglang-$version.in" tools.in --output-file "sglang-$version.txt"
done
# SGLang alone, every supported version, one a line.
for version in 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23; do
    uv pip compile --quiet --python-version 3.11 --no-deps --generate-hashes --no-annotate --no-header \
        --no-emit-index-url - <<<"sglang==$version" | tr -d '\\\n' | tr -s ' '
    echo
done >sglang-wheels.txt
