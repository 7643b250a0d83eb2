"""Stands in for the scheduler's request receiver: hands it a scenario's requests when they are due.

The scheduler calls ``recv_requests`` once per turn of its event loop; everything behind that call (dispatch, queueing,
prefix matching, batching, retraction) is SGLang's own. Outgoing messages are dropped except abort notices.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import adapters, logprobs, sleep
from .memory import Memory
from .scenario import PAUSED, Outcome, Request, Scenario

STALL_STEPS = 3000

ASLEEP = "retract, asleep"
"""How the engine has paused where it slept meanwhile, and loaded its weights behind an empty cache."""


class PlainTokenizer:
    """Token id 17 reads "17 " after its predecessor: enough for stop strings, and every text is unambiguous."""

    bos_token_id = eos_token_id = None
    additional_stop_token_ids: frozenset[int] = frozenset()
    is_fast = False

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids, **_: Any) -> str:
        return "".join(f" {token}," for token in token_ids)

    def batch_decode(self, sequences, **_: Any) -> list[str]:
        return [self.decode(tokens) for tokens in sequences]


class Receiver:
    """What `child.run_here` wants to know of whoever hands a scheduler its requests; see `spec.Result`."""

    released_bytes = 0

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.memory = Memory()
        self.paused: list[tuple[str, int]] = []
        self.step = 0


class Feeder(Receiver):
    """Drives a scheduler through scenarios, one after the other, and stops its event loop when all are done.

    ``all_done`` is asked at every turn of the event loop, told whether this rank is done, whether all ranks are.
    """

    def __init__(self, scheduler: Any, scenarios: Sequence[Scenario], max_steps: int, all_done: Callable[[bool], bool]):
        super().__init__()
        self.scheduler = scheduler
        self.todo = list(scenarios)
        self._all_done = all_done
        self._max_steps = max_steps
        self._scenario: Scenario | None = None
        self._start = 0
        self._sent: dict[str, Request] = {}
        self._sent_at: dict[str, int] = {}
        self._reqs: dict[str, Any] = {}
        self._prompts: dict[str, list[int]] = {}
        self._abort_sent: set[str] = set()
        self._abort_notices: set[str] = set()
        self._last_progress = (0, -1)
        self._idle_steps = 0
        self._first: list[Any] = []
        self._free_bytes: list[int] = []
        self._adapters = adapters.by_name(scheduler)
        self._install()

    def _install(self) -> None:
        from .grammar import CountingBackend

        scheduler = self.scheduler
        scheduler.tokenizer = PlainTokenizer()
        scheduler.request_receiver = self
        scheduler.grammar_manager.grammar_backend = CountingBackend(end=min(scheduler.model_config.hf_eos_token_id))
        add = scheduler._add_request_to_queue

        def add_and_note(req, *args, **kwargs):
            self._reqs[req.rid] = req
            self._prompts[req.rid] = list(req.origin_input_ids)  # a streaming session appends to it
            return add(req, *args, **kwargs)

        scheduler._add_request_to_queue = add_and_note
        channels = scheduler.ipc_channels
        for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            sender.send_output = self._on_output

    def _on_output(self, output: Any, *_: Any) -> None:
        if type(output).__name__ == "AbortReq":
            self._abort_notices.add(output.rid)
        elif type(output).__name__ == "UpdateWeightFromDiskReqOutput" and not output.success:
            raise AssertionError(f"the weights were not loaded: {output.message}")

    @property
    def released_bytes(self) -> int:
        """Memory of the device that was free during the first sleep and not before it."""
        before, asleep = self._free_bytes[:2] or (0, 0)
        return asleep - before

    # -- what the scheduler calls --------------------------------------------------------------------------------

    def recv_requests(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        """The messages due at this turn of the event loop."""
        self.step += 1
        if self.step > self._max_steps:
            raise TimeoutError(f"not done after {self._max_steps} event-loop steps: {self._describe()}")
        running = self._scenario is not None or self._next_scenario()
        self.scheduler.gracefully_exit = self._all_done(not running and not self.todo and self._idle_steps >= 3)
        if not running:
            return list(local_reqs)
        if self._first:  # one a turn, with a turn of an idle scheduler between them
            self._start = self.step + 1
            if self._scenario.sleep:
                self._free_bytes.append(sleep.free_bytes())
                if len(self._free_bytes) % 2 == 0:  # it sleeps, with nothing cached
                    self.memory.read()
                else:
                    self._falls_asleep(f"before {self._scenario.name}")
            return [*local_reqs, self._first.pop(0)]
        messages = [*local_reqs, *self._in_pauses(), *self._arrivals(), *self._aborts(), *self._pauses()]
        self._check_progress(bool(messages))
        if self._done():
            messages += self._closing()
            self._finish_scenario()
        return messages

    # -- scenario bookkeeping ------------------------------------------------------------------------------------

    def _next_scenario(self) -> bool:
        if not self.scheduler.is_fully_idle():
            return False
        self._idle_steps += 1
        if self._idle_steps < 3:  # the scheduler's own leak checks run when it is idle
            return False
        if not self.todo:
            return False
        self._idle_steps = 0
        self._scenario = self.todo.pop(0)
        if self._scenario.flush:
            if not self.scheduler.flush_cache():
                raise AssertionError("the idle scheduler refused to flush its cache")
            self.memory.read()
        self._first = sleep.messages() if self._scenario.sleep else []
        if self._scenario.weights is not None:
            self._first.append(_load(self._scenario.weights))
        self._start, self._sent, self._abort_sent = self.step, {}, set()
        return True

    def _finish_scenario(self) -> None:
        for rid in self._sent:
            req, key = self._reqs[self._key(rid)], f"{self._scenario.name}/{rid}"
            reason = req.finished_reason.to_json() if req.finished_reason is not None else {"type": "abort"}
            self.outcomes[key] = Outcome(
                prompt=self._prompts[self._key(rid)],
                tokens=list(req.output_ids_through_stop),
                prompt_logprobs=logprobs.of_prompt(req),
                logprobs=logprobs.of_answer(req),
                free=self._sent[rid].free,
                finish=reason["type"],
                aborted=reason["type"] == "abort",
                cached_tokens=req.cached_tokens,
                verify_steps=req.spec_verify_ct,
                accepted_drafts=req.spec_num_correct_drafts,
                retractions=req.retraction_count,
            )
        # A request keeps tensors of the device; only a turn of the same scenario asks for one that is done.
        self._reqs.clear()
        self._prompts.clear()
        self._scenario = None

    def _key(self, rid: str) -> str:
        return f"{self._scenario.name}/{rid};"  # aborts match rids by their start, hence the end mark

    def _tokens(self, rid: str) -> list[int]:
        req = self._reqs.get(self._key(rid)) if rid in self._sent else None
        return list(req.output_ids_through_stop) if req is not None else []

    def _ended(self, rid: str) -> bool:
        if rid not in self._sent:
            return False
        key = self._key(rid)
        req = self._reqs.get(key)
        return (req is not None and req.finished()) or key in self._abort_notices

    def _done(self) -> bool:
        return all(self._ended(request.rid) for request in self._scenario.requests)

    def _due(self, request: Request) -> bool:
        return (
            request.rid not in self._sent
            and self.step - self._start >= request.at_step
            and all(self._ended(rid) for rid in (request.after, request.continues) if rid is not None)
            and (request.when is None or len(self._tokens(request.when[0])) >= request.when[1])
        )

    def _arrivals(self) -> list[Any]:
        due = [request for request in self._scenario.requests if self._due(request)]
        messages = [*self._opening(due), *(self._message(request) for request in due)]
        self._sent |= {request.rid: request for request in due}
        self._sent_at |= {request.rid: self.step for request in due}
        return messages

    def _session(self, request: Request) -> str:
        return f"{self._scenario.name}/{request.session}"

    def _opening(self, due: Sequence[Request]) -> list[Any]:
        """Open the sessions of requests that are about to be sent."""
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        new = {self._session(request): None for request in due if request.session is not None}
        opened = self.scheduler.session_controller.sessions
        streaming = self._scenario.streaming
        return [
            OpenSessionReqInput(capacity_of_str_len=10_000, session_id=session, streaming=streaming)
            for session in new
            if session not in opened
        ]

    def _closing(self) -> list[Any]:
        """Close the sessions that are open."""
        from sglang.srt.managers.io_struct import CloseSessionReqInput

        return [CloseSessionReqInput(session_id=session) for session in self.scheduler.session_controller.sessions]

    def _message(self, request: Request) -> Any:
        from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        prompt, session = list(request.prompt), None
        if request.session is not None:
            branch = None if request.continues is None else self._key(request.continues)
            session = SessionParams(id=self._session(request), rid=branch)
        elif request.continues is not None:
            earlier = self._reqs[self._key(request.continues)]
            prompt = [*earlier.origin_input_ids, *earlier.output_ids_through_stop, *prompt]
        stop, stop_token_ids = None, None
        if request.stop_like is not None:
            rid, i = request.stop_like
            stop = [PlainTokenizer().decode(self._tokens(rid)[i : i + 2])]
        if request.stop_token_like is not None:
            rid, i = request.stop_token_like
            stop_token_ids = {self._tokens(rid)[i]}
        params = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            **({} if request.penalty is None else dict([request.penalty])),
            stop=stop,
            stop_token_ids=stop_token_ids,
            regex=None if request.grammar is None else str(request.grammar),
            ignore_eos=stop_token_ids is None and request.grammar is None,
        )
        if stop:
            # What SamplingParams.normalize would ask a real tokenizer: how many tokens a stop string may span.
            params.stop_strs, params.stop_str_max_len, params.stop_regex_strs = stop, 4, []
            params.stop, params.is_normalized = None, True
        else:
            params.normalize(None)
        params.verify(self.scheduler.model_config.vocab_size)
        return TokenizedGenerateReqInput(
            rid=self._key(request.rid),
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=request.logprobs is not None,
            logprob_start_len=-1 if request.logprobs is None else request.logprobs,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            extra_key=request.salt,
            lora_id=self._adapters[request.adapter],
            session_params=session,
        )

    def _aborts(self) -> list[Any]:
        from sglang.srt.managers.io_struct import AbortReq

        due = [rid for rid, request in self._sent.items() if rid not in self._abort_sent and self._abort_due(request)]
        self._abort_sent |= set(due)
        return [AbortReq(rid=self._key(rid)) for rid in due]

    def _abort_due(self, request: Request) -> bool:
        if request.abort_at_step is not None:
            return self.step - self._sent_at[request.rid] >= request.abort_at_step
        return request.abort_after is not None and len(self._tokens(request.rid)) >= request.abort_after

    def _pauses(self) -> list[Any]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        messages: list[Any] = []
        for step, how in self._scenario.pauses:
            if self.step - self._start == step:
                self.paused.append((how, self.scheduler.running_batch.batch_size()))
                messages.append(PauseGenerationReqInput(mode=how))
            elif self.step - self._start == step + PAUSED:
                messages.append(ContinueGenerationReqInput())
        return messages

    def _in_pauses(self) -> list[Any]:
        """What is done in a pause, before anything else arrives in it."""
        folder, since = self._scenario.in_pauses, {step: how for step, how in self._scenario.pauses}
        how = since.get(self.step - self._start - 1)
        if folder is None or how is None:
            return []
        if how == "retract" and _idle_but_for_the_queue(self.scheduler):
            self.paused[-1] = (ASLEEP, self.paused[-1][1])
            self._falls_asleep(f"in a pause of {self._scenario.name}")
            return [*sleep.messages(), _load(folder)]
        if self.scheduler.device == "cuda":  # SGLang does not wait for a forward that is at work on what it changes
            torch.cuda.synchronize()
        return [_load(folder, flush=False)]

    def _falls_asleep(self, when: str) -> None:
        """Where it does is in the engine's log. A GPU is given something to read in the memory that goes, as late as
        that: who gives memory back waits for it (`hooks.sleep.fall_asleep`)."""
        print(f"step {self.step}: falls asleep {when}", flush=True)
        if self.scheduler.device == "cuda":
            torch.cuda._sleep(50_000_000)  # cycles, some 30 ms
            self.scheduler.req_to_token_pool.req_to_token.sum()

    # -- failing loudly ------------------------------------------------------------------------------------------

    def _check_progress(self, new_messages: bool) -> None:
        emitted = sum(len(req.output_ids) for req in self._reqs.values())
        forwards = self.scheduler.forward_ct
        if new_messages or (emitted, forwards) != self._last_progress[1:]:
            self._last_progress = (self.step, emitted, forwards)
        elif self.step - self._last_progress[0] > STALL_STEPS:
            raise TimeoutError(f"no forward for {STALL_STEPS} event-loop steps: {self._describe()}")

    def _describe(self) -> str:
        if self._scenario is None:
            return "between scenarios; the scheduler is not idle"
        parts = []
        for request in self._scenario.requests:
            state = "ended" if self._ended(request.rid) else "running" if request.rid in self._sent else "not sent"
            parts.append(f"{request.rid}: {state}, {len(self._tokens(request.rid))} tokens")
        waiting, running = len(self.scheduler.waiting_queue), self.scheduler.running_batch.batch_size()
        return f"scenario {self._scenario.name}: {'; '.join(parts)} (waiting {waiting}, running {running})"


def _idle_but_for_the_queue(scheduler: Any) -> bool:
    """Whether a paused scheduler has requests in its queue alone, which some versions then flush and sleep beside."""
    if "ignore_waiting" not in inspect.signature(scheduler.is_fully_idle).parameters:
        return False
    return scheduler.is_fully_idle(ignore_waiting=True)


def _load(folder: str, flush: bool = True) -> Any:
    """What a server is sent that shall load a folder's weights; ``flush``: it flushes its cache then."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    return UpdateWeightFromDiskReqInput(model_path=folder, load_format="auto", flush_cache=flush)
