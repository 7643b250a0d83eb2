"""The shapes of launch/shapes, as SGLang reads them: no weights, no server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mtp_bench import shapes
from mtp_bench.options import SHAPES, shape_names

from tests.engine.harness import import_sglang

MIB = 2**20
# name: family, linear layers, state of one layer on one GPU (heads, two sizes), bytes of a request's state on one GPU
# and on each of two. 73.7 MiB of Qwen3-Next is what users report of a checkpoint (SGLang issue 28730).
FACTS = {
    "qwen3-next-80b": ("gdn", 36, (32, 128, 128), 77266944, 38633472),
    "qwen3.5-35b-a3b": ("gdn", 30, (32, 128, 128), 64389120, 32194560),
    "nemotron-nano-9b-v2": ("mamba2", 27, (128, 80, 128), 143548416, 71774208),
    "granite-4.0-h-small": ("mamba2", 36, (128, 64, 128), 152819712, 76437504),
}
MTP = {
    "qwen3-next-80b": "Qwen3NextForCausalLMMTP",
    "qwen3.5-35b-a3b": "Qwen3_5ForCausalLMMTP",
    "nemotron-nano-9b-v2": "NemotronHForCausalLMMTP",
}


@pytest.fixture(scope="module")
def model_config():
    """Builds SGLang's `ModelConfig`, as a server does."""
    import_sglang()
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig


def test_every_shape_is_known_here():
    assert set(shape_names()) == set(FACTS)
    for name in FACTS:
        assert (SHAPES / name / "README.md").is_file()


@pytest.mark.parametrize("name", FACTS)
def test_states(model_config, name, monkeypatch):
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")  # as on a GPU: SGLang's default, which a CPU overrides
    from sglang.srt import runtime_context

    from sglang_mamba_mtp.compat import startup

    family, layers, state, *sizes = FACTS[name]
    config = model_config(str(SHAPES / name))
    assert startup.linear_family(config)[0] == family
    newer = hasattr(runtime_context, "linear_attn_parallel_group")  # 0.5.23 asks which group the layers are split over
    more = {"enable_cp_tp_group_sharing": False} if newer else {}
    for ranks, size in zip((1, 2), sizes, strict=True):
        with runtime_context.get_parallel().override(attn_tp_size=ranks, tp_size=ranks, **more):
            params = startup.cache_params(config)
        assert len(params.layers) == layers
        assert params.shape.temporal == (state[0] // ranks, *state[1:])
        assert params.mamba_cache_per_req == size
    assert f"{sizes[0] / MIB:.1f} MiB" in (SHAPES / name / "README.md").read_text()


@pytest.mark.parametrize("name", MTP)
def test_a_draft_layer_of_the_models_own(model_config, name):
    assert model_config(str(SHAPES / name), is_draft_model=True).hf_config.architectures == [MTP[name]]


def test_granites_draft_model_shares_its_vocabulary(model_config):
    folder = SHAPES / "granite-4.0-h-small"
    draft, target = model_config(str(folder / "draft")), model_config(str(folder))
    assert draft.vocab_size == target.vocab_size
    assert draft.context_len >= target.context_len


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "nemotron-nano-9b-v2"])
def test_prompts_lie_within_the_vocabulary_and_every_token_is_text(tmp_path, name):
    import_sglang()
    from sglang.benchmark.utils import get_tokenizer

    folder = shapes.make(SHAPES / name, tmp_path / name)
    size = json.loads((SHAPES / name / "config.json").read_text())["vocab_size"]
    tokenizer = get_tokenizer(str(folder / shapes.TOKENIZER))
    assert tokenizer.vocab_size == size  # what bench_serving draws its prompts from
    assert tokenizer.decode([0, 100, size - 1], skip_special_tokens=True) == f"t0 t100 t{size - 1}"
    assert tokenizer.encode(f"t7 t{size - 1}") == [7, size - 1]
    assert tokenizer.num_special_tokens_to_add() == 0


def test_a_folder_is_made_once(tmp_path):
    made = shapes.make(SHAPES / "granite-4.0-h-small", tmp_path / "m") / shapes.TOKENIZER / "tokenizer.json"
    before = made.stat().st_mtime_ns
    shapes.make(SHAPES / "granite-4.0-h-small", tmp_path / "m")
    assert made.stat().st_mtime_ns == before
    assert not (tmp_path / "m" / shapes.TOKENIZER / "config.json").exists()


def test_shapes_hold_no_weights():
    assert all(path.suffix in (".json", ".md") for path in Path(SHAPES).rglob("*") if path.is_file())
