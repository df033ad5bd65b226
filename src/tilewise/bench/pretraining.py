"""The suite "train": one GPT by several attentions, a step of each in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import plots
from .console import table
from .gpt import GPT2, GPTConfig
from .meters import DeviceLostError, Failure, attempt, release
from .providers import FORWARD_BACKWARD, Provider, Shape
from .results import Output, Row, machine
from .rivals import CPU, providers_on
from .text import Text, standard_library
from .training import Run, Trainer, TrainingConfig

SUITE = "train"
PROTOCOL = "in turn"
WINDOW = 20  # steps of the moving average
_SAVE_EVERY = 25
_CPU_TEXT = 200_000  # bytes
_GPU_TEXT = 4_000_000
# Of a step on a GPU: with a quarter of them the host's launches decide the time of a step.
_GPU_TOKENS = 32 << 10
_WARM_STEPS = 5  # not counted in times
OTHER_SEED = "standard-other-seed"
# name of a run: (attention, what is added to the seed, its provider)
RUNS: dict[str, tuple[str, int, str]] = {
    "standard": ("eager", 0, "eager"),
    OTHER_SEED: ("eager", 1, "eager"),
    "tilewise": ("tilewise", 0, "tilewise"),
    "sdpa": ("sdpa", 0, "sdpa-flash"),
}
# Runs beside these, each by the provider of its name.
OTHERS = ("sdpa-flash", "sdpa-cudnn", "flash-attn", "fa3", "fa4")


def runs_on(device: str) -> tuple[str, ...]:
    """``RUNS``, and of ``OTHERS`` those that are there and have a backward."""
    known = providers_on(device)
    others = [known[name] for name in OTHERS if name in known]
    return (*RUNS, *(p.name for p in others if p.has_backward and p.absent() is None))


def _run(name: str) -> tuple[str, int, str]:
    return RUNS.get(name, (name, 0, name))


def config_for(
    device: str,
    *,
    model: str | None = None,
    dropout_p: float = 0.0,
    steps: int | None = None,
    batch: int | None = None,
    context: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> TrainingConfig:
    """A GPT-2 over bytes on a GPU, a tiny model on a CPU; None is the device's default.

    ``model`` is a name of ``gpt.GPT2``, GPT-2 small by default; a CPU does not read it. By default
    a GPU's batch has 32k tokens, but at least one sequence.
    """
    if device == CPU:
        tiny = GPTConfig("tiny", context=64, layers=2, nheads=2, width=64)
        config = TrainingConfig(tiny, steps=30, batch=4, warm_up=3, evaluation_batches=4)
    else:
        gpt2 = GPT2[model or "gpt2-small"]
        config = TrainingConfig(
            gpt2,
            steps=300,
            batch=max(1, _GPU_TOKENS // (context or gpt2.context)),
            learning_rate=6e-4,
            warm_up=30,
            evaluation_batches=16,
            dtype="bfloat16",
        )
    return replace(
        config,
        model=replace(config.model, context=context or config.model.context, dropout_p=dropout_p),
        steps=steps or config.steps,
        batch=batch or config.batch,
        dtype=dtype or config.dtype,
        device=device,
        seed=seed,
    )


def smoothed(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each ``window`` losses that follow one another; of all where there are fewer."""
    window = max(1, min(window, len(losses)))
    return [sum(losses[end - window : end]) / window for end in range(window, len(losses) + 1)]


