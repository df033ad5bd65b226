"""What users give, checked and brought to the operators' form.

Everything that shapes, dtypes and numbers can tell is checked here, before anything is computed.
Values inside ``cu_seqlens`` and ``seqused`` are checked by the operator when they are on the host,
or here on request.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .backends.base import AttentionTensors
from .dispatch import ALGORITHMS, AUTO, BACKENDS
from .errors import InvalidInputError, UnsupportedError
from .formats import varlen
from .ops.schema import Scalars

# A window side from here on hides nothing; beyond, int64 arithmetic on positions could wrap.
FAR = 2**31 - 1

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Options(NamedTuple):
    """The keyword arguments that dense and packed calls share, with their defaults."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    attn_bias: Tensor | None = None
    sink: Tensor | None = None
    return_lse: bool = False
    backend: str = "auto"
    algorithm: str = "auto"
    seed: int | Tensor | None = None
    validate: bool = False


class Packing(NamedTuple):
    """The further arguments of a packed call."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


def dense_call(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[AttentionTensors, Scalars]:
    """Checks a dense call and brings it to the operators' form.

    Raises:
        InvalidInputError: an argument cannot be right.
    """
    q, k, v = _autocast(q, k, v)
    _check_qkv(q, k, v, ("batch", "seqlen", "nheads", "head_dim"))
    if k.shape[0] != q.shape[0]:
        raise InvalidInputError("k", f"batch size {k.shape[0]}", f"q has {q.shape[0]}")
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k = k.shape[1]
    bias = _bias(options.attn_bias, q, (batch, nheads, seqlen_q, seqlen_k))
    return _finish(q, k, v, batch, bias, options, seqlen_q, seqlen_k, None)


def packed_call(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options
) -> tuple[AttentionTensors, Scalars]:
    """Checks a packed call and brings it to the operators' form.

    Raises:
        InvalidInputError: an argument cannot be right.
    """
    q, k, v = _autocast(q, k, v)
    _check_qkv(q, k, v, ("total", "nheads", "head_dim"))
    p = packing
    for name, cu_seqlens in (("cu_seqlens_q", p.cu_seqlens_q), ("cu_seqlens_k", p.cu_seqlens_k)):
        _check_integers(name, cu_seqlens, q)
        if cu_seqlens.shape[0] == 0:
            raise InvalidInputError(name, "no entries", "must have batch + 1 entries")
    if p.cu_seqlens_q.shape != p.cu_seqlens_k.shape:
        raise InvalidInputError(
            "cu_seqlens_k",
            f"{p.cu_seqlens_k.shape[0]} entries",
            f"cu_seqlens_q has {p.cu_seqlens_q.shape[0]}, one more than there are sequences",
        )
    batch = p.cu_seqlens_q.shape[0] - 1
    p = p._replace(
        max_seqlen_q=_integer("max_seqlen_q", p.max_seqlen_q),
        max_seqlen_k=_integer("max_seqlen_k", p.max_seqlen_k),
    )
    for name, longest in (("max_seqlen_q", p.max_seqlen_q), ("max_seqlen_k", p.max_seqlen_k)):
        if not 0 <= longest <= FAR:
            raise InvalidInputError(name, longest, f"must be in [0, {FAR}]")
    for name, used in (("seqused_q", p.seqused_q), ("seqused_k", p.seqused_k)):
        if used is None:
            continue
        _check_integers(name, used, q)
        if used.shape[0] != batch:
            raise InvalidInputError(
                name, f"{used.shape[0]} entries", f"there are {batch} sequences"
            )
    bias = options.attn_bias
    if bias is not None:
        _check_bias(bias, q)
        wanted, nheads = (q.shape[0], p.max_seqlen_k), q.shape[1]
        heads_ok = bias.dim() == 2 or (bias.dim() == 3 and bias.shape[0] in (1, nheads))
        if not heads_ok or tuple(bias.shape[-2:]) != wanted:
            raise InvalidInputError(
                "attn_bias",
                f"shape {tuple(bias.shape)}",
                "must be (nheads or 1, total_q, max_seqlen_k), "
                f"here ({nheads} or 1, {wanted[0]}, {wanted[1]})",
            )
        bias = bias if bias.dim() == 3 else bias[None]
    if options.validate and q.device.type not in ("cpu", "meta"):
        varlen.sequences(
            p.cu_seqlens_q,
            p.cu_seqlens_k,
            total_q=q.shape[0],
            total_k=k.shape[0],
            max_seqlen_q=p.max_seqlen_q,
            max_seqlen_k=p.max_seqlen_k,
            seqused_q=p.seqused_q,
            seqused_k=p.seqused_k,
        )
    return _finish(q, k, v, batch, bias, options, p.max_seqlen_q, p.max_seqlen_k, p)


def refuse_block_table(block_table: object) -> None:
    """Holds flash-attn's place for paged keys and values, which packed calls do not have yet."""
    if block_table is not None:
        raise UnsupportedError(
            "block_table: paged keys and values are not supported",
            {"every backend": ("no paged cache",)},
        )


