"""State slots that SGLang's own sizing fits into the same memory, and speculative state per request, in every mode.

    python tests/bench/fit_slots.py --json FILE                        # 16 engines on the GPU, two at a time
    python tests/bench/fit_slots.py --memory-gib 32 --max-running-requests 64 --nodes 4 8 --modes off replay

Real engines (a Scheduler each, in a process of its own) with random weights: the linear-attention layers are those of
Qwen3-Next (36 GDN layers) and of Nemotron-Nano-9B-v2 (27 Mamba2 layers) in number and head sizes, the attention layers
in what a token costs; hidden size, experts, MLPs and vocabulary are small, so that engines start quickly. SGLang sizes
its pools itself, from one number that is fixed here: the memory left for state slots and KV cache together, where
otherwise it would take what the weights leave of --mem-fraction-static. NEXTN chains of N-1 steps.

Reads what the plugin's log says of its state, what its sizing came to, and the pools' own sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graph_timing import ROOT, environment, import_kernels, write_record

FAMILIES = ("gdn", "mamba2")
MODES = ("off", "snapshot", "slots", "replay")

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "max_position_embeddings": 32768,
    "bos_token_id": 1023,
    "eos_token_id": 1023,
    "pad_token_id": 1023,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gdn": {
        **SMALL,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "mamba2": {
        **SMALL,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 56,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "mtp_hybrid_override_pattern": "*",
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mlp_hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False,
        "use_mamba_kernels": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "mamba_n_groups": 8,
        "n_groups": 8,
        "mamba_d_conv": 4,
        "conv_kernel": 4,
        "mamba_expand": 2,
        "mamba_hidden_act": "silu",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_chunk_size": 128,
        "chunk_size": 128,
    },
}

ATTENTION = {"gdn": "triton", "mamba2": "flashinfer"}
"""On a GPU; SGLang 0.5.17 refuses Triton attention for Nemotron-H."""


# ------------------------------------------------------------------------------------------------------- what logs say


def state_line(log: str) -> dict[str, Any] | None:
    """The plugin's report of what it allocated for speculation; None where it left SGLang alone."""
    found = re.findall(r"mamba-mtp state: (\{.*\})", log)
    return json.loads(found[-1]) if found else None


def memory_line(log: str) -> str | None:
    """What the plugin told SGLang's sizing; None where it told nothing."""
    found = re.findall(r"mamba-mtp memory: (.*)", log)
    return found[-1].strip() if found else None


# ----------------------------------------------------------------------------------------------------------- one engine


