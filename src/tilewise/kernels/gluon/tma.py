"""TMA copies by one name in every version of Triton: 3.9 has renamed them."""

from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
store_wait = tma.store_wait
