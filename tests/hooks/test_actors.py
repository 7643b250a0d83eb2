"""What a scheduler that is a Ray actor does before it is one; Ray itself is in tests/engine/test_ray.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins

from sglang_mamba_mtp import config
from sglang_mamba_mtp.hooks import actors, registry
from sglang_mamba_mtp.hooks.table import active

TINY = Path(__file__).parents[2] / "launch" / "models" / "tiny-gdn"
MODE, WINDOW = config.OPTIONS["mode"].env, config.OPTIONS["window"].env
SLOTS = {MODE: "slots", WINDOW: None, config.SPELLINGS: "mode=flag", "SGLANG_PLUGINS": None}


class Stock:
    """Stands for SGLang's class."""

    def __init__(self, **keywords):
        self.keywords, self.hooks = keywords, len(registry.registered())


def test_the_plugin_is_loaded_first_with_the_options_of_who_asked(forked):
    def body():
        made = actors.with_the_plugin(Stock, SLOTS)(server_args="arguments", dist_init_addr=None)
        assert made.keywords == {"server_args": "arguments", "dist_init_addr": None}
        assert made.hooks == len(active("slots"))
        assert os.environ[MODE] == "slots" and WINDOW not in os.environ
        assert config.current().spelled("mode") == "--mamba-mtp-mode slots"

    # what this process inherited is of nobody who asked
    result = forked(body, **{MODE: "replay", WINDOW: "7", "SGLANG_PLUGINS": "another"})
    assert result.code == 0, result.output


@pytest.mark.parametrize(
    "carried, words",
    [
        ({"SGLANG_PLUGINS": "another"}, "none was registered"),
        ({MODE: "fast"}, "SGLANG_MAMBA_MTP_MODE=fast: expected one of"),  # a SystemExit elsewhere
    ],
)
def test_where_it_cannot_be_loaded_there_is_no_actor(forked, carried, words):
    result = forked(lambda: actors.with_the_plugin(Stock, carried)())
    assert result.code == 1
    assert "MtpError: mamba-mtp: the plugin could not be loaded in a Ray actor on" in result.output
    assert words in result.output


def test_an_actor_that_has_loaded_it_in_mode_off(forked):
    """Whoever starts Ray may have its workers load plugins."""

    def body():
        load_plugins()
        actors.with_the_plugin(Stock, SLOTS)()

    result = forked(body, **{MODE: "off"})
    assert result.code == 1 and "it had been loaded there in mode off before" in result.output


def test_everything_that_says_how_to_serve_is_carried():
    assert {option.env for option in config.OPTIONS.values()} < set(actors.CARRIED)


def test_without_ray_nothing_happens(forked):
    """SGLang says what is missing, once it looks for it."""

    def body():
        import sys

        sys.modules["ray"] = None
        actors.choose(ours=True)

    result = forked(body)
    assert result.code == 0, result.output


DECIDED_WITHOUT_US = [
    {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1, "speculative_num_draft_tokens": 4},
    {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "linear_attn_decode_backend": "flashinfer",
    },
]


@pytest.mark.parametrize("given", DECIDED_WITHOUT_US, ids=["ngram", "flashinfer"])
@pytest.mark.parametrize("loaded", ["before", "behind"])
def test_arguments_are_resolved_behind_the_plugin_or_refused(forked, given, loaded):
    """`RayEngine` resolves them before it loads plugins, up to 0.5.18."""

    def body():
        from sglang.srt.server_args import ServerArgs

        if loaded == "before":
            load_plugins()
        args = ServerArgs(model_path=str(TINY), device="cpu", skip_tokenizer_init=True, use_ray=True, **given)
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        load_plugins()
        args.check_server_args()

    result = forked(body)
    if loaded == "before":
        assert result.code == 0, result.output
    else:
        assert result.code == 1 and "call sglang.srt.plugins.load_plugins() before" in result.output, result.output
