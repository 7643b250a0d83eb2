#!/usr/bin/env bash
# Set up and run the whole test suite on both SGLang versions, as many suites side by side as there are cores.
#
#   bash launch/test.sh                       everything CI runs
#   bash launch/test.sh --version 0.5.17      one version
#   bash launch/test.sh --version 0.5.20 tests/engine/test_equality.py
#                                             one in between: its sources in the environment of an end (on a CPU)
#   bash launch/test.sh tests/plugin -k help  anything else goes to pytest
set -uo pipefail
. "$(dirname "$0")/setup.sh"

versions=()
arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --version) [ $# -gt 1 ] || misuse "--version needs a value: ${SGLANG_VERSIONS[*]}"; versions+=("$2"); shift 2 ;;
        --version=*) versions+=("${1#*=}"); shift ;;
        -h | --help) sed -n '2,8p' "$0"; exit 0 ;;
        *) arguments+=("$1"); shift ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || versions=("${SGLANG_VERSIONS[@]}")
cd "$ROOT"

for version in "${versions[@]}"; do
    [ -z "${SGLANG_RUNS_IN[$version]:-}" ] || setup_wheels "$version"
    setup_environment "${SGLANG_RUNS_IN[$version]:-$version}"
done

failed=0
# The kernel tests run in Triton's interpreter, which is a choice for a whole process, and the training tests load models
# into transformers, whose configurations SGLang replaces when anything of it is imported: a process for each. The
# longest go first and the shortest last, so that all cores are done at about the same time.
apart=(tests/engine tests/kernels tests/train)
suites=("${apart[0]}" "tests ${apart[*]/#/--ignore=} --ignore=tests/wheels" "${apart[1]}" "${apart[2]}")
# What reads the wheels of all versions runs once, in whichever environment was set up last.
once="tests/wheels"
for argument in ${arguments[@]+"${arguments[@]}"}; do
    [ ! -e "${argument%%::*}" ] || suites=("") once="" # tests were named: those, and nothing else
done
[ -z "$once" ] && [[ "${arguments[*]-}" != *tests/wheels* ]] || setup_wheels

logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
# Imports are four times slower without byte code, and on two cores more threads than cores are slower than one.
unset PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

# One suite on one version; pytest's exit code 5 means that it found no test to run.
run_suite() {
    local version="$1" suite="$2" code
    if [ -n "${SGLANG_RUNS_IN[$version]:-}" ]; then
        local -x PYTHONPATH="$ROOT/.cache/sglang/$version${PYTHONPATH:+:$PYTHONPATH}"
        # 0.5.21's other radix tree is built for another PyTorch than 0.5.17's
        [ "$version" != 0.5.21 ] || local -x SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
    fi
    # shellcheck disable=SC2086 - a suite is a list of words
    "$ROOT/.venvs/${SGLANG_RUNS_IN[$version]:-$version}/bin/python" -m pytest --durations=15 $suite "${arguments[@]}" 2>&1 |
        tee "$(mktemp "$logs/$version.XXXX")" | sed -u "s/^/[$version] /"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || { [ "$code" -eq 5 ] && [ -n "$suite" ]; } || {
        say "SGLang $version, ${suite:-what was asked for}: FAILED"
        return 1
    }
}

run_linters() {
    (
        code=0
        "$PYTHON" -m ruff check . || code=1
        "$PYTHON" -m mypy || code=1
        "${PYTHON%/*}/lint-imports" --no-cache --no-logo || code=1
        exit "$code"
    ) 2>&1 | tee "$logs/linters" | sed -u "s/^/[linters] /"
    [ "${PIPESTATUS[0]}" -ne 0 ] || { rm "$logs/linters"; return; }
    say "ruff, mypy, or who imports whom: FAILED"
    return 1
}

run_once() {
    local code
    "$PYTHON" -m pytest $once "${arguments[@]}" 2>&1 | tee "$logs/once" | sed -u "s/^/[wheels] /"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || [ "$code" -eq 5 ] || { say "$once: FAILED"; return 1; }
}

# A GPU is shared by as many suites as there are versions.
at_once="$(env -u OMP_NUM_THREADS nproc)"
[ ! -e /dev/nvidiactl ] || at_once="${#versions[@]}"
running=0
take_core() {
    if [ "$running" -ge "$at_once" ]; then
        wait -n || failed=1
        running=$((running - 1))
    fi
    running=$((running + 1))
}
take_core
run_linters &
for suite in "${suites[@]}"; do
    if [ -n "$once" ] && [ "$suite" = tests/train ]; then
        take_core
        run_once &
    fi
    for version in "${versions[@]}"; do
        take_core
        run_suite "$version" "$suite" &
    done
done
while [ "$running" -gt 0 ]; do
    wait -n || failed=1
    running=$((running - 1))
done

# What failed and why stands last: whoever keeps only the end of a long output needs that part. Of each failure pytest's
# heading and the first lines of its reason.
for log in "$logs"/*; do
    name="${log##*/}"
    awk '/^(_+|=+) (ERROR|FAILURES|test_|Test).* (_+|=+)$/ || /^(FAILED|ERROR) / { print; lines = 0 }
         /^E  / && lines++ < 12 { print substr($0, 1, 300) }' "$log" | sed "s/^/[${name%.????}] /"
done
[ ! -e "$logs/linters" ] || tail -n 40 "$logs/linters" | sed "s/^/[linters] /"

count() { grep -hE '(passed|failed|error|skipped).* in [0-9.]+s' "$logs"/* 2>/dev/null | grep -oE "[0-9]+ $1" | awk '{s += $1} END {print s + 0}'; }
printf '%d passed, %d failed, %d skipped\n' "$(count passed)" "$(($(count failed) + $(count error)))" "$(count skipped)"
exit $failed
