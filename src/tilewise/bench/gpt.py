"""A small causal GPT over bytes whose attention is given from outside."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api import flash_attn_func
from ..formats.philox import keep_mask
from .providers import Provider, Shape
from .rivals import CPU, providers_on
from .text import VOCABULARY

# (q, k, v, dropout_p, seed) -> out, all (batch, seqlen, nheads, head_dim)
CausalAttention = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


def _probabilities(q: Tensor, k: Tensor) -> Tensor:
    """Causal softmax(q k^T), (batch, nheads, seqlen, seqlen)."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    seqlen, head_dim = q.shape[-2:]
    s = (q @ k.mT) / math.sqrt(head_dim)
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).triu_(1)
    return torch.softmax(s.masked_fill(hidden, float("-inf")), dim=-1)


def standard_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, seed: int) -> Tensor:
    """softmax(q k^T) v with the matrix in memory; its dropout mask is tilewise's."""
    p = _probabilities(q, k)
    if dropout_p > 0:
        batch, nheads, seqlen, _ = p.shape
        keep = keep_mask(
            seed,
            dropout_p,
            batches=range(batch),
            heads=range(nheads),
            rows=range(seqlen),
            cols=range(seqlen),
            device=q.device,
        )
        p = p * keep / (1 - dropout_p)
    return (p @ v.transpose(1, 2)).transpose(1, 2)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, seed: int) -> Tensor:
    """The same as models in torch have it; dropout draws from torch's generator.

    ``seed`` is not used.
    """
    p = _probabilities(q, k)
    if dropout_p > 0:
        p = F.dropout(p, dropout_p)
    return (p @ v.transpose(1, 2)).transpose(1, 2)


def tilewise_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, seed: int) -> Tensor:
    """The same by ``tilewise.flash_attn_func``."""
    out = flash_attn_func(q, k, v, dropout_p, causal=True, seed=seed)
    assert isinstance(out, Tensor)
    return out


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, seed: int) -> Tensor:
    """The same by torch's ``scaled_dot_product_attention``; dropout draws from torch's generator.

    ``seed`` is not used.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return out.transpose(1, 2)


def provided_attention(provider: Provider) -> CausalAttention:
    """The same by a provider, which gets views in its layout; ``seed`` is not used."""

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, seed: int) -> Tensor:
        batch, seqlen, nheads, head_dim = q.shape
        dtype, device = str(q.dtype).removeprefix("torch."), q.device.type
        shape = Shape(batch, seqlen, nheads, head_dim, True, dtype, dropout_p, device)
        call = provider.bind(shape)
        if not provider.heads_first:
            return call(q, k, v)
        return call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return attend


ATTENTION: dict[str, CausalAttention] = {
    "standard": standard_attention,
    "tilewise": tilewise_attention,
}
RIVALS: dict[str, CausalAttention] = {"eager": eager_attention, "sdpa": sdpa_attention}


def attention_named(name: str, device: str = CPU) -> CausalAttention:
    """Of ``RIVALS`` or ``ATTENTION``, else by the device's provider of that name."""
    if found := RIVALS.get(name) or ATTENTION.get(name):
        return found
    return provided_attention(providers_on(device)[name])


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model; the defaults have 3.3 million parameters.

    Over bytes "gpt2-small" of ``GPT2`` has 86 million, "gpt2-medium" 304 million.
    """

    name: str = "demo"
    context: int = 256
    layers: int = 4
    nheads: int = 4
    width: int = 256
    dropout_p: float = 0.1


GPT2 = {
    config.name: config
    for config in (
        GPTConfig("gpt2-small", 1024, layers=12, nheads=12, width=768, dropout_p=0.0),
        GPTConfig("gpt2-medium", 1024, layers=24, nheads=16, width=1024, dropout_p=0.0),
    )
}


class Block(nn.Module):
    """Attention and a perceptron, each normalised before and dropped out after."""

    def __init__(self, config: GPTConfig, attention: CausalAttention) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, seed: int) -> Tensor:
        """(batch, seqlen, width) to the same; ``seed`` is of the attention's dropout."""
        dropout_p = self.config.dropout_p if self.training else 0.0
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.config.nheads, -1))
        q, k, v = qkv.unbind(2)  # (batch, seqlen, nheads, head_dim)
        out = self.project(self.attention(q, k, v, dropout_p, seed).flatten(2))
        x = x + F.dropout(out, dropout_p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), dropout_p)


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    def __init__(self, config: GPTConfig, attention: CausalAttention) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("project.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
                nn.init.normal_(p, std=std)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        """(batch, seqlen) to (batch, seqlen, 256); dropout seeds come from ``step`` and layer."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer, block in enumerate(self.blocks):
            x = block(x, dropout_seed(step, layer))
        logits: Tensor = self.head(self.norm(x))
        return logits


def dropout_seed(step: int, layer: int) -> int:
    """The seed of a layer's attention dropout in a step; step may count from any number on."""
    return (step << 16) + layer
