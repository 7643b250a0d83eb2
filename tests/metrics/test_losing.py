"""When the operator is told that speculation loses."""

from __future__ import annotations

from sglang_mamba_mtp.metrics.losing import PATIENCE, SILENCE, Losing


def test_it_is_said_after_a_streak_and_then_kept_quiet():
    now = [0.0]
    losing = Losing(lambda: now[0])

    def ask(accept_length: float) -> str | None:
        return losing.warning(accept_length, 1.9, 12.4)

    for _ in range(PATIENCE - 1):
        assert ask(1.2) is None
    assert ask(2.0) is None  # one interval that gains starts the count again
    for _ in range(PATIENCE - 1):
        assert ask(1.2) is None
    said = ask(1.2)
    for words in ("accept length 1.20", "about 1.90", "12 requests", "--speculative-num-draft-tokens", "estimate"):
        assert words in said
    assert ask(1.2) is None
    now[0] += SILENCE
    assert ask(1.2) is not None
