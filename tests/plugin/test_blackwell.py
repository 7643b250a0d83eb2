"""What SGLang resolves by itself on a B200, and what the plugin makes of it.

SGLang's own resolution runs, with the plugin's hooks in it, on a GPU that only says what it is; then what the launcher
and each scheduler decide of the result. No weight is loaded, no memory is sized and no process started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mamba_mtp_kernels.common.operands import MAX_NODES

from sglang_mamba_mtp import names
from sglang_mamba_mtp.compat import startup
from sglang_mamba_mtp.families.table import FAMILIES
from sglang_mamba_mtp.state.window import WindowShape, threshold_to_rewind

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU, which would be asked")

SHAPES = Path(__file__).parents[2] / "launch" / "shapes"
GDN_MODEL, MAMBA2_MODEL = "qwen3-next-80b", "nemotron-nano-9b-v2"
CHAIN = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
BFLOAT16 = {"mamba_ssm_dtype": "bfloat16"}
GIB = 2**30


def defaults_of(model: str, version: str) -> tuple[str, int]:
    """SGLang's attention backend and page size for this model on sm_100."""
    if model == MAMBA2_MODEL and tuple(map(int, version.split(".")[:3])) < (0, 5, 19):
        return "flashinfer", 1
    return "trtllm_mha", 64


def pretend_b200() -> None:
    """From here on this process finds a B200 wherever SGLang asks what it runs on."""
    import torch
    from sglang.srt.utils import common

    from sglang_mamba_mtp.cpu import defaults

    properties = SimpleNamespace(
        name="NVIDIA B200", major=10, minor=0, total_memory=179 * GIB, multi_processor_count=148, warp_size=32
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (10, 0),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (178 * GIB, 179 * GIB),
    }
    for question, answer in answers.items():
        setattr(torch.cuda, question, lambda *_, answer=answer, **__: answer)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "0"
    for name in ("SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"):  # what tests of CPU engines want
        os.environ.pop(name, None)
    for probe in vars(common).values():
        if hasattr(probe, "cache_clear"):
            probe.cache_clear()
    defaults.apply = lambda args: None  # what a CPU needs


def resolve(model: str, **given: Any) -> Any:
    """The server arguments of a chain of 4 nodes, after SGLang's resolution with the plugin's hooks in it."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(SHAPES / model), skip_tokenizer_init=True, **CHAIN, **given)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


def cache_params(model_config: Any) -> Any:
    """As `startup.cache_params` finds them once SGLang has set up its ranks, of which there is one."""
    from sglang.srt import runtime_context

    newer = hasattr(runtime_context, "linear_attn_parallel_group")
    more = {"enable_cp_tp_group_sharing": False} if newer else {}
    with runtime_context.get_parallel().override(attn_tp_size=1, tp_size=1, **more):
        return startup.cache_params(model_config)


@pytest.fixture
def on_b200(forked) -> Callable[..., None]:
    """Calls body(model runner, resolved arguments, the plugin's decision) in a fork with a B200, where neither SGLang
    nor the plugin refuses to start; the runner has no more than a decision asks of it."""

    def run(body: Callable[..., None], model: str, given: dict[str, Any]) -> None:
        def child() -> None:
            from sglang.srt import plugins

            from sglang_mamba_mtp.hooks.startup import decision

            plugins.load_plugins()
            pretend_b200()
            args = resolve(model, **given)
            args.check_server_args()
            runner = SimpleNamespace(model_config=startup.model_config(args), server_args=args)
            body(runner, startup.resolved(args), decision(runner))

        result = forked(child)
        assert result.code == 0, result.output

    return run


@pytest.mark.parametrize("given", [{}, BFLOAT16], ids=["defaults", "bfloat16"])
@pytest.mark.parametrize("model, family", [(GDN_MODEL, names.GDN), (MAMBA2_MODEL, names.MAMBA2)])
def test_replay_starts_with_sglangs_defaults(on_b200, sglang, model, family, given):
    """Nothing is refused, and states are rewound to multiples of the page."""
    backend, page = defaults_of(model, sglang)

    def body(runner, view, serving):
        import torch

        assert view.device == "cuda" and view.speculative_algorithm in ("NEXTN", "EAGLE")
        assert (view.attention_backend, view.page_size) == (backend, page)
        assert view.mamba_radix_cache_strategy == "extra_buffer" and not view.disable_overlap_schedule
        # states have 32 bits unless asked otherwise; with 16 SGLang decodes by FlashInfer, and would verify by it
        params = cache_params(runner.model_config)
        assert params.dtype.temporal == (torch.bfloat16 if given else torch.float32)
        assert params.dtype.conv == torch.bfloat16
        assert view.linear_attn_decode_backend == ("flashinfer" if given else None)
        overridden = bool(given) and family == names.GDN
        assert view.linear_attn_verify_backend == ("triton" if overridden else None)

        assert (serving.mode.name, serving.family) == (names.REPLAY, family)
        assert serving.backend is not None and not serving.not_rewound_with
        assert serving.rewinds_to == page

        window = WindowShape.of(
            FAMILIES[family],
            params,
            layers=1,
            nodes=4,
            window=None,
            dtype=torch.bfloat16,
            rewinds_to=serving.rewinds_to,
        )
        assert window.threshold == (12 if page == 1 else 67)

    on_b200(body, model, given)


@pytest.mark.parametrize(
    "given, obstacle",
    [
        ({"page_size": 128}, "--page-size 128, "),  # 4 nodes and 127 tokens since a boundary: Mamba2's window holds 128
        ({"mamba_radix_cache_strategy": "extra_buffer"}, "--mamba-radix-cache-strategy extra_buffer"),
    ],
    ids=str,
)
def test_what_keeps_states_from_being_rewound(on_b200, given, obstacle):
    """It is named, and the server starts."""

    def body(runner, view, serving):
        assert serving.backend is not None and serving.rewinds_to == 0
        assert serving.not_rewound_with.startswith(obstacle)

    on_b200(body, MAMBA2_MODEL, given)


@pytest.mark.parametrize("family", [names.GDN, names.MAMBA2])
def test_the_longest_chain_over_pages_of_64_can_be_rewound(family):
    assert threshold_to_rewind(MAX_NODES, 64) <= FAMILIES[family].longest_window
