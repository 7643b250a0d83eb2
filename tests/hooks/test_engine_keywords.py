"""`sgl.Engine(mamba_mtp_mode=...)`: our options among the engine's keywords."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODE, WINDOW = "SGLANG_MAMBA_MTP_MODE", "SGLANG_MAMBA_MTP_WINDOW"
TINY = Path(__file__).parents[2] / "launch" / "models" / "tiny-gdn"

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="forks CPU engines")


class Launched(Exception):
    """An engine would have started its processes now."""


def launch(**keywords):
    """What an engine made with these keywords would have been started with: its ServerArgs."""
    from sglang.srt.entrypoints.engine import Engine

    def stop(self, server_args, **ignored):
        raise Launched(server_args)

    Engine._launch_subprocesses = stop
    with pytest.raises(Launched) as launched:
        Engine(model_path=str(TINY), device="cpu", skip_tokenizer_init=True, **keywords)
    return launched.value.args[0]


def test_keywords_are_options(forked):
    def body():
        args = launch(mamba_mtp_mode="slots", speculative_algorithm="NGRAM")
        assert os.environ[MODE] == "slots" and args.speculative_algorithm == "NGRAM"
        launch(mamba_mtp_window=3)  # they hold for one engine
        assert MODE not in os.environ and os.environ[WINDOW] == "3"
        launch()
        assert MODE not in os.environ and WINDOW not in os.environ

    result = forked(body)
    assert result.code == 0, result.output


def test_the_environment_is_put_back(forked):
    def body():
        launch(mamba_mtp_mode="snapshot")
        assert os.environ[MODE] == "snapshot"
        launch()
        assert os.environ[MODE] == "slots"

    result = forked(body, **{MODE: "slots"})
    assert result.code == 0, result.output


@pytest.mark.parametrize(
    "keywords, environment, words",
    [
        ({"mamba_mtp_mode": "fast"}, {}, ["fast", "expected one of replay"]),
        ({"mamba_mtp_window": "abc"}, {}, ["MtpError: mamba_mtp_window=abc: expected a number", "the keyword out"]),
        ({"mamba_mtp_mode": "slots", "mamba_mtp_window": 4}, {}, ["mamba_mtp_window=4: no effect in mode 'slots'"]),
        ({"mamba_mtp_mode": "replay"}, {MODE: "off"}, ["Engine(mamba_mtp_mode='replay')", "unset"]),
        ({"mamba_mtp_speed": 3}, {}, ["mamba_mtp_speed"]),
    ],
)
def test_refusals(forked, keywords, environment, words):
    result = forked(lambda: launch(**keywords), **environment)
    assert result.code == 1
    for word in words:
        assert word in result.output


@pytest.mark.slow
def test_an_engine_serves_in_the_mode_of_its_keyword(tmp_path):
    """Its scheduler is another process, which sees the environment only."""
    program = tmp_path / "serve.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sglang as sgl

            if __name__ == "__main__":
                engine = sgl.Engine(
                    model_path={str(TINY)!r}, device="cpu", dtype="float32", log_level="info", mamba_mtp_mode="slots",
                    speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_eagle_topk=1,
                    speculative_num_draft_tokens=4,
                )
                answer = engine.generate("Tom has 3 apples.", {{"temperature": 0, "max_new_tokens": 24}})
                state = engine.get_server_info()["internal_states"][0]["mamba_mtp"]
                print("served:", state["state"]["mode"], answer["meta_info"]["completion_tokens"])
                engine.shutdown()
            """
        )
    )
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=500)
    assert "served: slots" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
