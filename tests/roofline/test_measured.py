"""Measured roofs: kept per device, found for the same device alone, put in place of the datasheet's."""

import msgspec
import pytest

from advisor.errors import UsageError
from advisor.roofline.bound import classify
from advisor.roofline.devices import find_device
from advisor.roofline.measured import Measured, all_measured, choose_roofs, find, save, with_measured
from advisor.trace.events import MEMCPY

H200 = {"name": "NVIDIA H200", "totalGlobalMem": 150_109_880_320, "numSms": 132}
MEASURED = Measured(
    name="NVIDIA H200",
    total_memory_bytes=150_109_880_320,
    sms=132,
    bandwidth_bytes_per_s=4.27e12,
    peaks={"tensor_bf16": 750e12, "vector_fp32": 51e12},
    launch_ns=4500.0,
    link_bytes_per_s={"to_device_pinned": 55e9, "to_host_pinned": 54e9},
    measured_on="2025-03-01",
    versions={"torch": "2.6.0"},
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINING_ADVISOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_saved_is_found_for_the_same_device(cache):
    path = save(MEASURED)

    assert path.is_relative_to(cache)
    assert find(H200) == MEASURED
    assert all_measured() == [MEASURED]


@pytest.mark.parametrize(
    "properties",
    [
        None,
        {"name": "NVIDIA H200"},
        {**H200, "name": "NVIDIA H200 NVL"},
        {**H200, "totalGlobalMem": 75_000_000_000},
        {**H200, "numSms": 60},
    ],
    ids=["nothing known", "no memory", "another name", "a slice of memory", "a slice of units"],
)
def test_another_device_or_a_partition_finds_nothing(cache, properties):
    save(MEASURED)

    assert find(properties) is None


def test_a_damaged_file_is_as_none(cache):
    save(MEASURED).write_text('{"name": 3')

    assert find(H200) is None
    assert all_measured() == []


def test_a_folder_that_cannot_be_written_is_a_usage_error(cache):
    cache.write_text("a file, not a folder")

    with pytest.raises(UsageError, match="TRAINING_ADVISOR_CACHE"):
        save(MEASURED)


def test_measured_roofs_replace_what_was_measured_and_keep_the_datasheet_beside():
    datasheet = find_device(H200)

    device = with_measured(datasheet, MEASURED)

    assert device.roofs == "measured"
    assert device.peak("tensor_bf16") == 750e12
    assert device.datasheet_peak("tensor_bf16") == datasheet.peak("tensor_bf16") == 989.4e12
    assert device.peak("tensor_fp8") == datasheet.peak("tensor_fp8")
    assert device.ridge("tensor_bf16") == pytest.approx(750 / 4.27)
    assert device.link_bytes_per_s == 55e9
    assert "2025-03-01" in device.bandwidth_source
    assert "2025-03-01" in device.peak_sources["tensor_bf16"]
    assert "2025-03-01" not in device.peak_sources["tensor_fp8"]


def test_auto_prefers_measured_roofs_unless_the_user_has_a_say(cache, tmp_path):
    table = tmp_path / "mine.toml"
    table.write_text('[device.h200]\nbandwidth_bytes_per_s = 4.0e12\nsource = "mine"\n')
    save(MEASURED)
    device, own = find_device(H200), find_device(H200, user_toml=table)

    assert choose_roofs(device, H200).roofs == "measured"
    assert choose_roofs(device, H200, "datasheet").roofs == "datasheet"
    assert choose_roofs(device, H200, named=True).roofs == "datasheet"
    assert choose_roofs(own, H200).bandwidth_bytes_per_s == 4.0e12
    assert choose_roofs(own, H200, "measured").bandwidth_bytes_per_s == 4.27e12


def test_asking_for_measured_roofs_that_are_not_there_says_what_to_run(cache):
    device = find_device(H200)

    assert choose_roofs(device, H200) is device
    with pytest.raises(UsageError, match="advisor calibrate"):
        choose_roofs(device, H200, "measured")


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("Memcpy HtoD (Pinned -> Device)", 55e9),
        ("Memcpy DtoH (Device -> Pinned)", 54e9),
        ("Memcpy HtoD (Pageable -> Device)", 11e9),
        ("Memcpy DtoH (Device -> Pageable)", 63.015e9 / 8),
        ("CopyHostToDevice", 55e9),
        ("CopyDeviceToHost", 54e9),
    ],
)
def test_a_copy_is_set_against_the_link_measured_in_its_direction_and_from_its_kind_of_memory(name, rate):
    links = {**MEASURED.link_bytes_per_s, "to_device_pageable": 11e9, "to_host_pageable": 63.015e9 / 8}
    measured = msgspec.structs.replace(MEASURED, link_bytes_per_s=links)
    device = with_measured(find_device(H200), measured)

    found = classify(None, 1_000_000, MEMCPY, device, name=name, copy_bytes=1_000_000)

    assert found.efficiency == pytest.approx(1e6 / rate / 1e-3)


def test_a_direction_that_was_not_measured_keeps_the_rate_known_for_the_link():
    links = {"to_device_pinned": 50e9, "to_host_pinned": -1.0}
    device = with_measured(find_device(H200), msgspec.structs.replace(MEASURED, link_bytes_per_s=links))

    for name in ("Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pageable -> Device)"):
        found = classify(None, 1_000_000, MEMCPY, device, name=name, copy_bytes=1_000_000)
        assert found.efficiency == pytest.approx(1e6 / 50e9 / 1e-3)
