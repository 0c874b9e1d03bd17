"""Copies keep what kernels look at; stand-ins share nothing that counts."""

import pytest
import torch
from torch import nn

from advisor.swap.adversaries import VALUES, changed, hard, narrowed, not_a_number
from advisor.swap.site import Example
from advisor.swap.tensors import copied, has_hooks, remade, stand_in


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t[:, 1:, ::2],
        lambda t: t[:, :1].expand(4, 5, 6),
        lambda t: t.flatten()[3:],
        lambda t: t[0, 0, 0],
        lambda t: t[:0],
    ],
)
def test_a_copy_has_the_same_values_strides_and_alignment(make) -> None:
    original = make(torch.arange(120.0).view(4, 5, 6)).detach().requires_grad_()
    copy = copied(original)
    assert torch.equal(copy, original)
    assert copy.stride() == original.stride()
    assert copy.requires_grad
    assert copy.is_leaf
    if original.numel():
        assert copy.data_ptr() % 16 == original.data_ptr() % 16
        assert copy.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


def test_a_tensor_that_is_passed_twice_is_copied_once() -> None:
    q = torch.randn(3)
    (a, b), kwargs = remade(((q, q), {"k": q}), copied)
    assert a is b is kwargs["k"]
    assert a is not q


def test_a_stand_in_has_the_parameters_and_not_the_hooks() -> None:
    # GIVEN a module with a hook, a tied weight and a child
    calls: list[int] = []
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    module[0].register_forward_hook(lambda *_: calls.append(1))
    # WHEN a stand-in on copies is called and written to
    twin = stand_in(module, copied)
    twin(torch.randn(8, 4))
    with torch.no_grad():
        twin[0].weight.zero_()
    # THEN nothing of it reaches the module
    assert calls == []
    assert module[1].num_batches_tracked == 0
    assert module[0].weight.abs().sum() > 0
    assert twin[0].weight is twin[2].weight
    assert has_hooks(module[0])
    assert not has_hooks(twin[0])


def test_a_stand_in_in_float64_computes_in_float64() -> None:
    twin = stand_in(nn.LayerNorm(4), lambda p: p.double())
    assert twin(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("name", list(VALUES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hard_values_keep_shape_dtype_strides_and_the_mask(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 8).to(dtype).transpose(1, 2).requires_grad_()
    mask = torch.zeros(6).masked_fill(torch.arange(6) > 3, -torch.inf).to(dtype)
    made = dict(hard(Example((x, mask))))[name]
    assert made.args[0].stride() == x.stride()
    assert made.args[0].dtype == dtype
    assert made.args[0].requires_grad
    assert made.args[0].isfinite().all()
    assert not torch.equal(made.args[0], x)
    assert torch.equal(made.args[1], mask)


def test_only_values_drawn_anew_touch_parameters_and_never_the_modules_own() -> None:
    module = nn.LayerNorm(8)
    example = Example((stand_in(module), torch.randn(3, 8, requires_grad=True)))
    ones = {name: torch.equal(made.args[0].weight, torch.ones(8)) for name, made in hard(example)}
    assert [name for name, kept in ones.items() if not kept] == ["everything drawn anew"]
    assert torch.equal(module.weight, torch.ones(8))


def test_values_of_an_expanded_tensor_stay_equal_along_the_expansion() -> None:
    x = torch.randn(1, 4).expand(3, 4).requires_grad_()
    made = changed(Example((x,)), torch.randn_like).args[0]
    assert made.stride() == (0, 1)
    assert torch.equal(made[0], made[2])


def test_one_nan_is_put_into_each_input() -> None:
    made = not_a_number(Example((torch.randn(3, 4, requires_grad=True),)))
    assert int(made.args[0].isnan().sum()) == 1


def test_a_call_is_narrowed_along_the_rows_that_its_inputs_share() -> None:
    module, weight = nn.LayerNorm(8), torch.randn(8, 8)
    x, target = torch.randn(64, 8, requires_grad=True), torch.arange(64)
    few = narrowed(Example((module, x, weight), {"target": target}), elements=128)
    assert few.args[0] is module
    assert torch.equal(few.args[1], x[:16])
    assert few.args[1].requires_grad
    assert few.args[2] is weight
    assert torch.equal(few.kwargs["target"], target[:16])


def test_a_small_call_is_not_narrowed() -> None:
    example = Example((torch.randn(4, 4),))
    assert narrowed(example) is example


def test_hard_values_of_attention_do_not_make_its_softmax_a_step() -> None:
    # GIVEN queries, of which products with keys like them are as large as their square
    q = torch.randn(2, 4, 64, 32)

    hard_values = dict(hard(Example((q,))))
    softer = dict(hard(Example((q,)), saturates=True))

    # THEN they are scaled to what a softmax still tells apart, and the other sets stay
    assert hard_values["large values"].args[0].square().mean().sqrt() > 50
    assert softer["large values"].args[0].square().mean().sqrt() == pytest.approx(2.0, rel=1e-3)
    assert softer["one huge value"].args[0].max() == 10.0
    assert list(softer) == list(hard_values)
