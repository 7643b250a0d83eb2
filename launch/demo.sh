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
. "$ROOT/launch/demo/choose_python.sh"

printf -v DEMO_COMMAND ' %q' bash launch/demo.sh "$@"
export DEMO_COMMAND="${DEMO_COMMAND# }"
choose_python "$ROOT/launch/demo/mtp_demo/options.py" "$@"
export HF_HUB_OFFLINE=1
exec "$PYTHON" "$ROOT/launch/demo/main.py" ${arguments[@]+"${arguments[@]}"}
