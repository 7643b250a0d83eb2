"""Gated delta rule (GDN) in plain PyTorch: the recurrence, and an equal chunked form that trains fast.

State S [K, V] of a head, per token: ``S = e^g S; S += beta k (v - S^T k)^T; o = scale S^T q``, k and q l2-normalised.
Chunked (Yang et al. 2024, "Gated Delta Networks"): inside a chunk the corrected values u solve a unit lower triangular
system; between chunks the state is carried.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def l2norm(x: Tensor) -> Tensor:
    """x / |x| over the last dim, with FLA's epsilon."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """[B, S, H or HV, *] in any dtype -> float32 [B, HV, S, *]; q scaled; q, k normalised and repeated to HV heads."""
    repeat = v.shape[2] // k.shape[2]
    q, k = (l2norm(t.float()).repeat_interleave(repeat, dim=2).transpose(1, 2) for t in (q, k))
    v, g, beta = (t.float().transpose(1, 2) for t in (v, g, beta))
    return q * k.shape[-1] ** -0.5, k, v, g, beta


def recurrent_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The plain recurrence. q, k [B, S, H, K]; v [B, S, HV, V]; g, beta [B, S, HV] -> float32 [B, S, HV, V]."""
    q, k, v, g, beta = _prepare(q, k, v, g, beta)
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(k.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state))
        state = state + k[:, :, t, :, None] * u[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, dim=1)


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, chunk: int = 64) -> Tensor:
    """As recurrent_gated_delta_rule, ``chunk`` tokens at a time; S is padded to a multiple of it."""
    length = q.shape[1]
    q, k, v, g, beta = _prepare(q, k, v, g, beta)
    pad = -length % chunk
    q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, pad)) for t in (g, beta))
    q, k, v, g, beta = (t.unflatten(2, (-1, chunk)) for t in (q, k, v, g, beta))  # [B, HV, N, C, *]

    decay = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    ratio = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, float("-inf")).exp()  # [.., C, C]
    system = (beta[..., None] * (k @ k.transpose(-1, -2)) * ratio).tril(-1)  # unit diagonal implied
    decayed = decay.exp()[..., None]
    right = torch.cat([v, k * decayed], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, corrections = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * ratio
    q = q * decayed
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    total = decay[..., -1].exp()[..., None, None]  # [B, HV, N, 1, 1]

    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    parts = zip(*(t.unbind(2) for t in (q, k, values, corrections, scores, total)), strict=True)
    for q_n, k_n, values_n, corrections_n, scores_n, total_n in parts:
        u = values_n - corrections_n @ state
        outputs.append(q_n @ state + scores_n @ u)
        state = state * total_n + k_n.transpose(-1, -2) @ u
    out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2)
