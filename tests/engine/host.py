"""Watches what HiCache copies to the host and back: how many states, and which, each under its token prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .states import Prefix, Record, State, read_state

if TYPE_CHECKING:
    from .recorder import Recorder


class HostWatch:
    """Counts the states copied ``to_host`` and ``from_host``, and knows whose each of them is. Where the radix cache
    has no host tier it does nothing.

    On a CPU, and where running requests are recorded live, it also records them (kinds "host" and "loaded"). Elsewhere
    it reads nothing of the device's as they are copied: that would put copies and forwards in order that are not.
    """

    def __init__(self, scheduler: Any, recorder: Recorder):
        self.to_host = self.from_host = 0
        self._recorder = recorder
        self._keys: dict[int, Prefix] = {}
        self._due: list[Callable[[], None]] = []
        controller = getattr(scheduler.tree_cache, "cache_controller", None)
        if controller is None:
            return
        from sglang.srt.mem_cache.hicache_storage import PoolName

        self._controller, self._name = controller, PoolName.MAMBA
        self._host = controller.mem_pool_host.entry_map[PoolName.MAMBA].host_pool
        self._shows = recorder.live or recorder.pool.mamba_cache.temporal.device.type == "cpu"
        controller.start_writing = self._wrap_writing(controller.start_writing)
        controller.start_loading = self._wrap_loading(controller.start_loading)
        controller.load = self._wrap_load(controller.load)

    def catch_up(self) -> None:
        """Work out whose the states are that have been copied; call before slots change hands."""
        due, self._due = self._due, []
        for step in due:
            step()

    def _copies(self, operations: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Slots on the device and places on the host, of the states to be copied."""
        return [
            (transfer.device_indices, transfer.host_indices)
            for operation in operations
            for transfer in operation.pool_transfers or ()
            if transfer.name == self._name
        ]

    def _wrap_writing(self, start_writing):
        def wrapped():
            copies = self._copies(self._controller.write_queue)
            self.to_host += sum(len(slots) for slots, _ in copies)
            self._due.append(partial(self._note_written, copies, self._recorder.inserting))
            out = start_writing()
            if self._shows:
                self._wait()
                self.catch_up()
                for slot, place in _pairs(copies):
                    self._record("host", f"slot {slot} at {place}", self._keys[place], self._on_host(place))
            return out

        return wrapped

    def _note_written(self, copies: list[tuple[torch.Tensor, torch.Tensor]], inserting: dict[int, Prefix]) -> None:
        """``inserting`` are the slots that the radix cache was being given."""
        for slot, place in _pairs(copies):
            self._keys[place] = (self._recorder.owned | inserting)[slot]

    def _wrap_loading(self, start_loading):
        def wrapped():
            copies = self._copies(self._controller.load_queue)
            self.from_host += sum(len(slots) for slots, _ in copies)
            producer = start_loading()
            if self._shows:
                self._wait()
                for slot, place in _pairs(copies):
                    (state,) = read_state(self._recorder.pool, torch.tensor([slot]), settle=False)
                    self._record("loaded", f"slot {slot} from {place}", self._keys[place], state)
            return producer

        return wrapped

    def _wrap_load(self, load):
        """Slots that are taken here are the radix cache's; a request that waits for the state has its own already."""

        def wrapped(*args, extra_pools=None, **kwargs):
            states = [transfer for transfer in extra_pools or () if transfer.name == self._name]
            caches = [transfer for transfer in states if transfer.device_indices is None]
            tokens = load(*args, extra_pools=extra_pools, **kwargs)
            if tokens is not None:
                copies = [(transfer.device_indices, transfer.host_indices) for transfer in caches]
                self._due.append(partial(self._note_loaded, copies))
                if self._shows:
                    self.catch_up()
            return tokens

        return wrapped

    def _note_loaded(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for slot, place in _pairs(copies):
            self._recorder.own(slot, self._keys[place])

    def _on_host(self, place: int) -> State:
        """What lies on the host, pages first: [places, L, 1, ...]."""
        host = self._host
        return State(
            host.temporal_buffer[place, :, 0].clone(), tuple(conv[place, :, 0].clone() for conv in host.conv_buffer)
        )

    def _record(self, kind: str, where: str, prefix: Prefix, state: State) -> None:
        self._recorder.records.append(Record(kind, f"{where}@{self._recorder.step}", prefix, state))

    @staticmethod
    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _pairs(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[int, int]]:
    """Slot and place of each state; on a GPU this waits for what the current stream has been given."""
    for slots, places in copies:
        yield from zip(slots.tolist(), places.tolist(), strict=True)
