#!/usr/bin/env bash
# Set up (once), serve a model without speculation and in every way to verify drafts, one server after the other at equal
# flags and equal memory, and measure each with SGLang's bench_serving.
#
#   bash launch/bench_serving.sh --shape nemotron-nano-9b-v2          a real model's sizes, random weights (GPU)
#   bash launch/bench_serving.sh --shape qwen3-next-80b --tp 2 --concurrency 16,64,256
#   bash launch/bench_serving.sh --model-path PATH --draft chain4,tree8 --out r.json
#   bash launch/bench_serving.sh --model-path launch/models/tiny-gdn --device cpu --quick
#   bash launch/bench_serving.sh --shape qwen3-next-80b --conversations 64    each next turn's time to the first token, too
#   bash launch/bench_serving.sh --version 0.5.17 ...                 another SGLang version
#   bash launch/bench_serving.sh --python /usr/bin/python3 ...        this interpreter, which has SGLang: no set-up
#   bash launch/bench_serving.sh --help                               all flags
#
# A call that was stopped goes on where it was: finished loads are kept in the JSON.
set -uo pipefail
. "$(dirname "$0")/setup.sh"
. "$ROOT/launch/demo/choose_python.sh"

printf -v BENCH_COMMAND ' %q' bash launch/bench_serving.sh "$@"
export BENCH_COMMAND="${BENCH_COMMAND# }"
choose_python "$ROOT/launch/bench/mtp_bench/options.py" "$@"
unset PYTHONDONTWRITEBYTECODE # imports take four times as long without byte code
exec "$PYTHON" "$ROOT/launch/bench/bench_serving.py" ${arguments[@]+"${arguments[@]}"}
