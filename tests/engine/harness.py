"""Runs real SGLang engines for tests: imports once, forks one process per configuration (1-3 s each on a CPU).

    result = run(EngineSpec(model=path, spec="NGRAM", mode="snapshot"), [scenario, ...])
    check_equal(result, [scenario, ...])       # tokens and pool states against a plain engine without any cache

Two Schedulers cannot share a process, so each run has its own. On a CPU it is forked from a process that has imported
SGLang and loaded the plugin (`nursery`); with ``device="cuda"`` it is spawned, because importing
sgl_kernel asks the device what it is, and a process that has initialised CUDA cannot fork into one that uses it
(`run_all` runs several instead).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import cuda_ops, logprobs, ranks
from .child import child_main
from .nursery import Nursery
from .scenario import Outcome, Request, Scenario
from .spec import EngineSpec, Result
from .states import Comparison, Prefix, State, as_tokens, compare

STATE_BOUND = 1e-5
"""Largest relative error of a state in float32. Clean runs show a few 1e-6, the mildest fault of sabotage.py 1e-1."""

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "SGLANG_MAMBA_SSM_DTYPE": "float32",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""What the CPU engine needs in the environment, before SGLang or torch is imported."""

PRELOAD = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # imports every model there is
    "sglang.srt.layers.attention.hybrid_linear_attn_backend",
    "sglang.srt.layers.attention.linear.gdn_backend",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.speculative.ngram_worker",
    "sglang.srt.mem_cache.kv_cache_configurator",
    "sglang.srt.mem_cache.unified_radix_cache",
)
"""Imported once in the parent; whatever is missing here each child imports again."""

LOG_TAIL = 40


def prepare_environment(device: str) -> None:
    """Set what engines on ``device`` need; call before importing torch or SGLang. Values already set are kept."""
    for name, value in (ENVIRONMENT if device == "cpu" else cuda_ops.PROCESS_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")


@functools.cache
def import_sglang() -> str:
    """Import what a Scheduler needs, once, so that forks start warm. Returns SGLang's version."""
    prepare_environment("cpu")
    import torch

    torch.set_num_threads(1)
    from sglang_mamba_mtp import cpu

    cpu.install()  # also for mode "off": without a GPU there is no engine to compare with otherwise
    import sglang

    for name in PRELOAD:
        importlib.import_module(name)
    from sglang.srt.arg_groups import arg_utils
    from sglang.srt.server_args import ServerArgs

    for kept in ("namespace_of", "resolvable_fields", "fallbacks_of"):  # of all annotations; 0.5.17 has no fallbacks
        if hasattr(arg_utils, kept):
            getattr(arg_utils, kept)(ServerArgs)
    # Every child collects garbage twice as it starts; millions of imported objects are none.
    gc.collect()
    gc.freeze()
    return sglang.__version__


class EngineError(RuntimeError):
    """A child died, timed out or raised; the text ends with the tail of its log. No xfail may hide it."""


def run(spec: EngineSpec, scenarios: Sequence[Scenario]) -> Result:
    """Run the scenarios one after the other on one engine of its own."""
    names = [scenario.name for scenario in scenarios]
    if len(set(names)) != len(names):
        raise ValueError(f"scenario names repeat: {names}")
    on_cpu = spec.device == "cpu"
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        parts = [Path(folder, f"rank{rank}") for rank in range(spec.ranks)]
        if on_cpu and spec.ranks == 1:
            ends = [_from_nursery(spec, scenarios, parts[0])]
        else:
            ends = _processes(spec, scenarios, parts)
        found = [read_result(spec, *each) for each in zip(parts, ends, strict=True)]
    if texts := [each for each in found if isinstance(each, str)]:
        raise EngineError("\n".join(texts))
    try:
        payload = ranks.joined(found)
    except AssertionError as error:
        raise EngineError(f"engine {spec.label}: {error}") from error
    if on_cpu and spec.sabotage is None:
        _imported.update(dict.fromkeys(payload.imported))
    note(spec, payload)
    return payload


def read_result(spec: EngineSpec, part: Path, end: str) -> Result | str:
    """What a process left that ended so, or what became of it."""
    out, log = Path(f"{part}.result"), Path(f"{part}.log")
    if not out.exists():
        return _report(spec, end, log)
    payload = pickle.loads(out.read_bytes())
    if not isinstance(payload, Result):
        return _report(spec, str(payload).strip().rpartition("\n")[2], log)  # the log has it all
    payload.log = log.read_text(errors="replace")
    return payload


_nurseries: dict[tuple[str, str], Nursery] = {}
_imported: dict[str, None] = {}
"""Modules, in the order that engines imported them."""


def _from_nursery(spec: EngineSpec, scenarios: Sequence[Scenario], part: Path) -> str:
    """Run an engine of one rank on a CPU. How its process ended."""
    import_sglang()
    out, log = Path(f"{part}.result"), Path(f"{part}.log")
    key = spec.mode, repr(sorted(spec.env.items()))
    if key not in _nurseries:
        _nurseries[key] = Nursery(spec.mode, spec.env)
    try:
        code = _nurseries[key].run(spec, scenarios, out, log, _imported)
    except EOFError:
        del _nurseries[key]
        return "the plugin was not loaded"
    return f"no result within {spec.timeout:.0f} s" if code is None else f"the process died, exit code {code}"


def _processes(spec: EngineSpec, scenarios: Sequence[Scenario], parts: Sequence[Path]) -> list[str]:
    """Run an engine of several ranks, or on a GPU: a process a rank. How each of them ended."""
    on_cpu = spec.device == "cpu"
    if on_cpu:
        import_sglang()
    context = multiprocessing.get_context("fork" if on_cpu else "spawn")
    processes = []
    for rank, part in enumerate(parts):
        where = (f"{part}.result", f"{part}.log", rank)
        processes.append(context.Process(target=child_main, args=(spec, list(scenarios), *where), daemon=True))
    with _memory_saver(spec):
        for process in processes:
            process.start()
    late = ranks.wait(processes, spec.timeout)
    return [
        why or f"the process died, exit code {process.exitcode}" for why, process in zip(late, processes, strict=True)
    ]


def _memory_saver(spec: EngineSpec) -> contextlib.AbstractContextManager:
    """What the process of an engine that sleeps must be started in."""
    if not spec.extra.get("enable_memory_saver"):
        return contextlib.nullcontext()
    import torch_memory_saver

    return torch_memory_saver.configure_subprocess()


def run_all(jobs: Sequence[tuple[EngineSpec, Sequence[Scenario]]], at_once: int) -> list[Result | EngineError]:
    """Run several engines on a GPU at the same time: most of an engine's life is imports and compilation. None is begun
    after GPU_TESTS_UNTIL, seconds since the epoch, of the environment."""

    until = float(os.environ.get("GPU_TESTS_UNTIL", "inf"))

    def one(job: tuple[EngineSpec, Sequence[Scenario]]) -> Result | EngineError:
        if time.time() > until:
            return EngineError(f"engine {job[0].label}: not begun, the time is up")
        try:
            return run(*job)
        except EngineError as error:
            print(f"\n{error}", flush=True)  # now: it may be long until a test asks for it
            return error

    if any(spec.device == "cpu" for spec, _ in jobs):
        raise ValueError("engines on a CPU are forked, which a process with threads must not do")
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(one, jobs))


