"""Compiles what the launchers launch, for any device and with none.

The launchers of ``tilewise.backends.triton`` run as they are, on tensors that have a shape, strides
and an address but no memory, and under a driver that only names a target. What they hand to Triton
is caught at the moment of compilation - after Triton's own specialisation of every argument - and
the launch does not happen. So what is compiled here is what a GPU would be given.

As a program: reads one case (``Case``, as JSON) a line from standard input, and writes what
``results`` says of it, a JSON list, in a line to standard output; with "ask": "keys" beside the
case's own fields only what Triton would find each kernel by, uncompiled. TRITON_INTERPRET must not
be set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tilewise.backends import base
from tilewise.backends.base import AttentionTensors, Wanted
from tilewise.backends.gluon import counters
from tilewise.core.config import TileConfig
from tilewise.core.mask import MaskSpec
from tilewise.core.problem import DENSE, VARLEN, AttentionProblem
from tilewise.tuning import lookup
from tilewise.tuning.keys import arch_of

FUNCTIONS = {
    "fwd": "flash_fwd_kernel",
    "fwd_sm90": "flash_fwd_sm90_kernel",
    "bwd_sm90": "flash_bwd_sm90_kernel",
    "bwd_dkdv_sm90": "flash_bwd_dkdv_sm90_kernel",
    "bwd_dq_sm90": "flash_bwd_dq_sm90_kernel",
    "bwd_convert": "flash_bwd_convert_kernel",
    "bwd_dkdv": "flash_bwd_dkdv_kernel",
    "bwd_dq": "flash_bwd_dq_kernel",
    "bwd_dbias": "flash_bwd_dbias_kernel",
    "bwd_preprocess": "flash_bwd_preprocess_kernel",
    "fa1_fwd": "fa1_fwd_kernel",
    "fa1_bwd": "fa1_bwd_kernel",
}
MASKS = {"full": MaskSpec(), "causal": MaskSpec(None, 0), "window": MaskSpec(1024, 0)}


@dataclass(frozen=True)
class Case:
    """One call of one kernel, as JSON can hold it.

    Attributes:
        kernel: a key of ``FUNCTIONS``.
        arch: as in ``tilewise.tuning.keys``.
        mask: a key of ``MASKS``.
        features: names of ``tilewise.core.features``; those of the mask and the widths follow.
        config: pins the kernel's TileConfig; None takes the table's.
    """

    kernel: str
    arch: str = "sm_90"
    dtype: str = "float16"
    head_dim: int = 128
    head_dim_v: int = 0
    mask: str = "full"
    features: tuple[str, ...] = ()
    batch: int = 2
    nheads: int = 8
    nheads_kv: int = 0
    seqlen_q: int = 4096
    seqlen_k: int = 0
    config: dict[str, Any] | None = None
    label: dict[str, Any] = field(default_factory=dict)

    def problem(self) -> AttentionProblem:
        """The call's facts."""
        nheads_kv = self.nheads_kv or self.nheads
        features = set(self.features)
        if self.mask != "full":
            features.add(self.mask)
        if nheads_kv < self.nheads:
            features.add("gqa")
        if self.head_dim_v and self.head_dim_v != self.head_dim:
            features.add("head_dim_v")
        return AttentionProblem(
            device="cuda",
            dtype=self.dtype,
            layout=VARLEN if "varlen" in features else DENSE,
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k or self.seqlen_q,
            nheads=self.nheads,
            nheads_kv=nheads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim,
            mask=MASKS[self.mask],
            softmax_scale=self.head_dim**-0.5,
            deterministic="deterministic" in features,
            softcap=30.0 if "softcap" in features else 0.0,
            dropout_p=0.1 if "dropout" in features else 0.0,
            features=frozenset(features),
            needs_grad=self.kernel not in ("fwd", "fa1_fwd", "fwd_sm90"),
            arch=self.arch,
        )


