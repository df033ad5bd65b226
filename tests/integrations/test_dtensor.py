"""Sharded calls give what the same call gives in one process, without more communication."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import torch.multiprocessing as mp
from torch.distributed.tensor import Partial, Replicate, Shard

import tilewise
from tilewise.integrations import dtensor

BATCH, ROWS, HEADS = Shard(0), Shard(1), Shard(2)
RANKS = 2


def inputs(nheads=4, nheads_kv=2, batch=2, **extra):
    torch.manual_seed(0)
    found = {
        "q": torch.randn(batch, 6, nheads, 8),
        "k": torch.randn(batch, 7, nheads_kv, 8),
        "v": torch.randn(batch, 7, nheads_kv, 8),
    }
    shapes = {
        "sink": (nheads,),
        "shared bias": (1, 1, 6, 7),
        "heads' bias": (1, nheads, 6, 7),
        "batch's bias": (batch, 1, 1, 7),
        "slopes": (nheads,),
        "batch's slopes": (batch, nheads),
    }
    names = {"bias": "attn_bias", "slopes": "alibi_slopes", "sink": "sink"}
    for name in extra.get("also", ()):
        found[names[name.split()[-1]]] = torch.randn(shapes[name])
    if extra.get("packed"):
        found = {name: x.flatten(0, 1) if name in "qkv" else x for name, x in found.items()}
        cu = {"cu_seqlens_q": torch.tensor([0, 4, 12]), "cu_seqlens_k": torch.tensor([0, 9, 14])}
        found |= cu
    return found


# name: (inputs, placement of q, k and v, placement of out, of the gradients, communication)
CASES = {
    "replicated": ({}, Replicate(), Replicate(), [Replicate()] * 3, 0),
    "batch": ({}, BATCH, BATCH, [BATCH] * 3, 0),
    "heads": ({}, HEADS, HEADS, [HEADS] * 3, 0),
    "rows are gathered": ({}, ROWS, Replicate(), [Replicate()] * 3, 6),  # forward, backward
    "groups that do not fit are gathered": (
        {"nheads": 6, "nheads_kv": 3}, HEADS, Replicate(), [Replicate()] * 3, 6,
    ),
    "batch with the rest": (
        {"also": ["sink", "shared bias", "batch's slopes"]}, BATCH, BATCH,
        [BATCH] * 3 + [Partial(), Partial()], 0,
    ),
    "heads with the rest": (
        {"also": ["sink", "heads' bias", "slopes"]}, HEADS, HEADS,
        [HEADS] * 3 + [Shard(0), Shard(1)], 0,
    ),
    "heads with the batch's": (
        {"also": ["batch's bias", "batch's slopes"]}, HEADS, HEADS, [HEADS] * 3 + [Partial()], 0,
    ),
    "packed heads": (
        {"packed": True, "also": ["slopes"]}, Shard(1), Shard(1), [Shard(1)] * 3, 0,
    ),
}  # fmt: skip


def call(x, wanted):
    """Results, and the gradients of what is wanted."""
    x = dict(x)
    for name in wanted:
        x[name] = x[name].detach().requires_grad_()
    if "cu_seqlens_q" in x:
        out, lse = tilewise.flash_attn_varlen_func(
            **x, max_seqlen_q=8, max_seqlen_k=9, causal=True, return_lse=True
        )
    else:
        out, lse = tilewise.flash_attn_func(**x, causal=True, softcap=3.0, return_lse=True)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), [x[name] for name in wanted])
    return [out.detach(), lse.detach(), *grads]


def child(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    from torch.distributed.tensor import distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    dtensor.register()
    dtensor.register()
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, (make, placement, out, grads, communication) in CASES.items():
        x = inputs(**make)
        wanted = [n for n in ("q", "k", "v", "sink", "attn_bias") if n in x]
        sharded = {
            n: distribute_tensor(y, mesh, [placement if n in "qkv" else Replicate()])
            for n, y in x.items()
        }
        with CommDebugMode() as counted:
            got = call(sharded, wanted)
        want = call(x, wanted)
        assert got[0].placements == (out,), (name, got[0].placements)
        assert [g.placements[0] for g in got[2:]] == grads, (name, got[2:])
        assert counted.get_total_counts() == communication, (name, counted.get_total_counts())
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)
        for some in (["q"], ["v"], ["k", "v"]):  # each asked for alone: other shapes of the rest
            for a, b in zip(call(sharded, some), call(x, some), strict=True):
                torch.testing.assert_close(a.full_tensor(), b)

    x = inputs(nheads_kv=1)  # one head of keys for all shards
    sharded = {
        n: distribute_tensor(y, mesh, [HEADS if n == "q" else Replicate()]) for n, y in x.items()
    }
    with CommDebugMode() as counted:
        got = call(sharded, "qkv")
    assert [g.placements[0] for g in got[2:]] == [HEADS, Partial(), Partial()]
    assert counted.get_total_counts() == 0
    for a, b in zip(got, call(x, "qkv"), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)

    probs = tilewise.flash_attn_func(**sharded, return_attn_probs=True)[2]
    assert probs.placements == (Shard(1),)
    torch.testing.assert_close(
        probs.full_tensor(), tilewise.flash_attn_func(**x, return_attn_probs=True)[2]
    )
    with pytest.raises(Exception, match="dropout of a DTensor"):
        tilewise.flash_attn_func(**sharded, dropout_p=0.5)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    mp.spawn(child, (str(tmp_path / "rendezvous"),), RANKS)


# Rules for meshes that are not at hand


def spec(shape, mesh=(2,)):
    return SimpleNamespace(shape=shape, mesh=SimpleNamespace(shape=mesh))


def rules(nheads, nheads_kv, mesh, packed=False, seed=None):
    lead = (12,) if packed else (4, 6)
    tensors = [spec((*lead, n, 8), mesh) for n in (nheads, nheads_kv, nheads_kv)]
    cu = [spec((3,), mesh)] * 2 if packed else [None] * 2
    scalars = [6, 6, 0.0, 1.0, 0.0, -1, -1, False, "auto", "auto"]
    arguments = (*tensors, None, None, None, *cu, None, None, seed, *scalars)
    return [out[0] for out, _ in dtensor.forward_rules(*arguments)]


@pytest.mark.parametrize(
    ("nheads", "nheads_kv", "mesh", "fits"),
    [
        (8, 8, (2,), True),
        (8, 4, (4,), True),
        (8, 4, (2, 4), True),  # both dimensions together are more than there are groups
        (8, 1, (4,), True),
        (12, 3, (2,), False),
        (24, 12, (2, 4), False),  # both together would split 12 groups in 8
        (5, 5, (4,), False),
    ],
)
def test_heads_are_split_in_whole_groups(nheads, nheads_kv, mesh, fits):
    assert rules(nheads, nheads_kv, mesh) == [Replicate(), BATCH, *([HEADS] if fits else [])]
    assert rules(nheads, nheads_kv, mesh, packed=True) == [
        Replicate(),
        *([Shard(1)] if fits else []),
    ]


def test_dropout_is_refused():
    with pytest.raises(tilewise.UnsupportedError, match=re.escape("dropout of a DTensor")):
        rules(4, 4, (2,), seed=spec((1,)))
