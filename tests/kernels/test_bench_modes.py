"""tests/bench/bench_modes.py without a GPU: all its steps in the interpreter, at toy sizes, with timings left out."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import bench_modes
import cases
import graph_timing
import peers
import replayssm
import step
import stock
from cases import GdnShape, Mamba2Shape
from mamba_mtp_kernels import common, conv1d, gdn, mamba2
from peers import PEERS, Decode, floors

from ..operations import Operations
from .gdn.stock import normalise_as, stock_module

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run the benchmark itself on")

CPU = torch.device("cpu")


def once(launches, **_):
    """In place of time_launches: every launch runs, nobody looks at a clock."""
    for launch in launches:
        launch()
    return {"us": 1.0, "us_p10": 1.0, "us_p90": 1.0, "replays": 1, "launches": len(launches)}


def scatter(self, states, buffer, conv_states, windows, *, slots, last, track_slots, track):
    """What SGLang's commit does; its kernels refuse tensors that are not on a GPU."""
    for dst, src in ((states, buffer), (conv_states, windows)):
        for to, node in ((slots, last), (track_slots, track)):
            rows = (node >= 0).nonzero()[:, 0]
            dst[:, to[rows].long()] = src[:, rows, node[rows].long()]


def scatter_windows(conv, conv_states, windows, *, slots, last, track_slots, track):
    """replayssm.scatter_windows, whose kernel refuses tensors that are not on a GPU."""
    for to, node in ((slots, last), (track_slots, track)):
        rows = (node >= 0).nonzero()[:, 0]
        conv_states[:, to[rows].long()] = windows[:, rows, node[rows].long()]


@triton.jit
def _exp(x):
    """For kernels whose module has taken tl.exp for its own before the interpreter gave it a meaning."""
    return tl.exp(x)


class Index(int):
    """A loop's index as a compiled kernel has it."""

    def to(self, _):
        return self


def compiled_range(*bounds):
    """In place of range, for a kernel that converts its index."""
    return map(Index, range(*bounds))