def tensors(p: AttentionProblem, device: Any = "cuda", fill: Any = None) -> AttentionTensors:
    """A call's tensors on ``device``, uninitialised, or made by ``fill`` from shape and dtype."""
    make = fill or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
    dtype = getattr(torch, p.dtype)
    varlen = p.layout == VARLEN
    rows = [(p.batch * n,) if varlen else (p.batch, n) for n in (p.seqlen_q, p.seqlen_k)]
    t = AttentionTensors(
        make((*rows[0], p.nheads, p.head_dim), dtype),
        make((*rows[1], p.nheads_kv, p.head_dim), dtype),
        make((*rows[1], p.nheads_kv, p.head_dim_v), dtype),
    )
    more: dict[str, Any] = {}
    shape = (p.nheads, p.batch * p.seqlen_q, p.seqlen_k) if varlen else None
    shape = shape or (p.batch, p.nheads, p.seqlen_q, p.seqlen_k)
    if "attn_bias" in p.features:
        more["attn_bias"] = make(shape, dtype)
    if "bool_mask" in p.features:
        more["attn_bias"] = torch.ones(shape, dtype=torch.bool, device=device)
    if "alibi" in p.features:
        more["alibi_slopes"] = make((p.nheads,), torch.float32)
    if "sink" in p.features:
        more["sink"] = make((p.nheads,), torch.float32)
    if "dropout" in p.features:
        more["seed"] = torch.ones(1, dtype=torch.int64, device=device)
    if varlen:
        for side, n in (("q", p.seqlen_q), ("k", p.seqlen_k)):
            steps = [i * n for i in range(p.batch + 1)]
            more[f"cu_seqlens_{side}"] = torch.tensor(steps, dtype=torch.int32, device=device)
            if "seqused" in p.features:
                used = torch.full((p.batch,), n, dtype=torch.int32, device=device)
                more[f"seqused_{side}"] = used
    return AttentionTensors(t.q, t.k, t.v, **more)


WANTED = {
    "bwd_dkdv": Wanted(dq=False),
    "bwd_dq": Wanted(dk=False, dv=False),
    "bwd_dbias": Wanted(False, False, False, dbias=True),
    "bwd_preprocess": Wanted(False, False, False),
    "fa1_bwd": Wanted(),
}


def prepared(
    kernel: str, p: AttentionProblem, t: AttentionTensors, given: Any = None
) -> Callable[[], Any]:
    """What launches ``kernel`` through the backend; ``given`` is a backward's (out, lse, dout)."""
    from tilewise.backends.gluon import GluonBackend
    from tilewise.backends.triton import TritonBackend

    gluon = kernel.endswith("_sm90") or kernel == "bwd_convert"
    backend = GluonBackend() if gluon else TritonBackend()
    algorithm = "fa1" if kernel.startswith("fa1") else backend.algorithms[0]
    if kernel in ("fwd_sm90", "fwd", "fa1_fwd"):
        return partial(backend.forward(p, t, algorithm), t)
    if given is None:
        out = torch.empty(*t.q.shape[:-1], p.head_dim_v, dtype=t.q.dtype, device=t.q.device)
        shape = (p.batch, p.nheads, p.seqlen_q)
        shape = (p.nheads, t.q.shape[0]) if p.layout == VARLEN else shape
        given = out, torch.empty(shape, dtype=torch.float32, device=t.q.device), out
    out, lse, dout = given
    run = backend.backward(p, t, dout, WANTED.get(kernel, Wanted()), algorithm)
    return partial(run, t, out, lse, dout, None)


def call(kernel: str, p: AttentionProblem, t: AttentionTensors, given: Any = None) -> Any:
    """Launches it."""
    return prepared(kernel, p, t, given)()


class _GpuTensor(torch.Tensor):
    """A tensor without memory that says it lies on a GPU, at an aligned address."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return (1 << 20) + self.storage_offset() * self.element_size()


class _OnGpu(TorchFunctionMode):
    """Makes every tensor that is asked for on a GPU a ``_GpuTensor``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and not isinstance(out, _GpuTensor) and out.is_meta:
            return out.as_subclass(_GpuTensor)
        return out


