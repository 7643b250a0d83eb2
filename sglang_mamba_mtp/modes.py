"""The registry of modes: a mode is a class, and adding a mode is adding a class to ``MODES``.

Imports nothing of SGLang at module level: the registry is read while command-line flags are built, before SGLang's
model code is loaded. Methods import what they need.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import MtpError

if TYPE_CHECKING:
    from .config import MtpConfig
    from .drafts import DraftStore
    from .guards import Decline

#: The linear-attention families a mode can provide backends for (`compat.linear_family` returns one of them).
GDN = "gdn"
MAMBA2 = "mamba2"


class Mode(ABC):
    """How target verify treats the recurrent state.

    Every method's default is what SGLang does, so that a mode overrides only what it changes.

    Attributes
        name: value of ``--mamba-mtp-mode``.
        summary: one line for ``--help``.
        options: names of the options (`config.OPTIONS`) that change anything in this mode.
        stock: True if SGLang serves unchanged: no hook other than the flags is active.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    stock: ClassVar[bool] = False

    def __init__(self, config: MtpConfig) -> None:
        self.config = config

    def pool_class(self, stock: type) -> type:
        """The class built where SGLang builds ``stock``, a `MambaPool` (sub)class."""
        return stock

    def backend_class(self, family: str) -> type | None:
        """The linear-attention backend for ``family``, a subclass of SGLang's, or None for SGLang's own."""
        return None

    def size_pool(self, original: Any, configurator: Any, total_rest_memory: float, family: str) -> float:
        """Choose the number of state slots; ``original`` is SGLang's `_handle_max_mamba_cache` (GiB in and out)."""
        return original(configurator, total_rest_memory)

    def before_donation(self, mamba_pool: Any, slot: Any) -> None:  # noqa: B027 - nothing to do is SGLang's default
        """The radix cache is about to read or own ``slot`` (tensor, shape [1])."""

    def commit(self, original: Any, hybrid_backend: Any, *args: Any, **kwargs: Any) -> Any:
        """Record what a verify accepted; ``original`` is SGLang's `update_mamba_state_after_mtp_verify`."""
        return original(hybrid_backend, *args, **kwargs)

    def guards(self) -> tuple[Decline, ...]:
        """What this mode declines to run with (`guards.py`)."""
        return ()

    def speculative_state(self, mamba_pool: Any) -> dict[str, int]:
        """Bytes allocated for speculation in ``mamba_pool``, by what they hold."""
        return {}


class Off(Mode):
    """Stock SGLang."""

    name = "off"
    summary = "SGLang unchanged"
    stock = True


class Snapshot(Mode):
    """SGLang's own verify (one state copy per draft node, scattered back at commit) with this plugin's fixes."""

    name = "snapshot"
    summary = "SGLang's own verify, a copy of the state per draft node, with this plugin's fixes"

    def backend_class(self, family: str) -> type | None:
        from .backends import snapshot

        return snapshot.BACKENDS.get(family)

    def guards(self) -> tuple[Decline, ...]:
        from .guards import COMMON

        return COMMON

    def speculative_state(self, mamba_pool: Any) -> dict[str, int]:
        from .backends import snapshot

        return snapshot.speculative_state(mamba_pool)


class OwnVerify(Mode):
    """A mode that verifies with the project's own kernels, over a mamba pool of its own."""

    def backend_class(self, family: str) -> type | None:
        from .backends import verify

        return verify.BACKENDS.get(family)

    def open_store(self, pool: Any, family: str, model_runner: Any, max_batch: int) -> DraftStore:
        """What the mode keeps of draft nodes, in ``pool``, for batches of up to ``max_batch`` rows."""
        raise NotImplementedError

    def before_donation(self, mamba_pool: Any, slot: Any) -> None:
        mamba_pool.settle(slot)

    def commit(self, original: Any, hybrid_backend: Any, *args: Any, **kwargs: Any) -> Any:
        return hybrid_backend.linear_attn_backend.commit_verify(*_what_was_accepted(*args, **kwargs))

    def guards(self) -> tuple[Decline, ...]:
        from .guards import COMMON, OWN_VERIFY

        return COMMON + OWN_VERIFY


