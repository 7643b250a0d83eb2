"""The training loop: joint loss, schedule by progress, checkpoints that resume."""

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tinymodels.base import TinyModel
from tinymodels.corpus import Corpus

try:
    from tqdm import tqdm
except ImportError:  # the loop runs without it, silently
    tqdm = None

DRAFT_WEIGHTS = (0.4, 0.3, 0.3)
LOG_EVERY = 20


@dataclass
class Settings:
    """rows x length tokens a step; training ends at ``steps`` or after ``minutes``, whichever comes first."""

    steps: int
    minutes: float | None = None
    rows: int = 32
    length: int = 768
    learning_rate: float = 1.5e-3
    warmup: int = 150
    weight_decay: float = 0.05
    seed: int = 0
    save_every_s: float = 60.0


@dataclass
class State:
    """What a checkpoint holds besides weights and optimizer."""

    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def losses(model: TinyModel, tokens: Tensor, weights: Tensor) -> Tensor:
    """Mean weighted cross-entropy of the trunk and of each draft step: float32 [1 + drafts]. tokens: [B, S + 2]."""
    outputs = model(tokens[:, :-1], len(DRAFT_WEIGHTS))
    result = []
    for index, hidden in enumerate(outputs):
        skip, shift = max(index - 1, 0), min(index, 1)  # rows without a meaning; how much further ahead it predicts
        length = hidden.shape[1]
        target = tokens[:, 1 + shift + skip : 1 + shift + length]
        weight = weights[:, 1 + shift + skip : 1 + shift + length]
        logits = model.lm_head(hidden[:, skip:]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        result.append((loss * weight.flatten()).sum() / weight.sum())
    return torch.stack(result)


def make_optimizer(model: TinyModel, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; no decay on vectors, embeddings and convolutions."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and "conv1d" not in name and "embed" not in name
        (decayed if matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)


def progress(state: State, settings: Settings) -> float:
    """0..1: the further of the share of steps and the share of minutes."""
    by_time = state.seconds / (60 * settings.minutes) if settings.minutes else 0.0
    return min(1.0, max(state.step / settings.steps, by_time))


def learning_rate(state: State, settings: Settings) -> float:
    """Linear warm-up by step, then a half cosine to zero by progress."""
    warm = min(1.0, (state.step + 1) / settings.warmup)
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress(state, settings)))


def save_checkpoint(path: Path, model: TinyModel, optimizer: torch.optim.Optimizer, state: State) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": vars(state)}, temporary)
    os.replace(temporary, path)


def train(
    model: TinyModel,
    corpus: Corpus,
    settings: Settings,
    device: torch.device,
    checkpoint: Path,
    *,
    resume: bool = False,
) -> State:
    """Train in place; the batch of a step depends on (seed, step) alone, so a resumed run continues the same stream."""
    optimizer, state = make_optimizer(model, settings), State()
    if resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = State(**saved["state"])
        print(f"resumed at step {state.step} ({state.seconds:.0f} s trained)", flush=True)
    weights = torch.tensor((1.0, *DRAFT_WEIGHTS), device=device)
    generator = torch.Generator(device=device)
    bar = tqdm(total=settings.steps, initial=state.step, mininterval=10, dynamic_ncols=True) if tqdm else None
    last = last_save = time.perf_counter()
    while progress(state, settings) < 1.0:
        generator.manual_seed(settings.seed * 1_000_003 + state.step)
        tokens, token_weights = corpus.batch(settings.rows, settings.length + 2, generator)
        rate = learning_rate(state, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            parts = losses(model, tokens, token_weights)
        (parts * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.step += 1
        if state.step % LOG_EVERY == 0 or state.step == 1:
            values = parts.tolist()  # waits for the device, so that the clock below is true
            if not all(map(math.isfinite, values)):
                raise FloatingPointError(f"loss is not finite at step {state.step}: {values}")
            names = ("main", "draft1", "draft2", "draft3")
            state.history.append({"step": state.step, "lr": rate, **dict(zip(names, values, strict=True))})
            if bar:
                bar.set_postfix(main=f"{values[0]:.4f}", draft3=f"{values[3]:.4f}", refresh=False)
        now = time.perf_counter()
        state.seconds, last = state.seconds + now - last, now
        if bar:
            bar.update()
        if now - last_save > settings.save_every_s:
            save_checkpoint(checkpoint, model, optimizer, state)
            last_save = now
    save_checkpoint(checkpoint, model, optimizer, state)
    if bar:
        bar.close()
    return state
