"""Every way into the package, the formulas by hand, and the one tolerance rule."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import tilewise
from tilewise import testing

F64 = torch.float64
INF = math.inf
NAN = math.nan
TOLERANCE = 1e-12  # of float64 results, see ``near``

BACKENDS = {
    "cpu-fa2": {"backend": "cpu", "algorithm": "fa2"},
    "cpu-fa1": {"backend": "cpu", "algorithm": "fa1"},
    "reference": {"backend": "reference", "algorithm": "standard"},
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Entries that take any shapes, and those that need q, k and v of one shape.
CROSS = ("dense", "kvpacked", "varlen", "varlen_kvpacked")
SELF = (*CROSS, "qkvpacked", "varlen_qkvpacked")
MERGE = ("merge",)  # keys in two parts, joined; for calls whose mask is all in attn_bias


def rand(*shape, seed, scale=1.0, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen, dtype=F64) * scale).to(dtype)


def zeros(*shape, dtype=F64):
    return torch.zeros(*shape, dtype=dtype)


def lse_dtype(dtype):
    return F64 if dtype == F64 else torch.float32


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def noted(label):
    """Says which of a test's inputs failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at {label}")
        raise


def call(entry, q, k, v, *, attn_bias=None, **arguments):
    """(out, lse) of dense tensors through one entry, always in the dense shapes."""
    arguments = {"return_lse": True, **arguments}
    b, sq, h, _ = q.shape
    sk = k.shape[1]
    if entry == "dense":
        return tilewise.flash_attn_func(q, k, v, attn_bias=attn_bias, **arguments)
    if entry == "kvpacked":
        kv = torch.stack((k, v), 2)
        return tilewise.flash_attn_kvpacked_func(q, kv, attn_bias=attn_bias, **arguments)
    if entry == "qkvpacked":
        qkv = torch.stack((q, k, v), 2)
        return tilewise.flash_attn_qkvpacked_func(qkv, attn_bias=attn_bias, **arguments)
    if entry == "merge":
        parts = []
        for keys in (slice(0, sk // 2), slice(sk // 2, sk)):
            bias = attn_bias
            if bias is not None:
                bias = bias.expand(*bias.shape[:-1], sk)[..., keys]
            parts.append(
                tilewise.flash_attn_func(q, k[:, keys], v[:, keys], attn_bias=bias, **arguments)
            )
        return tilewise.merge_attention(parts)
    cu_q = torch.arange(b + 1, dtype=torch.int32) * sq
    cu_k = torch.arange(b + 1, dtype=torch.int32) * sk
    if attn_bias is not None:
        attn_bias = attn_bias.expand(b, h, sq, sk).transpose(0, 1).reshape(h, b * sq, sk)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    arguments["attn_bias"] = attn_bias
    if entry == "varlen":
        found = tilewise.flash_attn_varlen_func(q, k, v, cu_q, cu_k, sq, sk, **arguments)
    elif entry == "varlen_kvpacked":
        kv = torch.stack((k, v), 1)
        found = tilewise.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, sq, sk, **arguments)
    elif entry == "varlen_qkvpacked":
        qkv = torch.stack((q, k, v), 1)
        found = tilewise.flash_attn_varlen_qkvpacked_func(qkv, cu_q, sq, **arguments)
    else:
        raise KeyError(entry)
    out, lse = found
    return out.unflatten(0, (b, sq)), lse.unflatten(1, (b, sq)).transpose(0, 1)


LEAVES = {"q": "dq", "k": "dk", "v": "dv", "attn_bias": "dbias", "sink": "dsink"}


def gradients(function, tensors, dout=None, dlse=None, **arguments):
    """out, lse and the gradients of <out, dout> + <lse, dlse> as a dict; dout is ones when None."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in tensors.items()
        if x is not None and x.is_floating_point()
    }
    rest = {name: x for name, x in tensors.items() if name not in leaves}
    out, lse = function(**leaves, **rest, **arguments)
    dout = torch.ones_like(out) if dout is None else dout.to(out.dtype)
    outputs, weights = [out], [dout]
    if dlse is not None:
        outputs.append(lse)
        weights.append(dlse.to(lse.dtype))
    found = torch.autograd.grad(outputs, list(leaves.values()), weights)
    names = [LEAVES[name] for name in leaves]
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, found, strict=True))}


def run(entry, backend, q, k, v, *, attn_bias=None, sink=None, dout=None, dlse=None, **arguments):
    """``gradients`` of one entry on one backend."""
    tensors = {"q": q, "k": k, "v": v, "attn_bias": attn_bias, "sink": sink}
    tensors = {name: x for name, x in tensors.items() if x is not None}

    def function(**given):
        return call(entry, **given, **arguments, **backend)

    return gradients(function, tensors, dout, dlse)


def band_mask(sq, sk, left=-1, right=-1):
    """(sq, sk) bool: d - left <= j <= d + right with d = i + sk - sq; -1 is without limit."""
    d, j = torch.arange(sq)[:, None] + (sk - sq), torch.arange(sk)[None, :]
    above = j <= d + right if right >= 0 else torch.ones(sq, sk, dtype=torch.bool)
    return above & (j >= d - left) if left >= 0 else above


def distance(sq, sk):
    """|i + sk - sq - j|, (sq, sk) float64."""
    i, j = torch.arange(sq, dtype=F64), torch.arange(sk, dtype=F64)
    return (i[:, None] + (sk - sq) - j[None, :]).abs()


def by_hand(q, k, v, *, attn_bias=None, sink=None, seen=None, scale=None, softcap=0.0):
    """Attention from its definition with the scores materialised, in the dtype of q.

    ``seen`` and ``attn_bias`` broadcast to (B, H, Sq, Sk); a bool ``attn_bias`` counts as seen.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    x = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap > 0:
        x = softcap * torch.tanh(x / softcap)
    allowed = torch.ones(x.shape, dtype=torch.bool)
    if seen is not None:
        allowed = allowed & seen
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        allowed = allowed & attn_bias
    elif attn_bias is not None:
        allowed = allowed & (attn_bias != -INF)
        x = x + torch.where(attn_bias == -INF, 0.0, attn_bias).to(x.dtype)
    x = torch.where(allowed, x, -INF)
    if sink is not None:
        column = sink.to(x.dtype)[None, :, None, None].expand(*x.shape[:3], 1)
        x = torch.cat([x, column], -1)
    top = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:3], 1)
    top = torch.where(top == -INF, 0.0, top)
    e = torch.exp(x - top)
    total = e.sum(-1, keepdim=True)
    some = total > 0
    safe = torch.where(some, total, 1.0)
    lse = torch.where(some, top + torch.log(safe), -INF).squeeze(-1)
    p = (e / safe)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def expected(q, k, v, *, attn_bias=None, sink=None, dout=None, dlse=None, **formula):
    """The right values: ``by_hand`` in float64 and its gradients by autograd, on rounded inputs."""
    return _formula(F64, q, k, v, attn_bias, sink, dout, dlse, formula)


