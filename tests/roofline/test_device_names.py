"""Names as drivers, traces and people spell them resolve to the right device, or to none."""

import gzip
import json
import re
from pathlib import Path

import pytest

from advisor.errors import UsageError
from advisor.roofline.devices import find_device

GIB = 2**30

DRIVER_NAMES = [
    ("Tesla V100-SXM2-16GB", 16.0, "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", 31.7, "v100-sxm2-32gb"),
    ("Tesla V100-DGXS-32GB", 31.7, "v100-dgxs-32gb"),
    ("Tesla V100-PCIE-16GB", 15.8, "v100-pcie-16gb"),
    ("Tesla V100S-PCIE-32GB", 31.7, "v100s-pcie-32gb"),
    ("Tesla T4", 14.7, "t4"),
    ("NVIDIA GeForce RTX 2080 Ti", 10.8, "rtx-2080-ti"),
    ("NVIDIA A10", 22.1, "a10"),
    ("NVIDIA A10G", 22.2, "a10g"),
    ("NVIDIA A30", 23.6, "a30"),
    ("NVIDIA A40", 44.4, "a40"),
    ("A100-SXM4-40GB", 39.6, "a100-sxm-40gb"),
    ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40gb"),
    ("NVIDIA A100-SXM4-80GB", 79.2, "a100-sxm-80gb"),
    ("NVIDIA A100-SXM-80GB", 79.2, "a100-sxm-80gb"),
    ("NVIDIA A100-PCIE-40GB", 39.4, "a100-pcie-40gb"),
    ("NVIDIA A100 80GB PCIe", 79.1, "a100-pcie-80gb"),
    ("NVIDIA A100-PG509-200", 39.6, "a100-sxm-40gb"),
    ("NVIDIA L4", 22.0, "l4"),
    ("NVIDIA L40", 44.4, "l40"),
    ("NVIDIA L40S", 44.4, "l40s"),
    ("NVIDIA GeForce RTX 3090", 23.7, "rtx-3090"),
    ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
    ("NVIDIA GeForce RTX 5090", 31.4, "rtx-5090"),
    ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx-6000-ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.0, "rtx-pro-6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.0, "rtx-pro-6000-server"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 95.0, "rtx-pro-6000-max-q"),
    ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
    ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
    ("NVIDIA H100 NVL", 93.1, "h100-nvl"),
    ("NVIDIA H200", 139.8, "h200"),
    ("NVIDIA H200 NVL", 139.8, "h200-nvl"),
    ("NVIDIA GH200 480GB", 94.5, "gh200-96gb"),
    ("NVIDIA GH200 144G HBM3e", 140.0, "gh200-144gb"),
    ("NVIDIA H20", 95.0, "h20"),
    ("NVIDIA B200", 178.4, "b200"),
    ("NVIDIA GB200", 184.0, "gb200"),
    ("NVIDIA B300 SXM6 AC", 268.0, "b300"),
    ("AMD Instinct MI210", 64.0, "mi210"),
    ("AMD Instinct MI250X", 64.0, "mi250x"),
    ("AMD Instinct MI300X", 192.0, "mi300x"),
    ("AMD Instinct MI300X VF", 192.0, "mi300x"),
    ("AMD Instinct MI325X", 256.0, "mi325x"),
    ("AMD Instinct MI355X", 288.0, "mi355x"),
]


@pytest.mark.parametrize(("name", "gib", "row"), DRIVER_NAMES)
def test_a_driver_name_finds_its_row_with_and_without_memory_size(name: str, gib: float, row: str) -> None:
    assert find_device({"name": name, "totalGlobalMem": int(gib * GIB)}).matched == row
    # Without a size only the plain GH200 and A100-PG509 names could be anything else, and they are not.
    assert find_device({"name": name}).matched == row


