"""The table is what SGLang has; whatever goes wrong ends the process instead of letting stock code serve."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_mamba_mtp import config, cpu, plugin
from sglang_mamba_mtp.compat import version
from sglang_mamba_mtp.compat.surfaces import HOOKED, RELIED_ON, Surface
from sglang_mamba_mtp.errors import MtpError
from sglang_mamba_mtp.hooks import registry
from sglang_mamba_mtp.hooks.table import TABLE, active

PACKAGE = "sglang_mamba_mtp."


def load_plugins():
    from sglang.srt import plugins

    plugins.load_plugins()


# ------------------------------------------------------------------------------------------------------------- table


def test_table_matches_this_sglang(sglang):
    assert list(registry.problems((*HOOKED.values(), *RELIED_ON))) == []


def test_table_is_complete():
    assert {hook.surface for hook in TABLE} == set(HOOKED)
    for hook in TABLE:
        assert hook.kind in ("BEFORE", "AFTER", "AROUND") and hook.modes <= set(config.MODES) and hook.why
    assert {hook.surface for hook in active("off")} == {"add_cli_args", "from_cli_args"}


@pytest.mark.parametrize(
    "path, parameters, words",
    [
        ("sglang.srt.no_such_module:f", "x", ["sglang.srt.no_such_module"]),
        ("sglang.srt.server_args:ServerArgs.no_such_method", "self", ["no_such_method", "ServerArgs"]),
        ("sglang.srt.server_args:NoSuchClass.method", "self", ["NoSuchClass"]),
        ("sglang.srt.server_args:ServerArgs.add_cli_args", "parser extra", ["(parser)", "(parser, extra)"]),
    ],
)
def test_a_surface_that_is_not_there_says_so(sglang, path, parameters, words):
    with pytest.raises(MtpError) as caught:
        Surface(path, (tuple(parameters.split()),)).check()
    assert all(word in str(caught.value) for word in words)


def test_a_surface_that_has_moved_is_found_where_it_lies(sglang):
    there, gone = "sglang.srt.server_args:ServerArgs.check_server_args", "sglang.srt.no_such_module:f"
    moved = Surface(gone, (("self",),), (there,))
    moved.check()
    assert moved.dotted == there.replace(":", ".")
    assert Surface(there, (("self",),), (gone,)).location == there
    with pytest.raises(MtpError, match=r"no module sglang\.no_such\.package"):
        Surface("sglang.no_such.package:f", (("self",),), (gone,)).check()


def overrides(cls: type) -> Iterator[set[str]]:
    """For every method of SGLang that ``cls`` has its own version of, ``module:qualname`` of SGLang's versions."""
    ours, theirs = ([base for base in cls.__mro__ if base.__module__.startswith(root)] for root in (PACKAGE, "sglang."))
    for name in {name for base in ours for name, value in vars(base).items() if inspect.isfunction(value)}:
        if any(name in vars(base) for base in theirs):
            yield {f"{base.__module__}:{base.__qualname__}.{name}" for base in theirs if name in vars(base)}


def test_whatever_is_overridden_is_relied_on(sglang):
    from sglang_mamba_mtp import modes

    classes = {backend for mode in modes.MODES.values() for backend in mode.backends.values()}
    classes |= {mode.pool for mode in modes.MODES.values() if mode.pool is not None}
    assert len(classes) > 4
    relied_on = {surface.path for surface in RELIED_ON}
    missing = [paths for cls in classes for paths in overrides(cls) if not paths & relied_on]
    assert not missing, f"overridden, but not in compat/surfaces.py: {missing}"


# ---------------------------------------------------------------------------------------------------------- live rows


@pytest.mark.parametrize("mode", list(config.MODES))
def test_every_row_is_live_after_loading(forked, mode):
    def body():
        load_plugins()
        registry.prove()
        assert registry.registered() == active(mode)
        for hook in TABLE:
            if hook.target.is_needed():
                assert registry.is_live(hook) == (mode in hook.modes), hook

    result = forked(body, SGLANG_MAMBA_MTP_MODE=mode)
    assert result.code == 0, result.output


