#!/usr/bin/env bash
# Set up (once), serve a model without speculation and in every way to verify drafts, one server after the other at equal
# flags and equal memory, and measure each with SGLang's bench_serving.
#
#   bash launch/bench_serving.sh --shape nemotron-nano-9b-v2          a real model's sizes, random weights (GPU)
#   bash launch/bench_serving.sh --shape qwen3-next-80b --tp 2 --concurrency 16,64,256
#   bash launch/bench_serving.sh --model-path PATH --draft chain4,tree8 --out r.json
#   bash launch/bench_serving.sh --model-path launch/models/tiny-gdn --device cpu --quick
#   bash launch/bench_serving.sh --version 0.5.17 ...                 another SGLang version
#   bash launch/bench_serving.sh --python /usr/bin/python3 ...        this interpreter, which has SGLang: no set-up
#   bash launch/bench_serving.sh --help                               all flags
#
# A call that was stopped goes on where it was: finished loads are kept in the JSON.
set -uo pipefail
. "$(dirname "$0")/setup.sh"

version="${SGLANG_VERSIONS[0]}"
PYTHON="${DEMO_PYTHON:-}"
arguments=()
printf -v BENCH_COMMAND ' %q' bash launch/bench_serving.sh "$@"
export BENCH_COMMAND="${BENCH_COMMAND# }"
while [ $# -gt 0 ]; do
    case "$1" in
        --version) [ $# -gt 1 ] || die "--version needs a value: ${SGLANG_VERSIONS[*]}"; version="$2"; shift 2 ;;
        --version=*) version="${1#*=}"; shift ;;
        --python) [ $# -gt 1 ] || die "--python needs the path of an interpreter"; PYTHON="$2"; shift 2 ;;
        --python=*) PYTHON="${1#*=}"; shift ;;
        *) arguments+=("$1"); shift ;;
    esac
done

# Wrong flags are told before nine gigabytes are installed.
checker="${PYTHON:-$(find_python)}" || die "Python 3.11, 3.12 or 3.13 is needed and none is on PATH."
command -v "$checker" >/dev/null || die "--python: no interpreter at $checker"
PYTHONDONTWRITEBYTECODE=1 "$checker" "$ROOT/launch/bench/mtp_bench/options.py" ${arguments[@]+"${arguments[@]}"} || exit $?
for argument in ${arguments[@]+"${arguments[@]}"}; do
    case "$argument" in -h | --help) exit 0 ;; esac
done

if [ -n "$PYTHON" ]; then
    . "$ROOT/launch/demo/use_python.sh"
else
    setup_environment "$version"
fi
unset PYTHONDONTWRITEBYTECODE # imports take four times as long without byte code
exec "$PYTHON" "$ROOT/launch/bench/bench_serving.py" ${arguments[@]+"${arguments[@]}"}
