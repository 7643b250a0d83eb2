"""The mamba pools of the project's own modes: SGLang's slots without SGLang's per-draft state copies.

SGLang's ``MambaPool`` allocates, beside the slots, one recurrent state and one convolution window for every draft node
of every running request. `MtpMambaPool` keeps the slots only, and owns two things more: the axis order of every slot
and a `DraftStore`, which the linear-attention backend opens when it is built (only the backend knows the model). It
keeps the rule that nobody ever reads a slot behind its request: whoever reads a slot settles it first, whoever
overwrites a slot forgets what was known about it. And whoever touches a slot first catches up with what the scheduler
has decided about slots (slot_queue.py).

Somebody may touch slots beside the forwards, on another stream: the scheduler, on whose word HiCache copies states to
the host and back. It does so behind all forwards so far and ahead of those to come (`MtpMambaPool._in_order`).
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from mamba_mtp_kernels import common
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MambaPool

from .. import config
from ..compat import batches
from ..errors import MtpError
from ..families.table import FAMILIES
from .arrivals import Arrivals
from .axis_order import VK, axis_orders_for
from .draft_slots import DraftSlots, draft_slots
from .slot_queue import SlotQueue
from .store import DraftStore, padding_slots
from .window import Window, WindowShape


class HostCopy(NamedTuple):
    """States on the host: SGLang's own copy, and the axis order [n] uint8 of each."""

    states: Any
    axis_orders: torch.Tensor


