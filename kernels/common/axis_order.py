"""Axis order of a recurrent state in its slot: the values of the pool's axis_order [S] uint8, one entry per slot, the
same in all layers.

VK is SGLang's: a head lies as [V, K] (Mamba2: V = headdim, K = dstate). KV: the same V*K elements lie as [K, V]. No
triton in this file: whoever needs the constants only does not load the compiler.
"""

from __future__ import annotations

VK = 0
KV = 1
