"""Launches a compiled kernel on an NVIDIA GPU past most of Triton's Python.

Triton's own launch of a compiled kernel asks each tensor for its address and the driver whose it
is, encodes each TMA descriptor anew, and takes the arguments apart one by one: tens of
microseconds, which a short kernel's caller waits for. Here the arguments of a kernel and of its
tensors' layout are laid out once; a call fills in addresses, and descriptors that it knows by
address. What is called in the end is Triton's own C function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_MAPS = 1024  # encoded descriptors kept for each argument


def _c_function(launcher: Any) -> Any:
    """The C function below a launcher's handling of descriptors."""
    function = launcher.launch
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "launcher" in names:
        return function.__closure__[names.index("launcher")].cell_contents
    return function


class _Maps(dict[int, Any]):
    """Encoded descriptors of one argument by address, encoded when first asked for."""

    def __init__(self, template: Any, meta: dict[str, Any]) -> None:
        super().__init__()
        self._template, self._meta = template, meta

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_MAPS:
            self.clear()
        found = self[address] = _encoded(self._template, self._meta, address)
        return found


class Direct:
    """One compiled kernel with the arguments that stay.

    Args:
        compiled: Triton's compiled kernel, launched before.
        grid: number of programs.
        values: the kernel's arguments in order; at the places below, anything.
        tensors: (place, number) of tensors, numbered as a call gives them.
        descriptors: (place, number, template) of descriptors.
    """

    __slots__ = ("_arguments", "_descriptors", "_launch", "_tensors")

    def __init__(
        self,
        compiled: Any,
        grid: int,
        values: list[Any],
        tensors: list[tuple[int, int]],
        descriptors: list[tuple[int, int, Any]],
    ) -> None:
        launcher = compiled.run
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        templates = {place: (number, template) for place, number, template in descriptors}
        self._launch = _c_function(launcher)
        # of the C function; None: the stream, which each call gives, then scratch and hooks
        arguments: list[Any] = [
            grid, 1, 1, None,
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl,
            None, None, compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        self._descriptors: list[tuple[int, int, _Maps]] = []
        at = []
        for place, value in enumerate(values):
            at.append(len(arguments))
            if place in templates:
                number, template = templates[place]
                self._descriptors.append((at[place], number, _Maps(template, next(metas))))
                arguments += [None, *template.shape, *template.strides]
            else:
                arguments.append(value)
        self._tensors = [(at[place], number) for place, number in tensors]
        self._arguments = arguments

    def __call__(self, stream: int, tensors: Sequence[Any]) -> None:
        """Launches on a stream of the current device."""
        arguments = self._arguments.copy()
        arguments[3] = stream
        for place, number in self._tensors:
            arguments[place] = tensors[number].data_ptr()
        for place, number, maps in self._descriptors:
            arguments[place] = maps[tensors[number].data_ptr()]
        self._launch(*arguments)


def _encoded(template: Any, meta: dict[str, Any], address: int) -> Any:
    """A tensor map, as Triton's launcher makes it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    return driver.active.utils.fill_tma_descriptor(
        address,
        meta["swizzle"],
        meta["elem_size"],
        TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
        meta["block_size"],
        list(template.shape),
        list(template.strides),
        0,
    )


def applies(compiled: Any) -> bool:
    """Whether a compiled kernel can be launched so: by Triton 3.6, whose C function takes these
    arguments, on an NVIDIA GPU, without scratch memory, and while no hook wants to see launches."""
    import triton
    from triton import knobs

    if not triton.__version__.startswith("3.6."):
        return False
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if any(getattr(hook, "calls", hook) for hook in hooks):
        return False
    launcher = compiled.run
    return (
        type(launcher).__name__ == "CudaLauncher"
        and launcher.global_scratch_size == 0
        and launcher.profile_scratch_size == 0
    )
