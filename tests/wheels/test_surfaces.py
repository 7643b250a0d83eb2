"""Every version that is supported has what the plugin patches, overrides, calls and reads, as its sources say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_mamba_mtp
from sglang_mamba_mtp.compat import version
from sglang_mamba_mtp.compat.records import Names, Surface
from sglang_mamba_mtp.compat.surfaces import ARGUMENTS, HOOKED, READ, RELIED_ON
from sglang_mamba_mtp.errors import MtpError
from sglang_mamba_mtp.guards import COMMON, OWN_VERIFY, SGLANGS_VERIFY

from ..arguments import arguments_read
from .conftest import VERSIONS, sources_of
from .sources import Sources

SURFACES = (*HOOKED.values(), *RELIED_ON)


def problem_with(surface: Surface, sources: Sources) -> str | None:
    """What is wrong with ``surface`` in these sources; as `Surface.check` has it."""
    path = next(
        (path for path in (surface.path, *surface.former) if sources.module(path.partition(":")[0])), surface.path
    )
    parameters = sources.parameters(path)
    if parameters is None:
        return None if surface.later else f"no function {path}"
    try:
        surface.compare(parameters)
    except MtpError as error:
        return str(error)
    return None


def problem_with_names(alternatives: tuple[Names, ...], sources: Sources) -> str | None:
    """What is wrong with a row of `READ`: the first owner that has any of its names must have them all."""
    for wanted in alternatives:
        there = sources.names(wanted.owner).intersection(wanted.names)
        missing = sorted(set(wanted.names) - there)
        if not missing:
            return None
        if there or wanted is alternatives[-1]:
            return f"{wanted.owner} has no {', '.join(missing)}"
    return None


def problems(sources: Sources) -> list[str]:
    """Everything that is not as the plugin expects it."""
    found = [problem_with(surface, sources) for surface in SURFACES]
    found += [problem_with_names(alternatives, sources) for alternatives in READ]
    found += [f"no server argument {name}" for name in ARGUMENTS if name not in sources.arguments]
    return [problem for problem in found if problem is not None]


def test_every_version_is_what_the_plugin_was_written_for(wheel):
    assert problems(wheel) == []


def test_what_the_guards_read_is_there(wheel):
    always = arguments_read(guard for guard in COMMON + OWN_VERIFY + SGLANGS_VERIFY if not guard.optional)
    assert len(always) > 20
    assert always <= wheel.arguments, always - wheel.arguments


def test_optional_guards_are_of_some_versions_only():
    for guard in (guard for guard in COMMON + OWN_VERIFY + SGLANGS_VERIFY if guard.optional):
        (name,) = arguments_read([guard])
        there = [each for each in VERSIONS if name in sources_of(each).arguments]
        assert 0 < len(there) < len(VERSIONS), f"{guard.flag} is in {there}"


def test_what_came_later_is_in_some_versions_only():
    later = [surface for surface in SURFACES if surface.later]
    assert later
    for surface in later:
        there = [each for each in VERSIONS if sources_of(each).parameters(surface.path) is not None]
        assert there and there == list(VERSIONS)[-len(there) :] and len(there) < len(VERSIONS), surface.path


def test_the_versions_are_those_that_are_supported():
    assert all(version.is_supported(each) for each in VERSIONS)
    assert version.numbers(VERSIONS[0]) == version.SUPPORTED_MIN
    *stem, last = version.SUPPORTED_BELOW
    assert [version.numbers(each) for each in VERSIONS] == [
        (*stem, number) for number in range(version.SUPPORTED_MIN[-1], last)
    ]


def test_alternatives_are_all_in_use():
    """A row for a version that is no longer supported would go unnoticed."""
    every = [sources_of(each) for each in VERSIONS]
    for surface in SURFACES:
        for path in (surface.path, *surface.former):
            assert any(sources.parameters(path) for sources in every), path
    for alternatives in READ:
        for wanted in alternatives:
            held = [set(wanted.names) <= sources.names(wanted.owner) for sources in every]
            assert any(held), wanted
            assert wanted is alternatives[-1] or not all(held), f"{alternatives[1:]} are needed by no version"


# ------------------------------------------------------------------------------------------------------ is it complete


def imports(folder: Path) -> Iterator[tuple[str, str]]:
    """``(module, name)`` of everything that the sources in ``folder`` import of SGLang, at whatever level."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                yield from ((str(node.module), alias.name) for alias in node.names)


