#!/usr/bin/env bash
# Set up (once) and serve a tiny model with the plugin, until Ctrl-C. On the GPU if there is one, else on the CPU.
#
#   bash launch/serve_tiny.sh                                   tiny-gdn, NEXTN, 3 steps, port 30000
#   bash launch/serve_tiny.sh --model mamba2 --version 0.5.17
#   bash launch/serve_tiny.sh --plain                           without speculation
#   bash launch/serve_tiny.sh --port 31000 --mamba-mtp-mode off anything else goes to sglang.launch_server
#   bash launch/serve_tiny.sh --host 0.0.0.0                    to other machines too; without it to this one alone
#   bash launch/serve_tiny.sh --python PATH                     this interpreter, which has SGLang: no set-up
set -uo pipefail
. "$(dirname "$0")/setup.sh"

version="${SGLANG_VERSIONS[0]}"
PYTHON="${DEMO_PYTHON:-}"
model=gdn
speculate=(--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4)
arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --version | --model | --python)
            [ $# -gt 1 ] || misuse "$1 needs a value"
            case "$1" in --version) version="$2" ;; --model) model="$2" ;; --python) PYTHON="$2" ;; esac
            shift 2 ;;
        --plain) speculate=(); shift ;;
        --speculative-algorithm*) speculate=(); arguments+=("$1"); shift ;;
        -h | --help) sed -n '2,9p' "$0"; exit 0 ;;
        *) arguments+=("$1"); shift ;;
    esac
done
case "$model" in gdn | mamba2) model="$ROOT/launch/models/tiny-$model" ;; esac
[ -f "$model/config.json" ] || misuse "--model: $model has no config.json"

if [ -n "$PYTHON" ]; then . "$ROOT/launch/demo/use_python.sh"; else setup_environment "$version"; fi
if [ -e /dev/nvidiactl ]; then
    # SGLang refuses Triton attention for Nemotron-H, whose first layer is no attention layer.
    case "$model" in *mamba2*) attention=flashinfer ;; *) attention=triton ;; esac
    device=(--attention-backend "$attention" --sampling-backend pytorch --grammar-backend none
        --max-total-tokens 131072 --max-running-requests 32 --max-mamba-cache-size 160 --disable-prefill-cuda-graph)
else
    device=(--device cpu --dtype float32)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
unset PYTHONDONTWRITEBYTECODE # imports take four times as long without byte code
export HF_HUB_OFFLINE=1
# To this machine alone, unless --host is among the arguments: the last one counts.
exec "$PYTHON" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 "${device[@]}" \
    ${speculate[@]+"${speculate[@]}"} ${arguments[@]+"${arguments[@]}"}
