"""What the shipped sources may not contain, read from their syntax: docs/security.md says why it matters.

Each exception stands in a list here with its reason, and a list with an entry that is no longer met fails too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVED = ("sglang_mamba_mtp", "kernels")  # what a server imports
SHIPPED = (*SERVED, "launch")
SCRIPTS = sorted(ROOT.glob("launch/**/*.sh"))

#: Calls that run text as code or in a shell, build objects from bytes, or name a temporary file that others can guess.
FORBIDDEN = {
    *("eval", "exec", "compile", "builtins.eval", "builtins.exec"),
    *("os.system", "os.popen", "os.execl", "os.execlp", "os.execvp", "os.spawnlp", "os.spawnvp", "pty.spawn"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("torch.load", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("tempfile.mktemp", "os.tmpnam", "runpy.run_path", "runpy.run_module", "code.interact"),
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "pty", "telnetlib"}
ALLOWED_CALLS = {
    ("launch/train/tinymodels/loop.py", "torch.load"): "its own checkpoint, and weights_only: tensors, no objects",
    ("launch/bench/mtp_bench/record.py", "runpy.run_module"): "sglang.check_env, by a name written there",
}

#: Modules that reach other processes, or other machines.
OUTSIDE = {
    *("subprocess", "multiprocessing", "socket", "socketserver", "ssl", "asyncio", "http", "xmlrpc", "ftplib"),
    *("urllib", "requests", "httpx", "aiohttp", "zmq", "grpc", "uvicorn", "fastapi", "flask", "ctypes", "tempfile"),
}
ALLOWED_MODULES = {
    ("sglang_mamba_mtp/env_report.py", "subprocess"): "a program for people: nvidia-smi, and whether sgl_kernel loads",
    ("sglang_mamba_mtp/plugin.py", "multiprocessing"): "asks whether it is in a server's first process",
    ("sglang_mamba_mtp/cpu/__init__.py", "ctypes"): "asks whether there is a CUDA driver",
    ("sglang_mamba_mtp/cpu/speculative_ops.py", "ctypes"): "the KV cache's rows, at the addresses SGLang hands its op",
    ("sglang_mamba_mtp/live/asking.py", "http"): "a program for people: what can go wrong while it asks a server",
    ("sglang_mamba_mtp/live/asking.py", "urllib"): "the same program: it asks the server it was given",
    ("sglang_mamba_mtp/live/serve.py", "socket"): "the same: this machine's names, where it is told to listen on all",
}

#: Methods and functions that open a file, or change one.
OPENS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "unlink", "rename"),
    *("mkdir", "makedirs", "rmdir", "rmtree", "remove", "symlink_to", "copyfile", "copytree", "chmod", "fdopen"),
    *("load_file", "save_file", "fromfile", "tofile", "memmap"),
}
#: The model's folder is named by the operator.
ALLOWED_OPENS = {
    ("sglang_mamba_mtp/advice.py", "index.read_text"): "model.safetensors.index.json, for the size of the weights",
    ("sglang_mamba_mtp/cpu/defaults.py", "config.read_text"): "config.json, for a dtype; as JSON",
    ("sglang_mamba_mtp/live/asking.py", "self._opener.open"): "the address of a server, not a file",
}

#: Where a module's name is not written beside its import.
ALLOWED_NAMES = {
    "sglang_mamba_mtp/compat/surfaces.py": "one of two names of the same function",
    "sglang_mamba_mtp/compat/records.py": "the names in compat/surfaces.py",
}


@cache
def sources(folders: tuple[str, ...]) -> dict[str, ast.Module]:
    """Every Python file of ours, by its path in the repository."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls by their dotted name, as far as it is written out: ``path.open`` of ``(a / b).path.open()``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".removeprefix(".")
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of the modules that a file imports, also inside functions and by ``__import__``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("__import__", "importlib.import_module"):
            name = node.args[0]
            yield name.value.partition(".")[0] if isinstance(name, ast.Constant) else ""


def forbidden(tree: ast.AST) -> Iterator[str]:
    """What a file has of `FORBIDDEN`, shells among it."""
    plain = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name, call in calls(tree):
        name = plain.get(name, name)
        if name in FORBIDDEN:
            yield name
        for keyword in call.keywords:
            if keyword.arg in ("shell", "allow_pickle") and not is_false(keyword.value):
                yield f"{name}({keyword.arg})"
    yield from FORBIDDEN_MODULES.intersection(imported(tree))


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.once
def test_nothing_runs_text_or_unpickles():
    files = sources(SHIPPED)
    assert len(files) > 100
    assert {(path, name) for path, tree in files.items() for name in forbidden(tree)} == ALLOWED_CALLS.keys()
    every = [(name, call) for tree in files.values() for name, call in calls(tree)]
    (load,) = [call for name, call in every if name == "torch.load"]
    assert {keyword.arg: keyword.value.value for keyword in load.keywords if keyword.arg == "weights_only"} == {
        "weights_only": True
    }
    (module,) = [call.args[0] for name, call in every if name == "runpy.run_module"]
    assert module.value == "sglang.check_env"


@pytest.mark.once
def test_the_plugin_starts_no_process_and_opens_no_connection():
    found = {(path, name) for path, tree in sources(SERVED).items() for name in imported(tree) if name in OUTSIDE}
    assert found == ALLOWED_MODULES.keys()


@pytest.mark.once
def test_the_plugin_reads_two_files_of_the_model_and_writes_none():
    found = {
        (path, name)
        for path, tree in sources(SERVED).items()
        for name, _ in calls(tree)
        if name.rpartition(".")[2] in OPENS or name in ("json.load", "torch.save")
    }
    assert found == ALLOWED_OPENS.keys()


@pytest.mark.once
def test_modules_are_imported_by_names_in_the_source():
    """No request and no variable of the environment names a module."""
    assert {path for path, tree in sources(SERVED).items() if "" in imported(tree)} == ALLOWED_NAMES.keys()


@pytest.mark.once
def test_sockets_are_bound_to_this_machine():
    """The one the launch programs bind to find a free port; servers are SGLang's (tests/demo, tests/bench_serving)."""
    bound = []
    for path, tree in sources(SHIPPED).items():
        hosts = {
            node.targets[0].id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for name, call in calls(tree):
            if name.endswith(".bind"):
                (address,) = call.args
                assert isinstance(address, ast.Tuple) and isinstance(address.elts[0], ast.Name), path
                bound.append(hosts[address.elts[0].id])
    assert bound == ["127.0.0.1"]


@pytest.mark.once
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_run_no_text_and_guess_no_file(script):
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    assert re.findall(r"\b(?:eval|curl|wget)\b|\b(?:ba)?sh -c\b|/tmp\b", text) == []
    assert re.findall(r"\bmktemp\b(?! -d\b)(?! \"\$logs/)", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "eval(text)",
        "import os\nos.system(text)",
        "from os import system as run\nrun(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "torch.load(path)",
        "def read(data):\n    import pickle\n    return pickle.loads(data)",
        "__import__('marshal')",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_it_would_be_seen(text):
    assert list(forbidden(ast.parse(text)))
