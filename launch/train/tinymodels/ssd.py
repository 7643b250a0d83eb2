"""Mamba2's state-space scan in plain PyTorch: the recurrence, and the equal chunked (SSD) form.

State h [P, N] of a head, per token: ``h = e^{dt A} h + dt x B^T; y = h C`` (Dao and Gu 2024). The caller adds D x.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _prepare(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """[B, S, heads or groups, *] in any dtype -> float32 [B, H, S, *], groups repeated to heads."""
    repeat = x.shape[2] // b.shape[2]
    b, c = (t.float().repeat_interleave(repeat, dim=2).transpose(1, 2) for t in (b, c))
    return x.float().transpose(1, 2), dt.float().transpose(1, 2), b, c


def recurrent_ssm(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The plain recurrence. x [B, S, H, P]; dt [B, S, H]; a [H] < 0; b, c [B, S, G, N] -> float32 [B, S, H, P]."""
    x, dt, b, c = _prepare(x, dt, b, c)
    state = x.new_zeros(*x.shape[:2], x.shape[-1], b.shape[-1])
    outputs = []
    for t in range(x.shape[2]):
        step = dt[:, :, t, None, None]
        state = state * (step * a[:, None, None]).exp() + step * x[:, :, t, :, None] * b[:, :, t, None, :]
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, :, t]))
    return torch.stack(outputs, dim=1)


def chunk_ssm(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, chunk: int = 64) -> Tensor:
    """As recurrent_ssm, ``chunk`` tokens at a time; S is padded to a multiple of it."""
    length = x.shape[1]
    x, dt, b, c = _prepare(x, dt, b, c)
    pad = -length % chunk
    x, b, c = (F.pad(t, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for t in (x, b, c))  # [B, H, N, C, *]
    dt = F.pad(dt, (0, pad)).unflatten(2, (-1, chunk))

    decay = (dt * a[:, None, None]).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    ratio = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    x = x * dt[..., None]
    inside = ((c @ b.transpose(-1, -2)) * ratio) @ x
    c = c * decay.exp()[..., None]
    added = (b * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2) @ x  # [B, H, N, state, P]
    total = decay[..., -1].exp()[..., None, None]

    state = torch.zeros_like(added[:, :, 0])
    outputs = []
    for inside_n, c_n, added_n, total_n in zip(*(t.unbind(2) for t in (inside, c, added, total)), strict=True):
        outputs.append(inside_n + c_n @ state)
        state = state * total_n + added_n
    out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2)
