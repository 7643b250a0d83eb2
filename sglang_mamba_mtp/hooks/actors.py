"""Schedulers that are Ray's actors (``--use-ray``).

SGLang loads its plugins in processes that it starts itself, and an actor's process is started by Ray, maybe on another
machine. So the process that starts them hands Ray a class of ours: SGLang's, which loads the plugins first.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from .. import config
from ..compat import ray_actors
from ..errors import MtpError
from . import flags, registry

#: What an actor must know and its process may not: it inherits the environment in which Ray was started.
CARRIED = (*(option.env for option in config.OPTIONS.values()), config.SPELLINGS, "SGLANG_PLUGINS")


def choose(ours: bool) -> None:
    """Let the schedulers that this process starts from now on load the plugin, or be SGLang's own."""
    stock = ray_actors.stock_class()
    if stock is not None:
        environment = {name: os.environ.get(name) for name in CARRIED}
        ray_actors.make_schedulers_of(with_the_plugin(stock, environment) if ours else stock)


def with_the_plugin(stock: Any, environment: Mapping[str, str | None]) -> type:
    """SGLang's actor ``stock``, which loads the plugin before anything else. Ray sends the class by value, this module
    by its name: where the plugin is not installed nothing starts."""

    class SchedulerActor(stock):
        def __init__(self, **keywords: Any) -> None:
            load_here(environment)
            super().__init__(**ray_actors.kept_resolved(keywords))

    return SchedulerActor


def load_here(environment: Mapping[str, str | None]) -> None:
    """Load SGLang's plugins in this process, an actor's, with the options of the process that asked for it (None: not
    set there).

    Raises
        MtpError: the plugin has not hooked; Ray hands it on to the process that waits for the actor.
    """
    for name, text in environment.items():
        os.environ.pop(name, None)
        if text is not None:
            os.environ[name] = text
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
        registry.prove()
        if len(registry.registered()) == len(flags.HOOKS):
            raise MtpError("it had been loaded there in mode off before")
    except (MtpError, SystemExit) as error:  # Ray takes a SystemExit for a wish and loses its message
        raise MtpError(
            f"mamba-mtp: the plugin could not be loaded in a Ray actor on {platform.node()}; it must be installed "
            f"there as it is here\n{error}"
        ) from error
