#!/bin/sh
# Writes cuda.lock, cpu.lock and dev.lock from the *.in files. Run it (`make lock`) after changing one of those.
# cuda.lock is resolved first and constrains the others: one package has one version in all three.
set -eu
cd "$(dirname "$0")"
uv=../.venv/bin/uv

resolve() { # input, output, further options
    input=$1 output=$2
    shift 2
    {
        sed 's/^/# /' <<EOF
Written by requirements/lock.sh from $input: change that and run \`make lock\`.
Complete, pinned, for Linux and Python 3.11 to 3.13. Install it with \`make install\`: see requirements/README.md.
Without hashes on purpose: one pin of torch stands for several builds (a plain 2.13.0, or 2.13.0+cpu from a
local wheel or PyTorch's own index), so no list of hashes would be true on every machine.
EOF
        "$uv" pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
            --no-header --no-annotate "$@" "$input"
    } >"$output.new"
    mv "$output.new" "$output"
}

resolve cuda.in cuda.lock
resolve cpu.in cpu.lock --constraint cuda.lock --override cpu-overrides.in
resolve dev.in dev.lock --constraint cuda.lock --override dev-overrides.in
