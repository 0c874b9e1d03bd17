"""The rule on layouts says of a trace what the device did: gradients are held against float64's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, schedule

from advisor.advice.advise import advise
from advisor.advice.rule import find_rule
from advisor.roofline.analysis import analyse_timeline
from advisor.trace.link import join
from advisor.trace.read import decode_trace

HEADS, DIM, STEPS = 4, 64, 6
CAUSAL = {"is_causal": True}


def gradient(like: Tensor, how: str) -> Tensor:
    batch, heads, tokens, dim = like.shape
    if how == "expanded":
        return torch.ones((), device=like.device, dtype=like.dtype).expand(like.shape)
    if how == "heads outside":
        return torch.randn(batch, heads, tokens, dim, device=like.device, dtype=like.dtype)
    return torch.randn(batch, tokens, heads, dim, device=like.device, dtype=like.dtype).transpose(1, 2)


def two_calls(first, second, tokens: int, lays_out: bool):
    """Queries, keys and values, output gradient, settings and gradients of each."""
    made = []
    for how, settings in (first, second):
        qkv = [
            torch.randn(2, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for _ in range(3)
        ]
        y = F.scaled_dot_product_attention(*qkv, **settings)
        if lays_out:
            y.register_hook(lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2))
        grad = gradient(y, how)
        made.append((qkv, grad, settings, torch.autograd.grad(y, qkv, grad)))
    return made


def off(qkv: list[Tensor], grad: Tensor, settings: dict[str, object], mine: tuple[Tensor, ...]) -> float:
    exact = [x.detach().double().requires_grad_() for x in qkv]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*exact, **settings)
    theirs = torch.autograd.grad(out, exact, grad.double())
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("number", "first", "second", "lays_out"),
    [
        (0, ("tokens outside", CAUSAL), ("heads outside", CAUSAL), False),
        (1, ("heads outside", CAUSAL), ("tokens outside", CAUSAL), False),
        (2, ("tokens outside", CAUSAL), ("tokens outside", CAUSAL), False),
        (3, ("tokens outside", CAUSAL), ("heads outside", {**CAUSAL, "scale": 0.3}), False),
        (4, ("tokens outside", CAUSAL), ("heads outside", {}), False),
        (5, ("expanded", CAUSAL), ("tokens outside", CAUSAL), False),
        (6, ("expanded", CAUSAL), ("heads outside", CAUSAL), False),
        (7, ("tokens outside", CAUSAL), ("heads outside", CAUSAL), True),
    ],
)
def test_the_rule_fires_where_gradients_are_wrong_and_nowhere_else(tmp_path, number, first, second, lays_out):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    # GIVEN a number of tokens of this case's own, so that no other's plans serve it
    tokens = 128 * (number + 2)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    steps = schedule(wait=1, warmup=1, active=STEPS - 2)
    with profile(activities=activities, record_shapes=True, schedule=steps) as recorded:
        for _ in range(STEPS):
            calls = two_calls(first, second, tokens, lays_out)
            torch.cuda.synchronize()
            recorded.step()
    path = Path(tmp_path) / "trace.json"
    recorded.export_chrome_trace(str(path))

    raw = path.read_bytes()
    found = advise(
        analyse_timeline(join(decode_trace(raw, str(path), len(raw)))), [find_rule("attention.layouts")]
    )
    if found.not_applicable:
        pytest.skip("PyTorch picks another backend than cuDNN here")
    errors = [off(*call) for call in calls]
    assert errors[0] < 0.05
    assert bool(found.advice) is (errors[1] > 0.5), (errors, found.advice)
