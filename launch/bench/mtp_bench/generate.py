"""One streamed answer of SGLang's ``/generate``: its token ids, when the first came, what of its prompt was cached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .client import ClientError

if TYPE_CHECKING:
    import aiohttp

_PREFIX, _DONE = b"data: ", b"[DONE]"


@dataclass(frozen=True)
class Answer:
    """ids: its tokens; ttft: seconds until the first; prompt, cached: tokens of the prompt, and those of them that were
    found in the cache, as SGLang counts."""

    ids: list[int]
    ttft: float
    prompt: int
    cached: int


class Stream:
    """Puts an answer together from its lines. ids: the tokens so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._about: dict[str, Any] = {}

    def take(self, line: bytes) -> None:
        """Read one line of the body.

        A chunk's ``output_ids`` are all tokens so far, or with ``--incremental-streaming-output`` the new ones;
        ``completion_tokens`` counts all of them either way.

        Raises
            ClientError: the server tells of an error.
        """
        import orjson

        line = line.strip().removeprefix(_PREFIX)
        if not line or line == _DONE:
            return
        chunk = orjson.loads(line)
        if "error" in chunk:
            raise ClientError(f"/generate: {chunk['error']}")
        self._about = chunk["meta_info"]
        new = chunk["output_ids"]
        self.ids = new if len(new) >= self._about["completion_tokens"] else self.ids + new

    def answer(self, ttft: float, tokens: int) -> Answer:
        """The whole, which should have ``tokens``.

        Raises
            ClientError: it has not.
        """
        if len(self.ids) != tokens:
            reason = self._about.get("finish_reason")
            raise ClientError(f"/generate: {len(self.ids)} of {tokens} tokens were answered ({reason})")
        return Answer(self.ids, ttft, self._about["prompt_tokens"], self._about["cached_tokens"])


async def ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int) -> Answer:
    """Have the server at ``url`` answer the ids ``prompt`` with ``tokens`` tokens, greedily.

    Raises
        ClientError: it does not answer in full.
    """
    import aiohttp

    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    stream, ttft = Stream(), 0.0
    began = time.perf_counter()
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                raise ClientError(f"/generate: {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                seconds = time.perf_counter() - began
                stream.take(line)
                if stream.ids and not ttft:
                    ttft = seconds
    except aiohttp.ClientError as error:
        raise ClientError(f"/generate: {type(error).__name__}: {error}") from error
    return stream.answer(ttft, tokens)
