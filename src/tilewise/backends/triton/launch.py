"""What every launch shares: strides, descriptors, head sections, the kernels' common arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.config import TileConfig
from ...core.problem import VARLEN, AttentionProblem
from ...formats.philox import threshold
from ...kernels import compat, direct
from .. import base
from ..base import AttentionTensors, lse_dtype

# What programs running at the same time may share in the L2 cache, in bytes.
SECTION_BYTES = 32 << 20
# Beyond this a window side hides nothing, and 32-bit arithmetic on positions would wrap.
FAR = 2**30
# The smallest scale that still hides masked scores (0 times -inf is NaN).
TINY = 2.0**-126

# A call's tensors by name: the operators' and what a backend adds.
Call = dict[str, Tensor | None]

# Operands whose strides no kernel is told.
_FLAT = ("sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def arch(x: Tensor) -> str:
    """What tuning tables call x's device: "sm_90", "gfx942"; "interpret" on a CPU."""
    return base.arch(x) or "interpret"


class Of(NamedTuple):
    """Stands for a call's tensor among a launch's arguments, directly or in a descriptor."""

    name: str
    descriptor: Any = None


class Launch:
    """One launch of a kernel, for tensors of one layout, through Triton's own launcher.

    Args:
        kernel: the kernel.
        grid: number of programs.
        arguments: the kernel's arguments by name, with ``Of`` in place of tensors.
        options: of the compiler.
    """

    __slots__ = (
        "_compiled", "_descriptors", "_grid", "_kernel", "_options", "_tensors", "_values",
    )  # fmt: skip

    def __init__(
        self, kernel: Any, grid: int, arguments: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._options = kernel, grid, options
        self._compiled: Any = None
        self._values: list[Any] = [arguments[name] for name in kernel.arg_names]
        self._tensors: list[tuple[int, str]] = []
        self._descriptors: list[tuple[int, str, Any]] = []
        for place, value in enumerate(self._values):
            if isinstance(value, Of):
                self._values[place] = None
                if value.descriptor is None:
                    self._tensors.append((place, value.name))
                else:
                    value.descriptor.base = None  # holds no memory
                    self._descriptors.append((place, value.name, value.descriptor))

    def __call__(self, call: Call) -> None:
        """Launches with these tensors; the first time compiles."""
        values = self._values.copy()
        for place, name in self._tensors:
            values[place] = call[name]
        for place, name, template in self._descriptors:
            values[place] = compat.descriptor_of(template, call[name])
        if self._compiled is not None:
            self._compiled[(self._grid, 1, 1)](*values)
        else:
            self._compiled = self._kernel[(self._grid,)](*values, **self._options)

    def direct(self, names: tuple[str, ...]) -> direct.Direct | None:
        """The same launch past Triton's Python, of tensors in the order of ``names``; None where
        that is not possible."""
        if self._compiled is None or not direct.applies(self._compiled):  # None: interpreted
            return None
        return direct.Direct(
            self._compiled,
            self._grid,
            self._values,
            [(place, names.index(name)) for place, name in self._tensors],
            [(place, names.index(name), x) for place, name, x in self._descriptors],
        )


class Plan:
    """The launches of calls of one kind, one after another.

    The first call makes them, from its own tensors, and goes through Triton's launcher, which
    compiles; later ones hand addresses to the compiled kernels where that is possible.

    Args:
        names: what the tensors are called, in the order in which calls give them.
        device: where they are.
        make: returns the launches for tensors by name.
    """

    __slots__ = ("_device", "_direct", "_launches", "_make", "_names")

    def __init__(
        self,
        names: tuple[str, ...],
        device: torch.device,
        make: Callable[[Call], list[Launch]],
    ) -> None:
        self._names, self._device, self._make = names, device, make
        self._launches: list[Launch] | None = None
        self._direct: list[direct.Direct] | None = None

    def __call__(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Launches with these tensors."""
        if self._direct is None:
            self._through_triton(tensors)
            return
        index = self._device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        if torch._C._cuda_getDevice() == index:
            for one in self._direct:
                one(stream, tensors)
        else:
            with torch.cuda.device(index):
                for one in self._direct:
                    one(stream, tensors)

    def _through_triton(self, tensors: tuple[Tensor | None, ...]) -> None:
        call = dict(zip(self._names, tensors, strict=True))
        first = self._launches is None
        if self._launches is None:
            self._launches = self._make(call)
        on_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            for one in self._launches:
                one(call)
        if first:
            found = [one.direct(self._names) for one in self._launches]
            if found and None not in found:
                self._direct = found  # type: ignore[assignment]


def tensors_of(call: Call) -> AttentionTensors:
    """The operators' tensors among a call's."""
    return AttentionTensors(*(call[name] for name in AttentionTensors._fields))  # type: ignore[arg-type]


def fitting(
    p: AttentionProblem, t: AttentionTensors, also: tuple[str, ...] = ()
) -> Callable[[AttentionTensors], AttentionTensors] | None:
    """What brings a call's tensors to the form that kernels take; None where they have it.

    Operands whose strides no kernel is told, and those named in ``also``, become contiguous. A
    negative scale's sign moves to the queries: a maximum of scores is then the scaled maximum of
    the products.
    """
    copied = [n for n in _FLAT if (x := getattr(t, n)) is not None and not x.is_contiguous()]
    copied += also
    negative = p.softmax_scale < 0
    if not (copied or negative):
        return None

    def fit(t: AttentionTensors) -> AttentionTensors:
        t = t._replace(q=t.q.neg()) if negative else t
        return t._replace(**{name: getattr(t, name).contiguous() for name in copied})

    return fit


def power_of_two(n: int, least: int = 16) -> int:
    """The least power of two from ``least`` on that is at least n."""
    return max(least, 1 << (n - 1).bit_length()) if n > 0 else least


def strides(x: Tensor) -> tuple[int, int, int, int]:
    """(batch, row, head, column) of (batch, seqlen, heads, dim) or (total, heads, dim).

    A dimension of size one gets stride 0, whatever torch says, so that it is no compile key; a
    single head the stride that more of them would have.
    """
    s = [0 if n == 1 else st for n, st in zip(x.shape, x.stride(), strict=True)]
    if x.shape[-2] == 1:
        s[-2] = x.shape[-1]
    column = 1 if x.shape[-1] == 1 else s[-1]
    return (*s[:-1], column) if x.dim() == 4 else (0, *s[:-1], column)  # type: ignore[return-value]


def suits_tma(x: Tensor) -> bool:
    """Whether a tensor descriptor can read x: whole 16-byte units, columns adjacent, not empty."""
    size = x.element_size()
    return (
        x.numel() > 0
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and x.shape[-1] * size >= 16
        and all(
            st * size % 16 == 0 and (st > 0 or n == 1)
            for n, st in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
    )


def descriptor(x: Tensor, rows: int, block_d: int, make: Any = compat.tensor_descriptor) -> Any:
    """A tensor descriptor of tiles of ``rows`` rows of one head, as ``make`` makes it."""
    shape, steps = (x.shape, x.stride()) if x.dim() == 4 else ((1, *x.shape), (0, *x.stride()))
    unit = 16 // x.element_size()
    # a dimension of size one has any stride, here one of whole units
    wide = -(-x.numel() // unit) * unit
    steps = tuple(wide if n == 1 else st for n, st in zip(shape[:3], steps[:3], strict=True))
    return make(x, list(shape), [*steps, 1], [1, rows, 1, block_d])


def section(problem: AttentionProblem, heads: int, bytes_of_head: int | None = None) -> int:
    """Of the grid's ``heads``, counted over the batch, those that are worked on together: their
    keys and values, or ``bytes_of_head`` of each key head, stay in the L2 cache."""
    if problem.mask.window_right is None:
        return 1  # equal tiles: one head at a time shares most
    if bytes_of_head is None:
        element = 4 if problem.dtype == "float32" else 2
        bytes_of_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * element
    together = SECTION_BYTES // max(1, bytes_of_head) * (heads // problem.nheads_kv)
    return max(1, min(together, problem.batch * heads))


def outputs(p: AttentionProblem, t: AttentionTensors) -> Callable[[], tuple[Tensor, Tensor]]:
    """What makes a forward's out and lse, to be written; lse is -inf where a packed tensor has no
    sequence."""
    q, varlen = t.q, p.layout == VARLEN
    new_out = room((*q.shape[:-1], p.head_dim_v), q.dtype, q.device)
    shape = (p.nheads, q.shape[0]) if varlen else (p.batch, p.nheads, p.seqlen_q)
    new_lse = room(shape, lse_dtype(t), q.device)

    def make() -> tuple[Tensor, Tensor]:
        return new_out(), new_lse().fill_(-torch.inf) if varlen else new_lse()

    return make


def room(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes contiguous tensors, to be written: by the quickest of torch's ways to do so."""
    shape = tuple(shape)
    steps = torch.empty(shape, device="meta").stride()
    return partial(torch.empty_strided, shape, steps, dtype=dtype, device=device)


def streams(
    tensors: dict[str, Tensor], tiles: tuple[tuple[int, int], ...], config: TileConfig
) -> tuple[dict[str, Any], bool]:
    """The tensors that a kernel's loop walks through as it takes them, and whether through TMA.

    A tile that stays for the whole loop is always read by pointers: the compiler then leaves it in
    shared memory, where WGMMA reads it, and does not hold it in registers.
    """
    if not (config.use_tma and all(suits_tma(x) for x in tensors.values())):
        return {name: Of(name) for name in tensors}, False
    made = zip(tensors.items(), tiles, strict=True)
    return {name: Of(name, descriptor(x, *tile)) for (name, x), tile in made}, True


def stream_rows(
    p: AttentionProblem,
    q: Tensor,
    dout: Tensor,
    tiles: tuple[tuple[int, int], ...],
    config: TileConfig,
) -> tuple[dict[str, Any], bool]:
    """``streams`` of the rows that a backward walks through.

    Where the window leaves rows of a dense tensor no key they go by pointers, whose loads have a
    mask that can leave these rows out; in a packed tensor the end of a sequence is cut as well.
    """
    right = p.mask.window_right
    if p.layout != VARLEN and right is not None and p.seqlen_q > p.seqlen_k + right:
        config = replace(config, use_tma=False)
    return streams({"q": q, "dout": dout}, tiles, config)


def statistics(
    lse: str, delta: str, call: Call, config: TileConfig, use_tma: bool
) -> dict[str, Of]:
    """The backward's own lse and delta, of these names, as a kernel's loop takes them."""

    def of(name: str) -> Of:
        x = call[name]
        if not use_tma or x is None:
            return Of(name)
        template = compat.tensor_descriptor(x, list(x.shape), [x.shape[1], 1], [1, config.BLOCK_M])
        return Of(name, template)

    return {"lse": of(lse), "delta": of(delta)}


def row_strides(**tensors: Tensor) -> dict[str, tuple[int, int, int, int]]:
    """``strides`` of each tensor, under the name of the kernel's argument."""
    return {f"{name}_strides": strides(x) for name, x in tensors.items()}


def approx_tanh(q: Tensor) -> bool:
    """Whether tanh may be the hardware's, whose relative error is 2^-11: no worse than a score
    rounded to half precision, as standard attention rounds it."""
    return q.is_cuda and torch.version.hip is None and q.dtype != torch.float32


def tiling(config: TileConfig, use_tma: bool, q: Tensor) -> dict[str, Any]:
    """What a configuration sets in every kernel that has TMA."""
    return {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "USE_TMA": use_tma,
        "APPROX_TANH": approx_tanh(q),
    }


def options(config: TileConfig) -> dict[str, Any]:
    """What a configuration tells the compiler."""
    return compat.launch_options(config.num_warps, config.num_stages, config.maxnreg)


def natural(problem: AttentionProblem) -> bool:
    """Whether scores are kept in natural units; see ``kernels.triton.score``."""
    return problem.dtype == "float32" or "attn_bias" in problem.features


def shared_arguments(problem: AttentionProblem, t: AttentionTensors) -> dict[str, Any]:
    """The arguments that forward and backward kernels share, by name."""
    p = problem
    left, right = p.mask.window_left, p.mask.window_right
    varlen = p.layout == VARLEN
    bias, slopes = t.attn_bias, t.alibi_slopes
    boolean = bias is not None and bias.dtype == torch.bool
    slope_strides = (0, 0)
    if slopes is not None:
        slope_strides = (slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))
    bias_strides = (0, 0, 0, 0)
    if bias is not None:
        bias_strides = tuple(  # type: ignore[assignment]
            0 if n == 1 else st for n, st in zip(bias.shape, bias.stride(), strict=True)
        )
        bias_strides = bias_strides if bias.dim() == 4 else (0, *bias_strides)  # type: ignore[assignment]
    scale = abs(p.softmax_scale)
    operands = ("alibi_slopes", "seed", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    return {
        "attn_bias": None if boolean or bias is None else Of("attn_bias"),
        "attn_mask": Of("attn_bias") if boolean else None,
        **{name: None if getattr(t, name) is None else Of(name) for name in operands},
        "bias_strides": bias_strides,
        "slope_strides": slope_strides,
        "batch": p.batch,
        "nheads": p.nheads,
        "group": p.group,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "total_q": t.q.shape[0] if varlen else 0,
        "total_k": t.k.shape[0] if varlen else 0,
        "softmax_scale": max(scale, TINY),
        "softcap": p.softcap or None,
        "natural": 1 if natural(p) else None,
        "window_left": None if left is None else min(left, FAR),
        "window_right": None if right is None else min(right, FAR),
        "dropout_threshold": threshold(p.dropout_p),
        "keep_scale": 1.0 / (1.0 - p.dropout_p),
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_D": power_of_two(p.head_dim),
        "BLOCK_DV": power_of_two(p.head_dim_v),
        "PRECISION": precision(p.dtype),
    }


def precision(dtype: str) -> str:
    """How a matrix product of float32 is computed: exactly, or in TF32 where torch's own is."""
    if dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"
