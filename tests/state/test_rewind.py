"""What stands against rewinding, where no engine on a CPU can be built with it; the rest is in tests/hooks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.usefixtures("sglang")


@pytest.mark.parametrize(
    ("backend", "obstacle"),
    [
        ("flashinfer", "--linear-attn-backend flashinfer, with which SGLang takes no snapshots"),
        ("triton", "--disable-overlap-schedule, where SGLang gives requests' own slots away itself"),
    ],
)
def test_the_flag_that_took_snapshots_away_is_named(backend, obstacle, monkeypatch):
    """SGLang answers either with ``no_buffer``, and turns overlap scheduling off with it."""
    from sglang_mamba_mtp.compat import startup
    from sglang_mamba_mtp.state import rewind

    args = SimpleNamespace(
        disaggregation_mode="null",
        disable_radix_cache=False,
        mamba_radix_cache_strategy="no_buffer",
        linear_attn_backend=backend,
        _resolved_overrides=[("SGLang", {"mamba_radix_cache_strategy": "no_buffer"})],
    )
    monkeypatch.setattr(startup, "resolved", lambda server_args: server_args)
    assert rewind.why_not(args, longest_window=32) == obstacle
