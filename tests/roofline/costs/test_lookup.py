"""Embedding, indexing, sorting and losses: what is read depends on indices."""

import math

import pytest

from advisor.roofline.costs import launch_costs, op_cost
from advisor.roofline.costs.traffic import looked_up
from tests.roofline.costs.calls import BF16, FP32, H200, INT64, call

TABLE = ((50257, 768), FP32)


def test_an_embedding_reads_the_distinct_rows_looked_up_and_not_the_table():
    found = op_cost(call("aten::embedding", TABLE, ((8, 1024), INT64), "-1", "False", "False"))
    # Of 8192 draws from 50257 rows 7559 are distinct.
    assert found.bytes_read == pytest.approx(7559 * 768 * 4 + 8192 * 8, rel=1e-3)
    assert found.bytes_written == 8192 * 768 * 4


def test_more_lookups_than_rows_read_the_table_once():
    found = op_cost(call("aten::embedding", ((10, 768), FP32), ((8192,), INT64)))
    assert found.bytes_read == pytest.approx(10 * 768 * 4 + 8192 * 8)


def test_the_embeddings_backward_splits_sorting_from_summing():
    kernels = [
        "DeviceRadixSortOnesweepKernel",
        "krn_partials_per_segment",
        "compute_grad_weight",
        "sum_and_scatter",
    ]
    found = launch_costs(
        call(
            "aten::embedding_dense_backward",
            ((8192, 768), FP32),
            ((8192,), INT64),
            "50257",
            "-1",
            "False",
            kernels=kernels,
        )
    )
    sort_pass, keys, sums, scatter = found
    assert sort_pass.bytes_read == 16 * 8192
    assert keys.bytes_read == 8 * 8192
    assert sums.bytes_read == pytest.approx(25.3e6, rel=0.01)  # counted on an H200
    assert scatter.bytes_read == pytest.approx(23.4e6, rel=0.01)  # as counted
    assert scatter.bytes_written == scatter.bytes_read


def test_gather_reads_an_expanded_index_once():
    found = op_cost(
        call("aten::gather", TABLE, "0", ((8192, 768), INT64, [1, 0]), "False", ((8192, 768), FP32))
    )
    rows = TABLE[0][0]
    drawn = rows * -math.expm1(-8192 / rows)
    assert found.bytes_read == pytest.approx(drawn * 768 * 4 + 8192 * 8)


def test_rows_that_the_cache_has_forgotten_are_fetched_again():
    # GIVEN 24,576 draws of rows of 4 kB, or of 2 kB, from 50,257: an H200 fetched 92.7 and 43.2 MB of them
    for width, megabytes in ((4096, 92.7), (2048, 43.2)):
        read, again = looked_up(call("", settings=H200), 24_576, 50_257, width)
        assert read / 1e6 == pytest.approx(megabytes, rel=0.02)
        assert looked_up(call(""), 24_576, 50_257, width) == (pytest.approx(read - again), 0.0)
    assert looked_up(call("", settings=H200), 24_576, 512, 2048)[1] == pytest.approx(0, abs=1)


def test_single_elements_cost_whole_fetches():
    found = op_cost(call("aten::gather", ((6000, 4000), FP32), "1", ((6000, 3000), INT64), "False"))
    assert found.bytes_read - 8 * 6000 * 3000 == pytest.approx(4 * 6000 * 4000, rel=0.001)


def test_indexing_with_what_may_be_a_mask_has_no_cost():
    assert op_cost(call("aten::index", ((64, 64), FP32), [[64, 64]])) is None
    assert op_cost(call("aten::index", ((64, 32), FP32), [[7]])).bytes_written == 7 * 32 * 4


def test_adding_by_index_reads_what_it_adds_to():
    found = op_cost(call("aten::index_add_", ((100, 8), FP32), "0", ((30,), INT64), ((30, 8), FP32), "1"))
    rows = 100 * -math.expm1(-0.3)
    assert found.bytes_read == pytest.approx(30 * 8 * 4 + rows * 8 * 4 + 30 * 8)
    assert found.flops == 240