def all_run(jobs: Sequence[tuple[EngineSpec, Sequence[Scenario]]], at_once: int) -> list[Result]:
    """As `run_all`, of engines each of which is needed.

    Raises
        EngineError: of the first that failed.
    """
    results = []
    for result in run_all(jobs, at_once):
        if isinstance(result, EngineError):
            raise result
        results.append(result)
    return results


def _report(spec: EngineSpec, what: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else ["(no log)"]
    return f"engine {spec.label}: {what}\n--- last lines of its log ---\n" + "\n".join(lines[-LOG_TAIL:])


def run_beside_plain(jobs: Sequence[tuple[EngineSpec, Sequence[Scenario]]], at_once: int = 4) -> list[Result]:
    """Run engines on a GPU and at the same time the plain engine of each, whose runs `baseline` knows from then on."""
    plain = {plain_spec(spec).key(): (plain_spec(spec), todo) for spec, todo in jobs}
    found = all_run([*jobs, *plain.values()], at_once)
    for (_, todo), result in zip(plain.values(), found[len(jobs) :], strict=True):
        remember(result, todo)
    return found[: len(jobs)]


def note(spec: EngineSpec, result: Result) -> None:
    print(
        f"\n  engine {spec.label}: build {result.seconds_to_build:.1f} s, run {result.seconds_to_run:.1f} s, "
        f"{result.forwards} forwards, accept length {result.accept_length:.2f}, "
        f"{result.cached_tokens} cached tokens, {len(result.records)} states",
        end="",
    )


# -- the reference: one plain engine per model and set of scenarios -------------------------------------------------

_baselines: dict[tuple[str, str, str], Result] = {}
_reference: dict[tuple[str, str], dict[Prefix, State]] = {}


def plain_spec(spec: EngineSpec) -> EngineSpec:
    """The engine to compare with: no speculation, no plugin, no radix cache, memory to spare."""
    return EngineSpec(
        model=spec.model,
        radix=None,
        mode="off",
        device=spec.device,
        dtype=spec.dtype,
        chunked_prefill_size=4096,
        max_mamba_cache_size=64,
        max_total_tokens=max(EngineSpec.max_total_tokens, spec.max_total_tokens),
        max_steps=max(EngineSpec.max_steps, spec.max_steps),
        timeout=spec.timeout,
    )


def baseline(spec: EngineSpec, scenarios: Sequence[Scenario]) -> Result:
    """The plain engine's run of these scenarios, cached for the session."""
    plain = plain_spec(spec)
    fresh = []
    for scenario in scenarios:
        key = (spec.model, plain.key(), repr(scenario))
        if key not in _baselines:
            fresh.append(scenario)
    if fresh:
        remember(run(plain, fresh), fresh)
    parts = [_baselines[spec.model, plain.key(), repr(scenario)] for scenario in scenarios]
    merged = {key: outcome for part in parts for key, outcome in part.outcomes.items()}
    return dataclasses.replace(parts[0], outcomes=merged)


def remember(result: Result, scenarios: Sequence[Scenario]) -> None:
    """Keep a plain engine's run of these scenarios for `baseline`, and the states it showed for `reference_states`."""
    plain = result.spec
    for scenario in scenarios:
        part = {key: x for key, x in result.outcomes.items() if key.split("/")[0] == scenario.name}
        _baselines[plain.model, plain.key(), repr(scenario)] = dataclasses.replace(result, outcomes=part, records=[])
    states = _known_states(plain)
    for record in result.records:
        states.setdefault(record.prefix, record.state)


def _known_states(plain: EngineSpec) -> dict[Prefix, State]:
    return _reference.setdefault((plain.model, plain.key()), {})


def unknown(spec: EngineSpec, prefixes: Iterable[Prefix]) -> set[Prefix]:
    """Those of the prefixes that no plain engine has shown a state for yet."""
    known = _known_states(plain_spec(spec))
    return {prefix for prefix in prefixes if prefix not in known}


def prefills(prefixes: Iterable[Prefix]) -> Scenario:
    """Requests that show the state after each prefix, prefilled in one go."""
    ordered = sorted(set(prefixes), key=lambda prefix: (len(prefix), prefix))
    return Scenario(
        "oracle", tuple(Request(f"p{i}", tuple(as_tokens(p)), max_new_tokens=1) for i, p in enumerate(ordered))
    )


def reference_states(spec: EngineSpec, prefixes: Sequence[Prefix]) -> dict[Prefix, State]:
    """The plain engine's states for these prefixes; what no baseline run has shown yet is prefilled on one more run."""
    missing = unknown(spec, prefixes)
    if missing:
        remember(run(plain_spec(spec), [prefills(missing)]), [])
    return _known_states(plain_spec(spec))


# -- the comparison ------------------------------------------------------------------------------------------------


def token_differences(result: Result, wanted: Result) -> list[str]:
    """One line per request whose prompt, tokens or finish reason differ from the wanted run's."""
    lines = []
    for key, want in wanted.outcomes.items():
        got = result.outcomes[key]
        if got.prompt != want.prompt:
            lines.append(f"{key}: prompt differs (an earlier turn's output did)")
            continue
        if want.free:
            continue
        if off := _logprobs_differ(got, want):
            lines.append(f"{key}: {off}")
        a, b = got.tokens, want.tokens
        if got.aborted and want.aborted:  # where an abort lands depends on the step, and a step yields several tokens
            n = min(len(a), len(b))
            a, b = a[:n], b[:n]
        elif got.finish != want.finish:
            lines.append(f"{key}: finished by {got.finish}, not {want.finish}")
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            lines.append(f"{key}: tokens differ from position {at}: {a[at : at + 6]} not {b[at : at + 6]}")
    return lines


def _logprobs_differ(got: Outcome, want: Outcome) -> str:
    """What is wrong with the log-probabilities that were asked for, "" if nothing is."""
    said = min(len(got.logprobs), len(want.logprobs)) if got.aborted and want.aborted else None
    answer = logprobs.difference(got.logprobs[:said], want.logprobs[:said])
    prompt = logprobs.difference(got.prompt_logprobs, want.prompt_logprobs)
    worst = max(answer, 0.0 if got.aborted else prompt)
    return f"log-probabilities differ by {worst:.1e}" if worst > logprobs.BOUND else ""


def compare_states(result: Result, bound: float = STATE_BOUND) -> Comparison:
    """Compare every state the run recorded with the plain engine's for the same tokens."""
    reference = reference_states(result.spec, [record.prefix for record in result.records])
    return compare(result.records, reference, bound)


def part(result: Result, scenarios: Sequence[Scenario], model: str) -> Result:
    """What the run showed in these scenarios, as of an engine of ``model``."""
    names = tuple(f"{scenario.name}/" for scenario in scenarios)
    outcomes = {key: each for key, each in result.outcomes.items() if key.startswith(names)}
    records = [record for record in result.records if any(name in record.where for name in names)]
    return dataclasses.replace(
        result, spec=dataclasses.replace(result.spec, model=model), outcomes=outcomes, records=records
    )


def check_equal(result: Result, scenarios: Sequence[Scenario], bound: float = STATE_BOUND) -> Comparison:
    """Assert that tokens and states equal the plain engine's, and that the run could have shown a difference."""
    differences = token_differences(result, baseline(result.spec, scenarios))
    if differences:
        raise AssertionError(f"{result.spec.label}: {len(differences)} requests differ:\n  " + "\n  ".join(differences))
    if result.spec.spec is not None and result.accept_length <= 1.05:
        raise AssertionError(f"{result.spec.label}: no drafts accepted ({result.accept_length:.2f}): proves nothing")
    started = time.perf_counter()
    comparison = compare_states(result, bound)
    comparison.check()
    print(
        f"; {comparison.compared} states equal, worst {comparison.worst:.1e} ({comparison.worst_where})"
        f" [{time.perf_counter() - started:.1f} s]",
        end="",
    )
    return comparison
