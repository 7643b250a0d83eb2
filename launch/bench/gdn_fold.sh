#!/usr/bin/env bash
# GDN's fold as products on a GPU: bits, errors and launch shapes, some minutes on an H200. Records go to $OUT (default: .).
#   BEFORE=/path/to/a/checkout/before bash launch/bench/gdn_fold.sh
# BEFORE: a tree whose kernels still fold token by token, timed in the same run.
set -euo pipefail
cd "$(dirname "$0")/../.."
root="$PWD" out="${OUT:-.}"
mkdir -p .cache/alias
ln -sfn "$root/kernels" .cache/alias/mamba_mtp_kernels
export PYTHONPATH="$root:$root/.cache/alias${PYTHONPATH:+:$PYTHONPATH}"

# one result whoever folds, in every tile; errors against float64; nothing races
python3 -m pytest tests/kernels/gdn/test_fold_product.py tests/kernels/gdn/test_fold.py tests/kernels/gdn/test_verify_replay.py \
    tests/kernels/gdn/test_axis_order.py -q -x --no-header | tail -15
python3 -m pytest tests/kernels/gdn/test_gpu.py -q --no-header -k "not slots" | tail -15

cases=(4:chain 8:chain)
for window in 8 16; do
    python3 tests/bench/bench_gdn.py --sweep --batches 8 64 --cases "${cases[@]}" --windows "$window" --states fp32 \
        --budget-ms 25 --json "$out/gdn-fold-sweep-window$window.json" | tee "$out/gdn-fold-sweep-window$window.txt"
done
python3 tests/bench/bench_gdn.py --batches 1 8 64 --cases 4:chain 8:chain 8:tree 16:tree --windows 8 16 --budget-ms 25 \
    --json "$out/gdn-fold-after.json" | tee "$out/gdn-fold-after.txt"
if [ -n "${BEFORE:-}" ]; then
    ln -sfn "$BEFORE/kernels" .cache/alias/mamba_mtp_kernels
    PYTHONPATH="$BEFORE:$root/.cache/alias" python3 "$BEFORE/tests/bench/bench_gdn.py" --batches 1 8 64 \
        --cases 4:chain 8:chain 8:tree 16:tree --windows 8 16 --budget-ms 25 --json "$out/gdn-fold-before.json" \
        | tee "$out/gdn-fold-before.txt"
    ln -sfn "$root/kernels" .cache/alias/mamba_mtp_kernels
fi
