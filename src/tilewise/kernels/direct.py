"""Launches a compiled kernel on an NVIDIA GPU past most of Triton's Python.

Triton's own launch of a compiled kernel asks each tensor for its address and the driver whose it
is, encodes each TMA descriptor anew, and takes the arguments apart one by one: tens of
microseconds, which a short kernel's caller waits for. Here the arguments of a kernel and of its
tensors' layout are laid out once; a call fills in addresses, and descriptors that it knows by
address. What is called in the end is Triton's own C function.
"""

from __future__ import annotations

from typing import Any

MOST_MAPS = 64  # encoded descriptors kept for each argument


def _c_function(launcher: Any) -> Any:
    """The C function below a launcher's handling of descriptors."""
    function = launcher.launch
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "launcher" in names:
        return function.__closure__[names.index("launcher")].cell_contents
    return function


class Direct:
    """One compiled kernel with the arguments that stay.

    Args:
        compiled: Triton's compiled kernel, launched before.
        grid: number of programs.
        values: the kernel's arguments in order; at the places below, anything.
        tensors: (place, name) of tensors.
        descriptors: (place, name, template) of descriptors.
    """

    __slots__ = ("_before", "_descriptors", "_flat", "_launch", "_tensors")

    def __init__(
        self,
        compiled: Any,
        grid: int,
        values: list[Any],
        tensors: list[tuple[int, str]],
        descriptors: list[tuple[int, str, Any]],
    ) -> None:
        launcher = compiled.run
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        templates = {place: (name, template) for place, name, template in descriptors}
        self._launch = _c_function(launcher)
        self._flat: list[Any] = []
        self._descriptors: list[tuple[int, str, Any, Any, dict[int, Any]]] = []
        at = []
        for place, value in enumerate(values):
            at.append(len(self._flat))
            if place in templates:
                name, template = templates[place]
                self._descriptors.append((at[place], name, template, next(metas), {}))
                self._flat += [None, *template.shape, *template.strides]
            else:
                self._flat.append(value)
        self._tensors = [(at[place], name) for place, name in tensors]
        # what comes before the kernel's arguments, the stream left out; None: scratch and hooks
        self._before = (
            (grid, 1, 1),
            (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl),
            (None, None, compiled.packed_metadata, None, None, None),
        )

    def __call__(self, stream: int, tensors: dict[str, Any]) -> None:
        """Launches on a stream of the current device."""
        flat = self._flat.copy()
        for place, name in self._tensors:
            flat[place] = tensors[name].data_ptr()
        for place, name, template, meta, maps in self._descriptors:
            address = tensors[name].data_ptr()
            encoded = maps.get(address)
            if encoded is None:
                if len(maps) >= MOST_MAPS:
                    maps.clear()
                encoded = maps[address] = _encoded(template, meta, address)
            flat[place] = encoded
        grid, function, more = self._before
        self._launch(*grid, stream, *function, *more, *flat)


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