def is_listed(module: str, name: str) -> bool:
    """Whether ``name`` of ``module`` is expected somewhere: as a name, as a function, or as a module of names."""
    owners = {wanted.owner: wanted.names for alternatives in READ for wanted in alternatives}
    paths = {path for surface in SURFACES for path in (surface.path, *surface.former)}
    rows = [wanted for alternatives in READ for wanted in alternatives if wanted.owner == module]
    return any(name in row.names for row in rows) or f"{module}:{name}" in paths or f"{module}.{name}" in owners


def test_whatever_is_imported_is_listed():
    package = Path(sglang_mamba_mtp.__file__).parent
    cpu = set(imports(package / "cpu"))
    missing = {pair for pair in imports(package) if pair not in cpu and not is_listed(*pair)}
    assert not missing, f"read from SGLang, but not in compat/surfaces.py: {sorted(missing)}"


def test_what_the_cpu_engine_imports_is_everywhere(wheel):
    package = Path(sglang_mamba_mtp.__file__).parent
    missing = {
        (module, name)
        for module, name in imports(package / "cpu")
        if name not in wheel.names(module) and wheel.module(f"{module}.{name}") is None
    }
    assert not missing


# --------------------------------------------------------------------------------------------------------- does it see


class Changed(Sources):
    """``sources`` with one text replaced in one module."""

    def __init__(self, sources: Sources, module: str, old: str, new: str) -> None:
        super().__init__(sources.root)
        self._sources, self._changed, self._old, self._new = sources, module, old, new

    def _module(self, name: str) -> ast.Module | None:
        if name != self._changed:
            return self._sources.module(name)
        text = self.text(name)
        assert text is not None and self._old in text
        return ast.parse(text.replace(self._old, self._new))


HL = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
SCHEDULE = "sglang.srt.managers.schedule_batch"


@pytest.mark.parametrize("each", [VERSIONS[0], VERSIONS[-1]])
@pytest.mark.parametrize(
    ("module", "old", "new", "words"),
    [
        (HL, "last_correct_step_indices: ", "last_steps: ", "takes (self, last_steps, "),
        (HL, "def _forward_metadata(", "def _metadata_of(", "no function "),
        (HL, "self.linear_attn_backend", "self.linear_backend", "has no linear_attn_backend"),
        (SCHEDULE, "mamba_lazy_spec_track_positions_cpu", "mamba_positions", "has no mamba_lazy_spec_track_positions"),
        (SCHEDULE, "mamba_last_track_seqlen", "mamba_track_seqlen", "has no mamba_last_track_seqlen"),
        ("sglang.srt.mem_cache.memory_pool", "mamba_pool_cls", "mamba_pool_class", "has no mamba_pool_cls"),
        ("sglang.srt.plugins.hook_registry", "AROUND = ", "ABOUT = ", "has no AROUND"),
    ],
)
def test_a_renamed_surface_is_seen(each, module, old, new, words):
    found = problems(Changed(sources_of(each), module, old, new))
    assert any(words in problem for problem in found), found


def test_a_lost_server_argument_is_seen():
    changed = Changed(sources_of("0.5.17"), "sglang.srt.server_args", "mamba_full_memory_ratio", "mamba_ratio")
    assert problems(changed) == ["no server argument mamba_full_memory_ratio"]
    fields = "sglang.srt.arg_groups.fields.schedule"
    changed = Changed(sources_of("0.5.23"), fields, "mamba_full_memory_ratio", "mamba_ratio")
    assert problems(changed) == ["no server argument mamba_full_memory_ratio"]