def _finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: int,
    bias: Tensor | None,
    options: Options,
    seqlen_q: int,
    seqlen_k: int,
    packing: Packing | None,
) -> tuple[AttentionTensors, Scalars]:
    for name in ("causal", "deterministic", "return_attn_probs", "return_lse", "validate"):
        if not isinstance(getattr(options, name), (bool, int)):
            kind = type(getattr(options, name)).__name__
            raise InvalidInputError(name, kind, "must be True or False")
    left, right = _window(options)
    p = packing
    scalars = Scalars(
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        dropout_p=_dropout_p(options.dropout_p),
        softmax_scale=_scale(options.softmax_scale, q),
        softcap=_softcap(options.softcap),
        window_left=left,
        window_right=right,
        deterministic=bool(options.deterministic) or torch.are_deterministic_algorithms_enabled(),
        backend=_name("backend", options.backend, BACKENDS),
        algorithm=_name("algorithm", options.algorithm, ALGORITHMS),
    )
    tensors = AttentionTensors(
        q,
        k,
        v,
        bias,
        _slopes(options.alibi_slopes, q, batch),
        _sink(options.sink, q),
        None if p is None else p.cu_seqlens_q,
        None if p is None else p.cu_seqlens_k,
        None if p is None else p.seqused_q,
        None if p is None else p.seqused_k,
        _seed(options, q),  # last: a refused call must not advance torch's generator
    )
    return tensors, scalars


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts q, k and v as torch's autocast does: all floating dtypes but float64."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InvalidInputError(name, type(x).__name__, "must be a tensor")
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(q), cast(k), cast(v)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, dims: tuple[str, ...]) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.layout != torch.strided:
            raise InvalidInputError(name, f"layout {x.layout}", "must be strided")
        if x.dim() != len(dims):
            raise InvalidInputError(name, f"shape {tuple(x.shape)}", f"must be ({', '.join(dims)})")
        if x.dtype not in DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise InvalidInputError(name, f"dtype {x.dtype}", f"must be one of {allowed}")
        if x.dtype != q.dtype:
            raise InvalidInputError(
                name, f"dtype {x.dtype}", f"q has {q.dtype}, and q, k and v must have one dtype"
            )
        _check_device(name, x, q)
    if k.shape[-1] != q.shape[-1]:
        raise InvalidInputError("k", f"head_dim {k.shape[-1]}", f"q has {q.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise InvalidInputError(
            "v", f"shape {tuple(v.shape)}", f"k has {tuple(k.shape)}; only head_dim may differ"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[-1] == 0:
            raise InvalidInputError(name, "head_dim 0", "must be at least 1")
        if x.shape[-2] == 0:
            raise InvalidInputError(name, "no heads", "must have at least 1")
    if q.shape[-2] % k.shape[-2] != 0:
        raise InvalidInputError(
            "q", f"{q.shape[-2]} heads", f"must be a multiple of k's {k.shape[-2]} heads"
        )


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise InvalidInputError(name, f"on {x.device}", f"q is on {q.device}; move it there")


def _check_integers(name: str, x: object, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise InvalidInputError(name, type(x).__name__, "must be an integer tensor")
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise InvalidInputError(name, f"dtype {x.dtype}", "must be an integer tensor (int32)")
    if x.dim() != 1:
        raise InvalidInputError(name, f"shape {tuple(x.shape)}", "must have one dimension")
    _check_device(name, x, q)


def _check_bias(bias: object, q: Tensor) -> None:
    if not isinstance(bias, Tensor):
        raise InvalidInputError("attn_bias", type(bias).__name__, "must be a tensor")
    if bias.dtype not in (torch.bool, *DTYPES) or bias.layout != torch.strided:
        raise InvalidInputError(
            "attn_bias",
            f"dtype {bias.dtype}, {bias.layout}",
            "must be float16, bfloat16, float32 or float64 (added) or bool (True is seen)",
        )
    _check_device("attn_bias", bias, q)


def _bias(bias: Tensor | None, q: Tensor, full: tuple[int, int, int, int]) -> Tensor | None:
    """Four dimensions, each full or 1."""
    if bias is None:
        return None
    _check_bias(bias, q)
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(shape) != 4 or any(n not in (1, want) for n, want in zip(shape, full, strict=True)):
        raise InvalidInputError(
            "attn_bias",
            f"shape {tuple(bias.shape)}",
            f"must broadcast to (batch, nheads, seqlen_q, seqlen_k) = {full}",
        )
    return bias if bias.dim() == 4 else bias.reshape(shape)


def _number(name: str, x: object) -> float:
    known = isinstance(x, (int, float, torch.SymFloat, torch.SymInt, numbers.Real))
    if isinstance(x, bool) or not known:
        raise InvalidInputError(name, type(x).__name__, "must be a number")
    return float(x)  # type: ignore[arg-type]


def _integer(name: str, x: object) -> int:
    """Python's and numpy's integers, and integer tensors of one element: what flash-attn takes."""
    if isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
        return x  # type: ignore[return-value]
    try:
        if isinstance(x, bool):
            raise TypeError
        return operator.index(x)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInputError(name, type(x).__name__, "must be an int") from None


def _window(options: Options) -> tuple[int, int]:
    window = options.window_size
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidInputError("window_size", repr(window), "must be (left, right)")
    sides = [_integer("window_size", side) for side in window]
    for side in sides:
        if side < -1:
            raise InvalidInputError(
                "window_size", repr(window), "each side must be -1 (no limit) or more"
            )
    left, right = (min(side, FAR) for side in sides)
    return left, 0 if options.causal else right


def _scale(softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(q.shape[-1])
    scale = _number("softmax_scale", softmax_scale)
    if not (-math.inf < scale < math.inf):  # math.isfinite would end a trace
        raise InvalidInputError("softmax_scale", scale, "must be finite")
    return scale


def _softcap(softcap: float) -> float:
    cap = _number("softcap", softcap)
    if cap != 0 and not (2.0**-64 <= cap <= 2.0**64):
        raise InvalidInputError("softcap", cap, "must be 0 (off) or within 2^-64 and 2^64")
    return cap


def _slopes(slopes: Tensor | None, q: Tensor, batch: int) -> Tensor | None:
    """float32, or float64 beside float64 inputs."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor):
        raise InvalidInputError("alibi_slopes", type(slopes).__name__, "must be a tensor")
    if not slopes.is_floating_point():
        raise InvalidInputError("alibi_slopes", f"dtype {slopes.dtype}", "must be floating")
    _check_device("alibi_slopes", slopes, q)
    nheads = q.shape[-2]
    if tuple(slopes.shape) not in ((nheads,), (batch, nheads)):
        raise InvalidInputError(
            "alibi_slopes",
            f"shape {tuple(slopes.shape)}",
            f"must be (nheads,) = ({nheads},) or (batch, nheads) = ({batch}, {nheads})",
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(
            "alibi_slopes", "requires_grad=True", "slopes have no gradient; detach them"
        )
    return slopes.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _sink(sink: Tensor | None, q: Tensor) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        raise InvalidInputError("sink", type(sink).__name__, "must be a tensor")
    if not sink.is_floating_point():
        raise InvalidInputError("sink", f"dtype {sink.dtype}", "must be floating")
    _check_device("sink", sink, q)
    if tuple(sink.shape) != (q.shape[-2],):
        raise InvalidInputError(
            "sink", f"shape {tuple(sink.shape)}", f"must be (nheads,) = ({q.shape[-2]},)"
        )
    return sink


def _dropout_p(dropout_p: float) -> float:
    p = _number("dropout_p", dropout_p)
    if not (0 <= p < 1 - 2.0**-17):  # rounded to 1/65536: beyond, everything would be dropped
        raise InvalidInputError("dropout_p", p, "must be in [0, 1 - 2^-17)")
    return p


def _seed(options: Options, q: Tensor) -> Tensor | None:
    """(1,) int64 on q's device: given, or drawn from torch's generator; None without dropout."""
    seed = options.seed
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise InvalidInputError(
                "seed", f"{seed.dtype} of shape {tuple(seed.shape)}", "must be one int64"
            )
        _check_device("seed", seed, q)
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InvalidInputError("seed", type(seed).__name__, "must be an int or an int64 tensor")
    if options.dropout_p == 0:
        return None
    if isinstance(seed, Tensor):
        return seed if seed.dim() == 1 else seed.reshape(1)
    if seed is None:
        return draw_seed(q.device)
    signed = (seed + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, dtype=torch.int64, device=q.device)


def draw_seed(device: torch.device) -> Tensor:
    """A seed of dropout from torch's generator."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _name(argument: str, name: object, known: Iterable[str]) -> str:
    if not isinstance(name, str) or name not in (AUTO, *known):
        raise InvalidInputError(argument, repr(name), f"must be one of {[AUTO, *known]}")
    return name
