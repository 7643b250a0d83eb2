#!/usr/bin/env bash
# The serving records, by name: their flags in one place. What else is given goes to launch/bench_serving.sh.
#
#   bash launch/bench/records.sh nemotron-chain4 --out r.json             one GPU
#   bash launch/bench/records.sh qwen3-next-chain4 --modes none,stock --time-limit 560     two GPUs, in two calls
#   names: nemotron-{chain4,chain8,tree8}, granite-{...}, qwen3.5-{...}, qwen3-next-{...}
#
# Sampling and grammar without packages of their own and no graphs for prefill: what a bare machine runs, for every mode.
# Acceptance is half of a chain's drafts and the target's own token; in a tree SGLang can simulate 2 (see --help).
set -uo pipefail

common="--sampling-backend pytorch --grammar-backend none --disable-prefill-cuda-graph"
name="${1:-}"
case "$name" in
    # SGLang refuses Triton attention for Nemotron-H, whose first layer is no attention layer.
    nemotron-*) model=(--shape nemotron-nano-9b-v2 --concurrency 64,256 --conversations 64
        --server-args "--attention-backend flashinfer $common") ;;
    granite-*) model=(--shape granite-4.0-h-small --concurrency 16,64,128 --server-args "--attention-backend flashinfer $common") ;;
    qwen3.5-*) model=(--shape qwen3.5-35b-a3b --concurrency 16,64,256 --server-args "--attention-backend triton $common") ;;
    # FlashInfer's all-reduce takes minutes to compile, and every graph size seconds to capture.
    qwen3-next-*) model=(--shape qwen3-next-80b --tp 2 --concurrency 64,256 --conversations 64 --server-args "--attention-backend triton $common
        --enforce-disable-flashinfer-allreduce-fusion --cuda-graph-bs-decode 1 16 64 104 128 256") ;;
    *) sed -n '2,9p' "$0" >&2; exit 2 ;;
esac
case "${name##*-}" in
    chain4) draft=(--draft chain4 --accept 3) ;;
    chain8) draft=(--draft chain8 --accept 5) ;;
    # At SGLang's 0.85 graphs and prefills of trees found no room where memory is full of requests.
    tree8) draft=(--draft tree8 --accept 2 --mem-fraction-static "$([[ $name == qwen3-next-* ]] && echo 0.78 || echo 0.80)") ;;
    *) sed -n '2,9p' "$0" >&2; exit 2 ;;
esac
shift
exec bash "$(dirname "$0")/../bench_serving.sh" "${model[@]}" "${draft[@]}" --device cuda --input-len 512 --output-len 256 \
    --rounds 2 "$@"