def test_the_proof_notices_a_hook_that_was_taken_off(forked):
    def body():
        load_plugins()
        owner, name, attribute = HOOKED["prepare_for_extend"].resolve()
        setattr(owner, name, attribute.__wrapped__)
        registry.prove()

    result = forked(body)
    assert result.code == 1 and "not live" in result.output and "prepare_for_extend" in result.output


def test_the_proof_notices_a_stale_import(forked):
    def body():
        from sglang.srt.layers.attention import attention_registry
        from sglang.srt.model_executor.model_runner_components import attention_backend_setup

        stock = attention_registry.attn_backend_wrapper
        load_plugins()
        assert attention_backend_setup.attn_backend_wrapper is attention_registry.attn_backend_wrapper
        attention_backend_setup.attn_backend_wrapper = stock
        registry.prove()

    result = forked(body)
    assert result.code == 1 and "attn_backend_wrapper" in result.output


# ----------------------------------------------------------------------------------------------------------- refusals


def launch(*argv: str):
    """`python -m sglang.launch_server argv`, in this process."""
    sys.argv = ["launch_server", *argv]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def renamed(surface: str):
    """Rename a hooked attribute, as a new SGLang might."""
    owner, name, attribute = HOOKED[surface].resolve()
    setattr(owner, f"{name}_renamed", attribute)
    delattr(owner, name)


@pytest.mark.parametrize("surface", ["prepare_for_extend", "attn_backend_wrapper", "commit"])
def test_launch_refuses_where_a_surface_was_renamed(forked, surface):
    def body():
        renamed(surface)
        launch("--model-path", "nowhere")

    result = forked(body)
    assert result.code == 1
    assert HOOKED[surface].resolve()[1] in result.output and "mamba-mtp" in result.output


def test_launch_refuses_where_a_signature_changed(forked):
    def body():
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        ScheduleBatch.prepare_for_extend = lambda self, another: None
        launch("--model-path", "nowhere")

    result = forked(body)
    assert result.code == 1 and "(self, another)" in result.output and "expected (self)" in result.output


def test_launch_refuses_where_sglang_fails_to_apply_a_hook(forked):
    """SGLang logs the failure and would go on."""

    def body():
        from sglang.srt.plugins.hook_registry import HookRegistry

        apply_target = HookRegistry._apply_target

        def failing(target, rows):
            if target.endswith("attn_backend_wrapper"):
                raise RuntimeError("no")
            apply_target(target, rows)

        HookRegistry._apply_target = staticmethod(failing)
        launch("--model-path", "nowhere")

    result = forked(body)
    assert result.code == 1 and "not live" in result.output and "attn_backend_wrapper" in result.output


def test_launch_refuses_where_a_surface_goes_after_it_was_checked(forked):
    """Another plugin's doing, between our registration and the registry's turn."""

    def body():
        require = registry.require

        def then_gone(surfaces):
            require(surfaces)
            owner, name, _ = HOOKED["prepare_for_extend"].resolve()
            delattr(owner, name)

        registry.require = then_gone
        launch("--model-path", "nowhere")

    result = forked(body)
    assert result.code == 1 and "mamba-mtp: SGLang has no prepare_for_extend" in result.output
    assert "Traceback" not in result.output


def test_a_registry_derived_from_sglangs_applies_hooks_of_its_own(forked):
    def body():
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()

        class Derived(HookRegistry):
            _hooks, _patched, applied = {"a.b": []}, set(), []

            @classmethod
            def _apply_target(cls, target, hooks):
                cls.applied.append(target)

        registry.prove = lambda: sys.exit("proved")  # ours may not be live yet when a derived one is applied
        Derived.apply_hooks()
        assert Derived.applied == ["a.b"] and HookRegistry._hooks != Derived._hooks

    result = forked(body)
    assert result.code == 0, result.output


