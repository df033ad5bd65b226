"""Training a GPT, step by step equal but for the attention."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .gpt import GPT, GPTConfig, attention_named
from .text import Text, batch_of

_EVALUATION_SEED = 1 << 40  # no step of a run draws there


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """One run; two runs with equal configs differ in nothing but the attention.

    ``dtype`` is that of autocast, "float32" for none; parameters and optimiser are float32.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    steps: int = 100
    batch: int = 4
    learning_rate: float = 1e-3
    warm_up: int = 10
    evaluation_batches: int = 8
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """Bytes that a step learns from."""
        return self.batch * self.model.context


@dataclass(slots=True)
class Run:
    """What one training gave; losses in nats per byte."""

    attention: str
    parameters: int
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    train_before: float = 0.0
    train_after: float = 0.0
    held_out_before: float = 0.0
    held_out_after: float = 0.0


class Trainer:
    """A model and its optimiser. Every step is a function of the configuration and its number.

    Steps of several trainers may be taken in turn: each sets torch's generator itself.

    Args:
        attention: a name that ``gpt.attention_named`` knows.
        text: what to learn.
        config: sizes, steps and seed.
    """

    def __init__(self, attention: str, text: Text, config: TrainingConfig) -> None:
        torch.manual_seed(config.seed)
        self.config, self.text = config, text
        # made on the CPU, so that every device starts from the same parameters
        self.model = GPT(config.model, attention_named(attention, config.device)).to(config.device)
        self.run = Run(attention, sum(p.numel() for p in self.model.parameters()))
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = config.device == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=fused
        )
        self.run.train_before = self.evaluate(text.train)
        self.run.held_out_before = self.evaluate(text.held_out)

    def step(self, step: int) -> float:
        """Takes a step and returns its loss."""
        config, start = self.config, time.perf_counter()
        number = config.seed * (1 << 24) + step
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step, config)
        tokens, targets = self._batch(self.text.train, number)
        torch.manual_seed(number)  # residual dropout
        loss = self._loss(tokens, targets, number)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.run.losses.append(loss.item())
        self.run.step_seconds.append(time.perf_counter() - start)
        return self.run.losses[-1]

    def finish(self) -> Run:
        """Evaluates the trained model and returns what there is to tell."""
        self.run.train_after = self.evaluate(self.text.train)
        self.run.held_out_after = self.evaluate(self.text.held_out)
        return self.run

    @torch.no_grad()
    def evaluate(self, data: Tensor) -> float:
        """Mean loss without dropout over batches that are the same every time."""
        self.model.eval()
        losses = []
        for i in range(self.config.evaluation_batches):
            seed = _EVALUATION_SEED + i
            tokens, targets = self._batch(data, seed)
            losses.append(self._loss(tokens, targets, 0).item())
        self.model.train()
        return sum(losses) / len(losses)

    def _batch(self, data: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        config = self.config
        tokens, targets = batch_of(data, config.batch, config.model.context, seed)
        return tokens.to(config.device), targets.to(config.device)

    def _loss(self, tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        dtype = getattr(torch, self.config.dtype)
        mixed = dtype != torch.float32
        with torch.autocast(self.config.device, dtype if mixed else None, enabled=mixed):
            logits = self.model(tokens, number)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _schedule(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < config.warm_up:
        return (step + 1) / config.warm_up
    progress = (step - config.warm_up) / max(1, config.steps - config.warm_up)
    return 0.55 + 0.45 * math.cos(math.pi * progress)
