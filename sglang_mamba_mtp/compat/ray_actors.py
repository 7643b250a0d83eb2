"""Where SGLang keeps the class of its schedulers that are Ray's actors (``--use-ray``). Ray need not be installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .startup import resolved


def are_to_come(server_args: Any) -> bool:
    """Whether a server's schedulers may become actors: it is told so, or this process has the engine that makes them,
    which does not ask."""
    return bool(resolved(server_args).use_ray) or "sglang.srt.ray.engine" in sys.modules


def stock_class() -> type | None:
    """SGLang's class as it was before ``ray.remote``; None where there is no Ray, which SGLang will say."""
    try:
        module: Any = importlib.import_module("sglang.srt.ray.scheduler_actor")
    except ImportError:
        return None
    return module.SchedulerActor.__ray_metadata__.modified_class.__ray_actor_class__


def make_schedulers_of(cls: type) -> None:
    """From now on the schedulers that this process starts are actors of ``cls``; `stock_class` takes it back."""
    remote = importlib.import_module("ray").remote(cls)
    engine: Any = importlib.import_module("sglang.srt.ray.engine")
    engine.SchedulerActor = remote


def kept_resolved(keywords: dict[str, Any]) -> dict[str, Any]:
    """What to hand to `stock_class` in place of ``keywords``, an actor's own.

    Up to 0.5.18 it copies its ``server_args`` to put an address in, and the copy resolves itself once more: what SGLang
    had chosen by itself then passes for asked for. So the address is put in here.
    """
    address = keywords.get("dist_init_addr")
    if not address or hasattr(importlib.import_module("sglang.srt.arg_groups.overrides"), "declare_resolution"):
        return keywords
    object.__setattr__(keywords["server_args"], "dist_init_addr", address)
    return {**keywords, "dist_init_addr": None}
