"""The stub says what it lacks, never claims AMX, and `install` refuses settings that cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp import cpu
from sglang_mamba_mtp.cpu import defaults, patches

needs_stub = pytest.mark.skipif(not cpu.needed(), reason="sgl_kernel loads on this machine")


def in_process(code: str) -> str:
    """Run code in a fresh interpreter after `cpu.install()`."""
    script = f"from sglang_mamba_mtp import cpu\nlines = cpu.install()\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@needs_stub
def test_stub_names_what_it_lacks():
    code = """
import torch, sgl_kernel
from sgl_kernel import verify_tree_greedy_cpu, rotate_input_ids_cpu
from sgl_kernel.mamba import chunk_gated_delta_rule_cpu
assert callable(torch.ops.sgl_kernel.fused_gdn_gating_cpu)
assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
assert not hasattr(sgl_kernel, "convert_weight_packed")
for act in (lambda: sgl_kernel.rmsnorm, lambda: sgl_kernel.mamba.nothing, lambda: rotate_input_ids_cpu(1)):
    try:
        act()
    except (AttributeError, NotImplementedError) as error:
        print(error)
assert cpu.install() is lines and len(lines) > 10
"""
    assert in_process(code).splitlines() == [
        "sgl_kernel.rmsnorm has no CPU version in sglang_mamba_mtp.cpu",
        "sgl_kernel.mamba.nothing has no CPU version in sglang_mamba_mtp.cpu",
        "sgl_kernel.rotate_input_ids_cpu has no CPU version in sglang_mamba_mtp.cpu",
    ]


@needs_stub
def test_spawned_processes_find_the_stub():
    code = """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "import sgl_kernel; print(sgl_kernel.__version__)"],
                     capture_output=True, text=True).stdout.strip())
"""
    assert in_process(code) == "0.0.0+cpu"


def raw_args(**given: object) -> SimpleNamespace:
    names = {*(d.name for d in defaults.DEFAULTS), *defaults.CANNOT_WORK, "mamba_radix_cache_strategy", "dtype"}
    args = dict.fromkeys(names) | {d.name: d.unset[0] for d in defaults.DEFAULTS}
    return SimpleNamespace(
        **args | {"dtype": "float32", "model_path": "nowhere", "disable_overlap_schedule": False} | given
    )


def test_defaults_fill_only_what_is_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(defaults.CONV_DTYPE, "float32")
    args = raw_args(max_running_requests=3)
    defaults.apply(args)
    assert args.max_running_requests == 3
    assert args.attention_backend == "torch_native"
    assert args.device == "cpu"
    assert args.sleep_on_idle is True
    assert args.disable_overlap_schedule is False
    args = raw_args(mamba_radix_cache_strategy="no_buffer")
    defaults.apply(args)
    assert args.disable_overlap_schedule is True


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_backend", "flashinfer"), ("device", "cuda"), ("pp_size", 2), ("kv_cache_dtype", "fp8_e4m3")],
)
def test_impossible_arguments_are_named(name: str, value: object):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value} cannot work"):
        defaults.apply(raw_args(**{name: value}))


def test_an_impossible_switch_is_named_without_a_value():
    with pytest.raises(ValueError, match=r"--speculative-use-rejection-sampling cannot work .* leave it out"):
        defaults.apply(raw_args(speculative_use_rejection_sampling=True))


def test_impossible_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    with pytest.raises(ValueError, match="SGLANG_USE_CPU_ENGINE=0"):
        defaults.set_environment()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_checkpoint_dtype(tmp_path, key: str):
    (tmp_path / "config.json").write_text(json.dumps({key: "bfloat16"}))
    assert defaults.checkpoint_dtype(str(tmp_path)) == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {key: "float16"}}))
    assert defaults.checkpoint_dtype(str(tmp_path)) == "float16"
    assert defaults.checkpoint_dtype(str(tmp_path / "missing")) is None


def test_host_torch_makes_cpu_tensors():
    host = patches.HostTorch()
    assert host.zeros(2, device="cuda").device.type == "cpu"
    assert not host.tensor([1], pin_memory=True).is_pinned()
    assert host.float32 is torch.float32
    assert host.Tensor is torch.Tensor


@needs_stub
def test_ops_stand_in_this_sglangs_modules():
    """(That every patch has a target in every version, by the sources: tests/wheels.)"""
    code = """
import importlib
mixer = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
print(mixer.causal_conv1d_fn.__module__, mixer.selective_state_update.__module__)
backend = importlib.import_module("sglang.srt.layers.attention.hybrid_linear_attn_backend")
print(backend.scatter_mamba_states_after_mtp_verify.__globals__["fused_mamba_state_scatter_with_mask"].__module__)
print(backend.track_mamba_states_if_needed.__module__)
"""
    assert in_process(code).splitlines() == [
        "sglang_mamba_mtp.cpu.conv1d_ops sglang_mamba_mtp.cpu.mamba2_ops",
        "sglang_mamba_mtp.cpu.commit_ops",
        "sglang_mamba_mtp.cpu.commit_ops",
    ]
