"""Runs a warp-specialised Gluon kernel on a CPU, each warp group in a thread of its own.

Gluon has no interpreter. Its kernels are Python, though, and here they run as such: ``gl`` and
``tl`` stand for torch, shared memory is filled with NaN, an mbarrier counts arrivals and bytes, and
a WGMMA reads its operands when it is waited for, not when it is issued. That shows what goes wrong
between warps: a wait for what never comes (an error after ``PATIENCE`` seconds), a stage that is
read too early or too late, a block too many, an address outside of a tensor. A missing wait shows
when those who should be waited for are ``slow``. Layouts, registers and time are beyond it.
"""

from __future__ import annotations

import builtins
import operator
import threading
import time
from functools import reduce as fold
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from tilewise.formats.philox import philox4x32

PATIENCE = 20.0
side_by_side = False  # whether the programs of a grid run at once
slow: frozenset[int] = frozenset()  # numbers of warp groups that dawdle at each barrier; -1 is last
_of_thread = threading.local()


def _dawdle() -> None:
    if getattr(_of_thread, "slow", False):
        time.sleep(0.001)


class Tile(torch.Tensor):
    """A tensor as device code sees it."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def __iadd__(self, other: Any) -> Tile:  # a new value, as there, not the old one's memory
        return self + other


def tile(x: Any) -> Tile:
    return torch.as_tensor(x).as_subclass(Tile)


class Pointer:
    """Elements of a tensor's storage; a step is an element, and each access must be inside."""

    def __init__(self, x: torch.Tensor, offset: Any = 0) -> None:
        self.x, self.offset = x, offset
        self.dtype = SimpleNamespace(element_ty=x.dtype)

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.x, self.offset + step)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.x, self.offset[index])

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        offset = torch.as_tensor(self.offset).long()
        mask = torch.as_tensor(True if mask is None else mask)
        offset, mask = torch.broadcast_tensors(offset, mask)
        memory = torch.as_strided(
            self.x, (self.x.untyped_storage().nbytes() // self.x.element_size(),), (1,), 0
        )
        place = offset + self.x.storage_offset()
        last = sum((n - 1) * st for n, st in zip(self.x.shape, self.x.stride(), strict=True))
        assert (~mask | ((offset >= 0) & (offset <= last))).all(), "an address outside"
        return memory, torch.where(mask, place, 0), mask


class Shared:
    """A tensor in shared memory, or a view of one."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.dtype = x.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.x[int(i)])

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.x.view([int(n) for n in shape]))

    def permute(self, order: Any) -> Shared:
        return Shared(self.x.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.x.narrow(dim, start, length))

    def load(self, layout: Any = None) -> Tile:
        return tile(self.x.clone())

    def store(self, value: Any) -> None:
        self.x.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0
        self.valid = False
        self.expected, self.seen = -1, 0  # the latest phase that bytes belong to; phases waited for

    def init(self, count: int) -> None:
        self.count = self.left = count
        self.valid = True

    def update(self, arrivals: int, more: int) -> None:
        _dawdle()
        with self.changed:
            assert self.valid
            self.left -= arrivals
            self.bytes += more
            if more > 0:
                self.expected = self.phase
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.left = self.count
                self.phase += 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        _dawdle()
        with self.changed:
            came = self.changed.wait_for(lambda: self.phase & 1 != int(parity), PATIENCE)
            assert came, "a wait for what does not come"
            self.seen = builtins.max(self.seen, self.phase)


class Named:
    """A named barrier: it opens when so many threads have come, some of whom do not wait."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.came = self.opened = 0

    def arrive(self, threads: int) -> int:
        _dawdle()
        with self.changed:
            turn = self.opened
            self.came += 128
            if self.came == threads:
                self.came = 0
                self.opened += 1
                self.changed.notify_all()
            return turn

    def sync(self, threads: int) -> None:
        turn = self.arrive(threads)
        with self.changed:
            opened = self.changed.wait_for(lambda: self.opened > turn, PATIENCE)
            assert opened, "a named barrier that stays shut"


class Barriers:
    """Mbarriers in shared memory: one, or as many as its shape says."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = shape
        self.each = [Barrier() for _ in range(fold(operator.mul, shape))]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


def _one(barrier: Any) -> Barrier:
    return barrier.each[0] if isinstance(barrier, Barriers) else barrier


class _mbarrier:
    MBarrierLayout = staticmethod(lambda: "mbarrier")

    @staticmethod
    def init(barrier: Any, count: int) -> None:
        _one(barrier).init(count)

    @staticmethod
    def invalidate(barrier: Any) -> None:
        one = _one(barrier)
        assert one.valid and one.seen > one.expected, "a load that nobody waited for"
        one.valid = False

    @staticmethod
    def expect(barrier: Any, size: int, pred: Any = True) -> None:
        if pred:
            _one(barrier).update(1, int(size))

    @staticmethod
    def arrive(barrier: Any, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            _one(barrier).update(count, 0)

    @staticmethod
    def wait(barrier: Any, phase: Any, pred: Any = True) -> None:
        if pred:
            _one(barrier).wait(phase)


class Descriptor:
    """A TMA descriptor: what lies outside of the tensor reads as 0 and is not written."""

    def __init__(self, host: Any) -> None:
        self.x = torch.as_strided(
            host.base, tuple(host.shape), tuple(host.strides), host.base.storage_offset()
        )
        self.block = host.block_shape
        self.dtype, self.shape, self.layout = host.base.dtype, list(host.shape), host.layout

    def part(self, start: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of the tensor that a block covers, and where in the block it lies."""
        source, target = [], []
        for n, size, first in zip(self.x.shape, self.block, map(int, start), strict=True):
            begin, end = builtins.max(first, 0), builtins.min(first + size, n)
            end = builtins.max(begin, end)
            source.append(slice(begin, end) if begin < n else slice(0, 0))
            target.append(slice(begin - first, end - first) if begin < n else slice(0, 0))
        return self.x[tuple(source)], tuple(target)  # type: ignore[return-value]


def _async_load(desc: Descriptor, at: Any, barrier: Any, into: Shared) -> None:
    part, where = desc.part(at)
    block = torch.zeros(desc.block, dtype=desc.dtype)
    block[where] = part
    into.x.copy_(block.view(into.x.shape))
    _one(barrier).update(0, -block.numel() * block.element_size())


_stores = threading.local()  # of each thread: what its TMA stores have yet to do, in order


def _late(do: Any) -> Any:
    """A TMA store reads shared memory as late as it may: when ``store_wait`` waits for it."""

    def issue(desc: Descriptor, at: Any, source: Shared) -> None:
        part, where = desc.part(at)
        _stores.left.append(lambda: do(part, source.x.view(desc.block)[where]))

    return issue


def _store_wait(pendings: int) -> None:
    while len(_stores.left) > pendings:
        _stores.left.pop(0)()


class _Pending:
    """A WGMMA that was issued."""

    def __init__(self, a: Any, b: Shared, acc: Tile, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.dtype = acc.dtype
        self.type = SimpleNamespace(layout=None)

    def done(self) -> Tile:
        a = self.a.x if isinstance(self.a, Shared) else self.a
        product = a.float() @ self.b.x.float()
        if not self.use_acc:
            return tile(product)
        acc = self.acc.done() if isinstance(self.acc, _Pending) else self.acc
        return tile(product + acc)


def _warpgroup_mma(
    a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool = False
) -> Any:
    return _Pending(a, b, acc, use_acc)


def _warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    found = [x.done() if isinstance(x, _Pending) else x for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tile:
    memory, place, mask = pointer.places(mask)
    return tile(torch.where(mask, memory[place], torch.as_tensor(other, dtype=memory.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    memory, place, mask = pointer.places(mask)
    value = torch.as_tensor(value).to(memory.dtype).expand(place.shape)
    memory[place[mask]] = value[mask]


def _reduce(of: Any) -> Any:
    def reduction(x: Any, axis: int) -> Tile:
        return tile(of(torch.as_tensor(x), axis))

    return reduction


def _either(choose: Any) -> Any:
    def function(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return {torch.minimum: builtins.min, torch.maximum: builtins.max}[choose](a, b)
        a, b = (x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in (a, b))
        return tile(choose(*torch.broadcast_tensors(*_promoted(a, b))))

    return function


def _promoted(a: Any, b: Any) -> Any:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _where(condition: Any, a: Any, b: Any) -> Tile:
    whole = isinstance(a, int) and isinstance(b, int)
    dtype = torch.int32 if whole else torch.float32
    dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), dtype)
    a, b = (torch.as_tensor(x, dtype=dtype) for x in (a, b))
    return tile(torch.where(torch.as_tensor(condition), a, b))


class Word(Tile):
    """Unsigned numbers of 32 bits, which torch hardly has, held in int64."""

    def __lshift__(self, n: int) -> Word:
        return (torch.Tensor.__lshift__(self, n) & 0xFFFFFFFF).as_subclass(Word)


_DTYPES = {
    "uint32": torch.int64,
    "uint64": torch.int64,
} | {
    name: getattr(torch, name)
    for name in ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}


def _language(program: int, programs: int, lock: Any) -> SimpleNamespace:
    """``gl`` and ``tl``."""

    def atomic_add(pointer: Pointer, value: int, sem: str = "") -> int:
        with lock:
            before = int(_load(pointer))
            _store(pointer, before + value)
        return before

    def allocate(dtype: Any, shape: Any, layout: Any = None) -> Any:
        if layout == "mbarrier":
            return Barriers(shape)
        fill = float("nan") if dtype.is_floating_point else -1
        return Shared(torch.full([int(n) for n in shape], fill, dtype=dtype))

    def warp_specialize(parts: Any, warps: Any, registers: Any) -> None:
        errors: list[BaseException] = []

        def run(number: int, function: Any, arguments: Any) -> None:
            _stores.left = []
            _of_thread.slow = bool({number, number - len(parts)} & slow)
            try:
                function(*arguments)
                assert not _stores.left, "TMA stores that nobody waited for"
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(number, *part), daemon=True)
            for number, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def layout(*_: Any, **__: Any) -> None:
        return None

    return SimpleNamespace(
        **_DTYPES,
        constexpr=lambda x: x,
        static_range=range,
        arange=lambda a, b, layout=None: tile(torch.arange(a, b, dtype=torch.int32)),
        full=lambda shape, value, dtype, layout=None: tile(
            torch.full([int(n) for n in shape], float(value), dtype=torch.float64).to(dtype)
        ),
        zeros=lambda shape, dtype, layout=None: tile(
            torch.zeros([int(n) for n in shape], dtype=dtype)
        ),
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        minimum=_either(torch.minimum),
        maximum=_either(torch.maximum),
        cdiv=lambda a, b: -(-a // b),
        cast=lambda x, dtype: tile(x).to(dtype),
        abs=lambda x: tile(torch.as_tensor(x).abs()),
        where=_where,
        max=_reduce(torch.amax),
        sum=_reduce(torch.sum),
        exp2=lambda x: tile(torch.exp2(x)),
        log2=lambda x: tile(torch.log2(x)),
        broadcast=lambda a, b: tuple(map(tile, torch.broadcast_tensors(a, b))),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        split=lambda x: (x[..., 0], x[..., 1]),
        join=lambda a, b: torch.stack([a, b], -1).as_subclass(type(a)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        load=_load,
        store=_store,
        atomic_add=atomic_add,
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
        NVMMADistributedLayout=layout,
        DotOperandLayout=layout,
        SliceLayout=layout,
        BlockedLayout=layout,
        SwizzledSharedLayout=layout,
        DistributedLinearLayout=layout,
        NVMMASharedLayout=SimpleNamespace(get_default_for=layout),
        named=[Named() for _ in range(16)],  # all at once: threads would race to make them
    )


def _exp2(x: Any) -> Tile:
    """As ``ex2.approx.ftz``: no subnormal results."""
    y = torch.exp2(x)
    return tile(torch.where(y < 2.0**-126, 0.0, y))


def _rescale(o: Any, alpha: Any, WIDTH: int) -> Tile:
    return tile(o * alpha[:, None])


def _any_above(x: Any, EXPONENT: int, scalar: Any, REGISTER: str) -> Any:
    return x, int(not bool((x <= 2.0**EXPONENT).all()))


def _tanh(x: Any, APPROX: Any) -> Tile:
    return tile(torch.tanh(x))


def _philox(DROPOUT: Any, c0: Any, c1: Any) -> Any:
    seed, _, head, batch = DROPOUT
    key = int(_load(seed))
    counter = [torch.as_tensor(x).long() for x in torch.broadcast_tensors(c0, c1)]
    counter += [torch.tensor(int(head)), torch.tensor(int(batch))]
    words = philox4x32(tuple(counter), (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF))
    return [w.as_subclass(Word) for w in words]


def _factors(p: Any, words: Any, DROPOUT: Any) -> Tile:
    """Of two neighbours, who have one word, the first has its lower lane."""
    columns = torch.arange(p.shape[-1])
    lanes = torch.where(columns % 2 == 0, words & 0xFFFF, words >> 16)
    return tile((torch.as_tensor(lanes) >= int(DROPOUT[1])).to(p.dtype))


def _exchange(w00: Any, w01: Any, w10: Any, w11: Any, odd: Any) -> Any:
    """Words of (key blocks, 8 keys, ...): a pair of keys has one of each row of a pair."""
    lanes = []
    for words in (w00, w01, w10, w11):
        first, second = words.unflatten(1, (4, 2)).unbind(2)
        of = [(first >> n & 0xFFFF) | (second >> n & 0xFFFF) << 16 for n in (0, 16)]
        lanes.append(torch.stack(of, 2).flatten(1, 2).as_subclass(Word))
    return lanes


_adding = threading.Lock()


def _add(part: torch.Tensor, x: torch.Tensor) -> None:
    with _adding:
        part.add_(x)


# What is asm, or words of 32 bits, in a kernel, by the name of its function.
_ASM = {
    "philox": _philox,
    "factors": _factors,
    "times": lambda p, factor: tile(p * factor),
    "turns": lambda factor: tile(factor * 2 - 1),
    "marked": lambda p, factor: tile(torch.where(factor == 0, -p, p)),
    "positive": lambda p, dtype: tile(torch.relu(p).to(dtype)),
    "_exchange": _exchange,
    "exp2": _exp2,
    "exp2_subnormal": lambda x: tile(torch.exp2(x)),
    "log2": lambda x: tile(torch.log2(x)),
    "rescale": _rescale,
    "any_above": _any_above,
    "block_boundary": lambda length: None,
    "opaque_zero": lambda x: 0,
    "opaque": lambda x: x,
    "_tanh": _tanh,
}
_HOPPER = {
    "mbarrier": _mbarrier,
    "async_load": _async_load,
    "async_store": _late(torch.Tensor.copy_),
    "async_add": _late(_add),
    "store_wait": _store_wait,
    "fence_async_shared": lambda: None,
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_init": lambda value: value,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
}


class _Python:
    """Device functions as Python functions of one program."""

    def __init__(self, language: SimpleNamespace) -> None:
        self.language = language
        self.functions: dict[Any, Any] = {}
        self.modules: dict[int, dict[str, Any]] = {}

    def function(self, jitted: Any) -> Any:
        source = jitted.fn
        if source.__name__ in _ASM:
            return _ASM[source.__name__]
        if source.__name__ == "bar_sync":
            return lambda barrier, threads: self.language.named[barrier].sync(threads)
        if source not in self.functions:
            self.functions[source] = FunctionType(
                source.__code__,
                self.globals(source.__globals__),
                source.__name__,
                source.__defaults__,
                source.__closure__,
            )
        return self.functions[source]

    def globals(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self.modules:
            found = self.modules[id(names)] = dict(names)
            for name, value in names.items():
                if name in _HOPPER:
                    found[name] = _HOPPER[name]
                elif name in ("gl", "tl"):
                    found[name] = self.language
                elif hasattr(value, "fn") and not isinstance(value, ModuleType):
                    found[name] = self.function(value)
                elif type(value).__name__ == "constexpr":
                    found[name] = value.value
        return self.modules[id(names)]


def run(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Runs the programs of a grid, one after another or, if ``side_by_side``, at once.

    Args:
        kernel: a Gluon kernel.
        programs: how many.
        arguments: by name; tensors as pointers, host descriptors as TMA descriptors.
    """

    def given(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Pointer(x)
        return Descriptor(x) if hasattr(x, "block_shape") else x

    values = [given(arguments[name]) for name in kernel.arg_names]
    lock = threading.Lock()
    errors: list[BaseException] = []

    def start(program: int) -> None:
        try:
            _Python(_language(program, programs, lock)).function(kernel)(*values)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(n,), daemon=True) for n in range(programs)]
    for thread in threads:
        thread.start()
        if not side_by_side:
            thread.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
