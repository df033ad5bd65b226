"""The torch operators: schemas, fake implementations, autograd, vmap."""
