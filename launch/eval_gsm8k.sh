#!/usr/bin/env bash
# SGLang's own few-shot GSM8K benchmark (sglang.test.few_shot_gsm8k) on the tiny models' held-out questions.
#
#   bash launch/eval_gsm8k.sh                          starts launch/serve_tiny.sh, asks 200 questions, stops it
#   bash launch/eval_gsm8k.sh --questions 50 -- --plain --model mamba2    after --: flags of serve_tiny.sh
#   bash launch/eval_gsm8k.sh --port 30000             asks a server that runs already
#   bash launch/eval_gsm8k.sh --version 0.5.17 | --python PATH
#
# The benchmark takes its worked examples from the head of the file it asks, so its first five questions are the
# examples themselves; the held-out questions follow.
set -uo pipefail
. "$(dirname "$0")/setup.sh"

version="${SGLANG_VERSIONS[0]}"
PYTHON="${DEMO_PYTHON:-}"
questions=200 parallel=8 port=
serve=()
while [ $# -gt 0 ]; do
    case "$1" in
        --version | --python | --questions | --parallel | --port)
            [ $# -gt 1 ] || die "$1 needs a value"
            case "$1" in
                --version) version="$2" ;; --python) PYTHON="$2" ;; --questions) questions="$2" ;;
                --parallel) parallel="$2" ;; --port) port="$2" ;;
            esac
            shift 2 ;;
        --) shift; serve=("$@"); break ;;
        -h | --help) sed -n '2,10p' "$0"; exit 0 ;;
        *) die "unknown flag $1; flags of the server go after --" ;;
    esac
done
for number in "$questions" "$parallel" ${port:+"$port"}; do
    case "$number" in '' | *[!0-9]*) die "'$number' is not a number" ;; esac
done
if [ -n "$PYTHON" ]; then . "$ROOT/launch/demo/use_python.sh"; else setup_environment "$version"; fi
exec env -u PYTHONDONTWRITEBYTECODE "$PYTHON" "$ROOT/launch/demo/gsm8k.py" --questions "$questions" \
    --parallel "$parallel" ${port:+--port "$port"} -- --python "$PYTHON" ${serve[@]+"${serve[@]}"}