@pytest.fixture
def toy(monkeypatch):
    """A benchmark that runs here in seconds."""
    recurrent = stock_module()
    normalise_as(recurrent, monkeypatch)
    for family in (common, conv1d, gdn, mamba2):
        launchers = family.ops_for("cuda")
        monkeypatch.setattr(family, "ops_for", lambda *_, launchers=launchers: launchers)
    monkeypatch.setattr(bench_modes, "ops_for", common.ops_for)
    from sglang.kernels.ops.attention.fla import fused_recurrent
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.kernels.ops.mamba.triton_ops import mamba_ssm

    for module in (causal_conv1d_triton, mamba_ssm, recurrent):
        monkeypatch.setattr(module, "is_arch_support_pdl", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "device", lambda _: contextlib.nullcontext(), raising=False)
    monkeypatch.setattr(fused_recurrent, "exp", _exp)
    if replayssm.replayssm_kind() is replayssm.FoldAtCommit:
        module = importlib.import_module("sglang.kernels.ops.attention.fla.gdn_replayssm_spec_fold")
        monkeypatch.setattr(module, "range", compiled_range, raising=False)
    monkeypatch.setattr(stock.StockCommit, "run", scatter)
    monkeypatch.setattr(peers, "scatter_windows", scatter_windows)
    monkeypatch.setattr(peers, "ACTIVATIONS", torch.float32)
    monkeypatch.setattr(bench_modes, "DEVICE", CPU)
    monkeypatch.setattr(step, "ACTIVATIONS", torch.float32)  # the interpreter cannot multiply bfloat16
    monkeypatch.setattr(bench_modes, "LAYERS", 1)
    monkeypatch.setattr(bench_modes, "CHECK_BATCH", 2)
    monkeypatch.setattr(bench_modes, "CHECK_LAYERS", 1)
    monkeypatch.setattr(bench_modes, "CHECK_STEPS", 4)
    monkeypatch.setattr(bench_modes, "WINDOW", 3)
    monkeypatch.setattr(bench_modes, "CEILING_BYTES", 4096)
    for module in (bench_modes, graph_timing):
        monkeypatch.setattr(module, "time_launches", once)
    monkeypatch.setattr(bench_modes, "environment", dict)
    monkeypatch.setattr(bench_modes, "sets_for", lambda *_, **__: 1)
    shapes = {"gdn": GdnShape(H=1, HV=2, K=32, V=32), "mamba2": Mamba2Shape(nheads=2, headdim=32, dstate=32, ngroups=1)}
    shapes |= {f"{name}-bf16": replace(shape, state="bf16") for name, shape in shapes.items()}
    monkeypatch.setattr(bench_modes, "SHAPES", shapes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gdn", "mamba2", "gdn-bf16", "mamba2-bf16"])
def test_runs(family, tmp_path, capsys, toy):
    record = tmp_path / "record.json"
    options = ["--workers", "0", "--families", family, "--nodes", "4", "--batches", "2", "--layout-batches", "2"]
    bench_modes.main([*options, "--slots", "2", "--json", str(record)])
    written = json.loads(record.read_text())
    chain, tree = (["stock", "slots", "replay", "rewind"] for _ in range(2))
    if "gdn" in family:
        chain.append("replayssm")
    assert [entry["step"] for entry in written["table"]] == chain + tree
    (floors,) = written["floors"]
    assert floors["family"] == family and floors["decode"]["parts"].keys() == {"conv", "decode"}
    assert {"us", "us_p10", "us_p90"} <= floors["decode"].keys() & floors["read"].keys() & floors["copy"].keys()
    reasons = {entry["kind"]: entry["why"] for entry in written["missing"]}
    assert reasons["tree"].keys() == {"replayssm", "flashinfer"}
    assert reasons["chain"].keys() == set(PEERS) - set(chain)
    assert {entry["step"] for entry in written["layouts"]} == {"slots", "slots-kv", "replay", "replay-kv"}
    assert written["moves"][0]["family"] == family
    printed = capsys.readouterr().out
    assert "RED" not in printed and f"{family:6s} 4 tree   2" in printed
    assert {entry["tracked rows"] for entry in written["table"]} == {2 * 3 / 256}


@pytest.mark.parametrize("shape", [GdnShape(), Mamba2Shape()], ids=["gdn", "mamba2"])
def test_what_a_verify_writes_is_not_filled_before(shape):
    """No server's layer does so, and a kernel between convolution and verify keeps that one from starting early."""
    ours = object.__new__(step.Ours)
    ours.layer = step.make_layer(shape, CPU)
    inputs = ours.layer.inputs(4, torch.Generator().manual_seed(0))
    ours.drafts = SimpleNamespace(inputs=[inputs])
    ours.store = SimpleNamespace(score=lambda *_, **__: called.names.append("verify"))
    ours._batch = lambda _: None
    with Operations() as called:
        ours.score(0, 0, {})
    assert set(called.names[:-1]) <= {"aten.new_empty.default"} and called.names[-1] == "verify"


WRONG = {
    "accepted": lambda last, track: ((last - 1).clamp(min=0), track),
    "tracked": lambda last, track: (last, torch.where(track >= 0, last, -1)),
    "untracked": lambda last, track: (last, torch.full_like(track, -1)),
}


@pytest.mark.once
@pytest.mark.parametrize("family", ["gdn", "mamba2"])
@pytest.mark.parametrize("mode", ["slots", "replay"])
@pytest.mark.parametrize("wrong", WRONG)
def test_red_on_a_wrong_state(family, mode, wrong, monkeypatch, capsys, toy):
    """A mode whose commit takes another node, or tracks another or none, fails, and nothing else is printed."""
    commit = bench_modes.Ours.commit
    monkeypatch.setattr(
        bench_modes.Ours, "commit", lambda self, which, last, track: commit(self, which, *WRONG[wrong](last, track))
    )
    case = bench_modes.Case(family, 4, "chain")
    with pytest.raises(SystemExit, match="RED"):
        bench_modes.check(case, [bench_modes.Variant(mode, "vk")])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("nodes", [4, 8])
def test_replayssm_is_called_rightly(nodes, toy):
    """Outputs, states and tracked states of several commits against float64; of eight nodes every commit folds."""
    errors = bench_modes.check(bench_modes.Case("gdn", nodes, "chain"), ["replayssm"])["replayssm"]
    # of a ring, outputs are made of rounded updates
    assert errors["verify"] < 1e-3 and errors["state"] < 1e-5


def test_red_on_a_peer_called_wrongly(monkeypatch, toy):
    commit = peers.Replayssm.commit
    monkeypatch.setattr(
        peers.Replayssm, "commit", lambda self, which, last, track: commit(self, which, (last - 1).clamp(min=0), track)
    )
    with pytest.raises(SystemExit, match="RED"):
        bench_modes.check(bench_modes.Case("gdn", 4, "chain"), ["replayssm"])


@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_plain_decode_is_one_node_of_a_verify(family, toy):
    layer = step.make_layer(bench_modes.SHAPES[family], CPU)
    drafts = step.Drafts(layer, batch=3, nodes=1, kind="chain", sets=1)
    decode = Decode(drafts, layers=1)
    states = torch.randn_like(decode.states)
    step.fill(decode, states, torch.randn_like(decode.conv_states))
    exact = step.Exact(drafts, states, decode.conv_states.clone())
    y = decode.convolve(0, 0)
    assert cases.rms_ratio(y, exact.convolve(0)) < 1e-6
    assert cases.rms_ratio(decode.score(0, 0, y), exact.score(0, y)) < 1e-5
    exact.commit(torch.zeros_like(drafts.last), torch.full_like(drafts.last, -1))
    slots = drafts.slots[0].long()
    assert cases.rms_ratio(decode.states[:, slots], exact.states[:, slots]) < 1e-5


def test_floors_touch_every_element():
    states = torch.randn(3, 64, 128)
    moves, before = floors(states), states.clone()
    moves["read"]()
    assert torch.equal(states, before)
    moves["copy"]()
    assert torch.equal(states, -before)
    with pytest.raises(ValueError, match="states: 100 elements"):
        floors(torch.zeros(100))


@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_hollow_steps_launch(family, toy):
    for kind, variant in [("tree", None), *(("chain", variant) for variant in bench_modes.IN_LAYOUTS)]:
        bench_modes.run_hollow(bench_modes.Case(family, 4, kind), variant, 2)


def test_rows_are_tracked_as_often_as_a_server_tracks_them():
    """Over many steps, every row's tokens pass a boundary once in an interval."""
    layer = step.make_layer(GdnShape(H=1, HV=2, K=16, V=32), CPU)
    for batch, nodes in ((1, 4), (64, 8), (200, 4)):
        drafts = step.Drafts(layer, batch=batch, nodes=nodes, kind="tree", sets=1)
        accept = nodes // 2 + 1
        lengths, passed, steps = torch.arange(batch) * 37 % 256, 0, 256
        for _ in range(steps):
            passed += int((lengths // 256 != (lengths + accept) // 256).sum())
            lengths += accept
        fewer, share = cases.boundaries(batch, accept)
        assert passed / steps == fewer + share
        for rows in (fewer, fewer + 1):
            track = drafts.tracked(rows)
            assert int((track >= 0).sum()) == rows and set(track[track >= 0].tolist()) <= set(drafts.accepted)


def test_records_name_their_commit():
    assert len(graph_timing.commit().removesuffix("-dirty")) == 40


def test_needs_no_sglang_but_its_kernels():
    """The package's windows and draft slots run where only SGLang's kernel files are."""
    program = f"""
import sys
sys.path.insert(0, {str(graph_timing.ROOT / "tests" / "bench")!r})
sys.modules["sglang"] = None
import step
assert sys.modules["sglang_mamba_mtp.state.window"].__file__.startswith({str(graph_timing.ROOT)!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
