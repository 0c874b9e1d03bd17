"""The demo's models learn their made-up data, so that their loops are real ones."""

import itertools

import pytest
import torch

from advisor.demo.convnet import CLASSES, ConvNet, ConvNetSize, Images, images
from advisor.demo.gpt import GPT, Attention, GPTSize, tokens

SMALL_GPT = GPTSize(vocabulary=50, context=16, width=32, layers=2, heads=4, batch=8)
SMALL_CONVNET = ConvNetSize(pixels=16, width=8, blocks=1, batch=20)


def losses(model: torch.nn.Module, batches: list, steps: int) -> list[float]:
    """Losses of plain training, without a Trainer."""
    model.log = lambda *args, **kwargs: None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for step, batch in zip(range(steps), itertools.cycle(batches), strict=False):
        loss = model.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (lambda: GPT(SMALL_GPT), lambda: tokens(SMALL_GPT, 4)),
        (lambda: ConvNet(SMALL_CONVNET), lambda: images(SMALL_CONVNET, 4)),
    ],
    ids=["gpt", "convnet"],
)
def test_the_loss_falls_well_below_where_it_started(model, batches) -> None:
    torch.manual_seed(0)
    history = losses(model(), list(batches()), steps=40)
    assert history[-1] < 0.7 * history[0]


def test_a_loader_has_a_batch_for_each_step_and_no_more() -> None:
    assert len(tokens(SMALL_GPT, 7)) == 7
    assert len(images(SMALL_CONVNET, 7)) == 7


def test_each_token_follows_from_the_one_before() -> None:
    (text,) = next(iter(tokens(SMALL_GPT, 1)))
    strides = (text[:, 1:] - text[:, :-1]) % SMALL_GPT.vocabulary
    assert text.shape == (8, 17)
    assert set(strides.unique().tolist()) == {1, 2, 3}


def test_attention_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    attention = Attention(SMALL_GPT).eval()
    x = torch.randn(1, 16, 32)
    changed = x.clone()
    changed[0, 10:] += 1
    torch.testing.assert_close(attention(x)[0, :10], attention(changed)[0, :10])
    assert not torch.allclose(attention(x)[0, 10:], attention(changed)[0, 10:])


def test_an_image_is_the_same_at_each_look_and_its_class_is_balanced() -> None:
    data = Images(pixels=16, count=3 * CLASSES)
    first, again = data[4], data[4]
    torch.testing.assert_close(first[0], again[0])
    assert first[0].shape == (3, 16, 16)
    assert torch.bincount(torch.tensor([data[i][1] for i in range(len(data))])).tolist() == [3] * CLASSES
