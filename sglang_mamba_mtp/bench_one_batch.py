"""``python -m sglang_mamba_mtp.bench_one_batch ...``: SGLang's one-batch benchmark with plugins loaded.

The benchmark builds a model runner without loading plugins. Arguments are the benchmark's own, plus ``--mamba-mtp-*``.
"""

from __future__ import annotations

import functools
from typing import Any

LARGEST_ID = 10_000
"""The benchmark draws its prompts below this, whatever the model's vocabulary."""


def fit_to_model(benchmark: Any) -> None:
    """Let SGLang's ``benchmark`` module run models that its own functions fail with, through those functions.

    Prompts are drawn within the model's vocabulary, and 0.5.17's benchmark, which builds no scheduler, chooses the
    kernels of Mamba2's single steps as a scheduler does; later ones do so themselves.
    """
    load_model, prepare_inputs = benchmark.load_model, benchmark.prepare_synthetic_inputs_for_latency_test
    largest_id = LARGEST_ID

    @functools.wraps(load_model)
    def load_and_ask(server_args: Any, *args: Any) -> Any:
        nonlocal largest_id
        from sglang.kernels.ops.mamba.triton_ops import ssu_dispatch

        from .compat import startup

        config = startup.model_config(server_args)
        if config is not None:
            largest_id = min(LARGEST_ID, config.vocab_size)
        if ssu_dispatch._mamba_ssu_backend is None:
            ssu_dispatch.initialize_mamba_selective_state_update_backend(startup.resolved(server_args))
        return load_model(server_args, *args)

    @functools.wraps(prepare_inputs)
    def prepare_within(batch_size: int, input_len: int, custom_inputs: Any = None) -> Any:
        drawn = benchmark.np.random.randint(0, largest_id, (batch_size, input_len)).tolist()
        return prepare_inputs(batch_size, input_len, custom_inputs or drawn)

    benchmark.load_model, benchmark.prepare_synthetic_inputs_for_latency_test = load_and_ask, prepare_within


if __name__ in ("__main__", "__mp_main__"):  # with --tp-size > 1 the ranks import this module again
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.benchmark import one_batch

    fit_to_model(one_batch)

if __name__ == "__main__":
    one_batch.cli_main()
