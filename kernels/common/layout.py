"""Layouts of a recurrent state in its slot: the values of the pool's state_layout [S] uint8, one entry a slot for all
layers.

VK is SGLang's: a head lies as [V, K] (Mamba2: V = headdim, K = dstate). KV: the same V*K elements lie as [K, V]. No
triton in this file: whoever needs the constants only does not load the compiler.
"""

from __future__ import annotations

VK = 0
KV = 1