@pytest.mark.parametrize(
    "name",
    [
        "AMD Radeon Graphics",
        "ARTEMIS",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H800",
        "NVIDIA RTX 6000",
        "Quadro RTX 6000",
        "GRID T4-8Q",
        "Tesla V100-FHHL-16GB",
        "Tesla V100-SXM3-32GB",
        "AMD Instinct MI300A",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_a_relative_of_a_known_device_is_unknown_and_has_no_peaks(name: str) -> None:
    device = find_device({"name": name})
    assert device.matched is None
    assert device.roofs == "unknown"
    assert not device.peaks
    assert device.bandwidth_bytes_per_s is None
    assert "--device" in device.note


@pytest.mark.parametrize(
    "properties",
    [
        {"name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb"},
        {"name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": 20 * GIB},
        {"name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": int(39.4 * GIB), "numSms": 42},
        {"name": "AMD Instinct MI300X", "totalGlobalMem": 192 * GIB, "numSms": 38},
    ],
)
def test_a_slice_of_a_device_does_not_get_the_whole_devices_roofs(properties: dict) -> None:
    device = find_device(properties)
    assert device.matched is None
    assert "slice" in device.note or "partition" in device.note


@pytest.mark.parametrize(("gib", "row"), [(15.8, "v100-sxm2-16gb"), (31.7, "v100-sxm2-32gb")])
def test_memory_size_tells_apart_what_the_name_does_not(gib: float, row: str) -> None:
    assert find_device({"name": "Tesla V100-SXM2", "totalGlobalMem": int(gib * GIB)}).matched == row


def test_a_name_that_fits_two_rows_is_left_unknown_and_names_both() -> None:
    device = find_device({"name": "NVIDIA A100-SXM4"})
    assert device.matched is None
    assert "a100-sxm-40gb or a100-sxm-80gb" in device.note


@pytest.mark.parametrize(
    ("given", "row"),
    [
        ("a100-80gb", "a100-sxm-80gb"),
        ("A100", "a100"),
        ("H100", "h100"),
        ("h100_sxm", "h100-sxm"),
        ("nvidia h100 nvl", "h100-nvl"),
        ("L40S", "l40s"),
        ("gh200", "gh200-96gb"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("v100", "v100-sxm2-32gb"),
        ("MI300X", "mi300x"),
        ("rtx5090", "rtx-5090"),
        ("4090", "rtx-4090"),
        ("RTX 2080Ti", "rtx-2080-ti"),
        ("a100sxm80gb", "a100-sxm-80gb"),
    ],
)
def test_the_user_may_give_a_row_a_marketing_or_a_driver_name(given: str, row: str) -> None:
    assert find_device(None, override=given).matched == row


def test_the_users_word_wins_over_the_trace_and_the_traces_name_stays() -> None:
    device = find_device({"name": "AMD Radeon Graphics", "totalGlobalMem": 64 * GIB}, override="mi250x")
    assert (device.name, device.matched) == ("AMD Radeon Graphics", "mi250x")


def test_an_unknown_device_option_names_the_closest_ones() -> None:
    with pytest.raises(UsageError, match=r"'H10'.*h100"):
        find_device(None, override="H10")


def test_a_number_that_ends_no_name_is_not_guessed_at() -> None:
    with pytest.raises(UsageError, match=r"device 'mi300' is not known; the closest are mi300x"):
        find_device(None, override="mi300")


def test_an_ambiguous_device_option_lists_what_it_may_be() -> None:
    with pytest.raises(UsageError, match=r"a100-sxm-40gb or a100-sxm-80gb"):
        find_device(None, override="A100-SXM4")


def test_a_trace_without_properties_has_an_unknown_device() -> None:
    assert find_device(None).name == "unknown"
    assert find_device({"id": 0}).roofs == "unknown"


def test_memory_and_units_are_those_the_driver_reports() -> None:
    device = find_device({"name": "NVIDIA H200", "totalGlobalMem": 150109880320, "numSms": 132})
    assert device.memory_bytes == 150109880320
    assert device.sms == 132


TRACES = {
    "h200/gpt_naive_bf16": "h200",
    "h200/ddp2_gpt_rank1": "h200",
    "public/a100_event_sync_streams": "a100-sxm-40gb",
    "public/a100_tensorlist_cudagraph": "a100-sxm-80gb",
    "public/b200_llm_inference": "b200",
    "public/mi210_gpu_only": "mi210",
    "public/mi250_tiny_train": None,
    "public/mi300x_hipgraph_decode": "mi300x",
    "public/mtia_no_kernels": None,
    "public/ranks_dlrm/rank0": "v100-sxm2-32gb",
    "public/rtx2080ti_resnet_extid": "rtx-2080-ti",
    "public/v100_resnet50_workers4": "v100-dgxs-32gb",
}


@pytest.mark.parametrize(("trace", "row"), TRACES.items())
def test_the_device_properties_of_real_traces_find_their_row(
    shared: Path, trace: str, row: str | None
) -> None:
    with gzip.open(shared / "traces" / f"{trace}.json.gz", "rt", errors="replace") as file:
        head = file.read(200_000)
    listed = re.search(r'"deviceProperties":\s*(\[.*?\])', head, re.DOTALL)
    assert listed
    properties = json.loads(listed[1])
    assert {find_device(entry).matched for entry in properties} == {row}
