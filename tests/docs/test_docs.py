"""What README and docs say is in the tree: files, links, flags; what is generated is what is committed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from sglang_mamba_mtp import config, guards

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")]
    + [*ROOT.glob("docs/*.md")]
)
RESULTS = ROOT / "tests" / "bench" / "results"

LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
#: `launch/demo.sh`, `sglang_mamba_mtp/state/`: words in code that begin with a folder of ours. FAMILY stands for any.
PATH = re.compile(r"`((?:launch|tests|sglang_mamba_mtp|kernels|docs|requirements)/[\w./-]*)`")
RECORD = re.compile(r"\d{4}-\d\d-\d\d-h\d+[\w.-]*\.(?:json|txt)")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def families() -> list[str]:
    return sorted(path.name for path in (ROOT / "kernels").iterdir() if (path / "__init__.py").is_file())


def test_the_page_of_costs_has_every_kernel():
    """A section a folder, and in it every file that launches something."""
    page = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `kernels/(\w+)`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert sorted(sections) == families()
    launchers = [path for path in ROOT.glob("kernels/*/*.py") if "_kernel[" in path.read_text(encoding="utf-8")]
    assert len(launchers) > 10
    assert [path for path in launchers if f"`{path.name}`" not in sections[path.parent.name]] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = [target for target in LINK.findall(text) if "://" not in target]
    lost = [target for target in links if not (page.parent / target).exists()]
    lost += [path for path in PATH.findall(text) if "FAMILY" not in path and not (ROOT / path).exists()]
    lost += [record for record in RECORD.findall(text) if not (RESULTS / record).is_file()]
    assert not lost


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "security.md"], ids=page_id)
def test_a_promise_names_a_test_that_is_there(page):
    """On each line of a table of promises a test stands in one of the files that the line names."""
    lines = page.read_text(encoding="utf-8").splitlines()
    promises = [line for line in lines if line.startswith("|") and re.search(r"`tests/[\w/]+\.py`", line)]
    assert len(promises) > 10
    for line in promises:
        tests = re.findall(r"`(test_\w+)`", line)
        found = "".join((ROOT / path).read_text(encoding="utf-8") for path in re.findall(r"`(tests/[\w/]+\.py)`", line))
        assert tests and [test for test in tests if f"\ndef {test}(" not in found] == [], line


def test_every_page_is_reached_from_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page_id(page) for page in PAGES if page.name != "README.md" and f"]({page_id(page)})" not in text] == []


def test_every_record_is_named_in_benchmarks():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    names = {name for name in re.findall(r"`([\w.{},*-]+\.(?:json|txt))`", text)}
    ends = [re.escape(name).replace(r"\*", ".*") for name in names]
    ends = [re.sub(r"\\{(.*?)\\}", lambda match: "(" + match[1].replace(",", "|") + ")", end) for end in ends]
    unnamed = [path.name for path in RESULTS.iterdir() if not any(re.search(f"{end}$", path.name) for end in ends)]
    assert unnamed == []


def test_readme_has_every_flag_mode_and_variable():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    words = [word for option in config.OPTIONS.values() for word in (option.flag, option.env)]
    assert [word for word in (*words, *(f"`{mode}`" for mode in config.MODES)) if word not in text] == []


@pytest.fixture(scope="module")
def compatibility():
    """launch/docs/compatibility.py, a program."""
    path = ROOT / "launch" / "docs" / "compatibility.py"
    spec = importlib.util.spec_from_file_location("compatibility", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_what_is_declined_is_the_guards(compatibility):
    page = compatibility.PAGE.read_text(encoding="utf-8")
    assert compatibility.updated(page) == page, "run: python launch/docs/compatibility.py"


def test_every_group_of_guards_is_on_the_page(compatibility):
    def is_group(value):
        return isinstance(value, tuple) and value and all(isinstance(each, guards.Decline) for each in value)

    groups = {name for name, value in vars(guards).items() if is_group(value) and not name.startswith("_")}
    assert groups == set(compatibility.GROUPS)


def test_the_page_is_written_for_either_sglang(compatibility):
    """The flag that only the newer one has is marked, whichever is installed."""
    (row,) = [line for line in compatibility.render().splitlines() if "external-linker` " in line]
    assert "(where SGLang has it)" in row