@pytest.mark.parametrize("installed", ["0.5.16", "0.5.24", "0.6.0", "1.0", "0.5.24rc1"])
def test_other_versions_are_refused_with_the_supported_range(monkeypatch, installed):
    monkeypatch.setattr(version, "sglang_version", lambda: installed)
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert installed in str(caught.value) and version.SUPPORTED in str(caught.value)


def another_version():
    """Let SGLang be of a version that is not supported, in a process that prints what it logs."""
    version.sglang_version = lambda: "0.5.99"
    logging.getLogger().handlers.clear()  # pytest's, which keep it


OFF = {"by flag": (["--mamba-mtp-mode", "off"], {}), "by environment": ([], {"SGLANG_MAMBA_MTP_MODE": "off"})}


@pytest.mark.parametrize("argv, env", OFF.values(), ids=OFF)
def test_off_serves_stock_in_a_version_that_is_not_supported(forked, argv, env):
    def body():
        another_version()
        launch("--model-path", "nowhere", *argv)

    result = forked(body, **env)
    assert result.output.count("SGLang 0.5.99") == 1 and version.SUPPORTED in result.output
    assert "SGLang was stopped" not in result.output and "unrecognized" not in result.output
    assert "nowhere" in result.output.partition("SGLang 0.5.99")[2]  # SGLang went on, to look for the model


def test_another_mode_is_refused_in_a_version_that_is_not_supported(forked):
    def body():
        another_version()
        launch("--model-path", "nowhere", "--mamba-mtp-mode", "slots")

    result = forked(body, SGLANG_MAMBA_MTP_MODE="off")
    assert result.code == 1 and "SGLang was stopped" in result.output and "--mamba-mtp-mode off" in result.output


def test_off_needs_no_surface_in_a_version_that_is_not_supported(forked):
    def body():
        from sglang.srt.server_args import ServerArgs

        another_version()
        add_cli_args = ServerArgs.add_cli_args
        ServerArgs.add_cli_args = staticmethod(lambda parser, another=None: add_cli_args(parser))
        load_plugins()
        assert registry.registered() == []

    result = forked(body, SGLANG_MAMBA_MTP_MODE="off")
    assert result.code == 0, result.output
    assert "SGLang 0.5.99" in result.output and "knows no --mamba-mtp flags" in result.output
    assert "(parser, another)" in result.output


def test_workers_do_not_repeat_the_warning(forked):
    def body():
        another_version()
        multiprocessing.parent_process = lambda: "the launcher"
        load_plugins()

    result = forked(body, SGLANG_MAMBA_MTP_MODE="off")
    assert result.code == 0 and "0.5.99" not in result.output, result.output


@pytest.mark.parametrize("installed", ["0.5.17", "0.5.17.post1", "0.5.20", "0.5.23", "0.5.23+cu130"])
def test_supported_versions(installed):
    assert version.is_supported(installed)


def test_ordinary_exceptions_of_registration_end_the_process(monkeypatch):
    def fail():
        raise KeyError("anything")

    monkeypatch.setattr(plugin, "_register", fail)
    with pytest.raises(SystemExit, match="KeyError"):
        plugin.register()


def test_a_bad_environment_ends_the_process(forked):
    result = forked(load_plugins, SGLANG_MAMBA_MTP_MODE="fast")
    assert result.code == 1 and "SGLANG_MAMBA_MTP_MODE=fast" in result.output
    assert "SGLang was stopped" not in result.output  # mode off would not set it right


def test_a_flag_wins_over_a_bad_variable_from_the_start(forked):
    """SGLang goes on, to look for the model."""
    result = forked(lambda: launch("--model-path", "nowhere", "--mamba-mtp-mode", "off"), SGLANG_MAMBA_MTP_MODE="fast")
    assert "mamba-mtp: SGLANG_MAMBA_MTP_MODE=fast" not in result.output and "nowhere" in result.output, result.output