@dataclass(frozen=True)
class Launch:
    """What a launcher handed to Triton.

    Attributes:
        name: the kernel's function.
        key: what Triton's cache of compiled kernels finds it by.
    """

    name: str
    key: str
    fn: Any
    signature: dict[str, Any]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: Any


def _target_of(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    amd = arch.startswith("gfx")
    number: Any = arch if amd else int(arch.removeprefix("sm_"))
    return GPUTarget("hip" if amd else "cuda", number, arch_of(arch).warp_size)


@contextmanager
def no_device(arch: str) -> Iterator[list[Launch]]:
    """Within, launchers see a GPU of kind ``arch``; what they launch is listed, not compiled."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = _target_of(arch)
    launches: list[Launch] = []

    def catch(self: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any,
              attrs: Any, warmup: bool) -> None:  # fmt: skip
        name = self.fn.__name__
        launches.append(Launch(name, key, self, signature, constexprs, attrs, options))

    amd = target.backend == "hip"
    major, minor = divmod(0 if amd else target.arch, 10)
    properties = SimpleNamespace(
        major=major, minor=minor, gcnArchName=arch, multi_processor_count=132, name=arch,
        total_memory=1 << 36, warp_size=target.warp_size, L2_cache_size=50 << 20,
        shared_memory_per_block_optin=arch_of(arch).shared_bytes,
    )  # fmt: skip
    stand_ins = (
        (JITFunction, "_do_compile", catch),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.version, "hip", "6.4" if amd else None),
        (counters, "counter_of", lambda device: torch.zeros(1, dtype=torch.int32, device=device)),
    )
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    kernels = []
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
            )
        )
        base._arch.cache_clear()
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("tilewise.kernels"):
                kernels += [x for x in vars(module).values() if isinstance(x, JITFunction)]
        for kernel in kernels:
            kernel.device_caches.clear()
        with _OnGpu():
            yield launches
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
        driver._active = None
        base._arch.cache_clear()
        for kernel in kernels:
            kernel.device_caches.clear()


def launches(case: Case) -> list[Launch]:
    """What a case launches, its own kernel last; nothing is compiled."""
    p = case.problem()
    pin = lookup.pinned(case.kernel, TileConfig(**case.config)) if case.config else nullcontext()
    with no_device(case.arch) as caught, pin:
        call(case.kernel, p, tensors(p))
    name = FUNCTIONS[case.kernel]
    return [x for x in caught if x.name != name] + [x for x in caught if x.name == name]


def compiled(launch: Launch, arch: str) -> Any:
    """Triton's compiled kernel of one launch; also leaves it in Triton's cache on disk."""
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime import driver

    kind = GluonASTSource if launch.fn.is_gluon() else ASTSource
    source = kind(launch.fn, launch.signature, launch.constexprs, launch.attrs)
    target = _target_of(arch)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # kernels ask it
    try:
        return triton.compile(source, target=target, options=launch.options.__dict__)
    finally:
        driver._active = None


def usage(kernel: Any, sass: bool = False) -> dict[str, Any]:
    """Registers, bytes spilled, shared memory and instructions of some kinds of a compiled
    kernel."""
    facts: dict[str, Any] = {"shared": kernel.metadata.shared}
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]

        def last(name: str) -> int:
            found = re.findall(rf"\.{name}:\s+(\d+)", text)
            return int(found[-1]) if found else 0

        return facts | {
            "registers": last("vgpr_count"),
            "stack": last("private_segment_fixed_size"),
            "mfma": len(re.findall(r"v_mfma_|v_wmma_", text)),
        }
    ptx = kernel.asm["ptx"]
    for name in (
        "wgmma.mma_async",
        "mma.sync",
        "tcgen05.mma",
        "cp.async.bulk.tensor",
        "setmaxnreg",
        "cvt.rn.f32",
        "mbarrier.init",
        "mbarrier.inval",
    ):
        facts[name] = ptx.count(name)
    output = _cuobjdump(kernel.asm["cubin"], "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert found is not None, output
    facts |= {"registers": int(found[1]), "stack": int(found[2])}
    if sass:
        text = _cuobjdump(kernel.asm["cubin"], "-sass")
        facts["spill_instructions"] = len(re.findall(r"\b(?:LDL|STL)\b", text))
    return facts


def pipeline(kernel: Any) -> dict[str, Any]:
    """What a kernel in Gluon must answer for: ptxas' remarks on WGMMA; accesses to local memory and
    branches on which threads of a warp may differ in the loops that multiply."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [program, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    # C7519 only says that a fence was added between products that follow one another
    remarks = re.findall(r"C75(?!19)\d\d|wgmma[^\n]*", done.stdout + done.stderr)
    lines = re.findall(
        r"/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*);",
        _cuobjdump(kernel.asm["cubin"], "-sass"),
    )
    code = [(int(at, 16), bool(guard), name, rest) for at, guard, name, rest in lines]
    loops = _loops(code)
    spills = {at for at, _, name, _ in code if name.startswith(("LDL", "STL"))}
    diverging = {at for at, _, name, _ in code if name.startswith("BSSY")}
    return {
        "remarks": remarks,
        "loops": len(loops),
        "loop_spills": max((len(spills & loop) for loop in loops), default=0),
        "loop_divergence": max((len(diverging & loop) for loop in loops), default=0),
    }


# Of an instruction: its address, whether it has a guard, its name and its operands.
_Code = list[tuple[int, bool, str, str]]


def _target(name: str, rest: str) -> int | None:
    found = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
    return int(found[1], 16) if found else None


def _loops(code: _Code) -> list[set[int]]:
    """The addresses of the innermost loops with a WGMMA."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(at for at, *_ in code)
    for (at, guard, name, rest), follower in zip(code, [*code[1:], None], strict=True):
        target = _target(name, rest)
        leaves = name in ("EXIT", "BRX") or name.startswith("RET") or name == "BRA"
        conditional = guard or (name == "BRA" and re.search(r"U?P\d", rest) is not None)
        if target in graph:
            graph.add_edge(at, target)
        if follower is not None and (conditional or not leaves):
            graph.add_edge(at, follower[0])
    products = {at for at, _, name, _ in code if name.startswith("HGMMA")}

    def innermost(nodes: set[int]) -> list[set[int]]:
        found = []
        for loop in networkx.strongly_connected_components(graph.subgraph(nodes)):
            if len(loop) > 1 and loop & products:
                entries = [at for at in loop if set(graph.predecessors(at)) - loop]
                found += innermost(loop - {min(entries)}) or [loop]
        return found

    return innermost(set(graph))


def _cuobjdump(cubin: bytes, option: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, option, file.name], capture_output=True, text=True)
    return done.stdout + done.stderr


def results(case: Case, own: bool = True) -> Iterator[dict[str, Any]]:
    """Compiles a case's kernel (all that it launches, unless ``own``); a dict for each."""
    import triton

    facts: dict[str, Any] = {"case": asdict(case), "triton": triton.__version__}
    try:
        found = launches(case)
    except Exception as error:
        yield facts | {"error": f"{type(error).__name__}: {error}"}
        return
    for launch in found:
        if own and launch.name != FUNCTIONS[case.kernel]:
            continue
        start = time.perf_counter()
        try:
            kernel = compiled(launch, case.arch)
        except Exception as error:
            cause = error.__cause__ or error
            yield facts | {"name": launch.name, "error": f"{type(cause).__name__}: {cause}"[-2000:]}
            continue
        seconds = time.perf_counter() - start
        facts_of = usage(kernel) | (pipeline(kernel) if launch.fn.is_gluon() else {})
        yield facts | {"name": launch.name, "seconds": round(seconds, 3)} | facts_of


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "TRITON_INTERPRET must not be set"
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        fields = json.loads(line)
        ask, own = fields.pop("ask", "results"), fields.pop("own", True)
        case = Case(**(fields | {"features": tuple(fields.get("features", ()))}))
        try:
            if ask == "keys":
                answer: Any = [{"name": x.name, "key": x.key} for x in launches(case)]
            else:
                answer = list(results(case, own))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
