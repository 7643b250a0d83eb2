#!/usr/bin/env bash
# Set up (once), serve the tiny models with the plugin, ask held-out word problems without and with speculation, compare.
#
#   bash launch/demo.sh                          every tiny model; on the GPU if there is one
#   bash launch/demo.sh --model gdn --json r.json --algorithm NGRAM --topk 4
#   bash launch/demo.sh --version 0.5.17         another SGLang version
#   bash launch/demo.sh --python /usr/bin/python3    (or DEMO_PYTHON=...) this interpreter, which has SGLang: no set-up
#   bash launch/demo.sh --help                   all flags
#
# With --python the plugin need not be installed: if its entry point is not visible, a folder with links to this checkout
# and a .dist-info is put on PYTHONPATH.
set -uo pipefail
. "$(dirname "$0")/setup.sh"

version="${SGLANG_VERSIONS[0]}"
PYTHON="${DEMO_PYTHON:-}"
arguments=()
printf -v DEMO_COMMAND ' %q' bash launch/demo.sh "$@"
export DEMO_COMMAND="${DEMO_COMMAND# }"
while [ $# -gt 0 ]; do
    case "$1" in
        --version) [ $# -gt 1 ] || misuse "--version needs a value: ${SGLANG_VERSIONS[*]}"; version="$2"; shift 2 ;;
        --version=*) version="${1#*=}"; shift ;;
        --python) [ $# -gt 1 ] || misuse "--python needs the path of an interpreter"; PYTHON="$2"; shift 2 ;;
        --python=*) PYTHON="${1#*=}"; shift ;;
        *) arguments+=("$1"); shift ;;
    esac
done

# Wrong flags are told before nine gigabytes are installed.
checker="${PYTHON:-$(find_python)}" || die "Python 3.11, 3.12 or 3.13 is needed and none is on PATH."
command -v "$checker" >/dev/null || misuse "--python: no interpreter at $checker"
PYTHONDONTWRITEBYTECODE=1 "$checker" "$ROOT/launch/demo/mtp_demo/options.py" ${arguments[@]+"${arguments[@]}"} || exit $?
for argument in ${arguments[@]+"${arguments[@]}"}; do
    case "$argument" in -h | --help) exit 0 ;; esac
done

if [ -n "$PYTHON" ]; then
    . "$ROOT/launch/demo/use_python.sh"
else
    setup_environment "$version"
fi
export HF_HUB_OFFLINE=1
exec "$PYTHON" "$ROOT/launch/demo/main.py" ${arguments[@]+"${arguments[@]}"}
