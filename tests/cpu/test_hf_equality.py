"""SGLang's CPU engine on these ops against transformers: greedy tokens, token for token, random float32 models."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_mamba_mtp import cpu
from tests.engine.harness import run
from tests.engine.models import WRITERS
from tests.engine.scenario import Request, Scenario
from tests.engine.spec import EngineSpec

pytestmark = pytest.mark.skipif(not cpu.needed(), reason="the CPU engine is installed where there is no CUDA driver")

NEW_TOKENS = 48
LENS = (1, 5, 63, 64, 65, 130, 200)

TRANSFORMERS = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.set_num_threads(1)
folder, prompts, new = json.load(sys.stdin)
config = AutoConfig.from_pretrained(folder)
if hasattr(config, "chunk_size"):
    # The torch Mamba2 of transformers 5.12 is wrong past its first chunk (it disagrees with itself token by token).
    config.chunk_size = 256
model, info = AutoModelForCausalLM.from_pretrained(
    folder, config=config, dtype=torch.float32, output_loading_info=True
)
assert not info["missing_keys"], info["missing_keys"]
out = []
for prompt in prompts:
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    out.append(ids[0, len(prompt):].tolist())
print("\\n" + json.dumps(out))
"""


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(1, 120) for _ in range(n)) for n in LENS]


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint and transformers' greedy continuations, from a process that has not imported SGLang."""
    folder = WRITERS[request.param](tmp_path_factory.mktemp(request.param), seed=3)
    question = json.dumps([str(folder), prompts(), NEW_TOKENS])
    done = subprocess.run([sys.executable, "-c", TRANSFORMERS], input=question, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


SPECS = {
    "plain": {},
    "plain, prefill in chunks of 32": {"chunked_prefill_size": 32},
    "ngram": {"spec": "NGRAM", "draft_tokens": 6},
    "mtp chain": {"spec": "NEXTN", "steps": 3, "draft_tokens": 4},
    "mtp tree": {"spec": "NEXTN", "steps": 3, "topk": 3, "draft_tokens": 8},
}


@pytest.mark.in_turn("model")
@pytest.mark.parametrize("name", SPECS)
def test_greedy_tokens_equal_transformers(model: tuple[Path, list[list[int]]], name: str):
    folder, wanted = model
    assert len({token for tokens in wanted for token in tokens}) > 20, "a model that repeats itself proves nothing"
    requests = tuple(Request(f"r{i}", p, max_new_tokens=NEW_TOKENS) for i, p in enumerate(prompts()))
    result = run(EngineSpec(model=str(folder), record_live=False, **SPECS[name]), [Scenario("hf", requests)])
    for i, tokens in enumerate(wanted):
        assert result.outcomes[f"hf/r{i}"].tokens == tokens, f"prompt of {LENS[i]} tokens"
