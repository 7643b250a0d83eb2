"""Per-token float64 loops: what the ops of `sglang_mamba_mtp.cpu` must compute. One sequence or one draft path each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def gdn_gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log-decay and write strength `[T, HV]`, float64."""
    g = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    return g, b.double().sigmoid()


def gdn_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token. state `[HV, V, K]`, q, k `[H, K]`, v `[HV, V]`, g, beta `[HV]` -> output `[HV, V]`, new state."""
    state = state.clone()
    out = torch.empty_like(v, dtype=torch.float64)
    group = v.shape[0] // q.shape[0]
    for h in range(v.shape[0]):
        key, query = k[h // group].double(), q[h // group].double()
        key = key / (key.pow(2).sum() + 1e-6).sqrt()
        query = query / (query.pow(2).sum() + 1e-6).sqrt() * query.shape[0] ** -0.5
        s = state[h] * g[h].exp()
        s = s + torch.outer(beta[h] * (v[h].double() - s @ key), key)
        state[h] = s
        out[h] = s @ query
    return out, state


def mamba2_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """One token. state `[nheads, P, N]`, x `[nheads, P]`, dt, A, D, dt_bias `[nheads]`, B, C `[ngroups, N]`."""
    state = state.clone()
    out = torch.empty_like(x, dtype=torch.float64)
    group = x.shape[0] // B.shape[0]
    for h in range(x.shape[0]):
        step = torch.nn.functional.softplus(dt[h].double() + dt_bias[h].double())
        s = state[h] * (step * A[h].double()).exp()
        state[h] = s + torch.outer(step * x[h].double(), B[h // group].double())
        out[h] = state[h] @ C[h // group].double() + D[h].double() * x[h].double()
    return out, state


def conv1d_step(window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token. window `[dim, width - 1]` oldest first, x `[dim]` -> silu output `[dim]`, new window."""
    taps = torch.cat([window.double(), x.double().unsqueeze(1)], dim=1)
    y = (taps * weight.double()).sum(1) + (0 if bias is None else bias.double())
    return y * y.sigmoid(), taps[:, 1:]


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, -1 for none."""
    n = len(parents)
    first = [min((j for j in range(n) if parents[j] == i), default=-1) for i in range(n)]
    after = [min((j for j in range(i + 1, n) if i and parents[j] == parents[i]), default=-1) for i in range(n)]
    return first, after


def relative(got: Tensor, want: Tensor) -> float:
    """RMS error over RMS value."""
    want = want.double()
    return float((got.double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt().clamp(min=1e-30))
