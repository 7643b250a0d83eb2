"""What a training run leaves beside the weights: training.json, loss.png and the model card."""

from pathlib import Path
from typing import Any

from tinymodels.base import TinyModel
from tinymodels.export import write_json

CARD = """---
license: apache-2.0
tags: [test-model, speculative-decoding]
---
# {name}

A test model of {parameters:.1f} M parameters (`{architecture}`) that solves generated grade-school word problems and
has an MTP (NEXTN) head. It exists to test serving engines: it is real enough to be graded (few-shot accuracy) and to
be drafted for (accept length), and small enough for a CPU. It knows nothing else.

| measured on held-out problems, {shots}-shot, greedy, bf16 weights | |
| --- | --- |
| answers reproduced token for token ({count} problems) | {exact:.3f} |
| right final number, free-running ({generated} problems) | {accuracy} |
| accept length, 3 chained MTP drafts, bonus included (max 4) | {accept:.2f} |
| drafts right at step 1 / 2 / 3, given the text before | {drafts} |

Trained from scratch on {tokens:.0f} M tokens of generated problems ({steps} steps, {seconds:.0f} s on {device}, seed
{seed}); loss history in `training.json`. The MTP head was trained together with the trunk, unrolled three times on its
own hidden states as a NEXTN draft worker runs it. Held-out problems use combinations of numbers that never occur in
training in the same kind of problem.

![loss](loss.png)

Made by `python launch/train/train.py --model {model} --seed {seed}`; data by `launch/train/word_problems.py`.
"""


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Loss curves; without matplotlib, a message instead."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is not installed: no loss.png (the numbers are in training.json)")
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for key, label in (
        ("main", "next token"),
        ("draft1", "MTP step 1"),
        ("draft2", "MTP step 2"),
        ("draft3", "MTP step 3"),
    ):
        axes.plot([h["step"] for h in history], [h[key] for h in history], label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="answer-weighted loss (nats)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(model: TinyModel, folder: Path, report: dict[str, Any]) -> None:
    """report: run (settings and totals), scores, history."""
    write_json(folder / "training.json", report)
    plot(report["history"], folder / "loss.png")
    run, scores = report["run"], report["scores"]
    accuracy = scores["generate_accuracy"]
    card = CARD.format(
        name=model.name,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        architecture=model.config()["architectures"][0],
        shots=scores["shots"],
        count=scores["problems"],
        exact=scores["exact_match"],
        generated=scores["generated_problems"],
        accuracy="not run" if accuracy is None else f"{accuracy:.3f}",
        accept=scores["accept_length"],
        drafts=" / ".join(f"{share:.3f}" for share in scores["draft_accuracy"]),
        tokens=run["tokens"] / 1e6,
        steps=run["steps_done"],
        seconds=run["seconds"],
        device=run["device"],
        seed=run["seed"],
        model=run["model"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
