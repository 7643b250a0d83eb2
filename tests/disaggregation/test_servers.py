"""Real servers: prefill here, decode there, SGLang's load balancer before them, equal to one server; and what a killed
prefill server takes with it.

States are compared in `tests/engine/test_disaggregation.py`.
"""

from __future__ import annotations

import importlib.util
import json
import random

import pytest

from ..clients import Client, wait_for
from .servers import HOST, MODELS, PATIENCE, Pair, answers

TOKENS = 40
LONG = 400
"""More than are said before the prefill server is dead."""


@pytest.fixture(
    scope="module",
    params=[pytest.param("gdn", marks=pytest.mark.once), pytest.param("mamba2", marks=pytest.mark.slow)],
)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(family, tmp_path_factory):
    pair = Pair(family, tmp_path_factory.mktemp(family))
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


@pytest.fixture(scope="module")
def prompts(family) -> list[list[int]]:
    """Of several lengths; one is longer than the interval at which prefills take snapshots."""
    vocab = json.loads((MODELS / f"tiny-{family}" / "config.json").read_text())["vocab_size"]
    draw = random.Random(7)
    return [[draw.randrange(10, vocab) for _ in range(length)] for length in (6, 70, 140, 300)]


def test_the_servers_say_what_they_are(pair):
    assert "a prefill server, which verifies nothing" in pair.prefill.log.read_text(errors="replace")
    assert "mode replay, " in pair.decode.log.read_text(errors="replace")


def test_two_turns_are_one_servers(pair, prompts):
    """The second is a hit of the first in the prefill server's radix cache."""
    for turn in range(2):
        wanted, told = (answers(server, prompts, TOKENS) for server in (pair.one, pair.balancer))
        assert [each["output_ids"] for each in told] == [each["output_ids"] for each in wanted]
        assert all(each["meta_info"]["spec_verify_ct"] < TOKENS - 1 for each in told)
        cached = [each["meta_info"]["cached_tokens"] for each in told]
        assert (min(cached[2:]) > 0) == (turn == 1), cached
        prompts = [prompt + each["output_ids"] + [11, 12] for prompt, each in zip(prompts, wanted, strict=True)]


def test_sglangs_parity_kit(pair, prompts):
    """Logits of both, cold and with a hit on the prefill side (the wheels that have it)."""
    if importlib.util.find_spec("sglang.test.kits.pd_parity_kit") is None:
        pytest.skip("this SGLang has no sglang.test.kits.pd_parity_kit")
    import unittest

    from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin

    class Parity(PDLogprobParityMixin, unittest.TestCase):
        parity_prompts = prompts[1:3]
        parity_max_new_tokens = 8
        parity_logprob_delta = 1e-3  # SGLang allows 0.05, in 16 bits
        parity_cached_prefix_min_prompt_tokens = 128
        prefill_url, decode_url, lb_url = (
            f"http://{HOST}:{server.port}" for server in (pair.prefill, pair.decode, pair.balancer)
        )
        process_prefill, process_decode, process_lb = (
            server._process for server in (pair.prefill, pair.decode, pair.balancer)
        )

        @classmethod
        def _collect_references(cls):
            """Of the server that is there."""
            url = f"http://{HOST}:{pair.one.port}"
            return [cls._generate(base_url=url, input_ids=prompt) for prompt in cls.parity_prompts]

        def launch_all(self):
            """They are."""

    Parity("test_logprob_parity").debug()


@pytest.mark.slow
def test_a_killed_prefill_server_loses_no_decode_request(pair, prompts):
    """What decodes is answered to its end, as one server answers it; and with another prefill server it goes on."""
    wanted = [each["text"] for each in answers(pair.one, prompts, LONG)]
    clients = [Client(pair.balancer.port, prompt, LONG) for prompt in prompts]
    assert wait_for(lambda: all(len(each.told) > 20 for each in clients), PATIENCE), [each.error for each in clients]
    pair.kill_prefill()
    assert not any(each.complete for each in clients), "they had ended before"
    assert wait_for(lambda: not any(each.is_alive() for each in clients), PATIENCE), [each.told for each in clients]
    assert [(each.error, each.complete) for each in clients] == [(None, True)] * len(clients)
    assert [each.told for each in clients] == wanted
    pair.start_prefill_again()
    told = answers(pair.balancer, prompts, TOKENS)
    assert [each["text"] for each in told] == [
        text[: len(each["text"])] for each, text in zip(told, wanted, strict=True)
    ]
