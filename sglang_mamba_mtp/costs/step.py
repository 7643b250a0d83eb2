"""The time of a decode step and of a verify step, modelled; the accept length at which they yield tokens equally fast.

A step takes the longer of two times: its bytes over the memory's bandwidth, its operations over the GPU's rate; each of
them for one rank of a tensor-parallel group. Bytes are the weights a step touches, the recurrent states it reads and
writes, and the keys and values it reads. Beside that `LAYER_SECONDS` for each layer, which is not overlapped (launches,
reductions between ranks), and `DRAFT_SECONDS` for a speculative step (drafting, building the tree, accepting).

It is an estimate, good for telling a clear loss from a clear gain: kernels' own speed, attention's arithmetic, and a
batch that is not full are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import names
from .weights import ModelSize

LAYER_SECONDS = 6e-5
DRAFT_SECONDS = 2e-3
#: The shares of a data sheet's figures that well-made kernels reach.
BANDWIDTH_SHARE, FLOPS_SHARE = 0.85, 0.6


@dataclass(frozen=True)
class Machine:
    """A device by its data sheet: bytes/s of its memory, dense bfloat16 operations/s."""

    name: str
    bandwidth: float
    flops: float

    def seconds(self, moved: float, operations: float) -> float:
        """Time of ``moved`` bytes and ``operations`` side by side."""
        return max(moved / (BANDWIDTH_SHARE * self.bandwidth), operations / (FLOPS_SHARE * self.flops))


#: By a part of the device's name.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("B200", 8.0e12, 2.25e15),
        Machine("H200", 4.8e12, 9.89e14),
        Machine("H20", 4.0e12, 1.48e14),
        Machine("H100", 3.35e12, 9.89e14),
        Machine("A100", 2.0e12, 3.12e14),
        Machine("L40S", 8.64e11, 3.62e14),
        Machine("CPU", 5.0e10, 5.0e11),
    )
}
DEFAULT_MACHINE = "H100"


def known_machine(device: str) -> Machine | None:
    """The machine whose name is in ``device`` ("NVIDIA H200"), if there is one."""
    return next((machine for name, machine in MACHINES.items() if name in device.upper()), None)


def machine_named(device: str) -> Machine:
    """The machine whose name is in ``device``; an H100 where none is."""
    return known_machine(device) or MACHINES[DEFAULT_MACHINE]


@dataclass(frozen=True)
class Drafting:
    """How drafts are made and verified: ``nodes`` of a verify, ``chain`` or tree, ``forwards`` of an MTP head per step
    (0: none, as NGRAM has)."""

    nodes: int
    chain: bool
    forwards: int


def state_traffic(mode: str, drafting: Drafting, window: int) -> float:
    """Recurrent states read and written in a verify step, in units of one request's.

    Args
        mode: of this plugin; any other is SGLang's own verify.
        window: pending tokens before a fold, in mode replay.
    """
    nodes = drafting.nodes
    read = 1 if drafting.chain else nodes
    if mode == names.REPLAY:
        accepted = nodes / 2 + 1
        return 1 + 1 / (1 + window // accepted)
    return read + nodes if mode == names.SLOTS else read + nodes + 2


@dataclass(frozen=True)
class StepModel:
    """What the times of a model's steps are computed from.

    Attributes
        size: its parameters.
        parameter_bytes: bytes of one.
        state_bytes: recurrent and convolution states of one request, all layers and ranks.
        kv_bytes: keys and values of one token, all layers and ranks.
        ranks: of the tensor-parallel group.
        machine: what each rank runs on.
    """

    size: ModelSize
    parameter_bytes: float
    state_bytes: float
    kv_bytes: float
    ranks: int
    machine: Machine

    def decode_seconds(self, requests: float, context: float) -> float:
        """A plain decode step of ``requests`` requests with ``context`` tokens each."""
        beside = requests * (2 * self.state_bytes + context * self.kv_bytes)
        return self._forward(self.size, requests, beside)

    def verify_seconds(self, requests: float, context: float, drafting: Drafting, traffic: float) -> float:
        """A step of drafting and verifying; ``traffic`` as `state_traffic` gives it."""
        beside = requests * (traffic * self.state_bytes + context * self.kv_bytes)
        draft = self._forward(self.size.one_layer(), requests, 0.0)
        verify = self._forward(self.size, requests * drafting.nodes, beside)
        return verify + drafting.forwards * draft + DRAFT_SECONDS

    def break_even(self, requests: float, context: float, drafting: Drafting, traffic: float) -> float:
        """Tokens a verify must yield to be as fast as plain decoding; may be below 1 or above the number of nodes."""
        verify = self.verify_seconds(requests, context, drafting, traffic)
        return verify / self.decode_seconds(requests, context)

    def _forward(self, size: ModelSize, tokens: float, beside: float) -> float:
        moved = size.touched(tokens) * self.parameter_bytes + beside
        operations = 2 * size.active * tokens
        return self.machine.seconds(moved / self.ranks, operations / self.ranks) + LAYER_SECONDS * size.layers
