import pytest

from tilewise.bench import cells
from tilewise.bench.cells import Asked


def test_the_papers_shapes_hold_16k_tokens_of_hidden_size_2048():
    found = cells.papers(Asked("cuda"), ["fwd", "bwd"])
    assert len(found) == 2 * 3 * 2 * 5
    for cell in found:
        s = cell.shape
        assert (s.batch * s.seqlen, s.nheads * s.head_dim) == (16384, 2048)
        assert (s.dtype, s.device, s.dropout_p, cell.suite) == (
            "bfloat16",
            "cuda",
            0.0,
            cell.direction,
        )
    assert {(c.shape.head_dim, c.shape.causal, c.shape.seqlen) for c in found} == {
        (d, causal, n)
        for d in (64, 128, 256)
        for causal in (True, False)
        for n in (1024, 2048, 4096, 8192, 16384)
    }


def test_generations_have_every_panel_and_a_set_of_few_heads():
    found = cells.generations(Asked("cuda"))
    gpt2 = [c for c in found if c.shape.nheads == 12]
    few = [c for c in found if c.shape.nheads == 4]
    assert len(gpt2) + len(few) == len(found) == 12 * (6 + 4)
    assert all(c.shape.batch * c.shape.seqlen == 65536 for c in gpt2)
    assert all(c.shape.batch == 1 for c in few)
    panels = {(c.direction, c.shape.causal, c.shape.dropout_p) for c in few}
    assert panels == {
        (d, causal, p)
        for d in ("fwd", "bwd", "fwd_bwd")
        for causal in (True, False)
        for p in (0.0, 0.1)
    }


def test_what_is_asked_for_replaces_the_default():
    asked = Asked("cpu", 3, 5, [7, 9], [16, 32], True, "float16", 0.25)
    for found in (cells.generations(asked, ["fwd"]), cells.papers(asked, ["fwd"])):
        sizes = {(c.shape.batch, c.shape.nheads, c.shape.causal, c.shape.dtype) for c in found}
        assert sizes == {(3, 5, True, "float16")}
        assert {(c.shape.seqlen, c.shape.head_dim) for c in found} == {
            (n, d) for n in (7, 9) for d in (16, 32)
        }
    assert {c.shape.dropout_p for c in cells.papers(asked, ["fwd"])} == {0.25}
    assert {c.shape.dropout_p for c in cells.generations(asked, ["fwd"])} == {0.0, 0.25}


def test_operations_are_counted_as_the_papers_do():
    shape = cells.papers(Asked("cuda", causal=False), ["fwd"])[0].shape
    forward = 4 * shape.batch * shape.nheads * shape.seqlen**2 * shape.head_dim
    for direction, factor in (("fwd", 1), ("bwd", 2.5), ("fwd_bwd", 3.5)):
        assert shape.flops(direction) == pytest.approx(factor * forward)


def test_grouped_heads_inputs_and_packed_sequences():
    asked = Asked("cuda", head_dims=[64], nheads=32, nheads_kv=8, inputs=["randn", "large"])
    found = cells.papers(asked, ["fwd"])
    assert len(found) == 2 * 2 * 5
    assert {(c.shape.heads_kv, c.shape.inputs) for c in found} == {(8, "randn"), (8, "large")}
    assert "32/8 heads" in str(found[0]) and "large" in str(found[-1])

    packed = cells.papers(Asked("cuda", packed=True), ["fwd", "bwd"])
    assert len(packed) == 2 * 3 * 2
    for cell in packed:
        s = cell.shape
        assert (s.lengths, s.batch, s.seqlen) == (cells.MIXED, 8, 8192)
        assert sum(s.lengths) == 16384
        squares = sum(n**2 for n in s.lengths)
        assert s.flops("fwd") == 4 * s.nheads * s.head_dim * squares * (0.5 if s.causal else 1)
