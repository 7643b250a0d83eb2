"""``python -m sglang_mamba_mtp.bench_one_batch ...``: SGLang's one-batch benchmark with plugins loaded.

The benchmark builds a model runner without loading plugins. Arguments are the benchmark's own, plus ``--mamba-mtp-*``.
"""

from __future__ import annotations

if __name__ in ("__main__", "__mp_main__"):  # with --tp-size > 1 the ranks import this module again
    from sglang.srt.plugins import load_plugins

    load_plugins()

if __name__ == "__main__":
    from sglang.benchmark.one_batch import cli_main

    cli_main()