def _what_was_accepted(
    last_correct_step_indices: Any, mamba_track_indices: Any, mamba_steps_to_track: Any, *_: Any, **__: Any
) -> tuple[Any, Any, Any]:
    """The arguments of `update_mamba_state_after_mtp_verify` that say what to commit."""
    return last_correct_step_indices, mamba_track_indices, mamba_steps_to_track


class Replay(OwnVerify):
    """One read of each checkpoint per verify, inputs kept in a window, the state written once per several steps."""

    name = "replay"
    summary = "read the state once per verify, keep inputs in a window, write the state once per several steps"
    options = frozenset({"window", "state_layout"})

    def pool_class(self, stock: type) -> type:
        from .pool import MtpMambaPool

        return MtpMambaPool

    def size_pool(self, original: Any, configurator: Any, total_rest_memory: float, family: str) -> float:
        from . import accounting

        return accounting.size_with_windows(
            original, configurator, total_rest_memory, family=family, threshold=self.config.window
        )

    def open_store(self, pool: Any, family: str, model_runner: Any, max_batch: int) -> DraftStore:
        from . import compat
        from .families import FAMILIES, window_layout
        from .window import Window

        kind, states = FAMILIES[family], pool.mamba_cache.temporal
        layout = window_layout(
            kind,
            compat.cache_params(model_runner.model_config),
            layers=pool.num_mamba_layers,
            nodes=pool.max_nodes,
            threshold=self.config.window,
            dtype=model_runner.dtype,
        )
        opened: DraftStore = pool.open_store(
            layout,
            lambda: Window(
                layout,
                verify=kind.replay(states.device),
                fold=kind.fold(states.device, model_runner.model),
                fold_first=kind.fold_first,
                states=states,
                conv_states=pool.mamba_cache.conv[0],
                layouts=pool.layouts,
                rows=pool.request_rows,
                max_batch=max_batch,
            ),
        )
        return opened

    def speculative_state(self, mamba_pool: Any) -> dict[str, int]:
        return {"windows": mamba_pool.speculative_bytes}


class Slots(OwnVerify):
    """Each draft node's state goes to a slot of its own in the pool; commit moves an index.

    SGLang's own accounting holds: a state per draft node and request row, in the pool instead of beside it.
    """

    name = "slots"
    summary = "write each draft node's state to a slot of the pool, commit by moving an index"
    options = frozenset({"state_layout"})

    def pool_class(self, stock: type) -> type:
        from .pool import DraftSlotPool

        return DraftSlotPool

    def open_store(self, pool: Any, family: str, model_runner: Any, max_batch: int) -> DraftStore:
        from .draft_slots import DraftSlots
        from .families import FAMILIES

        states = pool.mamba_cache.temporal
        opened: DraftStore = pool.open_store(
            family,
            lambda: DraftSlots(
                verify=FAMILIES[family].slots(states.device),
                states=states,
                conv_states=pool.mamba_cache.conv[0],
                layouts=pool.layouts,
                first=pool.first_draft_slot,
                rows=pool.request_rows,
                nodes=pool.max_nodes,
                max_batch=max_batch,
            ),
        )
        return opened

    def speculative_state(self, mamba_pool: Any) -> dict[str, int]:
        return {"draft slots": mamba_pool.speculative_bytes}


#: In the order of ``--help``.
MODES: dict[str, type[Mode]] = {mode.name: mode for mode in (Replay, Slots, Snapshot, Off)}

#: What is served if nobody asks for a mode.
DEFAULT: type[Mode] = Replay


def build(config: MtpConfig) -> Mode:
    """The mode ``config`` asks for.

    Raises
        MtpError: there is no such mode.
    """
    mode = MODES.get(config.mode)
    if mode is None:
        raise MtpError(f"{config.source('mode')}: no such mode {config.mode!r}; choose one of {', '.join(MODES)}")
    return mode(config)
