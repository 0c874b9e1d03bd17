"""Masks of attention made ready: bits, cells, and lists of blocks that leave out nothing that is seen."""

import pytest
import torch
from advisor.kernels import _attention_masks as masks
from advisor.kernels._triton import INTERPRETED

pytestmark = pytest.mark.quick


@pytest.fixture
def device():
    if torch.cuda.is_available() and not INTERPRETED:
        return torch.device("cuda")
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process, and there is no GPU: set TRITON_INTERPRET=1")
    return torch.device("cpu")


def _mask(kind, rows, cols):
    i, j = torch.arange(rows)[:, None], torch.arange(cols)
    if kind == "random":
        return torch.rand(2, 1, rows, cols, generator=torch.Generator().manual_seed(0)) > 0.5
    if kind == "single":
        return ((i == 64) & (j == 63))[None, None]
    if kind == "corner":
        return ((i == rows - 1) & (j == cols - 1))[None, None]
    if kind == "edges":
        # Open up to a cell's last column but one, and from the next cell's second on.
        return ((j < 63) | (j > 64)).expand(rows, -1)[None, None]
    if kind == "documents":
        return (i // 65 == j // 65)[None, None]
    if kind == "padding":
        return torch.stack([j < cols - 1, j < 1])[:, None, None]
    if kind == "rows":
        return (i % 3 == 0)[None, None]
    return torch.zeros(1, 1, rows, cols, dtype=torch.bool)


KINDS = ["random", "single", "corner", "edges", "documents", "padding", "rows", "nothing"]
SIZES = [(70, 200), (130, 65), (1, 33)]


def _unpacked(words, cols):
    """The mask that packed bits stand for."""
    j = torch.arange(cols)
    word = words[..., j // 128 * 4 + j % 8 // 2].cpu()
    return (word >> (j % 128 // 8 * 2 + j % 2)) & 1 == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_bits_stand_for_the_mask_in_both_directions(device, kind, size):
    mask = _mask(kind, *size).expand(2, 2, *size).to(device)
    for x in (mask, mask.transpose(2, 3)):
        words, _ = masks.surveyed(x, pack=True)
        assert torch.equal(_unpacked(words, x.shape[3]), x.cpu())
        assert words.stride()[:2] == tuple(
            0 if x.stride(d) == 0 else s for d, s in enumerate(words.stride()[:2])
        )


def test_bits_past_the_end_are_zero_and_strides_are_followed(device):
    mask = torch.ones(2, 1, 80, 200, dtype=torch.bool, device=device)[:, :, 1::2, 3::2]
    mask[1, 0, 5] = False
    words, _ = masks.surveyed(mask, pack=True)
    assert not _unpacked(words, 128)[..., mask.shape[3] :].any()
    assert torch.equal(_unpacked(words, mask.shape[3]), mask.cpu())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cell", [(64, 64), (16, 32), (128, 16)])
def test_a_cell_says_whether_any_of_its_scores_is_seen_and_any_is_hidden(device, kind, size, cell):
    mask = _mask(kind, *size).expand(2, 2, *size)
    _, cells = masks.surveyed(mask.to(device), *cell)
    for (a, x), (b, y) in _pairs(size, cell):
        part = mask[:, :, x, y]
        wanted = part.any(-1).any(-1).int() + 2 * (~part).any(-1).any(-1).int()
        assert torch.equal(cells[:, :, a, b].cpu(), wanted.int())


def _pairs(size, block):
    """Blocks of rows with blocks of columns: their numbers and slices."""
    first, second = (
        [(n, slice(at, at + step)) for n, at in enumerate(range(0, total, step))]
        for total, step in zip(size, block, strict=True)
    )
    return [(one, other) for one in first for other in second]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(200, 333), (333, 130), (1, 77)])
@pytest.mark.parametrize("block", [(128, 64), (192, 128), (64, 64)])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (-40, 30), (-90, None)])
def test_lists_have_each_block_that_is_seen_in_order_and_no_other(device, kind, size, block, window):
    mask = _mask(kind, *size).expand(2, 2, *size)
    _, cells = masks.surveyed(mask.to(device))
    low, high = window
    lists = masks.listed(
        cells, block[0] // 64, block[1] // 64, *block, size[1], low or 0, high or 0,
        (low is not None, high is not None),
    ).cpu()  # fmt: skip
    assert lists.shape[2:] == (-(-size[0] // block[0]), -(-size[1] // block[1]) + 1)
    distance = torch.arange(size[1]) - torch.arange(size[0])[:, None]
    inside = torch.ones_like(mask)
    if low is not None:
        inside = inside & (distance >= low)
    if high is not None:
        inside = inside & (distance <= high)
    for plane in ((0, 0), (1, 1)):
        for own in range(lists.shape[2]):
            entries = lists[plane][own]
            found = entries[1 : 1 + int(entries[0])].tolist()
            assert len(found) >= 1
            assert [e // 4 for e in found] == sorted({e // 4 for e in found})
            listed = dict(divmod(e, 4) for e in found)
            for (a, x), (b, y) in _pairs(size, block):
                if a != own:
                    continue
                part = mask[plane][x, y]
                if (part & inside[plane][x, y]).any():
                    assert b in listed, "what is seen is left out"
                if b in listed and len(found) > 1:
                    assert part.any(), "nothing of it is seen"
                assert listed.get(b) != 2 or part.all(), "what is hidden is not masked"


def test_one_score_more_lists_one_block_more(device):
    mask = _mask("documents", 260, 260).to(device)
    before = masks.listed(masks.surveyed(mask)[1], 2, 1, 128, 64, 260, 0, 0, (False, False))
    mask[0, 0, 3, 255] = True
    after = masks.listed(masks.surveyed(mask)[1], 2, 1, 128, 64, 260, 0, 0, (False, False))
    assert int(after[0, 0, 0, 0]) == int(before[0, 0, 0, 0]) + 1
    assert int(after[0, 0, 0, int(after[0, 0, 0, 0])]) == 4 * 3 + 1


def test_lists_longer_than_are_made_at_a_time_go_on(device, monkeypatch):
    mask = torch.ones(1, 1, 64, 64 * 11, dtype=torch.bool, device=device)
    mask[..., 64:128] = False
    monkeypatch.setattr(masks, "_LISTED", 4)
    lists = masks.listed(masks.surveyed(mask)[1], 1, 1, 64, 64, 64 * 11, 0, 0, (False, False))
    assert lists.flatten().tolist()[:11] == [10, *[4 * n + 2 for n in range(11) if n != 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_as_the_copy_engine_takes_them(dtype):
    whole = torch.randn(2, 3, 48, 72).to(dtype)
    given = {
        "as they are": whole,
        "the same for all": whole[:1, :1].expand(2, 3, 48, 72),
        "a row each": whole[..., :1, :],
        "rows of odd length": whole[..., :67].contiguous(),
        "across": whole.transpose(2, 3),
        "a number a row": whole[..., :1].expand(2, 3, 48, 72),
        "off by one": whole[..., 1:],
        "turned about": whole.transpose(0, 1),
    }
    for name, numbers in given.items():
        taken = masks.copyable(numbers)
        # THEN they are the same, in rows of 16 bytes, no stride is 0, and only what must be is copied
        assert torch.equal(taken.expand(numbers.shape), numbers), name
        assert taken.stride(3) == 1, name
        assert taken.data_ptr() % 16 == 0, name
        assert all(s > 0 and s * taken.element_size() % 16 == 0 for s in taken.stride()[:3]), name
        kept = name in ("as they are", "the same for all", "a row each", "turned about")
        assert (taken.data_ptr() == whole.data_ptr()) == kept, name
