"""What replay and slots tell SGLang's sizing, with SGLang's own `_handle_max_mamba_cache` of the installed version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp.compat import startup
from sglang_mamba_mtp.families.table import FAMILIES
from sglang_mamba_mtp.state import sizing as accounting
from sglang_mamba_mtp.state.sizing import DRAFT_SLOTS, WINDOWS, Holding
from sglang_mamba_mtp.state.window import WindowShape

GIB = 1 << 30
LAYERS, NODES = 36, 8
STATE = LAYERS * (32 * 128 * 128 * 4 + 8192 * 3 * 2)  # Qwen3-Next's heads in float32, its convolution in bfloat16
RATIO = 3

SHAPE = SimpleNamespace(conv=[(8192, 3)], temporal=(32, 128, 128), num_k_heads_per_tp=16)
PARAMS = SimpleNamespace(layers=list(range(LAYERS)), mamba_cache_per_req=STATE, shape=SHAPE)

pytestmark = pytest.mark.usefixtures("sglang")

BOTH = pytest.mark.parametrize("holding", [WINDOWS, DRAFT_SLOTS], ids=lambda holding: holding.what)


class Sizing:
    """A configurator as far as the sizing looks at one, and the settings it reads."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        requests: int,
        slots: int | None = None,
        radix: bool = True,
        nodes: int = NODES,
        arriving: int = 0,
        places: int = 0,
    ):
        from sglang.srt.mem_cache import kv_cache_configurator
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.original = kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache
        self.schedule = SimpleNamespace(
            max_running_requests=requests, max_mamba_cache_size=slots, mamba_full_memory_ratio=0.9
        )
        replay = SimpleNamespace(enable_linear_replayssm_spec=False, linear_replayssm_cache_len=16)
        settings = {
            "get_schedule": self.schedule,
            "get_memory": SimpleNamespace(disable_radix_cache=not radix),
            "get_spec": SimpleNamespace(speculative_num_draft_tokens=nodes),
            "get_exec": SimpleNamespace(mamba=replay),
            "get_context": SimpleNamespace(override=lambda source, **fields: vars(self.schedule).update(fields)),
            "_pd_prefill_skips_mamba_spec_state": False,
            "kimi_linear_config": None,
        }
        for name, value in settings.items():
            monkeypatch.setattr(kv_cache_configurator, name, lambda *ignored, value=value: value, raising=False)
        monkeypatch.setattr(startup, "cache_params", lambda model_config: PARAMS)
        monkeypatch.setattr(startup, "largest_draft", lambda server_args: nodes)
        monkeypatch.setattr(startup, "rows_in_transfer", lambda server_args: arriving)
        monkeypatch.setattr(startup, "checkpoint_bytes_of_a_slot", lambda configurator: places)
        self.configurator = SimpleNamespace(
            mambaish_config=SimpleNamespace(mamba2_cache_params=PARAMS),
            ps=SimpleNamespace(attn_dp_size=1, pp_size=1),
            attn_dp_size=1,
            pp_size=1,
            spec_algorithm=SpeculativeAlgorithm.EAGLE,
            server_args=None,
            model_config=SimpleNamespace(dtype=torch.bfloat16, num_hidden_layers=48),
            hybrid_gdn_config=None,
            hybrid_kda_config=None,
            extra_mamba_cache_bytes_per_req=0,
            fused_entry_bytes=lambda kind: None,
            _calculate_mamba_ratio=lambda: RATIO if radix else 1,
        )

    def stock(self, memory: float) -> tuple[int, float]:
        """(slots, GiB left) of SGLang's own verify."""
        given = self.schedule.max_mamba_cache_size
        rest = self.original(self.configurator, memory)
        slots, self.schedule.max_mamba_cache_size = self.schedule.max_mamba_cache_size, given
        return slots, rest

    def ours(self, holding: Holding, memory: float) -> tuple[int, float]:
        rest = accounting.size_with(holding, self.original, self.configurator, memory, "gdn", 0)
        assert not self.configurator.spec_algorithm.is_none()
        return self.schedule.max_mamba_cache_size, rest


def row_bytes(holding: Holding) -> int:
    if holding is DRAFT_SLOTS:
        return (NODES - 1) * STATE
    return WindowShape.of(
        FAMILIES["gdn"], PARAMS, layers=LAYERS, nodes=NODES, window=None, dtype=torch.bfloat16, rewinds_to=0
    ).bytes_per_row()


