"""The levels of memory, set against published figures."""

import pytest

from advisor.roofline.device_table import builtin_rows
from advisor.roofline.devices import Device, device_of_row, find_device
from advisor.roofline.hierarchy import hierarchy

H200 = {
    "name": "NVIDIA H200", "totalGlobalMem": 150_109_880_320, "numSms": 132, "regsPerMultiprocessor": 65_536,
    "sharedMemPerMultiprocessor": 233_472,
}  # fmt: skip


def levels_of(device):
    return {level.name.split(" (")[0]: level for level in hierarchy(device)}


@pytest.mark.parametrize(
    ("device", "level", "bytes_per_s"),
    [
        # Dao et al., FlashAttention (2022), figure 1: SRAM of the A100 at 19 TB/s.
        ("a100-sxm-40gb", "Shared memory and L1", 19e12),
        # As an independent survey has them (PubMed Central PMC10448217, table 3).
        ("a100-sxm-40gb", "L2 cache", 7219e9),
        ("v100-sxm2-32gb", "L2 cache", 3133e9),
        # CDNA 2 whitepaper: 4 KB per clock.
        ("mi210", "L2 cache", 6.96e12),
        ("mi300x", "Last-level cache", 17.2e12),
        ("h100-sxm", "Shared memory and L1", 132 * 128 * 1.98e9),
        ("h200", "Disk", 4 * 32e9 / 8 * 128 / 130),
    ],
)
def test_a_bandwidth_is_the_published_one(device, level, bytes_per_s):
    found = levels_of(find_device(override=device))[level].bandwidth_bytes_per_s
    assert found == pytest.approx(bytes_per_s, rel=0.03)


def test_sizes_are_those_that_the_driver_reports():
    # GIVEN a driver that reports another amount of shared memory than the table
    found = levels_of(find_device({**H200, "sharedMemPerMultiprocessor": 100_000}))
    # THEN
    assert found["Registers"].size_bytes == 132 * 65_536 * 4
    assert found["Shared memory and L1"].size_bytes == 132 * 100_000
    assert "driver" in found["Shared memory and L1"].source


def test_sizes_come_from_the_architecture_where_the_driver_is_silent():
    found = levels_of(find_device(override="h200"))
    assert found["Registers"].size_bytes == 132 * 256 * 1024
    assert found["Shared memory and L1"].size_bytes == 132 * 228 * 1024


def test_hip_s_own_spelling_of_shared_memory_is_read():
    amd = {"name": "AMD Instinct MI300X", "numSms": 304, "maxSharedMemoryPerMultiProcessor": 65_536}
    assert levels_of(find_device(amd))["Shared memory and L1"].size_bytes == 304 * 65_536


def test_what_has_no_source_stays_unknown():
    found = levels_of(find_device(override="h200"))
    assert found["L2 cache"].size_bytes == 60 * 2**20
    assert found["L2 cache"].bandwidth_bytes_per_s is None


def test_a_device_without_a_row_has_only_what_the_driver_says():
    found = levels_of(find_device({**H200, "name": "NVIDIA X1000"}))
    assert found["Registers"].size_bytes == 132 * 65_536 * 4
    assert [level.bandwidth_bytes_per_s for level in found.values()] == [None] * len(found)


def test_nothing_known_gives_no_levels():
    assert hierarchy(Device.unknown("mystery")) == []


@pytest.mark.parametrize("key", builtin_rows())
def test_levels_slow_down_on_the_way_out_and_every_figure_has_a_source(key):
    levels = hierarchy(device_of_row(builtin_rows()[key]))
    rates = [level.bandwidth_bytes_per_s for level in levels if level.bandwidth_bytes_per_s]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) >= 4
    assert all(level.source for level in levels if level.size_bytes or level.bandwidth_bytes_per_s)
