"""Schedulers that are Ray actors (``--use-ray``): they load the plugin, or nothing starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from . import scenarios
from .harness import baseline, token_differences
from .matrix import Case
from .ray_engine import Found, Job
from .scenario import mean_accept_length

# Not imported: engines are forked from this process.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

ROOT = Path(__file__).parents[2]
TIMEOUT = 300


def run_ray(job: Job, folder: Path) -> Found:
    # Nothing is told to Ray's makers, and nothing left in the home folder. Workers get as much of a core as what runs
    # beside them: as nice as Ray makes them an engine did not start in five minutes on a busy machine.
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment |= {"RAY_worker_niceness": "0"}
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "job").write_bytes(pickle.dumps(job))
    program = "import sys; from tests.engine.ray_engine import main; main(*sys.argv[1:])"
    with (
        open(folder / "log", "w") as log,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sessions,
    ):
        command = [sys.executable, "-c", program, str(folder), sessions]
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT
        ).returncode
    if code or not (folder / "found").exists():
        pytest.fail(f"exit code {code}\n" + (folder / "log").read_text(errors="replace")[-6000:])
    return pickle.loads((folder / "found").read_bytes())


FAST = Case("gdn", "ngram-tree", "rewind", "replay")
SLOW = Case("mamba2", "nextn-chain", "extra_buffer-overlap", "slots")

OURS, STOCK = "sglang_mamba_mtp.hooks.actors", "sglang.srt.ray.scheduler_actor"
REFUSED = "mamba-mtp: the plugin could not be loaded in a Ray actor"


@pytest.mark.in_turn
@pytest.mark.parametrize("case", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=lambda case: case.family)
def test_actors_load_the_plugin_or_nothing_starts(case, checkpoint, tmp_path, sglang_version):
    """Ray is started in mode off, and then an engine in another: tokens and log-probabilities are a plain engine's,
    those behind cached states too."""
    asked = scenarios.turns(checkpoint.vocab)
    requests = tuple(dataclasses.replace(request, logprobs=-1, at_step=0) for request in asked.requests)
    asked = dataclasses.replace(asked, requests=requests)
    spec = case.spec(checkpoint(case.family))
    refuses = ("actor", "machine", "engine") if case == SLOW else ()
    found = run_ray(Job(spec, asked, refuses), tmp_path)

    (mtp,) = found.mtp
    assert mtp["state"]["mode"] == spec.mode
    assert mtp["state"]["radix"] == ("rewind" if spec.radix == "auto" else spec.radix)
    wanted = baseline(spec, [asked])
    assert set(found.outcomes) == set(wanted.outcomes)
    assert not token_differences(dataclasses.replace(wanted, outcomes=found.outcomes), wanted)
    assert mean_accept_length(found.outcomes) > 1.05
    assert found.outcomes["turns/a2"].cached_tokens >= 64

    assert set(found.refusals) == set(refuses)
    for name, text in found.refusals.items():
        words = ["No module named 'sglang_mamba_mtp'"] if name == "machine" else [REFUSED, "none was registered"]
        assert all(word in text for word in words), text
    assert found.classes == {"ours": OURS, "no drafts": STOCK, "ours again": OURS, "off": STOCK}
