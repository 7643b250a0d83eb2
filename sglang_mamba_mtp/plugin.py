"""Entry point of SGLang's plugin framework.

SGLang logs whatever goes wrong in a plugin and then serves without it. So nothing is imported here that could fail
while SGLang loads the entry point, and every failure of `register` ends the process.
"""

from __future__ import annotations


def register() -> None:
    """Check the SGLang version and every surface, then register the hook table. Called once in every process.

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
            f"SGLang was stopped, because it would serve without the plugin. To do that on purpose, uninstall "
            f"sglang-mamba-mtp or name the other plugins in SGLANG_PLUGINS."
        ) from error


def _register() -> None:
    from . import cpu
    from .compat import surfaces, version

    version.require_supported_version()
    cpu.install()  # first: it puts in place what importing SGLang needs on a machine without a GPU

    from . import config, names
    from .hooks import flags, registry

    flags.take_engine_keywords()
    mode = config.current().mode
    if mode == names.OFF:
        registry.require(hook.target for hook in flags.HOOKS)
        registry.register(flags.HOOKS)
        return
    # Before the table imports what extends SGLang: a surface that is gone is then named.
    registry.require((*surfaces.HOOKED.values(), *surfaces.RELIED_ON))

    from .hooks import table

    registry.register(table.active(mode))
