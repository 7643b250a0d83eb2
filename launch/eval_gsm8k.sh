#!/usr/bin/env bash
# SGLang's own few-shot GSM8K benchmark (sglang.test.few_shot_gsm8k) on the tiny models' held-out questions.
#
#   bash launch/eval_gsm8k.sh                          starts launch/serve_tiny.sh, asks 200 questions, stops it
#   bash launch/eval_gsm8k.sh --questions 50 -- --plain --model mamba2    after --: flags of serve_tiny.sh
#   bash launch/eval_gsm8k.sh --port 30000             asks a server that runs already
#   bash launch/eval_gsm8k.sh --version 0.5.17 | --python PATH
#
# The benchmark takes its worked examples from the head of the file it asks, so its first five questions are the
# examples themselves; the held-out questions follow. Exits 0 when all were asked, 2 for wrong flags, 3 if the server
# fails or none answers, 130 after Ctrl-C.
set -uo pipefail
. "$(dirname "$0")/setup.sh"

version="${SGLANG_VERSIONS[0]}"
PYTHON="${DEMO_PYTHON:-}"
questions=200 parallel=8 port=
serve=()
while [ $# -gt 0 ]; do
    case "$1" in
        --version | --python | --questions | --parallel | --port)
            [ $# -gt 1 ] || misuse "$1 needs a value"
            case "$1" in
                --version) version="$2" ;; --python) PYTHON="$2" ;; --questions) questions="$2" ;;
                --parallel) parallel="$2" ;; --port) port="$2" ;;
            esac
            shift 2 ;;
        --) shift; serve=("$@"); break ;;
        -h | --help) sed -n '2,11p' "$0"; exit 0 ;;
        *) misuse "unknown flag $1; flags of the server go after --" ;;
    esac
done

# Told before nine gigabytes are installed.
require_number() { # NAME VALUE LARGEST
    case "$2" in '' | *[!0-9]* | ??????????*) misuse "$1: '$2' is not a number" ;; esac
    [ "$2" -ge 1 ] && [ "$2" -le "$3" ] || misuse "$1 $2: must be from 1 to $3"
}
require_number --questions "$questions" "$(wc -l <"$ROOT/launch/models/data/test.jsonl")"
require_number --parallel "$parallel" 1024
if [ -n "$port" ]; then
    require_number --port "$port" 65535
    [ ${#serve[@]} -eq 0 ] || misuse "--port asks a server that runs; the flags after -- are for one that is started"
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        printf 'nobody listens on port %s of this machine; start a server there: bash launch/serve_tiny.sh --port %s\n' \
            "$port" "$port" >&2
        exit 3
    fi
fi
if [ -n "$PYTHON" ]; then . "$ROOT/launch/demo/use_python.sh"; else setup_environment "$version"; fi
exec env -u PYTHONDONTWRITEBYTECODE "$PYTHON" "$ROOT/launch/demo/gsm8k.py" --questions "$questions" \
    --parallel "$parallel" ${port:+--port "$port"} -- --python "$PYTHON" ${serve[@]+"${serve[@]}"}
