"""The axes of the fault tests: backend with algorithm, and dtype."""

from pathlib import Path

import pytest
import torch

from tilewise.backends.triton import interpreted
from tilewise.testing import poisoned_memory

from .tools import BACKENDS, DTYPES

HERE = Path(__file__).parent
INTERPRETED = {"triton-fa2": {"backend": "triton", "algorithm": "fa2"}} if interpreted() else {}
# Triton's interpreter is slow and has neither float64 nor bfloat16 products. Of the tests that take
# a dtype it runs those in float16; of all others those that are not named here.
DTYPE = "float64 or bfloat16 inputs, which the interpreter does not have"
SLOW = "many tiles: tests/kernels/triton and tests/device have the case"
CPU = "promised by the CPU backend and the reference alone: a NaN that is seen may spread in a tile"
NOT_INTERPRETED = {
    "test_c01_empty_rows_in_every_tile": SLOW,
    "test_c02_causal_of_unequal_lengths_across_tiles": SLOW,
    "test_c02_windows_of_unequal_lengths_across_tiles": DTYPE,
    "test_c04_a_key_that_a_mask_hides_from_every_row": SLOW,
    "test_c04_causal_keeps_the_future_out_of_the_past": CPU,
    "test_c04_hidden_keys_in_every_tile": DTYPE,
    "test_c04_nan_in_a_key_that_is_seen_shows": DTYPE,
    "test_c05_merge_of_two_calls_far_from_zero": DTYPE,
    "test_c05_scores_far_from_zero_across_tiles": SLOW,
    "test_c06_a_window_side_wider_than_everything_hides_nothing": SLOW,
    "test_c06_causal_sets_the_right_side_to_zero": DTYPE,
    "test_c06_one_side_near_and_the_other_without_end": DTYPE,
    "test_c08_all_choices_in_one_process": DTYPE,
    "test_c08_every_other_choice_alternates_in_one_process": DTYPE,
    "test_c08_softcap_across_tiles": DTYPE,
    "test_c09_across_tiles": DTYPE,
    "test_c09_forward_and_backward": SLOW,
    "test_c10_empty_sequences_between_long_ones": DTYPE,
    "test_c12_wrong_lengths_are_refused_by_name": DTYPE,
    "test_c14_a_gradient_with_strides_in_every_tile": DTYPE,
    "test_c14_gradient_that_arrives_with_other_strides": SLOW,
    "test_c15_inputs_in_different_layouts": DTYPE,
    "test_c15_inputs_in_different_layouts_across_tiles": DTYPE,
    "test_c15_inputs_in_different_layouts_in_every_dtype": SLOW,
    "test_c15_packed_inputs_in_different_layouts": SLOW,
    "test_c16_the_case_as_written": DTYPE,
    "test_c17_a_bias_across_tiles": DTYPE,
    "test_c17_a_broadcast_bias_and_its_gradient": SLOW,
    "test_c17_every_length_of_a_bias": DTYPE,
    "test_c18_a_bias_with_rows_far_apart": DTYPE,
    "test_c18_batch_entries_far_apart": DTYPE,
    "test_c18_one_packed_tensor_with_rows_far_apart": DTYPE,
    "test_c18_packed_rows_far_apart": DTYPE,
    "test_c18_sequence_first_rows_far_apart": DTYPE,
    "test_c19_across_tiles": DTYPE,
    "test_c19_gradients_of_out_and_lse_together": SLOW,
    "test_c20_lse_need_not_be_returned": DTYPE,
    "test_c20_no_gradient_wanted": DTYPE,
    "test_c20_only_some_inputs_need_a_gradient": DTYPE,
    "test_c21_equal_bits_in_one_process": SLOW,
    "test_c21_torchs_own_switch": SLOW,
    "test_c27_autocast_is_casting_first": DTYPE,
    "test_c27_autocast_mixes_what_it_can": DTYPE,
    "test_c27_backward_inside_the_autocast_block": DTYPE,
    "test_c28_scores_that_grow_behind_a_left_window": SLOW,
    "test_c28_scores_that_grow_behind_the_causal_mask_across_tiles": SLOW,
}
# What the kernels get wrong so far.
WRONG = {
    "test_c05_equal_scores_far_from_zero": "beside scores of 10^5 lse has no digits in float32",
}


def pytest_collection_modifyitems(config, items):
    dropped = []
    for item in items:
        parameters = getattr(item, "callspec", None)
        backend = None if parameters is None else parameters.params.get("backend")
        if backend not in INTERPRETED.values():
            continue
        item.add_marker(pytest.mark.interpret)
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        name = item.originalname
        if parameters.params.get("dtype", torch.float16) != torch.float16:
            dropped.append(item)
        elif name in NOT_INTERPRETED:
            item.add_marker(pytest.mark.skip(reason=NOT_INTERPRETED[name]))
        elif name in WRONG:
            item.add_marker(pytest.mark.xfail(reason=WRONG[name], strict=True))
    config.hook.pytest_deselected(items=dropped)
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]


@pytest.fixture(params=[*BACKENDS.values(), *INTERPRETED.values()], ids=[*BACKENDS, *INTERPRETED])
def backend(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture
def poisoned():
    """Uninitialised memory is NaN, so that an unwritten result shows."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The inputs are small, and beside other processes more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
