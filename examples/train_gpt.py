"""Trains a GPT over the bytes of a text on one GPU or on a CPU, and lets it write.

python examples/train_gpt.py --text book.txt --steps 500 --save gpt.pt
python examples/train_gpt.py --text book.txt --steps 1000 --resume gpt.pt
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilewise

BYTES = 256
WARM_UP = 20  # steps in which the learning rate rises; it is constant after them
SIZES = ("seq_len", "layers", "d_model", "n_heads")  # a saved model keeps them


def attend(kind: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, window: int) -> Tensor:
    """Causal attention; q, k, v and the result are (batch, seqlen, nheads, head_dim).

    ``window`` is how many earlier bytes a byte sees beside itself, -1 for all.
    """
    if kind == "tilewise":
        return tilewise.flash_attn_func(q, k, v, dropout_p, causal=True, window_size=(window, 0))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if kind == "sdpa" and window < 0:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        return out.transpose(1, 2)
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if window >= 0:
        seen = seen.triu(-window)
    if kind == "sdpa":
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout_p)
    else:
        s = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
        out = F.dropout(s.softmax(-1), dropout_p) @ v
    return out.transpose(1, 2)


class Block(nn.Module):
    """Attention and a perceptron, each normalised before and dropped out after."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        d, self.options = options.d_model, options
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.project = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, d_model) to the same."""
        o, dropout_p = self.options, self.options.dropout if self.training else 0.0
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, o.n_heads, -1))
        out = attend(o.attention, *qkv.unbind(2), dropout_p, o.window)
        x = x + F.dropout(self.project(out.flatten(2)), dropout_p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), dropout_p)


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.bytes = nn.Embedding(BYTES, options.d_model)
        self.positions = nn.Embedding(options.seq_len, options.d_model)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.d_model)
        self.head = nn.Linear(options.d_model, BYTES, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * options.layers) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seqlen) int64 to (batch, seqlen, 256)."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.options.checkpoint and self.training:  # runs forward again in the backward
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def batch_of(text: Tensor, batch: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """(batch, seq_len) bytes at random places and the byte after each, int64."""
    starts = torch.randint(len(text) - seq_len, (batch, 1)).to(text.device)
    windows = text[starts + torch.arange(seq_len + 1, device=text.device)].long()
    return windows[:, :-1], windows[:, 1:]


def save(
    path: Path, model: GPT, optimizer: torch.optim.Optimizer, losses: list[float], device: str
) -> None:
    """Writes all that the next step depends on; a file that was there is replaced in one go."""
    state = {
        "sizes": {name: getattr(model.options, name) for name in SIZES},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if device == "cuda" else None,
    }
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    part.replace(path)


def load(
    state: dict[str, Any], model: GPT, optimizer: torch.optim.Optimizer, device: str
) -> list[float]:
    """Takes over what ``save`` wrote and returns the losses of the steps that were taken."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    if device == "cuda" and state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"])
    return state["losses"]


def peak_memory(device: str) -> str:
    """Of torch's allocator on a GPU; of the process, the interpreter included, on a CPU."""
    if device == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"
    import resource  # Linux and macOS

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak / (2**20 if sys.platform == 'darwin' else 2**10):,.0f} MiB"


