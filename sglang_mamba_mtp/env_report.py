"""``python -m sglang_mamba_mtp.env_report``: what is installed, which hooks would be live, and why not.

Prints whatever can be found out and always exits 0: it is for machines where something is wrong.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial

from . import __version__

NOT_NEEDED = "not needed: a later SGLang has it"
#: By the names their distributions have had, the newest first.
PACKAGES = (
    ("torch",),
    ("triton",),
    ("sglang",),
    ("sglang-kernel", "sgl-kernel"),
    ("transformers",),
    ("flashinfer-python",),
)
ENVIRONMENT = (
    "SGLANG_MAMBA_MTP_",
    "SGLANG_PLUGINS",
    "SGLANG_PLATFORM",
    "SGLANG_USE_CPU_ENGINE",
    "CUDA_VISIBLE_DEVICES",
)

Row = tuple[str, str]


def _attempt(find: Callable[[], str]) -> str:
    """The answer, or what went wrong."""
    try:
        return find()
    except (Exception, SystemExit) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"failed: {type(error).__name__}: {first_line}"


def _installed(names: tuple[str, ...]) -> Row:
    """The name under which a package is installed, and its version."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return names[0], "not installed"


def versions() -> Iterator[Row]:
    """Versions of what matters."""
    yield "sglang-mamba-mtp", __version__
    yield "python", platform.python_version()
    for names in PACKAGES:
        yield _installed(names)
    yield "sgl_kernel loads", _attempt(_sgl_kernel)


def _sgl_kernel() -> str:
    # In a process of its own: a library that cannot load may take the interpreter with it.
    code = "import sgl_kernel; print(getattr(sgl_kernel, '__version__', 'yes'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or [f"exit code {run.returncode}"]
    return ("yes, " if run.returncode == 0 else "no: ") + lines[-1]


def supported() -> Iterator[Row]:
    """Whether the installed SGLang is supported."""
    from .compat import version

    installed = version.sglang_version()
    verdict = "SGLang is not installed" if installed is None else ("yes" if version.is_supported(installed) else "no")
    yield f"supported ({version.SUPPORTED})", verdict


def gpus() -> Iterator[Row]:
    """The GPUs that torch sees, and the driver."""

    def name_all() -> str:
        import torch

        if not torch.cuda.is_available():
            return "none"
        return ", ".join(
            f"{torch.cuda.get_device_name(index)} (sm_{''.join(map(str, torch.cuda.get_device_capability(index)))}, "
            f"{torch.cuda.get_device_properties(index).total_memory / 2**30:.0f} GiB)"
            for index in range(torch.cuda.device_count())
        )

    def driver() -> str:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]

    yield "GPU", _attempt(name_all)
    yield "driver", _attempt(driver)


def cpu_engine() -> Iterator[Row]:
    """Whether SGLang's CPU engine needs this package's operations, and what was put in place."""

    def needed() -> str:
        from . import cpu

        return "needed" if cpu.needed() else "not needed"

    def installed() -> str:
        from . import cpu

        return f"{len(cpu.install())} replacements" if cpu.needed() else "nothing"

    yield "CPU engine", _attempt(needed)
    yield "CPU engine installed", _attempt(installed)


def plugin() -> Iterator[Row]:
    """Whether SGLang would load the plugin, in which mode, and the state of every hook and surface."""
    from . import config
    from .compat import surfaces
    from .hooks import registry

    def entry_point() -> str:
        found = [entry.value for entry in importlib.metadata.entry_points(group="sglang.srt.plugins", name="mamba_mtp")]
        allowed = os.environ.get("SGLANG_PLUGINS")
        if allowed and "mamba_mtp" not in [name.strip() for name in allowed.split(",")]:
            return "excluded by SGLANG_PLUGINS: SGLang serves without the plugin"
        return ", ".join(found) or "not registered: SGLang will not load the plugin"

    def load() -> str:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        return "yes" if registry.registered() else "SGLang did not load the plugin"

    mode = _attempt(lambda: config.current().mode)
    yield "entry point", _attempt(entry_point)
    yield "mode", mode
    yield "loaded by SGLang", _attempt(load)

    def state(hook: registry.Hook) -> str:
        if not hook.target.is_needed():
            return NOT_NEEDED
        if hook not in registry.registered():
            return "not registered" if mode in hook.modes else f"not used in mode {mode}"
        return "live" if registry.is_live(hook) else "NOT LIVE"

    def as_expected(surface: surfaces.Surface) -> str:
        if not surface.is_needed():
            return NOT_NEEDED
        missing = list(registry.problems([surface]))
        return f"MISSING: {missing[0]}" if missing else "as expected"

    def location(surface: surfaces.Surface) -> str:
        return surface.location

    for name, surface in surfaces.HOOKED.items():
        yield f"surface {name}", f"{_attempt(partial(as_expected, surface))}; {_attempt(partial(location, surface))}"
    for surface in surfaces.RELIED_ON:
        yield f"uses {surface.path.partition(':')[2]}", f"{_attempt(partial(as_expected, surface))}; {surface.path}"
    try:
        from .hooks.table import TABLE
    except Exception as error:  # it imports what extends SGLang's classes
        yield "hooks", f"failed: {type(error).__name__}: {error}"
        return
    for hook in TABLE:
        yield f"hook {hook.surface}", f"{_attempt(partial(state, hook))}; {hook.kind} {hook.function.__qualname__}"


def environment() -> Iterator[Row]:
    """Environment variables that decide something."""
    for name in sorted(os.environ):
        if name.startswith(ENVIRONMENT):
            yield name, os.environ[name]


SECTIONS: tuple[tuple[str, Callable[[], Iterator[Row]]], ...] = (
    ("versions", versions),
    ("support", supported),
    ("devices", gpus),
    ("CPU engine", cpu_engine),
    ("plugin", plugin),
    ("environment", environment),
)


def main() -> int:
    """Print the report."""
    warnings.simplefilter("ignore")
    for title, rows in SECTIONS:
        print(f"[{title}]")
        try:
            for name, value in rows():
                print(f"  {name:<48} {value}", flush=True)
        except (Exception, SystemExit) as error:
            print(f"  failed: {type(error).__name__}: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