def largest_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference of two smoothed curves, over the steps that both have."""
    steps = min(len(a), len(b))
    pairs = zip(smoothed(a[:steps]), smoothed(b[:steps]), strict=True)
    return max((abs(x - y) for x, y in pairs), default=0.0)


@dataclass(slots=True)
class Pretraining:
    """Runs of one configuration.

    Attributes:
        config: of the first seed.
        output: saved as the run proceeds.
        only: names of ``runs_on`` to train.
        limit: seconds after which no new step is taken; None is without end.
        tick: called after each step of a run.
        runs: what each gave, in nats per byte.
        errors: why a run ended early, or did not begin.
        refused: of these, the runs whose attention cannot do what is asked.
        steps_left_out: those not taken for the time limit.
    """

    config: TrainingConfig
    output: Output
    only: Sequence[str] = tuple(RUNS)
    limit: float | None = None
    tick: Callable[[str], None] = lambda text: None
    runs: dict[str, Run] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    steps_left_out: int = 0

    def run(self) -> None:
        """Trains, evaluates, saves.

        Raises:
            DeviceLostError: the GPU stopped answering; what there was has been saved.
        """
        start = time.monotonic()
        text = standard_library(_CPU_TEXT if self.config.device == CPU else _GPU_TEXT)
        try:
            trainers = self._start(text)
            for step in range(self.config.steps):
                if self.limit is not None and time.monotonic() - start > self.limit:
                    self.steps_left_out = self.config.steps - step
                    break
                take = partial(Trainer.step, step=step)
                for name in list(trainers):
                    if self._turn(trainers, name, take):
                        self.tick(f"{name}: loss {self.runs[name].losses[-1]:.3f}")
                if step % _SAVE_EVERY == _SAVE_EVERY - 1:
                    self.save()
            for name in list(trainers):
                self._turn(trainers, name, Trainer.finish)
        except DeviceLostError as error:
            for name in self.only:
                self.errors.setdefault(name, str(error))
            raise
        finally:
            self.save()

    def _try(self, name: str, function: Callable[[], object]) -> bool:
        found = attempt(function, self.config.device)
        if isinstance(found, Failure):
            self.errors[name] = found.reason
        return not isinstance(found, Failure)

    def _start(self, text: Text) -> dict[str, Trainer]:
        trainers: dict[str, Trainer] = {}
        asked = Shape(dropout_p=self.config.model.dropout_p)
        for name in self.only:
            attention, more, provider = _run(name)
            refusal = providers_on(self.config.device)[provider].refusal(asked, FORWARD_BACKWARD)
            if refusal is not None:
                self.errors[name] = refusal
                self.refused.add(name)
                continue
            config = replace(self.config, seed=self.config.seed + more)

            def start(
                name: str = name, attention: str = attention, config: TrainingConfig = config
            ) -> None:
                trainers[name] = Trainer(attention, text, config)
                self.runs[name] = trainers[name].run

            self._try(name, start)
        return trainers

    def _turn(
        self, trainers: dict[str, Trainer], name: str, act: Callable[[Trainer], object]
    ) -> bool:
        """Whether a trainer could ``act``; one that could not is let go, its memory given back."""
        done = self._try(name, partial(act, trainers[name]))
        if not done:
            del trainers[name]
            release(self.config.device)
        return done

    def gaps(self) -> dict[str, float]:
        """Largest difference of each run's smoothed curve to that of "standard", where both were
        trained to the end."""
        losses = {
            name: run.losses
            for name, run in self.runs.items()
            if run.losses and name not in self.errors
        }
        if "standard" not in losses:
            return {}
        return {
            name: largest_gap(curve, losses["standard"])
            for name, curve in losses.items()
            if name != "standard"
        }

    def seconds(self, name: str) -> float | None:
        """Median seconds of a step after the first few; None where none was taken."""
        times = self.runs[name].step_seconds if name in self.runs else []
        times = times[_WARM_STEPS:] or times
        return statistics.median(times) if times else None

    def rows(self) -> list[Row]:
        """A row for each run; ms are of a step."""
        providers = providers_on(self.config.device)
        return [self._row(name, providers[_run(name)[2]]) for name in self.only]

    def _row(self, name: str, provider: Provider) -> Row:
        config, model, run = self.config, self.config.model, self.runs.get(name)
        seconds = self.seconds(name)
        features: dict[str, Any] = {"run": name, "seed": config.seed + _run(name)[1]}
        features["model"] = model.name
        if model.dropout_p > 0:
            features["dropout_p"] = model.dropout_p
        if seconds is not None:
            features["steps_per_s"] = 1 / seconds
            features["tokens_per_s"] = config.tokens / seconds
        if run is not None and run.held_out_after:
            features["held_out_loss"] = run.held_out_after
            features["held_out_perplexity"] = math.exp(run.held_out_after)
        head_dim = model.width // model.nheads
        return Row(
            suite=SUITE,
            provider="sdpa" if name == "sdpa" else provider.name,
            provider_version=provider.version,
            protocol=PROTOCOL,
            dtype=config.dtype,
            batch=config.batch,
            nheads=model.nheads,
            nheads_kv=model.nheads,
            seqlen_q=model.context,
            seqlen_k=model.context,
            head_dim=head_dim,
            head_dim_v=head_dim,
            causal=True,
            ms=None if seconds is None else 1e3 * seconds,
            error=self.errors.get(name),
            inputs="text",
            features=features,
        )

    def save(self) -> None:
        """Writes what there is."""
        training = {
            "config": asdict(self.config),
            "runs": {name: asdict(run) for name, run in self.runs.items()},
            "window": WINDOW,
            "largest_gap_to_standard": self.gaps(),
            "steps_left_out": self.steps_left_out,
        }
        self.output.save(self.rows(), training=training)

    def summary(self) -> str:
        """A line for each run: losses, perplexity, speed, and its distance from "standard".

        Then a line for each that was not trained to the end, with the reason.
        """
        gaps, lines = self.gaps(), []
        for name in self.only:
            run, seconds = self.runs.get(name), self.seconds(name)
            if run is None or seconds is None:
                lines.append([name, *["-"] * 6])
                continue
            held_out = run.held_out_after
            lines.append(
                [
                    name,
                    f"{run.held_out_before:.4f}",
                    f"{held_out:.4f}" if held_out else "-",
                    f"{math.exp(held_out):.4f}" if held_out else "-",
                    f"{1 / seconds:.2f}",
                    f"{self.config.tokens / seconds:,.0f}",
                    f"{gaps[name]:.1e}" if name in gaps else "-",
                ]
            )
        header = ["run", "held out: start", "end", "perplexity", "steps/s", "tokens/s", "gap"]
        reasons = [f"  {name}: {reason}" for name, reason in self.errors.items()]
        ended = ["\nNot trained to the end:", *reasons] if reasons else []
        return "\n".join([table(header, lines), *ended])


def draw(runs: Mapping[str, Run], board: Mapping[str, Any], path: Path) -> None:
    """The smoothed loss curves, and each one's difference from "standard".

    Args:
        runs: by name; those without a step are left out.
        board: for the title.
        path: the PNG.
    """
    figure, axes = plots.figure(1, 2, 6.0, 3.8)
    curves, differences = axes[0]
    smooth = {name: smoothed(run.losses) for name, run in runs.items() if run.losses}
    for name, losses in smooth.items():
        dashed = ":" if name == OTHER_SEED else "-"
        first = len(runs[name].losses) - len(losses) + 1
        steps = range(first, first + len(losses))
        wide = 3.0 if name == "standard" else 1.3
        curves.plot(steps, losses, dashed, color=plots.color(name), lw=wide, label=name)
        if name != "standard" and "standard" in smooth:
            pairs = zip(losses, smooth["standard"], strict=False)
            gap = [abs(a - b) or float("nan") for a, b in pairs]
            differences.semilogy(
                steps[: len(gap)], gap, dashed, color=plots.color(name), lw=1.3, label=name
            )
    curves.set_ylabel(f"training loss, nats per byte, mean of {WINDOW}", fontsize=8)
    differences.set_ylabel("|difference from standard| (log)", fontsize=8)
    for ax in axes[0]:
        ax.set_xlabel("step")
        ax.legend(frameon=False, fontsize=8)
    figure.suptitle(machine(dict(board)), fontsize=9)
    plots.save(figure, path)
