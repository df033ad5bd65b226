"""The one place that knows Triton's versions: what differs between those that are tested.

- 3.6: its interpreter fails with numpy from 2.4 on; nothing for a GPU.
- 3.7, 3.8: nothing, the kernels keep to what all have.
- 3.9: block pointers are gone (not used here), and whether a product and a sum may become one
  instruction is about to be off by default: left open it warns, so it is always named here.

torch is not imported here, and triton only when something is asked for.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

# Minor versions that tests/compile covers.
TESTED = ("3.6", "3.7", "3.8", "3.9")


@cache
def check_version() -> None:
    """Warns, once in a process, when this version of Triton is not among those tested."""
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    if version not in TESTED:
        warnings.warn(
            f"tilewise is tested with Triton {', '.join(TESTED)}; this is {triton.__version__}",
            UserWarning,
            stacklevel=3,
        )


def launch_options(num_warps: int, num_stages: int, maxnreg: int = 0) -> dict[str, Any]:
    """How a kernel is compiled, as keyword arguments of a launch."""
    options: dict[str, Any] = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": True,
    }
    if maxnreg:  # NVIDIA's alone: elsewhere even its name is refused
        options["maxnreg"] = maxnreg
    return options


def tensor_descriptor(base: Any, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """Triton's host-side tensor descriptor: a TMA descriptor where the device has TMA."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, shape, strides, block)


def shared_descriptor(base: Any, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """Gluon's, which also says how a tile lies in shared memory: in the layout that WGMMA reads."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # the layout depends on the element's width alone
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16)
    return TensorDescriptor(base, shape, strides, block, layout)


def matrix_descriptor(
    base: Any, shape: list[int], strides: list[int], block: list[int], swizzled: bool
) -> Any:
    """Gluon's, of a float32 matrix whose tiles only threads read and write."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if swizzled:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    else:
        layout = gl.NVMMASharedLayout(0, 32, 2)
    return TensorDescriptor(base, shape, strides, block, layout)


def descriptor_of(template: Any, base: Any) -> Any:
    """``template`` for another tensor of the same layout; copy.copy takes ten times as long."""
    descriptor = object.__new__(type(template))
    vars(descriptor).update(vars(template), base=base)
    return descriptor