def test_a_scatter_out_of_place_leaves_the_copy_to_its_operator():
    arguments = (((64, 64), FP32), "1", ((64, 8), INT64), ((64, 8), FP32))
    (kernel,) = launch_costs(call("aten::scatter_add", *arguments, kernels=["scatter_gather_kernel"]))
    whole = op_cost(call("aten::scatter_add", *arguments))
    assert whole.bytes_read - kernel.bytes_read == whole.bytes_written - kernel.bytes_written == 4 * 64 * 64


def test_each_pass_over_a_mask_reads_all_of_it():
    kernels = ["DeviceReduceKernel", "DeviceSelectSweepKernel", "DeviceCompactInitKernel"]
    counting, choosing, starting = launch_costs(call("aten::nonzero", ((4096,), "bool"), kernels=kernels))
    assert counting.bytes_read == choosing.bytes_read == 4096
    assert starting.bytes_read == 0


def test_a_transform_in_two_kernels_moves_everything_twice():
    signal = ((64, 64), "c10::complex<float>")
    first, second = launch_costs(
        call("aten::_fft_c2c", signal, "[0, 1]", "0", "True", kernels=["vector_fft<a>", "vector_fft<b>"])
    )
    assert first.bytes_read == first.bytes_written == second.bytes_read == second.bytes_written == 8 * 4096


def test_top_k_reads_all_keys_in_each_counting_pass():
    kernels = [
        "mbtopk::computeBlockDigitCounts<c10::BFloat16>",
        "mbtopk::gatherTopK<c10::BFloat16>",
        "bitonicSortKVInPlace",
    ]
    counting, gathering, sorting = launch_costs(
        call("aten::topk", ((8192, 4096), BF16), "8", "-1", "True", "True", kernels=kernels)
    )
    assert counting.bytes_read == gathering.bytes_read == 2 * 8192 * 4096
    assert sorting.bytes_read == 8192 * 8 * (2 + 8)


def test_top_k_of_more_than_there_are_has_no_cost():
    assert op_cost(call("aten::topk", ((4, 4), BF16), "9", "-1", "True", "True")) is None


def test_the_bags_backward_splits_sorting_from_summing():
    # GIVEN 600,000 draws from a million rows, of which an H200 read 128 MB to scatter them
    arguments = [
        ((30000, 64), FP32), ((600000,), INT64), ((600000,), INT64), ((30000,), INT64), ((0,), INT64),
        "1000000", "False", "0", None, "-1",
    ]  # fmt: skip
    kernels = ["compute_grad_weight_bags<float, long>", "sum_and_scatter<float, long>"]
    sums, scatter = launch_costs(call("aten::_embedding_bag_dense_backward", *arguments, kernels=kernels))
    assert sums.bytes_read == 4 * 30000 * 64 + 3 * 8 * 600_000
    assert scatter.bytes_read == pytest.approx(128e6, rel=0.2)


def test_classes_picked_in_images_share_fetches():
    # GIVEN 21 classes, the positions of each side by side: an H200 read 87.7 MB
    images = ((16, 21, 320, 320), FP32), ((16, 320, 320), INT64)
    found = op_cost(call("aten::nll_loss2d_forward", *images, None, "1", "-100"))
    assert found.bytes_read == pytest.approx(87.7e6, rel=0.02)


def test_the_nll_loss_reads_one_fetch_a_row():
    found = op_cost(
        call("aten::nll_loss_forward", ((4096, 50257), FP32), ((4096,), INT64), None, "1", "-100")
    )
    assert found.bytes_read == pytest.approx(4096 * (64 + 8), rel=1e-3)


def test_the_nll_losss_gradient_writes_one_element_a_row():
    back = call(
        "aten::nll_loss_backward",
        ((), FP32),
        ((4096, 50257), FP32),
        ((4096,), INT64),
        None,
        "1",
        "-100",
        ((), FP32),
    )
    assert op_cost(back).bytes_written == 4096 * 4


def test_mean_squared_error_writes_the_loss_of_each_element():
    found = op_cost(call("aten::mse_loss", ((64, 64), FP32), ((64, 64), FP32), "1"))
    assert (found.bytes_read, found.bytes_written) == (2 * 4 * 4096, 4 * 4096)
