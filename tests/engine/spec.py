"""One engine configuration, and what a run of it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import cuda_ops
from .foresight import Text
from .scenario import Outcome, mean_accept_length
from .states import Record, Shards


@dataclass(frozen=True)
class EngineSpec:
    """A Scheduler to build. Frozen and hashable by :meth:`key`, so that runs can be cached.

    model: directory of the checkpoint. spec: None, "NGRAM", "NEXTN", or with a ``draft_model`` of its own "STANDALONE",
    "EAGLE3" or "DFLASH". topk, steps, draft_tokens: the tree they draft (topk 1 is a chain of steps + 1 nodes, DFLASH's
    one of draft_tokens); draft_tokens is NGRAM's node count too, and bfs_breadth its tree's breadth (1 is what stock
    takes for a chain). foreseen: texts that a DFLASH draft knows (`foresight`). seeded: what is drawn hangs on the
    request alone (`sampling`). radix: a strategy of SGLang's, or None
    for no radix cache. track_interval: decode tokens between two extra_buffer snapshots. mode: the plugin's.
    record_live: also record running requests' slots after every forward (synchronises each step: on a GPU it undoes the
    overlap). count_compiled: note which of our kernels are compiled, on a CPU would be compiled, while requests are
    served. retract_every: force a retraction every so many forwards. ranks: of tensor parallelism, a process each;
    data_parallel: their attention and states are whole, and each rank has scenarios of its own. sabotage: a fault of
    sabotage.py, on ``sabotaged_rank`` alone if that is given. extra: further ServerArgs fields, which win over all
    else.
    """

    model: str
    spec: str | None = None
    draft_model: str | None = None
    topk: int = 1
    steps: int = 3
    draft_tokens: int = 4
    bfs_breadth: int = 4
    foreseen: tuple[Text, ...] = ()
    seeded: bool = False
    radix: str | None = "no_buffer"
    mode: str = "off"
    track_interval: int = 16
    page_size: int = 1
    chunked_prefill_size: int = 64
    max_mamba_cache_size: int = 48
    max_running_requests: int = 8
    max_total_tokens: int = 8192
    device: str = "cpu"
    dtype: str = "float32"
    overlap: bool = False
    record_live: bool = True
    count_compiled: bool = False
    ranks: int = 1
    data_parallel: bool = False
    sabotage: str | None = None
    sabotaged_rank: int | None = None
    retract_every: int | None = None
    max_steps: int = 20_000
    timeout: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def key(self) -> str:
        """Equal for equal specs."""
        return repr(self)

    @property
    def label(self) -> str:
        """A short name for logs and failure texts."""
        tree = f"-k{self.topk}-s{self.steps}-n{self.draft_tokens}"
        algorithm = {None: "plain", "NGRAM": f"ngram-b{self.bfs_breadth}-n{self.draft_tokens}"}.get(self.spec, tree)
        if algorithm == tree:
            algorithm = f"{self.spec}{tree}".lower()
        parallel = f"-{'dp' if self.data_parallel else 'tp'}{self.ranks}" if self.ranks > 1 else ""
        cache = f"{self.radix or 'no_radix'}{'-overlap' * self.overlap}"
        return f"{Path(self.model).name}-{self.mode}-{algorithm}-{cache}{parallel}"

    def server_args(self) -> dict[str, Any]:
        """The ServerArgs keywords, the same for both SGLang versions."""
        gpu = self.device != "cpu"
        args: dict[str, Any] = {
            "model_path": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "tp_size": self.ranks,
            "trust_remote_code": False,
            "skip_tokenizer_init": True,
            "attention_backend": None if gpu else "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_overlap_schedule": not self.overlap,
            "disable_cuda_graph": not gpu,
            "max_total_tokens": self.max_total_tokens,
            "max_running_requests": self.max_running_requests,
            "max_mamba_cache_size": self.max_mamba_cache_size,
            "chunked_prefill_size": self.chunked_prefill_size,
            "page_size": self.page_size,
            "random_seed": 1,
            "watchdog_timeout": 3600,
            "log_level": "info",
        }
        if gpu:
            args |= cuda_ops.SERVER_ARGS
        if self.data_parallel:
            args |= {"dp_size": self.ranks, "enable_dp_attention": True}
        if self.radix is None:
            args["disable_radix_cache"] = True
        else:
            args["mamba_radix_cache_strategy"] = self.radix
            args["mamba_track_interval"] = self.track_interval
        if self.spec is not None:
            args["speculative_algorithm"] = self.spec
            args["speculative_num_draft_tokens"] = self.draft_tokens
        if self.spec == "NGRAM":
            args["speculative_ngram_max_bfs_breadth"] = self.bfs_breadth
            args["speculative_ngram_capacity"] = 500_000  # the default, 10,000,000, takes a second to allocate
        elif self.spec is not None:
            args["speculative_draft_model_path"] = self.draft_model
            args["speculative_num_steps"] = self.steps
            args["speculative_eagle_topk"] = self.topk
        return args | self.extra


@dataclass
class Result:
    """What one engine run showed. ``outcomes`` is keyed "scenario/rid"; ``records`` are in order of time.

    ``gaps`` (of plain engines) says, by the name of every prefix a token was chosen after (`states.name_of`), by how
    much its logit led the next one. ``memory`` is what `memory.Memory` read where scenarios began with a flushed
    cache, ``holders`` who took what a GPU has in use in the end, since the second of them. ``paused`` says of each
    pause how it was asked for and how many requests ran.
    ``pool`` is the mamba pool's class, ``draft_state_bytes`` what it holds in copies of the state per draft node,
    ``slot_bytes`` what it allocated for slots and ``pool_bytes`` all that it allocated.
    ``imported`` are the modules that building the engine imported.
    ``compiled`` names our kernels that were compiled at start-up, ``compiled_late`` those that a request waited for.
    ``kept`` are the tensors behind the pool that sleep mode would not give back (where `sleep.MemorySaver` stands in);
    ``released_bytes`` is what a GPU had free while the engine slept for the first time, and not before.
    ``graphs`` counts the forwards (a verify is one) that replayed a CUDA graph, ``traced`` are the functions that
    torch.compile compiled, ``ended_as_tails`` the requests that ended with a token they decoded in a prefill's batch
    (mixed chunks), ``to_host`` and ``from_host`` the states that HiCache copied. Of several ranks this is what
    `ranks.joined` makes of theirs; ``shards`` says how a rank's states are cut.
    """

    spec: EngineSpec
    outcomes: dict[str, Outcome]
    records: list[Record]
    gaps: dict[bytes, float]
    memory: list[tuple[int, int]]
    holders: list[str]
    paused: list[tuple[str, int]]
    insertions: int
    steps: int
    forwards: int
    pool: str
    draft_state_bytes: int
    pool_bytes: int
    slot_bytes: int
    hooks: list[str]
    imported: list[str]
    kept: list[str]
    released_bytes: int
    compiled: list[str]
    compiled_late: list[str]
    graphs: int
    traced: list[str]
    ended_as_tails: int
    to_host: int
    from_host: int
    seconds_to_build: float
    seconds_to_run: float
    shards: Shards
    log: str = ""

    @property
    def accept_length(self) -> float:
        """Mean tokens a verify step yielded."""
        return mean_accept_length(self.outcomes)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens served from the radix cache, over all requests."""
        return sum(outcome.cached_tokens for outcome in self.outcomes.values())