@torch.no_grad()
def sample(model: GPT, prompt: bytes, length: int, device: str) -> str:
    """``length`` bytes after the prompt, drawn at temperature 0.8."""
    model.eval()
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(tokens[:, -model.options.seq_len :])[:, -1].float()
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.8).softmax(-1), 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of an option: a whole number that is not less."""

    def integer(word: str) -> int:
        if (value := int(word)) < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return integer


def probability(word: str) -> float:
    """The type of an option: a number from 0 to less than 1."""
    if not 0 <= (value := float(word)) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not in [0, 1)")
    return value


def rate(word: str) -> float:
    """The type of an option: a number that is more than 0."""
    if not 0 < (value := float(word)) < math.inf:
        raise argparse.ArgumentTypeError(f"{word} is not positive and finite")
    return value


def text_of(name: str) -> bytes:
    """The type of --text: what is in a file, in standard input for "-"."""
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from None


def state_of(name: str) -> dict[str, Any]:
    """The type of --resume: what ``save`` wrote."""
    unknown = argparse.ArgumentTypeError(f"{name}: not a file that --save wrote")
    try:
        state: dict[str, Any] = torch.load(name, map_location="cpu", weights_only=True)
        known = state.keys() == {"sizes", "model", "optimizer", "losses", "rng", "cuda_rng"}
        if not known or state["sizes"].keys() != set(SIZES):
            raise unknown
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from None
    except Exception as error:  # torch.load and pickle have many for what they cannot read
        raise unknown from error
    return state


def new_file(name: str) -> Path:
    """The type of --save: a file in a folder that is there; it need not be."""
    path = Path(name)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is a folder or a device, not a file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no file can be written to {path.parent}")
    return path


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    help_text = "a file to learn, - for standard input; default: the source of Python's library"
    add("--text", type=text_of, help=help_text)
    add("--seq-len", type=at_least(1), default=256)
    add("--layers", type=at_least(1), default=4)
    add("--d-model", type=at_least(1), default=256)
    add("--n-heads", type=at_least(1), default=4)
    add("--batch", type=at_least(1), default=8)
    add("--steps", type=at_least(1), default=200, help="in all, those of --resume included")
    add("--learning-rate", type=rate, default=1e-3)
    add("--dropout", type=probability, default=0.0)
    add("--window", type=at_least(-1), default=-1, help="earlier bytes that a byte sees; -1: all")
    add("--attention", choices=["tilewise", "sdpa", "standard"], default="tilewise")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--checkpoint", action="store_true", help="hold the inputs of blocks, not what is inside")
    add("--save", type=new_file, help="write model, optimizer and generators here at the end")
    add("--resume", type=state_of, help="continue from what --save wrote")
    add("--device", choices=["cuda", "cpu"], default=device)
    add("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    add("--seed", type=int, default=0)
    add("--log-every", type=at_least(1), default=10, help="steps")
    add("--prompt", default="\n", help="what the sample at the end begins with")
    add("--sample", type=at_least(0), default=200, help="bytes to write at the end")
    options = parser.parse_args(arguments)
    if options.d_model % options.n_heads:
        parser.error("--d-model must be a multiple of --n-heads")
    if not options.prompt:
        parser.error("--prompt: give at least one character to begin with")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch.cuda.is_available() is False")
    if state := options.resume:
        for name, size in state["sizes"].items():
            if size != getattr(options, name):
                wanted = f"--{name.replace('_', '-')} {size}"
                parser.error(f"--resume: trained with another size: give {wanted}")
        if (taken := len(state["losses"])) > options.steps:
            parser.error(f"--steps {options.steps}: --resume has taken {taken}, which count too")
    if options.text is None:
        library = sorted(Path(os.__file__).parent.glob("*.py"))
        options.text = b"".join(path.read_bytes() for path in library)
    if len(options.text) <= options.seq_len:
        parser.error(
            f"--text has {len(options.text)} bytes: name a longer one or a shorter --seq-len"
        )
    if options.dtype is None:
        options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    return options


def main(arguments: list[str] | None = None) -> None:
    """Trains, saves, samples."""
    sys.stdout.reconfigure(errors="replace")  # it may be ASCII, the sample need not
    options = options_of(arguments)
    device, dtype = options.device, getattr(torch, options.dtype)
    torch.manual_seed(options.seed)
    text = torch.frombuffer(bytearray(options.text), dtype=torch.uint8).to(device)
    model = GPT(options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), fused=device == "cuda")
    losses = load(options.resume, model, optimizer, device) if options.resume else []
    options.text = options.resume = None  # frees them
    step_model = torch.compile(model) if options.compile else model
    mixed = torch.autocast(device, dtype, enabled=dtype != torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes")

    start, since = time.perf_counter(), len(losses)
    for step in range(len(losses), options.steps):
        optimizer.param_groups[0]["lr"] = options.learning_rate * min(1, (step + 1) / WARM_UP)
        tokens, targets = batch_of(text, options.batch, options.seq_len)
        with mixed:
            logits = step_model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        if len(losses) % options.log_every == 0 or len(losses) == options.steps:
            seconds, taken = time.perf_counter() - start, len(losses) - since
            rate = taken * options.batch * options.seq_len / seconds
            print(
                f"step {len(losses):5}  loss {sum(losses[since:]) / taken:.6f}  "
                f"{rate:10,.0f} tokens/s  peak {peak_memory(device)}",
                flush=True,
            )
            start, since = time.perf_counter(), len(losses)
    if options.save:
        save(options.save, model, optimizer, losses, device)
        print(f"saved {options.save}")
    prompt = options.prompt.encode(errors="surrogateescape")  # the bytes that were typed
    with mixed:
        print(sample(model, prompt, options.sample, device))


if __name__ == "__main__":
    main()