def allocated(holding: Holding, slots: int, requests: int, ratio: int = RATIO) -> int:
    """Bytes of slots and request rows; SGLang caps the requests by the slots and both pools have one for padding."""
    return (slots + 1) * STATE + (min(requests, slots // ratio) + 1) * row_bytes(holding)


@BOTH
@pytest.mark.parametrize("requests", [1, 4, 33, 64, 256, 1024, 4096])
def test_slots_fill_the_pools_share(holding: Holding, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a slot more fits, what is charged is what will be allocated, and it is never less than stock gets."""
    sizing = Sizing(monkeypatch, requests=requests)
    stock_slots, _ = sizing.stock(16.0)
    slots, rest = sizing.ours(holding, 16.0)
    budget = 16 * GIB * 0.9 / 1.9
    assert allocated(holding, slots, requests) <= budget < allocated(holding, slots + 1, requests)
    assert rest == pytest.approx(16.0 - allocated(holding, slots, requests) / GIB, abs=1e-6)
    assert slots > (stock_slots if holding is DRAFT_SLOTS else 2 * stock_slots)


@BOTH
@pytest.mark.parametrize("requests", [4, 64, 1024])
def test_int8_checkpoints_take_no_more_than_they_would(
    holding: Holding, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang adds two places a slot, from memory that it leaves free: those of more slots come out of the share."""
    places = STATE // 2 + 4096
    stock_slots, _ = Sizing(monkeypatch, requests=requests).stock(16.0)
    slots, rest = Sizing(monkeypatch, requests=requests, places=places).ours(holding, 16.0)
    budget = 16 * GIB * 0.9 / 1.9

    def taken(slots: int) -> float:
        return allocated(holding, slots, requests) + places * max(0, slots - stock_slots)

    assert stock_slots <= slots and taken(slots) <= budget < taken(slots + 1)
    assert rest == pytest.approx(16.0 - taken(slots) / GIB, abs=1e-6)


@BOTH
def test_more_requests_than_slots_cost_nothing(holding: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is charged for a request that can run, not for one that was asked for."""
    few, many = (Sizing(monkeypatch, requests=requests).ours(holding, 16.0) for requests in (256, 4096))
    assert few == many


@BOTH
@pytest.mark.parametrize("memory", [0.5, 1.0, 3.1, 7.7, 80.0])
@pytest.mark.parametrize("requests", [2, 48, 500])
def test_any_memory(holding: Holding, memory: float, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizing = Sizing(monkeypatch, requests=requests)
    budget = memory * GIB * 0.9 / 1.9
    if budget < allocated(holding, RATIO, requests):
        with pytest.raises(RuntimeError, match=f"GiB of {holding.what} are needed for one"):
            sizing.ours(holding, memory)
        return
    slots, _ = sizing.ours(holding, memory)
    assert allocated(holding, slots, requests) <= budget < allocated(holding, slots + 1, requests)


def test_drafts_of_one_node_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their root's state goes where it was read from, and there is no other."""
    slots, _ = Sizing(monkeypatch, requests=64, nodes=1).ours(DRAFT_SLOTS, 16.0)
    budget = 16 * GIB * 0.9 / 1.9
    assert (slots + 1) * STATE <= budget < (slots + 2) * STATE


@BOTH
@pytest.mark.parametrize("requests", [4, 64])
def test_fixed_slots_leave_more_to_the_kv_cache(
    holding: Holding, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizing = Sizing(monkeypatch, requests=requests, slots=30)
    _, stock_rest = sizing.stock(16.0)
    slots, rest = sizing.ours(holding, 16.0)
    assert slots == 30 and rest == pytest.approx(16.0 - allocated(holding, 30, requests) / GIB, abs=1e-6)
    assert rest > stock_rest


@BOTH
@pytest.mark.parametrize("radix", [True, False])
def test_a_decode_servers_rows_in_transfer_are_paid_for(holding: Holding, radix: bool, monkeypatch: pytest.MonkeyPatch):
    """With a radix cache there are fewer slots for them, without one fewer tokens."""
    slots, rest = Sizing(monkeypatch, requests=16, radix=radix).ours(holding, 64.0)
    fewer, left = Sizing(monkeypatch, requests=16, radix=radix, arriving=32).ours(holding, 64.0)
    assert (fewer < slots) == radix and (slots - fewer) * STATE <= 32 * row_bytes(holding) + STATE
    taken = (rest - left) * GIB + (slots - fewer) * STATE
    assert taken == pytest.approx(32 * row_bytes(holding), abs=1024)


@BOTH
def test_without_radix_cache(holding: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot a request, as SGLang has it then."""
    sizing = Sizing(monkeypatch, requests=12, radix=False)
    stock_slots, stock_rest = sizing.stock(16.0)
    slots, rest = sizing.ours(holding, 16.0)
    assert slots == stock_slots == 12 and rest > stock_rest
    assert rest == pytest.approx(16.0 - allocated(holding, 12, 12, ratio=1) / GIB, abs=1e-6)


@BOTH
def test_log_line(holding: Holding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What will be allocated, states that SGLang would have allocated, the slots gained."""
    sizing = Sizing(monkeypatch, requests=1024)
    stock_slots, stock_rest = sizing.stock(16.0)
    with caplog.at_level("DEBUG", logger="sglang_mamba_mtp.state.sizing"):
        slots, _ = sizing.ours(holding, 16.0)
    held = (slots // RATIO + 1) * row_bytes(holding)
    states = (16.0 - stock_rest) * GIB - (stock_slots + 1) * STATE
    assert f"{holding.what} {held / GIB:.3f} GiB in place of {states / GIB:.3f} GiB" in caplog.text
    assert f"state slots {slots}, {slots - stock_slots:+d} against" in caplog.text
    assert (
        accounting.last.slots - accounting.last.stock_slots == slots - stock_slots
    )  # for the line a server starts with
