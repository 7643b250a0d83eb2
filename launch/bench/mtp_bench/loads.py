"""What clients ask of a server: the kinds of load. Standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar


class Load(ABC):
    """One load. entries: the record's list of its kind; prompts: requests in all; room: requests at once at most."""

    entries: ClassVar[str] = "loads"
    prompts: int

    @property
    @abstractmethod
    def name(self) -> str:
        """Identifies it in the record, and for people."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Requests a server should be able to run at once for it."""

    @property
    def least_seconds(self) -> float:
        """It takes no less, however fast the server is."""
        return 0.0

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the record's entry says of it; two loads with the same facts are one."""


class BenchServing(Load):
    """A load that SGLang's bench_serving makes."""

    @abstractmethod
    def flags(self) -> list[str]:
        """bench_serving's flags for when requests come; as many for the warm-up as come at once."""


@dataclass(frozen=True)
class Requests(BenchServing):
    """``concurrency`` requests at all times: ``64 requests``."""

    concurrency: int
    prompts: int

    @property
    def name(self) -> str:
        return f"{self.concurrency} requests"

    @property
    def room(self) -> int:
        return self.concurrency

    def facts(self) -> dict[str, Any]:
        return {"load": self.name, "concurrency": self.concurrency, "request_rate": None, "prompts": self.prompts}

    def flags(self) -> list[str]:
        return ["--max-concurrency", str(self.concurrency), "--warmup-requests", str(self.concurrency)]


@dataclass(frozen=True)
class Arrivals(BenchServing):
    """``rate`` new requests a second: ``2/s``."""

    rate: float
    prompts: int

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s"

    @property
    def room(self) -> int:
        return 256  # how many meet is not known before

    @property
    def least_seconds(self) -> float:
        return self.prompts / self.rate

    def facts(self) -> dict[str, Any]:
        return {"load": self.name, "concurrency": None, "request_rate": self.rate, "prompts": self.prompts}

    def flags(self) -> list[str]:
        return ["--request-rate", str(self.rate), "--warmup-requests", str(min(self.prompts, 16))]


@dataclass(frozen=True)
class Conversations(Load):
    """``at_once`` conversations that all begin together: ``64 conversations of 2 turns``.

    A turn's prompt is the last turn's prompt, its answer, and ``turn_len`` new tokens.
    """

    entries: ClassVar[str] = "conversations"
    at_once: int
    turns: int
    turn_len: int

    @property
    def name(self) -> str:
        return f"{self.at_once} conversations of {self.turns} turns"

    @property
    def prompts(self) -> int:  # type: ignore[override]
        return self.at_once * self.turns

    @property
    def room(self) -> int:
        return self.at_once

    def facts(self) -> dict[str, Any]:
        return {"load": self.name, "at_once": self.at_once, "turns": self.turns, "turn_len": self.turn_len}