def plain_twin(q, k, v, *, attn_bias=None, sink=None, dout=None, dlse=None, **formula):
    """``by_hand`` in the inputs' dtype: what the tolerance rule measures rounding by."""
    return _formula(q.dtype, q, k, v, attn_bias, sink, dout, dlse, formula)


_KNOWN = {}


def _key(x):
    """Equal for equal numbers: entries and backends are held against one computation."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return tuple((n, _key(y)) for n, y in x.items()) if isinstance(x, dict) else x


def _formula(dtype, *inputs):
    key = hash((dtype, *map(_key, inputs)))
    if key not in _KNOWN:
        _KNOWN[key] = _compute(dtype, *inputs)
    return dict(_KNOWN[key])


def _compute(dtype, q, k, v, attn_bias, sink, dout, dlse, formula):
    tensors = {"q": q, "k": k, "v": v, "attn_bias": attn_bias, "sink": sink}
    tensors = {
        name: x.to(dtype) if x.is_floating_point() else x
        for name, x in tensors.items()
        if x is not None
    }
    return gradients(lambda **given: by_hand(**given, **formula), tensors, dout, dlse)


def check(
    got, q, k, v, *, attn_bias=None, sink=None, dout=None, dlse=None, tolerance=None, **formula
):
    """Holds every result against ``by_hand`` by the tolerance rule; infinities exactly."""
    inputs = (q, k, v, attn_bias, sink, dout, dlse, formula)
    right, plain = _formula(F64, *inputs), _formula(q.dtype, *inputs)
    compare(got, right, plain, q.dtype, tolerance)
    return right


def compare(got, right, plain, dtype, tolerance=None):
    """``near`` for every result that there is, and the dtypes of out and lse."""
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == lse_dtype(dtype)
    for name in got:
        near(got[name], right[name], dtype, name, plain[name], tolerance)


def check_packed(got, q, k, v, cu_q, cu_k, dout=None, causal=False, used_q=None, used_k=None):
    """Packed results against the formula on each sequence's used rows, 0 and -inf elsewhere."""
    right, plain = {}, {}
    for results, dtype in ((right, F64), (plain, q.dtype)):
        results["out"] = torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype)
        results["lse"] = torch.full((q.shape[1], q.shape[0]), -INF, dtype=dtype)
        results |= {"dq": torch.zeros(q.shape, dtype=dtype)}
        results |= {
            "dk": torch.zeros(k.shape, dtype=dtype),
            "dv": torch.zeros(v.shape, dtype=dtype),
        }
        for n in range(len(cu_q) - 1):
            sq = int(cu_q[n + 1] - cu_q[n]) if used_q is None else used_q[n]
            sk = int(cu_k[n + 1] - cu_k[n]) if used_k is None else used_k[n]
            rows, keys = (
                slice(int(cu_q[n]), int(cu_q[n]) + sq),
                slice(int(cu_k[n]), int(cu_k[n]) + sk),
            )
            formula = {"seen": band_mask(sq, sk, -1, 0)} if causal else {}
            own = None if dout is None else dout[None, rows]
            one = _formula(
                dtype, q[None, rows], k[None, keys], v[None, keys], None, None, own, None, formula
            )
            results["lse"][:, rows] = one["lse"][0]
            for name, where in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
                results[name][where] = one[name][0]
    compare(got, right, plain, q.dtype)


