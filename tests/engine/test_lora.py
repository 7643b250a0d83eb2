"""LoRA: requests with and without adapters in one batch get the tokens and states of models with these merged."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

from . import adapters, scenarios
from .harness import check_equal, run
from .matrix import Case, in_full
from .scenario import Scenario
from .spec import Result
from .weights import VOCAB

MODELS = {"gdn": "qwen3_5", "mamba2": "mamba2"}
"""By family. Qwen3-Next has no adapters on its linear layers in SGLang."""

OLD = importlib.metadata.version("sglang") == "0.5.17"
DRAFTS = ("ngram-tree",) if OLD else ("ngram-tree", "nextn-tree", "nextn-chain")
"""0.5.17 takes adapters with NGRAM alone."""

CACHES = ("no_buffer", "extra_buffer-overlap", "rewind")

FAST = {("gdn", "ngram-tree", "rewind", "replay"), ("mamba2", "ngram-tree", "extra_buffer-overlap", "replay")}
"""An engine a family."""


@pytest.fixture(scope="session")
def adapted(tmp_path_factory, checkpoint, written):
    """``adapted(family)``: the folder of the model, those of its adapters, and of the models merged with them."""
    made: dict[str, tuple[str, dict[str, str], dict[str | None, str]]] = {}

    def folders(family: str) -> tuple[str, dict[str, str], dict[str | None, str]]:
        if family not in made:
            model = written(MODELS[family]) if family == "gdn" else checkpoint(family)
            root = tmp_path_factory.mktemp(f"adapters-{family}")
            pairs = {name: adapters.write(model, root / name, seed) for seed, name in enumerate(("one", "two"))}
            merged = {None: model} | {name: folder for name, (_, folder) in pairs.items()}
            made[family] = model, {name: folder for name, (folder, _) in pairs.items()}, merged
        return made[family]

    return folders


def _with(scenario: Scenario, adapter: str | None) -> Scenario:
    """The scenario asked with an adapter."""
    if adapter is None:
        return scenario

    def renamed(rid: str | None) -> str | None:
        return rid and f"{rid}-{adapter}"

    return dataclasses.replace(
        scenario,
        requests=tuple(
            dataclasses.replace(
                request,
                rid=f"{request.rid}-{adapter}",
                after=renamed(request.after),
                continues=renamed(request.continues),
                adapter=adapter,
            )
            for request in scenario.requests
        ),
    )


def _share(result: Result, scenario: Scenario, model: str) -> tuple[Result, list[Scenario]]:
    """What the result shows of one scenario's requests, as an engine of ``model`` is asked them without adapters."""
    keys = {f"{scenario.name}/{request.rid}" for request in scenario.requests}
    part = dataclasses.replace(
        result,
        spec=dataclasses.replace(result.spec, model=model, extra={}),
        outcomes={key: outcome for key, outcome in result.outcomes.items() if key in keys},
        records=[record for record in result.records if any(f"{key};" in record.where for key in keys)],
    )
    plain = tuple(dataclasses.replace(request, adapter=None) for request in scenario.requests)
    return part, [dataclasses.replace(scenario, requests=plain)]


@pytest.mark.in_turn
@pytest.mark.parametrize("case", in_full(MODELS, DRAFTS, CACHES, FAST))
def test_every_request_gets_its_own_adapter(case: Case, adapted, sglang_version):
    """The same prompts with either adapter and with none, at once: they share a batch, and no cached state."""
    model, folders, merged = adapted(case.family)
    turns = scenarios.turns(VOCAB - 5)
    asked = {adapter: _with(turns, adapter) for adapter in merged}
    todo = [Scenario(turns.name, tuple(request for each in asked.values() for request in each.requests))]
    spec = case.spec(model)
    result = run(dataclasses.replace(spec, extra=spec.extra | adapters.server_args(folders)), todo)
    assert result.cached_tokens > 0
    compared = 0
    for adapter, scenario in asked.items():
        part, alone = _share(result, scenario, merged[adapter])
        compared += check_equal(part, alone).compared
        assert {"prefill", "decode", "insert", "radix"} <= {record.kind for record in part.records}
    assert compared == len(result.records), "some states belong to nobody"
    texts = {
        adapter: result.outcomes[f"turns/{scenario.requests[0].rid}"].tokens for adapter, scenario in asked.items()
    }
    assert len({*map(tuple, texts.values())}) == len(texts), "the adapters changed nothing"
