"""GroupNorm with and without the activation behind it, and what is not that."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advisor.swap.rewrite.wrap import StepRewrite
from tests.swap.rewrite.support import Holder, misses, one, rand, replacement_equals_original

C = 8


def args(dtype=torch.float32, *shape):
    return rand(*(shape or (2, C, 5, 6)), dtype=dtype), rand(C, dtype=dtype), rand(C, dtype=dtype)


ACTIVATED = {
    "silu": lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)),
    "relu": lambda x, w, b: F.group_norm(x, 4, w, b, 1e-3).relu(),
    "gelu": lambda x, w, b: F.gelu(torch.group_norm(x, 2, w, b)),
    "gelu_tanh": lambda x, w, b: F.gelu(F.group_norm(x, 2, w, b), approximate="tanh"),
    "relu_squared": lambda x, w, b: F.relu(F.group_norm(x, 2, w, b)).square(),
    "no weight": lambda x, w, b: F.silu(F.group_norm(x, 2)) * w.sum() + b.sum(),
    "written out": lambda x, w, b: (lambda h: h * torch.sigmoid(h))(F.group_norm(x, 2, w, b)),
    "in place": lambda x, w, b: F.silu(F.group_norm(x, 2, w, b), inplace=True),
    "in place, by a method": lambda x, w, b: F.group_norm(x, 2, w, b).relu_(),
    "a weight alone": lambda x, w, b: F.silu(F.group_norm(x, 2, w)) + b.sum(),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("fn", ACTIVATED.values(), ids=ACTIVATED.keys())
def test_a_norm_and_its_activation_are_one(fn, autocast):
    found = replacement_equals_original("group_act_norm", fn, *args(), autocast=autocast)
    assert found.match.attributes["name"] != "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, C), (2, C, 7), (2, C, 3, 2, 4)])
def test_a_norm_alone_in_any_number_of_dimensions(shape, dtype):
    fn = lambda x, w, b: F.group_norm(x, 2, w, b)  # noqa: E731
    found = replacement_equals_original("group_act_norm", fn, *args(dtype, *shape))
    assert found.match.what == "GroupNorm"
    assert found.match.kind == "norm"


def test_the_module_is_found_too():
    norm = nn.GroupNorm(4, C, eps=1e-3)
    found = replacement_equals_original("group_act_norm", lambda x: F.silu(norm(x)), args()[0])
    assert (found.match.attributes["groups"], found.match.attributes["eps"]) == (4, 1e-3)


def test_a_cast_to_fewer_bits_belongs_to_it():
    fn = lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)).half()  # noqa: E731
    found = replacement_equals_original("group_act_norm", fn, *args())
    assert found.match.attributes["dtype"] is torch.float16


def test_a_cast_to_more_bits_does_not():
    fn = lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)).float()  # noqa: E731
    assert one("group_act_norm", fn, *args(torch.float16)).match.attributes["dtype"] is torch.float16


NORM_ALONE = {
    "the norm is used elsewhere": lambda x, w, b: (lambda h: F.silu(h) + h)(F.group_norm(x, 2, w, b)),
    "the norm is returned": lambda x, w, b: (lambda h: (F.silu(h), h))(F.group_norm(x, 2, w, b)),
    "two activations of it": lambda x, w, b: (lambda h: F.silu(h) + F.relu(h))(F.group_norm(x, 2, w, b)),
    "a gate by another tensor": lambda x, w, b: F.group_norm(x, 2, w, b) * torch.sigmoid(x),
    "dropout between": lambda x, w, b: F.silu(F.dropout(F.group_norm(x, 2, w, b), 0.0)),
    "scaled between": lambda x, w, b: F.silu(F.group_norm(x, 2, w, b) * 2),
    "another activation": lambda x, w, b: F.mish(F.group_norm(x, 2, w, b)),
}


@pytest.mark.parametrize("fn", NORM_ALONE.values(), ids=NORM_ALONE.keys())
def test_what_is_more_than_an_activation_is_left_to_stand(fn):
    found = replacement_equals_original("group_act_norm", fn, *args())
    assert found.match.attributes["name"] == "none"


def test_of_two_activations_the_first_belongs_to_it():
    fn = lambda x, w, b: F.gelu(F.silu(F.group_norm(x, 2, w, b)))  # noqa: E731
    assert replacement_equals_original("group_act_norm", fn, *args()).match.attributes["name"] == "silu"


NONE = {
    "instance norm": lambda x, w, b: F.silu(F.instance_norm(x, weight=w, bias=b)),
    "batch norm": lambda x, w, b: F.silu(F.batch_norm(x, None, None, w, b, training=True)),
    "layer norm": lambda x, w, b: F.silu(F.layer_norm(x, x.shape[1:])) * w.sum() + b.sum(),
    "no norm": lambda x, w, b: F.silu(x * w[:, None, None] + b[:, None, None]),
    "changed in place later": lambda x, w, b: F.group_norm(x, 2, w, b).add_(1),
}


@pytest.mark.parametrize("fn", NONE.values(), ids=NONE.keys())
def test_what_is_no_group_norm_is_left_alone(fn):
    misses("group_act_norm", fn, *args())


def test_what_the_kernel_does_not_take_is_said():
    x = torch.randn(2, C, 4, 4).contiguous(memory_format=torch.channels_last)
    found = one("group_act_norm", lambda x: F.group_norm(x, 2), x)
    from advisor.swap.site import Example

    (candidate,) = found.match.candidates
    assert "channels_last" in str(candidate.unsupported(Example((x,))))
    assert "float64" in str(candidate.unsupported(Example((x.contiguous().double(),))))


class Residual(nn.Module):
    """A U-Net's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, C), nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.silu(self.norm(x)))


def test_under_autocast_the_kernel_writes_what_the_convolution_reads():
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(2, C, 6, 6, requires_grad=True)
    step = StepRewrite(model, "forward")
    assert step.install() == ""
    with step.collecting(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    (site,) = [site for site in step.sites() if "GroupNorm" in site.what]
    (example, *_) = site.examples
    assert example.args[0].dtype is torch.float32
    assert site.original(*example.args).dtype is torch.bfloat16
    (candidate,) = site.candidates
    assert candidate.call(*example.args).dtype is torch.bfloat16


def test_a_tensor_that_depends_on_its_group_count_is_not_guessed():
    def fn(holder, x):
        return F.silu(F.group_norm(x, holder.groups, holder.w))

    holder = Holder(fn, w=torch.randn(C))
    holder.groups = 4
    assert one("group_act_norm", holder, args()[0]).match.attributes["groups"] == 4