def engine(options: dict[str, Any]) -> dict[str, Any]:
    """Build one engine in this process and look at its pools. Keys of options: see `measure`."""
    sys.path.insert(0, str(ROOT))
    os.environ["SGLANG_MAMBA_MTP_MODE"] = options["mode"]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tests.engine import child, harness
    from tests.engine.spec import EngineSpec

    device = options["device"]
    if device == "cpu":
        harness.import_sglang()
        from sglang_mamba_mtp.cpu import defaults

        # these are for servers whose memory nobody fixed
        defaults.DEFAULTS = tuple(d for d in defaults.DEFAULTS if not d.name.startswith("max_"))
    import_kernels()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    fix_memory(options["memory_gib"])
    attention = "torch_native" if device == "cpu" else ATTENTION[options["family"]]
    spec = EngineSpec(
        model=options["model"],
        spec="NEXTN",
        steps=options["nodes"] - 1,
        draft_tokens=options["nodes"],
        mode=options["mode"],
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        max_running_requests=options["max_running_requests"],
        extra={
            **dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"), attention),
            "load_format": "dummy",
            "disable_cuda_graph": True,
            "max_mamba_cache_size": None,
            "max_total_tokens": None,
            "port": options["port"],
        },
    )
    scheduler = child.build_scheduler(spec)
    from sglang_mamba_mtp.state import sizing

    if sizing.last is not None:  # a server logs it for debugging only
        print(sizing.last.message(), flush=True)
    runner = scheduler.tp_worker.model_runner
    requests, cache = runner.req_to_token_pool, runner.req_to_token_pool.mamba_pool.mamba_cache
    return {
        "pool": type(requests.mamba_pool).__name__,
        "state_slots": requests.mamba_pool.size,
        "request_rows": requests.req_to_token.shape[0],
        "requests": requests.size,
        "kv_tokens": runner.max_total_num_tokens,
        "slot_bytes": sum(states.nbytes // states.shape[1] for states in (cache.temporal, *cache.conv)),
        "stock_speculative_bytes": child.draft_state_bytes(requests.mamba_pool),
    }


def fix_memory(gib: float) -> None:
    """Let SGLang size its pools as if weights had left this much."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    original = KVCacheConfigurator._profile_available_bytes

    def profile(self: Any, pre_model_load_memory: int) -> int:
        if self.mambaish_config is None:
            return original(self, pre_model_load_memory)
        return int(self._handle_max_mamba_cache(gib) * (1 << 30))

    KVCacheConfigurator._profile_available_bytes = profile


# ---------------------------------------------------------------------------------------------------------- all of them


def measure(options: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
    """Build an engine in a process of its own; what was asked, and facts about its pools.

    options: family, model (folder with config.json), mode, nodes, device, memory_gib, max_running_requests, port (one
    of its own, and a thousand above it, for every engine that runs at the same time).
    """
    with tempfile.TemporaryDirectory(prefix="fit-") as folder:
        log, result = Path(folder, "log"), Path(folder, "result")
        command = [sys.executable, str(Path(__file__).resolve()), "--one", json.dumps(options), str(result)]
        started = time.perf_counter()
        with log.open("w") as stream:
            status = subprocess.run(command, stdout=stream, stderr=stream, timeout=timeout).returncode
        text = log.read_text(errors="replace")
        if status or not result.exists():
            tail = "\n".join(text.splitlines()[-40:])
            raise RuntimeError(f"{options}: exit status {status}, last lines of its log:\n{tail}")
        facts = json.loads(result.read_text())
    report = state_line(text)
    if (report is None) != (options["mode"] == "off"):
        raise RuntimeError(f"{options}: the plugin reported {report}")
    # in mode off nobody reports, and nobody but SGLang allocates
    speculative = facts["stock_speculative_bytes"] if report is None else report["speculative_bytes"]
    return {
        **{name: value for name, value in options.items() if name not in ("model", "port")},
        **facts,
        "speculative_bytes": speculative,
        "speculative_bytes_per_request": speculative // facts["request_rows"],
        "memory_line": memory_line(text),
        "seconds": time.perf_counter() - started,
    }


def measured_or_error(options: dict[str, Any]) -> dict[str, Any] | Exception:
    """One engine's failure is not the others'."""
    try:
        return measure(options)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return error


def write_models(folder: Path) -> dict[str, str]:
    """config.json of each family; weights are made up when loaded. Returns the folders."""
    for family, config in CONFIGS.items():
        (folder / family).mkdir()
        (folder / family / "config.json").write_text(json.dumps(config, indent=1))
    return {family: str(folder / family) for family in CONFIGS}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    print("family N mode     | state slots | requests | KV tokens | speculative state a request | of it in off")
    for entry in results:
        share = ""
        for stock in results:
            if [stock[name] for name in ("family", "nodes", "mode")] == [entry["family"], entry["nodes"], "off"]:
                share = f"{entry['speculative_bytes_per_request'] / stock['speculative_bytes_per_request']:.1%}"
        print(
            f"{entry['family']:6s} {entry['nodes']} {entry['mode']:8s} | {entry['state_slots']:11d} | "
            f"{entry['requests']:8d} | {entry['kv_tokens']:9d} | "
            f"{entry['speculative_bytes_per_request'] / 2**20:23.1f} MiB | {share}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--memory-gib", type=float, default=32.0, help="for state slots and KV cache of one engine")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=2, help="engines on the GPU at a time")
    parser.add_argument("--json")
    parser.add_argument("--one", nargs=2, metavar=("OPTIONS", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        facts = engine(json.loads(options.one[0]))
        Path(options.one[1]).write_text(json.dumps(facts))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # SGLang leaves threads and sockets behind

    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        models = write_models(Path(folder))
        todo = [
            {
                "family": family,
                "model": models[family],
                "mode": mode,
                "nodes": nodes,
                "device": "cuda",
                "memory_gib": options.memory_gib,
                "max_running_requests": options.max_running_requests,
                "port": 20000 + 1500 * number,
            }
            for number, (family, nodes, mode) in enumerate(
                itertools.product(options.families, options.nodes, options.modes)
            )
        ]
        with ThreadPoolExecutor(options.at_once) as threads:
            outcomes = list(threads.map(measured_or_error, todo))
    results = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    errors = [str(outcome) for outcome in outcomes if not isinstance(outcome, dict)]
    record = {"environment": environment(), "options": vars(options), "configs": CONFIGS, "results": results}
    write_record(options.json, {**record, "errors": errors})
    for error in errors:
        print(error)
    print(f"{options.memory_gib:g} GiB for state slots and KV cache, {options.max_running_requests} requests at most")
    print_table(results)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
