"""An engine whose scheduler is a Ray actor, in a process of its own: `main`.

``FOLDER/job`` is a pickled `Job`. What the process finds is left in ``FOLDER/found``, a pickled `Found`.
"""

from __future__ import annotations

import os
import pickle
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .scenario import Outcome, Request, Scenario
from .spec import EngineSpec

MODE, PLUGINS = "SGLANG_MAMBA_MTP_MODE", "SGLANG_PLUGINS"

NOT_INSTALLED = textwrap.dedent(
    """
    import sys

    class NotInstalled:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "sglang_mamba_mtp":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NotInstalled())
    """
)
"""A ``sitecustomize`` of a machine that lacks the plugin."""


@dataclass(frozen=True)
class Job:
    """``scenario`` is asked of the engine. ``refuses`` names what is tried beside it and has to refuse: an "actor" that
    leaves the plugin out, one on a "machine" without it, an "engine" whose schedulers leave it out."""

    spec: EngineSpec
    scenario: Scenario
    refuses: tuple[str, ...] = ()


@dataclass
class Found:
    """``mtp`` is what each scheduler says of the plugin, ``classes`` where the class of a server's schedulers is
    defined, ``refusals`` what is raised by what refuses."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    mtp: list[dict[str, Any]] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


def main(path: str, sessions: str) -> None:
    """Do the job in the folder ``path``. ``sessions`` is where Ray keeps its sockets: a short path."""
    import ray

    folder = Path(path)
    job: Job = pickle.loads((folder / "job").read_bytes())
    found = Found()
    os.environ[MODE] = "off"  # of Ray, which is started before anybody has chosen a mode
    ray.init(
        num_cpus=2,
        num_gpus=2 * job.spec.ranks,  # as it is told: an engine keeps those that it was given
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _temp_dir=sessions,
    )
    os.environ |= {MODE: job.spec.mode, **job.spec.env}
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found.classes = classes(job)
    actors = {}
    if "actor" in job.refuses:
        actors["actor"] = refusing_actor({PLUGINS: "another"})
    if "machine" in job.refuses:
        actors["machine"] = refusing_actor({}, bare(folder))
    if "engine" in job.refuses:
        found.refusals["engine"] = refused_by_an_engine(job)
    serve(job, found, actors)
    (folder / "found").write_bytes(pickle.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # SGLang leaves threads behind, and has killed Ray, a child of this process


def serve(job: Job, found: Found, actors: Mapping[str, Any]) -> None:
    from sglang.srt.ray.engine import RayEngine

    engine = RayEngine(**job.spec.server_args(), use_ray=True)
    try:
        found.refusals |= {name: refused_by(actor) for name, actor in actors.items()}  # they started beside it
        for requests in in_turn(job.scenario):
            ask(engine, requests, job.scenario.name, found.outcomes)
        found.mtp = [state.get("mamba_mtp") for state in engine.get_server_info()["internal_states"]]
    finally:
        engine.shutdown()


def in_turn(scenario: Scenario) -> Iterator[list[Request]]:
    """The requests that can be asked together, after all those before."""
    todo, done = list(scenario.requests), set()
    while todo:
        due = [request for request in todo if {request.continues, request.after} <= {None, *done}]
        yield due
        done |= {request.rid for request in due}
        todo = [request for request in todo if request not in due]


def ask(engine: Any, requests: Sequence[Request], name: str, outcomes: dict[str, Outcome]) -> None:
    before = [outcomes.get(f"{name}/{request.continues}", Outcome([])) for request in requests]
    prompts = [[*last.prompt, *last.tokens, *request.prompt] for last, request in zip(before, requests, strict=True)]
    sampling = [{"temperature": 0, "max_new_tokens": request.max_new_tokens} for request in requests]
    answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True, logprob_start_len=-1)
    for request, prompt, answer in zip(requests, prompts, answers, strict=True):
        told = answer["meta_info"]
        outcomes[f"{name}/{request.rid}"] = Outcome(
            prompt,
            list(answer["output_ids"]),
            logprobs=[value for value, *_ in told["output_token_logprobs"]],
            finish=told["finish_reason"]["type"],
            cached_tokens=told["cached_tokens"],
            verify_steps=told["spec_verify_ct"],
            accepted_drafts=told["completion_tokens"] - told["spec_verify_ct"],
        )


def refused_by_an_engine(job: Job) -> str:
    """What an engine raises whose scheduler is told to leave the plugin out; this process has it."""
    from sglang.srt.ray.engine import RayEngine

    os.environ[PLUGINS] = "another"
    try:
        RayEngine(**job.spec.server_args(), use_ray=True)
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ[PLUGINS]
    return ""


def bare(folder: Path) -> dict[str, str]:
    """The environment of a process that lacks the plugin."""
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def refusing_actor(carried: Mapping[str, str], environment: Mapping[str, str] | None = None) -> Any:
    """A scheduler's actor that is told ``carried``, in a process with ``environment``."""
    import ray

    from sglang_mamba_mtp.compat import ray_actors
    from sglang_mamba_mtp.hooks import actors

    cls = ray.remote(actors.with_the_plugin(ray_actors.stock_class(), carried))
    return cls.options(runtime_env={"env_vars": dict(environment or {})}).remote()


def refused_by(actor: Any) -> str:
    import ray

    try:
        ray.get(actor.get_info.remote())
    except ray.exceptions.RayActorError as error:
        return str(error)
    return ""


def classes(job: Job) -> dict[str, str]:
    """The module whose class makes the schedulers of servers with these arguments."""
    drafts = job.spec.server_args()
    plain = {name: value for name, value in drafts.items() if not name.startswith("speculative_")}
    found = {"ours": class_for(drafts), "no drafts": class_for(plain), "ours again": class_for(drafts)}
    for name in job.spec.env:
        del os.environ[name]
    os.environ[MODE] = "off"
    try:
        return found | {"off": class_for(drafts)}
    finally:
        os.environ |= {MODE: job.spec.mode, **job.spec.env}


def class_for(args: Mapping[str, Any]) -> str:
    from sglang.srt.ray import engine
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**args, use_ray=True)
    if hasattr(server_args, "resolve_once"):  # 0.5.23
        server_args.resolve_once()
    server_args.check_server_args()
    return engine.SchedulerActor.__ray_metadata__.modified_class.__ray_actor_class__.__module__
