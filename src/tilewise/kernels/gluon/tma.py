"""TMA copies by one name in every version of Triton."""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.8 has renamed these
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
store_wait = tma.store_wait


@builtin
def async_add(tensor_desc, coord, src, _semantic=None):
    """Adds a tile in shared memory to global memory; ``store_wait`` waits for it too. Before 3.8
    Triton's builder has it and Gluon does not."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )
