"""`advisor calibrate` and what other verbs make of it."""

import json
import time

import pytest
import torch

from advisor.cli import main
from advisor.roofline.measured import Measured, find, save
from tests.tiny_trace import tiny_trace

H100 = {"name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_045_870_592, "numSms": 132}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINING_ADVISOR_CACHE", str(tmp_path / "cache"))
    return Measured(
        name=H100["name"],
        total_memory_bytes=H100["totalGlobalMem"],
        sms=132,
        bandwidth_bytes_per_s=2.9e12,
        peaks={"tensor_bf16": 700e12},
        launch_ns=4000.0,
        link_bytes_per_s={"to_device_pinned": 50e9},
        measured_on="2025-03-01",
        versions={"torch": "2.6.0"},
    )


def run(*args):
    try:
        main([*args])
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(tiny_trace()))
    return path


def analyse(trace, *options):
    out = trace.with_suffix(".report.json")
    page = trace.with_suffix(".html")
    assert run("analyze", str(trace), "--json", str(out), "-o", str(page), "-q", "--force", *options) == 0
    return json.loads(out.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_calibrate_is_a_usage_error(capsys):
    assert run("calibrate") == 2
    assert "no GPU" in capsys.readouterr().err


def test_analyze_prefers_measured_roofs_and_tells_utilisation_of_the_datasheets(measured, trace):
    before = analyse(trace)
    save(measured)
    after = analyse(trace)

    assert before["device"]["roofs"] == "datasheet"
    assert after["device"]["roofs"] == "measured"
    assert after["device"]["bandwidth_bytes_per_s"] == 2.9e12
    bf16 = next(p for p in after["device"]["peaks"] if p["pipe"] == "tensor_bf16")
    assert (bf16["flops_per_s"], bf16["datasheet_flops_per_s"]) == (700e12, 989.4e12)
    assert after["summary"]["mfu"] == before["summary"]["mfu"]
    assert after["summary"]["roof_fraction"] > before["summary"]["roof_fraction"]
    assert "device.measured" in {q["code"] for q in after["data_quality"]}


def test_roofs_can_be_insisted_on(measured, trace, capsys):
    assert run("analyze", str(trace), "--roofs", "measured", "-q") == 2
    assert "advisor calibrate" in capsys.readouterr().err

    save(measured)

    assert analyse(trace, "--roofs", "datasheet")["device"]["roofs"] == "datasheet"


def test_devices_shows_when_a_row_was_measured(measured, capsys):
    save(measured)

    assert run("devices") == 0
    assert "measured here on 2025-03-01" in capsys.readouterr().out
    assert run("devices", "h100-sxm") == 0
    sheet = capsys.readouterr().out
    assert "measured here on 2025-03-01" in sheet
    assert "2.9 TB/s" in sheet
    assert run("devices", "h100-sxm", "--json") == 0
    assert json.loads(capsys.readouterr().out)["measured"]["launch_ns"] == 4000.0
    assert find(H100) == measured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_calibrate_measures_sane_roofs_within_its_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRAINING_ADVISOR_CACHE", str(tmp_path / "cache"))
    start = time.monotonic()
    assert run("calibrate", "--json") == 0
    assert time.monotonic() - start < 60
    found = json.loads(capsys.readouterr().out)
    assert 1e11 < found["bandwidth_bytes_per_s"] < 2e13
    assert found["peaks"]["tensor_fp16"] > 1e12
    assert 500 < found["launch_ns"] < 100_000
    assert found["link_bytes_per_s"]["to_device_pinned"] > 1e9
