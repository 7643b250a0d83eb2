"""Watches what HiCache copies to the host and back: every state is recorded as it arrives, under its token prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .states import Prefix, Record, State, read_state

if TYPE_CHECKING:
    from .recorder import Recorder


class HostWatch:
    """Counts the states copied ``to_host`` and ``from_host``, and records them (kinds "host" and "loaded"). Where the
    radix cache has no host tier it does nothing."""

    def __init__(self, scheduler: Any, recorder: Recorder):
        self.to_host = self.from_host = 0
        self._recorder = recorder
        self._keys: dict[int, Prefix] = {}
        controller = getattr(scheduler.tree_cache, "cache_controller", None)
        if controller is None:
            return
        from sglang.srt.mem_cache.hicache_storage import PoolName

        self._controller, self._name = controller, PoolName.MAMBA
        self._host = controller.mem_pool_host.entry_map[PoolName.MAMBA].host_pool
        controller.start_writing = self._wrap_writing(controller.start_writing)
        controller.start_loading = self._wrap_loading(controller.start_loading)
        controller.load = self._wrap_load(controller.load)

    def _pairs(self, operations: list[Any]) -> Iterator[tuple[int, int]]:
        """Slots on the device and on the host, of every state to be copied."""
        for operation in operations:
            for transfer in operation.pool_transfers or ():
                if transfer.name == self._name:
                    yield from zip(transfer.device_indices.tolist(), transfer.host_indices.tolist(), strict=True)

    def _wrap_writing(self, start_writing):
        def wrapped():
            pairs = list(self._pairs(self._controller.write_queue))
            out = start_writing()
            self._wait()
            for slot, place in pairs:
                self._keys[place] = self._recorder.owned(slot)
                self.to_host += 1
                self._record("host", f"slot {slot} at {place}", self._keys[place], self._on_host(place))
            return out

        return wrapped

    def _wrap_loading(self, start_loading):
        def wrapped():
            pairs = list(self._pairs(self._controller.load_queue))
            producer = start_loading()
            self._wait()
            for slot, place in pairs:
                self.from_host += 1
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
                for transfer in caches:
                    for slot, place in zip(
                        transfer.device_indices.tolist(), transfer.host_indices.tolist(), strict=True
                    ):
                        self._recorder.own(slot, self._keys[place])
            return tokens

        return wrapped

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
