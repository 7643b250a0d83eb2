"""Many steps of verify, commit, snapshot and settle against the plain recurrence of the accepted tokens."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.operands import Folds, Rows, States
from mamba_mtp_kernels.common.reference import build_tree_reference, commit_window_reference
from mamba_mtp_kernels.common.window import commit_window
from mamba_mtp_kernels.mamba2.fold import mamba2_fold
from mamba_mtp_kernels.mamba2.reference import final_dt, mamba2_fold_reference, mamba2_verify_reference
from mamba_mtp_kernels.mamba2.verify_replay import mamba2_verify
from mamba_mtp_kernels.mamba2.window import Mamba2Window

from ..helpers import assert_close, assert_same_bits, path_to, planned, random_tree_parents, tree_links

# A step has few outputs, and of thousands of steps one cancels to a twentieth of its terms (the median to a third), so
# errors are measured against the sum of the absolute terms, not against the output. Plain float32 recurrence: 4e-8 in
# the RMS over all steps, 1.4e-7 in the worst of 4096. (Verify's worst step against its outputs, 1.1e-6 on an H100, is
# 1.2e-7 so measured: its terms are 9.1 times its outputs.)
STEP_LIMIT = 3e-7  # of any one step
# RMS over all steps: float32's own rounding unit. Plain float32 recurrence has 2.6e-8, the references 4.1e-8, an H100,
# whose products of float32 inputs are three tf32 passes, 8.0e-8.
RMS_LIMIT = 2.0**-23

KERNELS = (mamba2_verify, commit_window, mamba2_fold)
REFERENCES = (mamba2_verify_reference, commit_window_reference, mamba2_fold_reference)


def recurrence(start, parents, x, dt, B, C, A, dt_bias, D):
    """(y, state of every node, norm of the sums of y's absolute terms), token by token in start's dtype."""
    dtype, (batch, nodes) = start.dtype, parents.shape
    x, B, C, A, D = (tensor.to(dtype) for tensor in (x, B, C, A, D))
    steps = final_dt(dt, dt_bias, True, dtype)
    decay = torch.exp(A * steps)
    states = start.new_zeros(batch, nodes, *start.shape[1:])
    for b in range(batch):
        for node in range(nodes):
            token, parent = b * nodes + node, int(parents[b, node])
            above = start[b] if parent < 0 else states[b, parent]
            outer = x[token][:, :, None] * B[token][:, None, :]
            states[b, node] = above * decay[token][:, None, None] + outer * steps[token][:, None, None]
    products = states * C.view(batch, nodes, 1, 1, -1)
    skip = D[:, None] * x
    y = products.sum(-1).view(x.shape) + skip
    return y, states, (products.abs().sum(-1).view(x.shape) + skip.abs()).norm()


def run_steps(
    ops,
    device,
    *,
    steps,
    nodes,
    window,
    batch=2,
    nheads=2,
    headdim=4,
    dstate=16,
    tree=True,
    every=1,
    keeps_newest=False,
    seed=0,
):
    """Drive `steps` commits; returns nothing, asserts at each step and over all of them.

    Slots 1..batch are the requests', the next `batch` the tracked ones. Outputs, tracked states and (every `every`
    steps, settled into spare slots) states are compared with float64, outputs also with a plain float32 recurrence.
    keeps_newest: windows keep their newest tokens, and after each commit the states of two commits ago, and of some
    length since then, are made and compared too.
    """
    verify, commit, fold = ops
    generator = torch.Generator().manual_seed(seed)
    capacity = window + 2 * nodes

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    A = (-0.02 - torch.rand(1, nheads, generator=generator) * 0.5).to(device)
    dt_bias, D = randn(nheads).to(device), randn(nheads).to(device)
    checkpoint = zeros(1, 3 * batch + 1, nheads, headdim, dstate)
    checkpoint[:, 1 : batch + 1] = randn(batch, nheads, headdim, dstate).to(device)
    exact = checkpoint[0, 1 : batch + 1].double().cpu()
    plain = exact.float()
    ours, theirs = [], []
    windows = {
        "x": torch.full((1, batch, capacity, nheads, headdim), float("nan"), device=device),
        "B": torch.full((1, batch, capacity, 1, dstate), float("nan"), device=device),
        "dt": torch.full((1, batch, capacity, nheads), float("nan"), device=device),
    }
    order = torch.arange(capacity, dtype=torch.int32, device=device).repeat(batch, 1)
    pending, window_row = zeros(3 * batch + 1, dtype=torch.int32), zeros(3 * batch + 1, dtype=torch.int32)
    slots = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    rows = torch.arange(batch - 1, -1, -1, dtype=torch.int32, device=device)
    track_count = zeros(batch, dtype=torch.int32)

    pool = States(checkpoint)
    kept = {name: zeros(3 * batch + 1, dtype=torch.int32) for name in ("newest", "length")} if keeps_newest else {}
    window_of_all = Mamba2Window(pending, order, window, **windows, **kept)
    reached = [[exact[b]] for b in range(batch)]  # by length
    lengths = [torch.zeros(batch, dtype=torch.int32)]  # by step

    def fold_into(target, counts):
        fold(pool, window_of_all, Folds(slots, target, rows, counts), A=A)

    folds = 0
    for step in range(steps):
        parents_cpu = random_tree_parents(batch, nodes, generator)
        if not tree:
            parents_cpu[:] = torch.arange(-1, nodes - 1)
        parents, ancestors = parents_cpu.clone(), torch.zeros(batch, nodes, dtype=torch.int64)
        links = tree_links(parents_cpu)
        build_tree_reference(
            parents, ancestors, retrieve_next_token=links[0], retrieve_next_sibling=links[1], batch=batch
        )
        parents, ancestors = parents.to(device), ancestors.to(device)
        x, dt = randn(batch * nodes, nheads, headdim), randn(batch * nodes, nheads)
        B, C = randn(batch * nodes, 1, dstate), randn(batch * nodes, 1, dstate)
        batch_rows = Rows(slots, rows, parents=parents, ancestors=ancestors)
        folds += int((pending[slots.long()] > window).sum())
        entries = pending[slots.long()].long()[:, None] + torch.arange(nodes, device=device)
        nodes_at = rows.long()[:, None], order[rows.long()[:, None], entries].long()
        for name, inputs in (("x", x), ("B", B)):  # as the convolution leaves them
            windows[name][0][nodes_at] = inputs.to(device).unflatten(0, (batch, nodes))
        y = verify(
            dt.to(device),
            C.to(device),
            A=A[0],
            D=D,
            dt_bias=dt_bias,
            dt_softplus=True,
            states=pool.layer(0),
            rows=planned(batch_rows, window_of_all, nodes),
            window=window_of_all.layer(0),
        )

        inputs = (x, dt, B, C, A[0].cpu(), dt_bias.cpu(), D.cpu())
        expected, states, terms = recurrence(exact, parents_cpu, *inputs)
        by_plain, plain_states, _ = recurrence(plain, parents_cpu, *inputs)
        ours.append(float((y.double().cpu() - expected).norm() / terms))
        theirs.append(float((by_plain.double() - expected).norm() / terms))
        assert ours[-1] <= STEP_LIMIT, f"y at step {step}: error {ours[-1]:.3e} of its terms, limit {STEP_LIMIT:.1e}"

        last = torch.randint(0, nodes, (batch,), generator=generator)
        paths = [path_to(parents_cpu[b].tolist(), int(last[b])) for b in range(batch)]
        track = torch.tensor([path[step % len(path)] for path in paths])
        track[step % batch] = -1
        commit(
            window_of_all,
            batch_rows,
            window_row=window_row,
            last_correct=last.to(device),
            steps_to_track=track.to(device),
            track_count=track_count,
            lengths=lengths[-1].to(device) if keeps_newest else None,
        )
        lengths.append(lengths[-1] + torch.tensor([len(path) for path in paths], dtype=torch.int32))
        for b in range(batch if keeps_newest else 0):
            reached[b] += states[b, paths[b]]
        if keeps_newest:
            assert_same_bits("length", kept["length"][slots.long()], lengths[-1])
            since = lengths[max(step - 1, 0)]
            between = torch.rand(batch, generator=generator) * (lengths[-1] - since + 1)
            for wanted in (since, since + between.int()):
                counts = wanted.to(device) - (kept["length"] - pending)[slots.long()]
                assert (counts >= 0).all(), "a state wanted is gone"
                fold_into(slots + 2 * batch, counts)
                expected = torch.stack([reached[b][int(wanted[b])] for b in range(batch)])
                assert_close(f"state back at step {step}", checkpoint[0, 2 * batch + 1 :], expected, 1e-6)
        exact, plain = states[torch.arange(batch), last], plain_states[torch.arange(batch), last]
        if step % every == every - 1:
            fold_into(torch.where(track.to(device) >= 0, slots + batch, -1).int(), track_count)
            for b in range(batch):
                if track[b] >= 0:
                    tracked = checkpoint[0, batch + 1 + b]
                    assert_close(f"tracked at step {step}", tracked, states[b, int(track[b])], 1e-6)
            fold_into(slots + 2 * batch, pending[slots.long()])
            assert_close(f"state at step {step}", checkpoint[0, 2 * batch + 1 :], exact, 1e-6)
    assert folds > 0 or steps * nodes < window, "the run never folded"
    rms, plain_rms = (torch.tensor(errors).square().mean().sqrt() for errors in (ours, theirs))
    assert rms <= RMS_LIMIT, f"y: RMS error {rms:.3e} of its terms, plain recurrence's {plain_rms:.3e}"


@pytest.mark.in_turn
@pytest.mark.parametrize("ops", [KERNELS, REFERENCES], ids=["kernels", "references"])
@pytest.mark.parametrize(("nodes", "window"), [(3, 4), (1, 2), (4, 0), (5, 9)])
def test_steps(ops, nodes, window, device):
    run_steps(ops, device, steps=9, nodes=nodes, window=window, batch=2)


@pytest.mark.in_turn
@pytest.mark.parametrize("ops", [KERNELS, REFERENCES], ids=["kernels", "references"])
@pytest.mark.parametrize(("nodes", "window", "tree"), [(3, 4, True), (1, 2, False), (4, 4, False), (5, 9, True)])
def test_steps_back(ops, nodes, window, tree, device):
    """With a step too many committed, the one before it can be cut as well."""
    run_steps(ops, device, steps=9, nodes=nodes, window=window, batch=2, tree=tree, keeps_newest=True)


@pytest.mark.parametrize("too_far", ["newest forgotten", "one token"])
def test_a_fold_too_far_is_seen(too_far):
    """By the states wanted alone: outputs and settled states stay right where every party folds too far."""
    verify, commit, fold = REFERENCES

    def worse(*inputs, window, **arguments):
        window.newest.copy_((window.newest - (9 if too_far == "newest forgotten" else 1)).clamp(min=0))
        return verify(*inputs, window=window, **arguments)

    with pytest.raises(AssertionError, match="a state wanted is gone"):
        run_steps(
            (worse, commit, fold), torch.device("cpu"), steps=30, nodes=3, window=4, tree=False, keeps_newest=True
        )


@pytest.mark.once
def test_chain_4096_commits_do_not_drift(device):
    """As exact after 4096 commits as after one: the limit inside is the one-step limit."""
    ops = KERNELS if device.type == "cuda" else REFERENCES
    run_steps(ops, device, steps=4096, nodes=2, window=6, batch=1, nheads=1, tree=False, every=256)


@pytest.mark.parametrize("mutate", ["state cut to 20 bits", "dt off by 1e-6", "dropped token"])
def test_small_errors_are_seen(mutate):
    """A little less than float32 anywhere fails within some hundred steps."""
    verify, commit, fold = REFERENCES

    def worse(*inputs, states, rows, window, **arguments):
        y = verify(*inputs, states=states, rows=rows, window=window, **arguments)
        if mutate == "state cut to 20 bits":
            states.data.view(torch.int32).bitwise_and_(-16)
        elif mutate == "dt off by 1e-6":
            window.dt.mul_(1 + 1e-6)
        elif mutate == "dropped token":
            slots, pending = rows.slots.long(), window.pending
            pending[slots] = torch.where(pending[slots] == 5, 4, pending[slots])
        return y

    with pytest.raises(AssertionError, match="y"):
        run_steps(
            (worse, commit, fold),
            torch.device("cpu"),
            steps=256,
            nodes=2,
            window=6,
            batch=1,
            nheads=1,
            tree=False,
            every=1000,
        )


@pytest.mark.gpu
def test_tree_4096_commits_at_model_heads(device):
    run_steps(KERNELS, device, steps=512, nodes=8, window=16, batch=2, nheads=4, headdim=80, dstate=128, every=32)
    run_steps(KERNELS, device, steps=4096, nodes=4, window=8, batch=2, nheads=2, headdim=16, dstate=16, every=128)