def near(got, want, dtype, name="out", plain=None, tolerance=None):
    """The tolerance rule for one tensor; without ``plain`` the band alone, what rounding may cost.

    In float64 plain and oracle are one, so where gradients cancel the rule has no measure of
    rounding. There, or where a case names its own, a tolerance counts, relative to 1 + the largest
    value.
    """
    want = torch.as_tensor(want, dtype=F64)
    assert not want.isnan().any()
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, not {tuple(want.shape)}"
    assert not got.isnan().any(), f"{name}: NaN"
    error, allowed = testing.excess(name, got, want, want if plain is None else plain, dtype)
    if tolerance is None:
        tolerance = TOLERANCE if dtype == F64 else 0.0
    finite = want[torch.isfinite(want)]
    if finite.numel():
        allowed = max(allowed, tolerance * (1.0 + float(finite.abs().max())))
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def same(got, want):
    """Equal shapes and equal bits up to the sign of zero."""
    assert got.shape == want.shape
    assert torch.equal(got, want)


def all_zero(x):
    return bool((x == 0).all())


def all_empty(lse):
    return bool((lse == -INF).all())


def all_finite(*tensors):
    return all(bool(torch.isfinite(x).all()) for x in tensors)


def child_environment(**changes):
    """The environment for a process of its own, in which ``import tilewise`` finds this package."""
    source = str(Path(tilewise.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.update(changes)
    return {name: value for name, value in environment.items() if value is not None}


def start(program, *arguments, cwd=None, **environment):
    """Starts a Python program, given as text, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=child_environment(**environment),
    )


def finish(process, timeout=120):
    """Its output; its error output in the failure when it did not end well."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return output