def test_a_bad_environment_with_mode_off_by_flag_says_what_is_bad(forked):
    """And not to choose the mode that was chosen."""
    result = forked(lambda: launch("--model-path", "nowhere", "--mamba-mtp-mode", "off"), SGLANG_MAMBA_MTP_WINDOW="abc")
    assert result.code == 1 and "SGLANG_MAMBA_MTP_WINDOW=abc: expected a number of tokens" in result.output
    assert "unset the variable" in result.output and "SGLang was stopped" not in result.output


def test_entry_point_imports_nothing_that_can_fail():
    """SGLang swallows an entry point that does not load."""
    code = "import sys; import sglang_mamba_mtp.plugin; print([m for m in sys.modules if m.split('.')[0] in %r])"
    run = subprocess.run(
        [sys.executable, "-c", code % (["sglang", "torch", "transformers"],)], capture_output=True, text=True
    )
    assert run.stdout.strip() == "[]", run.stderr


# ------------------------------------------------------------------------------------------------------------ launcher


def test_help_shows_the_flags(forked):
    result = forked(lambda: launch("--help"))
    assert result.code == 0
    for words in ("--mamba-mtp-mode", "SGLANG_MAMBA_MTP_MODE", "--attention-backend"):
        assert words in result.output


def test_a_bad_flag_is_refused_by_name(forked):
    result = forked(lambda: launch("--model-path", "nowhere", "--mamba-mtp-mode", "fast"))
    assert result.code == 1 and "mamba-mtp: --mamba-mtp-mode fast: expected one of" in result.output


@pytest.mark.skipif(not cpu.needed(), reason="sgl_kernel loads on this machine")
def test_what_a_cpu_cannot_serve_is_refused_without_a_traceback(forked):
    model = Path(__file__).resolve().parents[2] / "launch" / "models" / "tiny-gdn"
    result = forked(lambda: launch("--model-path", str(model), "--device", "xpu"))
    assert result.code == 1 and "Traceback" not in result.output, result.output
    assert "mamba-mtp: --device xpu cannot work on a machine without a CUDA driver" in result.output


def test_asking_for_a_mode_of_an_excluded_plugin_is_refused(forked):
    """With SGLANG_PLUGINS naming others nothing of ours runs, so a flag of ours must not pass for served."""
    result = forked(lambda: launch("--model-path", "nowhere", "--mamba-mtp-mode", "snapshot"), SGLANG_PLUGINS="another")
    assert result.code == 2 and "unrecognized arguments: --mamba-mtp-mode" in result.output


def test_flags_reach_the_environment_of_workers(forked):
    def body():
        load_plugins()
        import argparse

        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        parsed = parser.parse_args(["--model-path", "dummy", "--mamba-mtp-mode", "off"])
        ServerArgs.from_cli_args(parsed)
        assert os.environ["SGLANG_MAMBA_MTP_MODE"] == "off"

    result = forked(body, SGLANG_MAMBA_MTP_MODE="snapshot")
    assert result.code == 0, result.output


def test_launch_server_refuses_a_renamed_attribute_for_real(tmp_path):
    """The whole command, in an SGLang whose attribute is renamed as it is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import importlib.abc, importlib.machinery, sys

            class Rename(importlib.abc.MetaPathFinder, importlib.abc.Loader):
                def find_spec(self, name, path, target=None):
                    if name != "sglang.srt.model_executor.model_runner":
                        return None
                    self.spec = importlib.machinery.PathFinder.find_spec(name, path)
                    return importlib.machinery.ModuleSpec(name, self, origin=self.spec.origin)

                def exec_module(self, module):
                    self.spec.loader.exec_module(module)
                    module.ModelRunner.make_attention_backends = module.ModelRunner.init_attention_backends
                    del module.ModelRunner.init_attention_backends

            sys.meta_path.insert(0, Rename())
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", "nowhere"],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert run.returncode == 1
    assert "SGLang has no init_attention_backends" in run.stderr
