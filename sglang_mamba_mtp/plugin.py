"""Entry point of SGLang's plugin framework.

SGLang logs whatever goes wrong in a plugin and then serves without it. So nothing is imported here that could fail
while SGLang loads the entry point, and every failure of `register` ends the process.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys

logger = logging.getLogger(__name__)


def register() -> None:
    """Check the SGLang version and every surface, then register the hook table. Called once in every process.

    In a version that is not supported mode `off` is served all the same, with a warning.

    Raises
        SystemExit: anything is not as it must be. (SGLang swallows ordinary exceptions.)
    """
    try:
        _register()
    except SystemExit:
        raise
    except Exception as error:
        from .errors import MtpError

        text = str(error) if isinstance(error, MtpError) else f"{type(error).__name__}: {error}"
        raise SystemExit(
            f"mamba-mtp: {text}\n"
            f"SGLang was stopped, because it would serve without the plugin. To do that on purpose, choose "
            f"--mamba-mtp-mode off (SGLANG_MAMBA_MTP_MODE=off), uninstall sglang-mamba-mtp or name the other plugins "
            f"in SGLANG_PLUGINS."
        ) from error


def _register() -> None:
    from . import config, cpu, names
    from .compat import surfaces, version
    from .errors import MtpError

    try:
        version.require_supported_version()
    except MtpError as error:
        if config.mode_asked_for(sys.argv[1:]) != names.OFF:
            raise
        _stay_out_of(str(error))
        return
    version.require_matching_kernels()
    cpu.install()  # first: it puts in place what importing SGLang needs on a machine without a GPU

    from .hooks import flags, registry

    flags.take_engine_keywords()
    # SGLang reads the flags later, in this process: off by flag must not leave hooks in it, nor off by variable keep
    # out those of another mode by flag.
    try:
        mode = config.to_come(sys.argv[1:]).mode
    except MtpError as error:  # a wrong value, which another mode would not set right
        raise SystemExit(f"mamba-mtp: {error}") from error
    if mode == names.OFF:
        registry.require(hook.target for hook in flags.HOOKS)
        registry.register(flags.HOOKS)
        return
    # Before the table imports what extends SGLang: a surface that is gone is then named.
    registry.require((*surfaces.HOOKED.values(), *surfaces.RELIED_ON))

    from .hooks import table

    registry.register(table.active(mode))


def _stay_out_of(unsupported: str) -> None:
    """Mode `off` in an SGLang that nothing is known of: offer the flags if that can be done, and do nothing else."""
    text = f"{unsupported}. Mode off: SGLang serves unchanged"
    try:
        from .hooks import flags, registry

        registry.require(hook.target for hook in flags.HOOKS)
        registry.offer(flags.HOOKS)
    except Exception as error:
        text += f", and knows no --mamba-mtp flags: {error}"
    if multiprocessing.parent_process() is None:  # once a server: its workers were started by this process
        logger.warning("mamba-mtp: %s", text)
