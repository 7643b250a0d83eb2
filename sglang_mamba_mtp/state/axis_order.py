"""The order of a recurrent state's last two axes, one bit a slot, owned by the pool.

SGLang keeps a head's state as [V, K] (VK) and so do its prefill and decode kernels. This project's kernels read either
order by the slot's bit and write the one asked for (``--mamba-mtp-state-layout``). A bit belongs to its slot's content:
whatever moves a state moves its bit, whatever overwrites one sets it, and who needs VK gets exactly the flagged slots
turned, on the device, without the host knowing which.

A write *in place* (a fold into the slot it read) keeps the slot's order, because the programs of a kernel share a head
and would overwrite each other's input; such slots are turned afterwards, whole heads at a time.
"""

from __future__ import annotations

import torch
from mamba_mtp_kernels import common
from mamba_mtp_kernels.common.axis_order import KV, VK

#: What ``auto`` means: the faster one, measured (tests/bench/results/*-modes.json, "layouts").
FASTER = VK

#: Values of ``--mamba-mtp-state-layout``.
CHOICES = {"vk": VK, "kv": KV, "auto": FASTER}


class AxisOrders:
    """The axis order of every slot: ``bits`` [S] uint8, `VK` or `KV`.

    Attributes
        write: what verify and fold write.
        in_play: ``bits`` as the kernels take them, or None where no slot can be anything but VK.
    """

    def __init__(self, states: torch.Tensor, write: int) -> None:
        """``states`` is the pool's ``temporal`` [L, S, ...]; every slot starts as VK."""
        self._states = states
        self._ops = common.ops_for(states.device)
        self.bits = torch.empty(states.shape[1], dtype=torch.uint8, device=states.device)
        self.write = write
        self.renew()

    def renew(self) -> None:
        """Every slot is VK again, as in a new pool."""
        self.bits.fill_(VK)

    @property
    def in_play(self) -> torch.Tensor | None:
        return self.bits

    def turn(self, slots: torch.Tensor, order: int) -> None:
        """Bring ``slots`` (distinct, entries <= 0 skipped) into ``order`` where they are in the other one."""
        self._ops.turn_states(self._states, self.bits, slots=slots.reshape(-1), to=order)

    def mark(self, slots: torch.Tensor, order: int) -> None:
        """Somebody has written, or is about to write, the states of ``slots`` in ``order``; entries <= 0 skipped."""
        # Slot 0 is nobody's: padding may land there.
        self.bits.index_fill_(0, slots.clamp(min=0).reshape(-1).to(torch.int64), order)

    def move(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        """The states of ``src_slots`` were copied to ``dst_slots``; pairs with an entry <= 0 are skipped."""
        moved = (src_slots > 0) & (dst_slots > 0)
        src, dst = (torch.where(moved, slots, 0).reshape(-1).to(torch.int64) for slots in (src_slots, dst_slots))
        self.bits.index_copy_(0, dst, self.bits.index_select(0, src))


class AlwaysVk(AxisOrders):
    """Nobody writes KV, so every bit stays VK and there is nothing to move or to turn."""

    @property
    def in_play(self) -> torch.Tensor | None:
        return None

    def turn(self, slots: torch.Tensor, order: int) -> None:
        pass

    def mark(self, slots: torch.Tensor, order: int) -> None:
        pass

    def move(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        pass


def axis_orders_for(states: torch.Tensor, choice: str) -> AxisOrders:
    """The bitmap of a pool for a value of ``--mamba-mtp-state-layout``."""
    write = CHOICES[choice]
    return AlwaysVk(states, write) if write == VK else AxisOrders(states, write)
