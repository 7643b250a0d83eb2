"""The models: equal to Transformers', drafts equal to sequential drafting, export complete, loop resumable."""

import pytest
import torch
from tinymodels import corpus, evaluate, export, loop, tokenizer
from tinymodels.layers import draft_mask
from tinymodels.registry import MODELS, padded_vocab

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=sorted(MODELS))
def exported(request, tokenizer_folder, tmp_path):
    """(model with bf16-valued weights, its checkpoint folder); every parameter is random, norms included."""
    tok = tokenizer.load(tokenizer_folder)
    model = MODELS[request.param](padded_vocab(tok.get_vocab_size())).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith(("A_log", "dt_bias")):
            parameter.data += 0.2 * torch.randn_like(parameter)
    export.round_to_bfloat16(model)
    export.save(model, tok, tokenizer_folder, tmp_path)
    return model, tmp_path


def test_equals_transformers(exported):
    model, folder = exported
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(4, 600, (2, 77))
    with torch.no_grad():
        ours = model.lm_head(model.trunk(tokens))
        theirs = reference(tokens, use_cache=False).logits
    assert type(reference).__name__ == model.config()["architectures"][0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (folder / "model.safetensors").stat().st_size < 10e6
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.eos_token_id == 3 and config.dtype == torch.bfloat16


def test_drafts_equal_sequential_drafting(exported):
    """The unrolled drafts at row i equal a draft worker's chain: prefill from true hidden states, then its own."""
    model, _ = exported
    tokens = torch.randint(4, 600, (1, 14))
    with torch.no_grad():
        _, *unrolled = model(tokens, 3)
        trunk, embeds = model.trunk(tokens[:, :-1]), model.embed(tokens[:, 1:])
        for end in (6, 9, 12):  # the row of the last draft step
            for steps in (1, 2, 3):
                prefix = end - steps + 2  # rows with true hidden states
                rows = [trunk[:, i] for i in range(prefix)]
                for row in range(prefix, end + 1):
                    out = sequential_row(model, embeds, rows, row - 1, prefix)
                    rows.append(out)
                last = sequential_row(model, embeds, rows, end, prefix)
                torch.testing.assert_close(last, unrolled[steps - 1][:, end], rtol=1e-4, atol=1e-5)


def sequential_row(model, embeds, rows, row, prefix):
    """The draft's output at ``row``: a plain causal pass over the hidden states given so far."""
    hidden = torch.stack(rows[: row + 1], dim=1)
    return model.draft(embeds[:, : row + 1], hidden, [])[:, row]


def test_draft_mask_step_two():
    mask = draft_mask(4, 2, torch.device("cpu")).view(4, 3, 4)
    assert mask[3].tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_loop_resumes_and_learns(name, tokenizer_folder, tmp_path):
    tok = tokenizer.load(tokenizer_folder)
    text = corpus.build(tokenizer_folder, seed=0, count=300, workers=1)
    device = torch.device("cpu")

    def run(steps, resume, checkpoint):
        torch.manual_seed(0)
        model = MODELS[name](padded_vocab(tok.get_vocab_size()))
        settings = loop.Settings(steps=steps, rows=2, length=128, warmup=2)
        return model, loop.train(model, text, settings, device, tmp_path / checkpoint, resume=resume)

    model, state = run(4, False, "a.pt")
    first = loop.losses(MODELS[name](model.lm_head.out_features), *text.batch(2, 130, torch.Generator()))
    again, resumed = run(4, True, "a.pt")  # nothing left to do
    assert resumed.step == state.step == 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert loop.losses(model, *text.batch(2, 130, torch.Generator()))[0] < first[0]
    scores = evaluate.score(model, tok, 2, device, rows=2)
    assert 1.0 <= scores.accept_length <= 4.0 and len(scores.draft_accuracy) == 3


def test_walk():
    assert evaluate.walk([4, 1, 1, 1, 2, 1]) == (6, 2)
    assert evaluate.walk([1, 1, 1]) == (3, 3)
