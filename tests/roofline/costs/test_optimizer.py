"""Foreach and fused optimizers: sizes from lists, from parameters, and from neither."""

from advisor.roofline.costs import Launch, launch_costs, op_cost
from tests.roofline.costs.calls import call, parameter

FUSED = "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
SQUARE = [4096, 4096]
BLOCKS = 4 * 4096 * 4096 // 65536


def test_launches_cover_chunks_in_list_order():
    # GIVEN four squares of 256 chunks each, of which every launch takes 320
    kernels = [Launch(FUSED, blocks) for blocks in (320, 320, 320, 64)]
    # WHEN fused AdamW updates them
    found = launch_costs(call("aten::_fused_adamw_", *[[SQUARE] * 4] * 4, kernels=kernels))
    # THEN a full launch reads parameter, gradient and two moments: 335.5 MB, as an H200 counted
    assert [cost.bytes_read for cost in found] == [4 * 4 * 65536 * blocks for blocks in (320, 320, 320, 64)]
    assert [cost.bytes_written for cost in found] == [
        3 * 4 * 65536 * blocks for blocks in (320, 320, 320, 64)
    ]


def test_the_last_chunk_of_a_tensor_is_partial():
    (found,) = launch_costs(call("aten::_foreach_mul_", [[65537], [10]], "2", kernels=[Launch(FUSED, 3)]))
    assert found.bytes_read == 4 * (65537 + 10)


def test_empty_lists_take_the_parameters_if_their_chunks_are_those_launched():
    parameters = [parameter(4096, 4096), parameter(4096)]
    (found,) = launch_costs(
        call("aten::_fused_adamw_", [], [], [], [], kernels=[Launch(FUSED, 257)], parameters=parameters)
    )
    assert found.bytes_read == 4 * 4 * (4096 * 4096 + 4096)


def test_gradients_of_several_steps_are_counted_once():
    step = [parameter(4096, 4096), parameter(4096), parameter(4096)]
    (found,) = launch_costs(
        call("aten::_fused_adamw_", [], [], [], [], kernels=[Launch(FUSED, 258)], parameters=step * 3)
    )
    assert found.bytes_read == 4 * 4 * (4096 * 4096 + 2 * 4096)


def test_a_group_without_vectors_is_recognised():
    parameters = [parameter(4096, 4096), parameter(4096)]
    (found,) = launch_costs(
        call("aten::_fused_adamw_", [], [], [], [], kernels=[Launch(FUSED, 256)], parameters=parameters)
    )
    assert found.bytes_read == 4 * 4 * 4096 * 4096


def test_parameters_that_do_not_fit_the_launched_blocks_are_not_used():
    call_ = call(
        "aten::_fused_adamw_", [], [], [], [], kernels=[Launch(FUSED, 77)], parameters=[parameter(4096, 4096)]
    )
    assert launch_costs(call_) == (None,)


def test_empty_lists_without_parameters_have_no_cost():
    assert launch_costs(call("aten::_fused_adamw_", [], [], [], [], kernels=[Launch(FUSED, 77)])) == (None,)


def test_the_element_type_is_the_functors():
    kernel = Launch(
        "multi_tensor_apply_kernel<TensorListScalarListMetadata<float, 1>, BinaryOpFunctor<c10::BFloat16>>",
        256,
    )
    (found,) = launch_costs(call("aten::_foreach_div_", [SQUARE], "[2]", kernels=[kernel]))
    assert found.bytes_read == 2 * 4096 * 4096


def test_a_second_list_is_read_only_where_there_is_one():
    kernel = Launch(FUSED, 256)
    with_list = launch_costs(call("aten::_foreach_add_", [SQUARE], [SQUARE], "1", kernels=[kernel]))[0]
    with_number = launch_costs(call("aten::_foreach_add_", [SQUARE], "1", kernels=[kernel]))[0]
    assert with_list.bytes_read == 2 * with_number.bytes_read


def test_clipping_reads_the_gradients_and_its_last_kernel_is_small():
    kernels = [
        Launch("multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, 1>>", 256),
        Launch("lpnorm_cleanup", 4),
    ]
    norms, cleanup = launch_costs(call("aten::_foreach_norm", [SQUARE], "2", kernels=kernels))
    assert (norms.bytes_read, norms.bytes_written) == (4 * 4096 * 4096, 0)
    assert cleanup.bytes < 100


def test_fused_sgd_without_momentum_has_no_state():
    plain = op_cost(call("aten::_fused_sgd_", [[64]], [[64]], []))
    assert plain is None  # a list's dtype is in the kernel's name alone
