"""The mamba pools of our modes, beside what the random lives of tests/stateful show of them."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_mamba_mtp.errors import MtpError

pytestmark = pytest.mark.usefixtures("sglang")

SLOTS = 64


def make_pool(device: str):
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    from sglang_mamba_mtp.state.pools import ReplayPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=512, n_groups=4, num_heads=4, head_dim=128, state_size=128, conv_kernel=4
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    params = Mamba2CacheParams(shape=shape, layers=[0, 1, 2], dtype=dtype)
    return ReplayPool(
        size=SLOTS,
        spec_state_size=4,
        cache_params=params,
        mamba_layer_ids=[0, 1, 2],
        device=device,
        speculative_num_draft_tokens=4,
    )


def check_copies(device: str) -> int:
    """Copy half of the slots to the others. Returns the bytes that took beside the pool."""
    pool = make_pool(device)
    cache = pool.mamba_cache
    for states in (cache.temporal, *cache.conv):
        states.copy_(torch.randn(states.shape, device=device))
    half = SLOTS // 2
    src, dst = torch.arange(1, half + 1, device=device), torch.arange(half + 1, SLOTS + 1, device=device)
    before = [states.clone() for states in (cache.temporal, *cache.conv)]
    taken = 0
    if device == "cuda":
        pool.copy_from(src[:1], dst[:1])  # compiles
        torch.cuda.reset_peak_memory_stats()
        taken = -torch.cuda.memory_allocated()
    pool.copy_from(src, dst)
    if device == "cuda":
        taken += torch.cuda.max_memory_allocated()
    for states, old in zip((cache.temporal, *cache.conv), before, strict=True):
        assert torch.equal(states[:, dst], old[:, src]) and torch.equal(states[:, : half + 1], old[:, : half + 1])
    return taken


def test_copies_go_to_their_slots_and_nowhere_else():
    check_copies("cpu")


class Stream:
    """A stream that notes what it waits for, and what is done on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize(
    "work, called", [("settle_for_sglang", "leave_for_host"), ("overwritten_by_sglang", "arrive_from_host")]
)
def test_slots_travel_behind_the_forwards_so_far_and_ahead_of_those_to_come(work, called, monkeypatch):
    pool, log, slots = make_pool("cpu"), [], torch.tensor([3])
    forward, scheduler = Stream("forward", log), Stream("scheduler", log)
    pool._forward_stream = forward
    monkeypatch.setattr(pool, work, lambda given: log.append(f"{work} {given.tolist()}"))
    for current, expected in (
        (scheduler, ["scheduler waits for forward", f"{work} [3]", "forward waits for scheduler"]),
        (forward, [f"{work} [3]"]),
    ):
        log.clear()
        monkeypatch.setattr(
            torch, "get_device_module", lambda device, s=current: SimpleNamespace(current_stream=lambda: s)
        )
        getattr(pool, called)(slots)
        assert log == expected


def test_a_copy_waits_for_what_is_on_its_way_from_the_host(monkeypatch):
    pool, log = make_pool("cpu"), []
    pool.arriving_until(SimpleNamespace(wait=lambda stream: log.append("waits")))
    copy = pool._copy_states
    monkeypatch.setattr(pool, "_copy_states", lambda *slots: (log.append("copies"), copy(*slots)))
    pool.copy_from(torch.tensor([1]), torch.tensor([2]))
    assert log == ["waits", "copies"]


def _no_memory(module, dtype: torch.dtype):
    """Nothing of this type can be allocated by ``module``'s torch, on any device, as PyTorch says it of a GPU."""

    def allocate(real):
        def without_memory(*size, **kwargs):
            if kwargs.get("dtype") == dtype:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 7.00 GiB. GPU 0 has a total of 1 MiB"
                )
            return real(*size, **kwargs)

        return without_memory

    names = {name: allocate(getattr(module.torch, name)) for name in ("empty", "zeros")}
    return mock.patch.multiple(module.torch, **names)


def test_who_has_no_memory_for_slots_is_told_the_flag():
    from sglang.srt.mem_cache import memory_pool

    told = "64 state slots do not fit into the device's memory (CUDA out of memory. Tried to allocate 7.00 GiB). "
    with _no_memory(memory_pool, torch.float32), pytest.raises(MtpError, match=re.escape(told)) as raised:
        make_pool("cpu")
    assert str(raised.value).endswith("else lower --mem-fraction-static or --max-mamba-cache-size")


def test_who_has_no_memory_for_windows_is_told_the_flag():
    from sglang_mamba_mtp.state import window

    pool = make_pool("cpu")
    runner = SimpleNamespace(dtype=torch.bfloat16, model=None)
    told = "the windows of 4 requests with 4 draft nodes do not fit into the device's memory"
    with _no_memory(window, torch.float32), pytest.raises(MtpError, match=told) as raised:
        pool.open_store("gdn", runner, 4)
    assert str(raised.value).endswith("else lower --mem-fraction-static, --max-running-requests or --mamba-mtp-window")
    assert pool.store is None


@pytest.mark.gpu
def test_many_copies_take_no_memory():
    """SGLang's own copy holds every state copied a second time: a server full of slots has no room for that."""
    assert check_copies("cuda") < 1 << 20


@contextlib.contextmanager
def _no_memory_on_the_gpu():
    """PyTorch's own allocator has nothing left in what it holds, and may not hold more."""
    held = []
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / whole)
    try:
        for exponent in range(24, 8, -1):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(1 << exponent, dtype=torch.uint8, device="cuda"))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_a_gpu_that_has_no_memory_is_told():
    torch.zeros(1, device="cuda")
    refused = r".* do not fit into the device's memory \(CUDA out of memory\. Tried to allocate \d"
    with _no_memory_on_the_gpu(), pytest.raises(MtpError, match=f"64 state slots{refused}"):
        make_pool("cuda")
    pool = make_pool("cuda")
    with _no_memory_on_the_gpu(), pytest.raises(MtpError, match=f"the windows of 4 requests{refused}"):
        pool.open_store("gdn", SimpleNamespace(dtype=torch.bfloat16, model=None), 4)
    assert pool.store is None