@contextlib.contextmanager
def _fitting(what: str, flags: str) -> Iterator[None]:
    """Memory for ``what`` is taken here; ``flags`` make that smaller.

    Raises
        MtpError: the device has not got it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = ". ".join(str(error).split(". ")[:2])
        raise MtpError(
            f"{what} do not fit into the device's memory ({said}). Something else may hold memory there "
            f"(nvidia-smi shows it); else lower {flags}"
        ) from error


class MtpMambaPool(MambaPool):
    """``MambaPool`` with no intermediate buffers; same constructor.

    Attributes
        cache_params: SGLang's ``Mamba2CacheParams`` of the model.
        max_nodes: the largest draft length; 0 without speculation.
        request_rows: request rows, the padding row included.
        axis_orders: which slot is in which axis order.
        store: what the mode keeps of draft nodes; None until a backend opened it.
        arrivals: where another server writes states into slots, what it has to wait for; else None.
        made_of, made_smaller_by: for who has no memory for it: what the store is made of, and the flags to turn.
    """

    made_of = "bookkeeping"
    made_smaller_by = "--mem-fraction-static or --max-running-requests"

    def __init__(
        self,
        *,
        cache_params: Any,
        speculative_num_draft_tokens: int | None = None,
        spec_state_size: int,
        **kwargs: Any,
    ) -> None:
        with _fitting(f"{kwargs['size']} state slots", "--mem-fraction-static or --max-mamba-cache-size"):
            # Without a draft length SGLang's pool allocates no per-draft copies.
            super().__init__(
                cache_params=cache_params, speculative_num_draft_tokens=None, spec_state_size=spec_state_size, **kwargs
            )
        self.cache_params = cache_params
        self.max_nodes = speculative_num_draft_tokens or 0
        self.request_rows = spec_state_size + 1
        with self._memory():
            self.axis_orders = axis_orders_for(self.mamba_cache.temporal, config.current().state_layout)
        self._ops = common.ops_for(self.mamba_cache.temporal.device)
        self.store: DraftStore | None = None
        self._opened_as: object = None
        self._forward_stream: Any = None
        self._loaded: Any = None
        self.arrivals: Arrivals | None = None

    def open_store(self, family: str, model_runner: Any, max_batch: int) -> DraftStore:
        """The store of this pool for batches of up to ``max_batch`` rows, made on the first call; later backends over
        the same pool share it.

        Raises
            MtpError: a backend over this pool has opened a different one, or there is no memory for it.
        """
        kind = self._kind_of_store(family, model_runner)
        if self.store is None:
            what = f"the {self.made_of} of {self.request_rows - 1} requests with {self.max_nodes} draft nodes"
            with self._memory(), _fitting(what, self.made_smaller_by):
                self.store, self._opened_as = self._make_store(family, model_runner, max_batch), kind
        elif self._opened_as != kind:
            raise MtpError(f"two backends over one mamba pool want different buffers: {self._opened_as}, {kind}")
        return self.store

    @abstractmethod
    def _kind_of_store(self, family: str, model_runner: Any) -> object:
        """Equal for backends that can share a store."""

    @abstractmethod
    def _make_store(self, family: str, model_runner: Any, max_batch: int) -> DraftStore:
        """What the mode keeps of draft nodes."""

    def warm_up(self, lengths: Iterable[int], *, tracked: bool) -> None:
        """Have compiled, before requests wait for it, what slots and commits will launch (`DraftStore.warm_up`)."""
        if self.store is None:
            return
        self.store.warm_up(lengths, tracked=tracked)
        for slots in padding_slots(self.device):
            self.settle_for_sglang(slots)
            self._copy_states(slots, slots)

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        """Allocate as SGLang's pool does: in memory that its sleep mode gives back, and from its own allocator if it
        has one."""
        own = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else contextlib.nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), own:
            yield

    def renew(self) -> None:
        """All slots are free, and the pool's memory was given back and taken again: fill what must hold a value.

        In place. States need none: a slot is cleared, or copied into, before anybody reads it.
        """
        self.axis_orders.renew()
        if self.store is not None:
            self.store.renew()

    @property
    def speculative_bytes(self) -> int:
        """Bytes held for speculation beside the slots."""
        return 0 if self.store is None else self.store.nbytes

    def enter_forward(self) -> None:
        """A forward begins, on the current stream, before it looks at any slot."""
        self.forwards_run_here()
        self.catch_up()

    def forwards_run_here(self) -> None:
        """The current stream is the forwards'."""
        if torch.device(self.device).type == "cuda":
            self._forward_stream = torch.get_device_module(self.device).current_stream()

    def catch_up(self) -> None:
        """Somebody is about to look at slots: what was decided about them is done first. Here nothing ever waits."""

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Work on slots from whatever stream: behind the forwards so far, ahead of those to come."""
        forward = self._forward_stream
        stream = None if forward is None else torch.get_device_module(self.device).current_stream()
        if stream is None or stream == forward:
            yield
            return
        stream.wait_stream(forward)
        yield
        forward.wait_stream(stream)

    def settle(self, slots: torch.Tensor) -> None:
        """Bring the states of ``slots`` up to date, in the axis order they are in; entries <= 0 are skipped."""
        self.catch_up()
        if self.store is not None:
            self.store.settle(slots)

    def settle_for_sglang(self, slots: torch.Tensor) -> None:
        """Bring ``slots`` up to date and into the axis order that SGLang's own kernels read."""
        self.settle(slots)
        self.axis_orders.turn(slots, VK)

    def overwritten_by_sglang(self, slots: torch.Tensor) -> None:
        """SGLang has written, or is about to write, the whole states of ``slots``; entries <= 0 are skipped."""
        self.catch_up()
        if self.store is not None:
            self.store.discard(slots)
        self.axis_orders.mark(slots, VK)

    def clear_slots(self, indices: torch.Tensor) -> None:
        self.catch_up()
        super().clear_slots(indices)
        self.overwritten_by_sglang(indices)

    @contextlib.contextmanager
    def read_by_sglang(self, slots: torch.Tensor) -> Iterator[None]:
        """SGLang reads the bytes of ``slots`` [n] on the current stream: they are the whole state, as its own kernels
        read it, and no later forward writes them before."""
        with self._in_order():
            self.settle_for_sglang(slots)
            yield

    def leave_for_host(self, slots: torch.Tensor) -> None:
        """The bytes of ``slots`` [n] are about to be copied to the host, behind what the current stream has been given:
        they are to be the whole state, as SGLang's kernels read it."""
        with self.read_by_sglang(slots):
            pass

    def arrive_from_host(self, slots: torch.Tensor) -> None:
        """States are about to be copied from the host into ``slots`` [n], behind what the current stream is given; or
        another server has written them.

        A slot's last owner may have a forward at work, for which up to 0.5.18 SGLang's copy does not wait."""
        with self._in_order():
            self.overwritten_by_sglang(slots)

    def arriving_until(self, loaded: Any) -> None:
        """The states on their way from the host are there with the event ``loaded``.

        A prefill waits for them layer by layer. A request that hits a prefix whose state is still on its way copies
        all its layers before the first of them, and SGLang lets it: here it waits."""
        self._loaded = loaded

    def given_up(self, slots: torch.Tensor) -> None:
        """The owner of ``slots`` [n] is gone, where states arrive from another server."""
        if self.arrivals is not None:
            self.arrivals.given_up(slots, self._forward_stream)

    def awaits(self, slot: torch.Tensor) -> None:
        """Another server is about to be told to write a state into ``slot`` (0-dim)."""
        if self.arrivals is not None:
            self.arrivals.wait_for(slot)

    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        """Copy the states of ``src_indices`` [n] to ``dst_indices`` [n], other slots than these.

        SGLang gathers all of them into a temporary first: 8 GiB where 61 requests of a 9B Mamba2 model hit a prefix
        together, more than a server that fills its memory with slots has left.
        """
        if self._loaded is not None:
            self._loaded.wait(torch.get_device_module(self.device).current_stream())
        self.settle(src_indices)
        self._copy_states(src_indices, dst_indices)
        for sibling in batches.slot_siblings(self):
            sibling.copy_slots(src_indices, dst_indices)
        self.overwritten_by_sglang(dst_indices)
        self.axis_orders.move(src_indices, dst_indices)

    def _copy_states(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        for states in (self.mamba_cache.temporal, *self.mamba_cache.conv):
            self._ops.move_states(states, src_slots=src_slots, dst_slots=dst_slots)

    def get_cpu_copy(self, indices: torch.Tensor) -> HostCopy:
        with self._in_order():
            self.settle(indices.reshape(-1))
        return HostCopy(super().get_cpu_copy(indices), self.axis_orders.bits[indices].cpu())

    def load_cpu_copy(self, mamba_cache_cpu: HostCopy, indices: torch.Tensor) -> None:
        self.catch_up()
        super().load_cpu_copy(mamba_cache_cpu.states, indices)
        with self._in_order():
            self.overwritten_by_sglang(indices.reshape(-1))
            self.axis_orders.bits[indices] = mamba_cache_cpu.axis_orders.to(self.axis_orders.bits.device)


class ReplayPool(MtpMambaPool):
    """Replay mode's pool: windows beside the slots."""

    made_of = "windows"
    made_smaller_by = "--mem-fraction-static, --max-running-requests or --mamba-mtp-window"

    @staticmethod
    def _rewinds_to(model_runner: Any) -> int:
        """The page size to whose multiples slots can be brought back; 0: they cannot."""
        return 0

    def _kind_of_store(self, family: str, model_runner: Any) -> WindowShape:
        return WindowShape.of(
            FAMILIES[family],
            self.cache_params,
            layers=self.num_mamba_layers,
            nodes=self.max_nodes,
            window=config.current().window,
            dtype=model_runner.dtype,
            rewinds_to=self._rewinds_to(model_runner),
        )

    def _make_store(self, family: str, model_runner: Any, max_batch: int) -> Window:
        kernels, states = FAMILIES[family], self.mamba_cache.temporal
        return Window(
            self._kind_of_store(family, model_runner),
            verify=kernels.replay(states.device),
            fold=kernels.fold(states.device, model_runner.model),
            states=states,
            conv_states=self.mamba_cache.conv[0],
            axis_orders=self.axis_orders,
            rows=self.request_rows,
            max_batch=max_batch,
        )


class RewindPool(ReplayPool):
    """The same where requests give their own slots to the radix cache, at exact lengths (state/rewind.py).

    Attributes
        queue: what the scheduler has decided about slots and is still to be done.
    """

    store: Window | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.queue = SlotQueue(self.mamba_cache.temporal.device)

    @staticmethod
    def _rewinds_to(model_runner: Any) -> int:
        return int(model_runner.page_size)

    def renew(self) -> None:
        self.queue.forget()
        super().renew()

    def catch_up(self) -> None:
        """Do what is queued, behind the forward that was launched last and ahead of the next one."""
        if self.store is None or not len(self.queue):
            return
        slots, lengths = self.queue.take()
        with self._in_order():
            self.store.state_at(slots, slots, lengths)

    @property
    def page(self) -> int:
        """The page size to whose multiples slots can be brought back, once a backend has opened the pool."""
        return 1 if self.store is None else self.store.shape.rewinds_to

    def give_away(self, slot: torch.Tensor, length: int) -> None:
        """The radix cache owns ``slot`` (0-dim) from now on, as the state after ``length`` tokens."""
        self.queue.put(slot, length)

    def warm_up(self, lengths: Iterable[int], *, tracked: bool) -> None:
        super().warm_up(lengths, tracked=tracked)
        if self.store is not None:
            for slots in padding_slots(self.device):
                self.store.state_at(slots, slots, torch.zeros_like(slots, dtype=torch.int64))


class DraftSlotPool(MtpMambaPool):
    """Slots mode's pool: draft slots for the draft nodes of every request row, behind the ordinary slots.

    Attributes
        first_draft_slot: where they begin. SGLang allocates the slots before only.
    """

    def __init__(
        self, *, size: int, speculative_num_draft_tokens: int | None = None, spec_state_size: int, **kwargs: Any
    ) -> None:
        super().__init__(
            size=size + (spec_state_size + 1) * draft_slots(speculative_num_draft_tokens or 0),
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            spec_state_size=spec_state_size,
            **kwargs,
        )
        self.size = size
        self.first_draft_slot = size + 1

    def _kind_of_store(self, family: str, model_runner: Any) -> str:
        return family

    def _make_store(self, family: str, model_runner: Any, max_batch: int) -> DraftSlots:
        states = self.mamba_cache.temporal
        return DraftSlots(
            verify=FAMILIES[family].slots(states.device),
            states=states,
            conv_states=self.mamba_cache.conv[0],
            axis_orders=self.axis_orders,
            first=self.first_draft_slot,
            rows=self.request_rows,
            nodes=self.max_nodes,
            max_batch=max_batch,
        )


def copies_per_draft(mamba_pool: Any) -> dict[str, int]:
    """Bytes that SGLang's own pool really allocated for the states and convolution windows of draft nodes (shared
    storage counts once), by what they hold."""
    cache = mamba_pool.mamba_cache
    return {
        name: _allocated(tensors)
        for name, tensors in (
            ("states", getattr(cache, "intermediate_ssm", None)),
            ("conv windows", getattr(cache, "intermediate_conv_window", None)),
        )
        if tensors is not None
    }


def _allocated(tensors: torch.Tensor | list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = [tensor.untyped_storage() for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
