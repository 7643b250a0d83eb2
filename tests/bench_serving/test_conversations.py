"""The conversations' client, against a server that streams as SGLang's does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from types import SimpleNamespace

import pytest
from aiohttp import web
from mtp_bench import client, conversations, generate
from mtp_bench.generate import Answer
from mtp_bench.loads import Conversations

TOKENS = 5


class Server:
    """Answers with the ids that follow a prompt's last one, in chunks of two, each ``pause`` seconds after the last.

    incremental: a chunk has the new ids alone; stops: tokens after which it ends an answer; error: told at its end;
    asked: every request's body, in order; open, most: requests being answered, now and at most.
    """

    def __init__(self, *, incremental=False, stops=None, error=None, status=200, pause=0.0):
        self.incremental, self.stops, self.error, self.status, self.pause = incremental, stops, error, status, pause
        self.asked: list[dict] = []
        self.open = self.most = 0

    async def generate(self, request):
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="too long")
        self.open += 1
        self.most = max(self.most, self.open)
        response = web.StreamResponse()
        await response.prepare(request)
        prompt, count = body["input_ids"], self.stops or body["sampling_params"]["max_new_tokens"]
        ids = [prompt[-1] + 1 + number for number in range(count)]
        await self.send(response, {"output_ids": [], "meta_info": self.about(prompt, 0)})
        for begin in range(0, count, 2):
            await asyncio.sleep(self.pause)
            end = min(begin + 2, count)
            new = ids[begin if self.incremental else 0 : end]
            await self.send(response, {"text": "x", "output_ids": new, "meta_info": self.about(prompt, end)})
        if self.error:
            await self.send(response, {"error": {"message": self.error}})
        await response.write(b"data: [DONE]\n\n")
        self.open -= 1
        return response

    @staticmethod
    def about(prompt, tokens):
        return {"prompt_tokens": len(prompt), "completion_tokens": tokens, "cached_tokens": len(prompt) // 2}

    @staticmethod
    async def send(response, chunk):
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    @contextlib.asynccontextmanager
    async def listening(self):
        application = web.Application()
        application.router.add_post("/generate", self.generate)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        finally:
            await runner.cleanup()

    def hold(self, talks, tokens=TOKENS):
        async def go():
            async with self.listening() as url:
                return await conversations.hold(url, talks, tokens)

        return asyncio.run(go())


@pytest.mark.parametrize("incremental", [False, True])
def test_a_turns_prompt_is_the_last_one_its_answer_and_new_tokens(incremental):
    server = Server(incremental=incremental)
    (answers,) = server.hold([[[10, 20], [50], [90, 91]]])
    assert [answer.ids for answer in answers] == [[21, 22, 23, 24, 25], [51, 52, 53, 54, 55], [92, 93, 94, 95, 96]]
    first, second, third = (body["input_ids"] for body in server.asked)
    assert first == [10, 20]
    assert second == [10, 20, 21, 22, 23, 24, 25, 50]
    assert third == [*second, 51, 52, 53, 54, 55, 90, 91]
    assert [(answer.prompt, answer.cached) for answer in answers] == [(2, 1), (8, 4), (15, 7)]
    assert all(body["stream"] for body in server.asked)
    assert server.asked[0]["sampling_params"] == {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}


def test_conversations_go_on_side_by_side():
    server = Server(pause=0.02)
    held = server.hold([[[10 * number], [1]] for number in range(1, 121)])  # aiohttp opens 100 connections unless told
    assert server.most > 100
    assert [answers[0].ids[0] for answers in held] == [10 * number + 1 for number in range(1, 121)]


def test_the_first_token_is_timed_not_the_first_chunk(monkeypatch):
    readings = itertools.count()  # a second each: as a request begins, then at every line
    monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=lambda: float(next(readings))))
    ((answer,),) = Server().hold([[[1]]])
    assert answer.ttft == 3  # lines one and two are a chunk without tokens, and the end of it


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(stops=3), "3 of 5 tokens were answered"),
        (Server(error="no memory"), "no memory"),
        (Server(status=400), "400: too long"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(server, message):
    with pytest.raises(client.ClientError, match=message):
        server.hold([[[1]], [[2]]])


def test_a_server_that_is_gone_is_a_failure():
    with pytest.raises(client.ClientError, match="ClientConnectorError"):
        asyncio.run(conversations.hold("http://127.0.0.1:9", [[[1]]], TOKENS))


@pytest.mark.parametrize("chunks", [[[1, 2], [1, 2, 3], [1, 2, 3]], [[1, 2], [3], []], [[1], [2, 3], []]])
def test_chunks_of_either_kind(chunks):
    """SGLang's last chunk repeats all ids, or has none left to tell."""
    stream = generate.Stream()
    for new, count in zip(chunks, (len(chunks[0]), 3, 3), strict=True):
        about = {"completion_tokens": count, "prompt_tokens": 4, "cached_tokens": 0}
        stream.take(b"data: " + json.dumps({"output_ids": new, "meta_info": about}).encode() + b"\n")
    assert stream.answer(0.5, 3) == Answer([1, 2, 3], 0.5, 4, 0)


