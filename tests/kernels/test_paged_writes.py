"""Writing to a paged cache: each token in its slot, in the cache's dtype, and nothing else touched."""

import pytest
import torch
from advisor.kernels import _paged_ops as ops
from advisor.kernels._device import UnsupportedError
from advisor.kernels.paged_attention import write_to_cache

from tests.kernels.checks import assert_bit_equal, cases, skip_unless_runnable

DTYPES = cases([torch.float32, torch.float16, torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", cases(["dense", "heads_first"]))
def test_tokens_are_written_to_their_slots_and_nowhere_else(device, dtype, layout):
    skip_unless_runnable(device, dtype)
    # GIVEN tokens of three sequences' projections, two of which have no slot
    both = torch.randn(2, 3, 2, 3, 24, device=device).to(dtype)
    key, value = both[0], both[1]
    slots = torch.tensor([[7, -1, 0], [12, 16 * 4, 63]], device=device)[:, :2]
    key, value = key[:2, :2], value[:2, :2]
    caches = [torch.randn(16, 4, 3, 24, device=device).to(dtype) for _ in range(2)]
    if layout == "heads_first":
        caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    expected = [x.clone() for x in caches]
    for x, new in zip(expected, (key, value), strict=True):
        x[1, 3], x[3, 0] = new[0, 0], new[1, 0]
    write_to_cache(key, value, *caches, slots)
    for got, right in zip(caches, expected, strict=True):
        assert_bit_equal(got, right)


@pytest.mark.quick
def test_writing_casts_to_the_caches_dtype_and_tells_autograd_that_it_wrote(device):
    key = torch.randn(1, 2, 16, device=device)
    caches = [torch.zeros(1, 4, 2, 16, dtype=torch.float16, device=device) for _ in range(2)]
    versions = [x._version for x in caches]
    write_to_cache(key, key, *caches, torch.tensor([2], device=device))
    assert_bit_equal(caches[0][0, 2], key[0].half())
    assert [x._version for x in caches] == [n + 1 for n in versions]
    assert key._version == 0


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_writing_8_bits_divides_by_the_scale_rounds_and_clamps(device, dtype):
    skip_unless_runnable(device, dtype)
    limit = ops.LIMITS[dtype]
    rows = torch.tensor([[0.26, -0.24, 1e6, -1e6], [0.3, 0.6, -0.9, 8.0]], device=device)[None]
    unit = torch.tensor([0.5, 0.1], device=device)
    caches = [torch.zeros(1, 1, 2, 4, dtype=dtype, device=device) for _ in range(2)]
    write_to_cache(rows, -rows, *caches, torch.tensor([0], device=device), k_scale=unit, v_scale=unit)
    wanted = (rows[0] / unit[:, None]).clamp(-limit, limit)
    for cache, sign in zip(caches, (1, -1), strict=True):
        got = cache[0, 0].float()
        if dtype == torch.int8:
            assert (got - sign * wanted).abs().max() <= 0.5
        else:
            assert_bit_equal(got, (sign * wanted).to(dtype).float())
        assert got.abs().max() == limit


@pytest.mark.quick
def test_writing_no_tokens_changes_nothing(device):
    caches = [torch.ones(1, 4, 2, 16, device=device) for _ in range(2)]
    nothing = torch.empty(0, 2, 16, device=device)
    write_to_cache(nothing, nothing, *caches, torch.empty(0, dtype=torch.int64, device=device))
    assert all((x == 1).all() for x in caches)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": torch.zeros(3, 2, 8)}, "of the cache"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "one a token"),
        ({"slots": torch.zeros(3)}, "float32"),
        ({"key": torch.zeros(3, 2, 16, requires_grad=True)}, "no_grad"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_reason(change, says):
    given = {
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 16),
        "k_cache": torch.zeros(1, 4, 2, 16),
        "v_cache": torch.zeros(1, 4, 2, 16),
        "slots": torch.zeros(3, dtype=torch.int64),
        **change,
    }
    with pytest.raises(UnsupportedError, match=says):
        write_to_cache(**given)
