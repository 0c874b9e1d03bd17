"""The cache's tables: who has which block, what a step is told, and that no step waits for the device."""

import pytest
import torch
from advisor.kernels.attention import attention_reference
from advisor.kernels.paged_attention import CacheFullError, PagedKVCache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def _cache(blocks=8, block_size=4, layers=1, device="cpu", **options):
    return PagedKVCache(
        layers=layers, blocks=blocks, block_size=block_size, heads=2, head_dim=16, device=device,
        dtype=torch.float32, **options,
    )  # fmt: skip


def test_blocks_are_taken_as_tokens_come_and_given_back():
    cache = _cache()
    first, second = cache.allocate(), cache.allocate()
    assert cache.free_blocks == 8
    cache.append([first, second], [5, 4])
    assert cache.free_blocks == 8 - 2 - 1
    cache.append([first, second])
    assert cache.free_blocks == 8 - 2 - 2
    assert (cache.length(first), cache.length(second)) == (6, 5)
    cache.free(first)
    assert cache.free_blocks == 8 - 2


def test_a_step_is_told_lengths_tables_and_the_slots_of_its_new_tokens():
    cache = _cache()
    first, second = cache.allocate(), cache.allocate()
    cache.append([first], 3)
    # WHEN the second gets five tokens and the first two, of which one opens a block
    step = cache.append([second, first], [5, 2])
    assert step.context_lens.tolist() == [5, 5]
    assert (step.max_context_len, step.total_context_len) == (5, 10)
    assert step.block_table.dtype == step.context_lens.dtype == torch.int32
    (a, b), (c, d) = step.block_table.tolist()
    assert len({a, b, c, d}) == 4
    assert step.slots.tolist() == [4 * a, 4 * a + 1, 4 * a + 2, 4 * a + 3, 4 * b, 4 * c + 3, 4 * d]


def test_what_does_not_fit_is_refused_and_changes_nothing():
    cache = _cache(blocks=3)
    first, second = cache.allocate(), cache.allocate()
    cache.append([first], 4)
    with pytest.raises(CacheFullError, match="4 more blocks of 4 tokens are needed, 2 are free"):
        cache.append([first, second], [8, 5])
    assert cache.free_blocks == 2
    assert (cache.length(first), cache.length(second)) == (4, 0)
    assert cache.append([second], 8).slots.numel() == 8


@pytest.mark.parametrize(
    ("sequences", "tokens", "error"),
    [
        ([0, 0], 1, ValueError),
        ([0], [1, 1], ValueError),
        ([0], -1, ValueError),
        ([1], 1, KeyError),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(sequences, tokens, error):
    cache = _cache()
    assert cache.allocate() == 0
    with pytest.raises(error):
        cache.append(sequences, tokens)
    assert cache.length(0) == 0


def test_a_freed_sequence_is_gone():
    cache = _cache()
    sequence = cache.allocate()
    cache.free(sequence)
    for use in (cache.free, cache.length, lambda s: cache.append([s])):
        with pytest.raises(KeyError, match="allocate"):
            use(sequence)


def test_a_step_without_sequences_or_tokens_is_empty():
    cache = _cache()
    step = cache.append([])
    assert step.slots.numel() == step.context_lens.numel() == step.total_context_len == 0
    sequence = cache.allocate()
    assert cache.append([sequence], 0).context_lens.tolist() == [0]


class Allocation(RuleBasedStateMachine):
    """Random lives of sequences: no block ever has two owners, and none is lost."""

    def __init__(self):
        super().__init__()
        self.cache = _cache(blocks=12, block_size=3)
        self.lengths = {}

    @rule()
    def allocate(self):
        sequence = self.cache.allocate()
        assert sequence not in self.lengths
        self.lengths[sequence] = 0

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def append(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True, min_size=1))
        tokens = [data.draw(st.integers(0, 7)) for _ in chosen]
        needed = sum(
            -(-(self.lengths[s] + n) // 3) - -(-self.lengths[s] // 3)
            for s, n in zip(chosen, tokens, strict=True)
        )
        if needed > self.cache.free_blocks:
            with pytest.raises(CacheFullError):
                self.cache.append(chosen, tokens)
            return
        step = self.cache.append(chosen, tokens)
        for sequence, count in zip(chosen, tokens, strict=True):
            self.lengths[sequence] += count
        assert step.context_lens.tolist() == [self.lengths[s] for s in chosen]
        assert step.slots.unique().numel() == sum(tokens)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def free(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.lengths)))
        self.cache.free(sequence)
        del self.lengths[sequence]

    @invariant()
    def every_block_has_one_owner_or_is_free(self):
        step = self.cache.append(sorted(self.lengths), 0)
        owned = []
        for row, n in zip(step.block_table.tolist(), step.context_lens.tolist(), strict=True):
            owned += row[: -(-n // 3)]
        assert len(set(owned)) == len(owned)
        assert len(owned) + self.cache.free_blocks == 12


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@pytest.mark.quick
def test_generating_token_by_token_gives_what_causal_attention_gives(device, poisoned):
    # GIVEN two layers of two sequences, prompts of 5 and 3 tokens and four steps after them
    lengths, steps, layers = [9, 7], 4, 2
    q, k, v = (torch.randn(layers, 2, 9, 2, 16, device=device) for _ in range(3))
    cache = _cache(layers=layers, device=device)
    sequences = [cache.allocate() for _ in lengths]
    prompt = cache.append(sequences, [n - steps for n in lengths])
    for layer in range(layers):
        new = [torch.cat([x[layer, b, : n - steps] for b, n in enumerate(lengths)]) for x in (k, v)]
        prompt.write(layer, *new)
    # WHEN each step writes the new token of each layer and looks at all before
    outs = torch.empty(layers, steps, 2, 2, 16, device=device)
    for at in range(steps):
        step = cache.append(sequences)
        place = [n - steps + at for n in lengths]
        for layer in range(layers):
            new = [torch.stack([x[layer, b, i] for b, i in enumerate(place)]) for x in (q, k, v)]
            step.write(layer, *new[1:])
            outs[layer, at] = step.attend(layer, new[0])
    # THEN that is causal attention over the whole
    for layer in range(layers):
        for b, n in enumerate(lengths):
            whole = (x[layer, b, :n].transpose(0, 1)[None] for x in (q, k, v))
            expected = attention_reference(*whole, causal=True)[0].transpose(0, 1)
            torch.testing.assert_close(outs[layer, :, b], expected[-steps:], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.quick
def test_no_step_waits_for_the_device(device):
    if device.type == "cpu":
        pytest.skip("nothing to wait for")
    cache = _cache(device=device)
    sequence = cache.allocate()
    row = torch.randn(1, 2, 16, device=device)
    for mode in ("default", "error"):  # the first step compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            step = cache.append([sequence])
            step.write(0, row, row)
            step.attend(0, row)
            step.attend(0, row, window_left=2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
