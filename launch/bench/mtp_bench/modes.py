"""The ways to serve that are compared. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .drafts import Draft


@dataclass(frozen=True)
class Mode:
    """One way to serve. title: for table and plot; speculates: with drafts; flags: on top of what all have."""

    name: str
    title: str
    speculates: bool
    flags: tuple[str, ...]

    def refusal(self, config: dict[str, Any], draft: Draft | None, algorithm: str, device: str) -> str | None:
        """Why this mode cannot serve ``config`` (a model's config.json, empty if unknown) with ``draft`` on ``device``;
        None if it can."""
        return None


class ReplaySsmFlag(Mode):
    """SGLang's own verify without per-draft states: gated delta nets, chains."""

    def refusal(self, config: dict[str, Any], draft: Draft | None, algorithm: str, device: str) -> str | None:
        """SGLang refuses trees with an error, ignores the flag for other linear layers, and ends with an error from
        Triton on a CPU, as late as in its first verify."""
        if config and not is_gdn(config):
            return "--enable-linear-replayssm-spec does nothing for this model: it serves gated delta nets"
        if draft is not None and (not draft.chain or algorithm == "NGRAM"):
            return "--enable-linear-replayssm-spec verifies chains only"
        if device == "cpu":
            return "--enable-linear-replayssm-spec needs a GPU"
        return None


def is_gdn(config: dict[str, Any]) -> bool:
    """Are the model's linear layers gated delta nets (Qwen3-Next, Qwen3.5 and their relatives)?"""
    return "linear_num_value_heads" in text_config(config)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    return config.get("text_config", config)


def _plugin(name: str) -> tuple[str, ...]:
    return ("--mamba-mtp-mode", name)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("none", "no speculation", False, _plugin("off")),
        Mode("stock", "SGLang's verify", True, _plugin("off")),
        ReplaySsmFlag(
            "replayssm", "SGLang's ReplaySSM flag", True, (*_plugin("off"), "--enable-linear-replayssm-spec")
        ),
        Mode("snapshot", "snapshot", True, _plugin("snapshot")),
        Mode("slots", "slots", True, _plugin("slots")),
        Mode("replay", "replay, SGLang's radix strategy", True, (*_plugin("replay"), "--mamba-mtp-radix", "sglang")),
        Mode("rewind", "replay", True, (*_plugin("replay"), "--mamba-mtp-radix", "rewind")),
    )
}
#: What is compared if nothing is asked for: `snapshot` is SGLang's verify with fixes and runs at its speed.
COMPARED = ("none", "stock", "replayssm", "slots", "replay", "rewind")
