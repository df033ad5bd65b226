"""What stands behind flash-attn's module names once ``flash_attn.install`` has put it there."""