def test_every_mode_is_asked_the_same(parse):
    options = parse("--conversations", "3", "--turns", "3", "--turn-len", "5", "--input-len", "8")
    (load,) = options.loads
    drawn = conversations.draw(options, load, 50, "load")
    assert drawn == conversations.draw(options, load, 50, "load")
    assert drawn != conversations.draw(options, load, 50, "warm-up")
    assert drawn != conversations.draw(parse("--conversations", "3", "--seed", "1"), load, 50, "load")
    assert [[len(question) for question in questions] for questions in drawn] == [[8, 5, 5]] * 3
    assert len({tuple(questions[0]) for questions in drawn}) == 3
    assert all(0 <= number < 50 for questions in drawn for question in questions for number in question)


def test_figures_are_told_turn_by_turn():
    quick = [Answer([1, 2], 0.1, 4, 0), Answer([3, 4], 0.2, 9, 6)]
    slow = [Answer([1, 2], 0.3, 4, 0), Answer([3, 4], 0.6, 9, 3)]
    found = conversations.figures([quick, slow], 4.0)
    assert (found["duration"], found["total_output_tokens"], found["output_throughput"]) == (4.0, 8, 2.0)
    first, second = found["turns"]
    assert first["mean_ttft_ms"] == pytest.approx(200)
    assert (first["cached_share"], first["last_turn_tokens"]) == (None, None)
    assert second["median_ttft_ms"] == pytest.approx(400)
    assert second["p99_ttft_ms"] == pytest.approx(596)
    assert (second["prompt_tokens"], second["last_turn_tokens"]) == (9, 6)
    assert (second["cached_tokens"], second["min_cached_tokens"], second["cached_share"]) == (4.5, 3, 0.75)
    assert second["computed_tokens"] == 4.5


def test_a_load_warms_up_with_other_conversations_and_flushes(parse, monkeypatch):
    from tests.engine.harness import import_sglang

    import_sglang()
    from sglang.benchmark import serving, utils

    done = []

    async def hold(url, talks, tokens):
        done.append((len(talks), tokens, talks))
        return [[Answer([0] * tokens, 0.1, 40, 0), Answer([0] * tokens, 0.1, 100, 70)] for _ in talks]

    monkeypatch.setattr(conversations, "hold", hold)
    monkeypatch.setattr(serving, "flush_server_cache", lambda *arguments: done.append(arguments))
    monkeypatch.setattr(utils, "get_tokenizer", lambda path: done.append(path) or type("Tokens", (), {"vocab_size": 9}))
    options = parse("--conversations", "3", "--output-len", "40")
    facts, told = conversations.measure(options, options.loads[0], url="u", model="m")
    where, warm, flushed, held = done
    assert where == "m"
    assert warm[:2] == held[:2]
    assert flushed == ("u", "sglang")
    assert held[:2] == (3, 40)
    assert warm[2] != held[2]
    assert facts["answers"]["total_output_tokens"] == 3 * 2 * 40
    assert told.endswith("turn 2: TTFT 100 ms, 70 of 100 prompt tokens cached")


def test_the_name_says_how_many_and_how_long():
    assert Conversations(64, 2, 32).name == "64 conversations of 2 turns"
