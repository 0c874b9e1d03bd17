from __future__ import annotations

import ctypes
import os

import pytest

from advisor.capture import cupti


def test_teardown_is_requested_while_recording_and_the_environment_is_given_back(monkeypatch):
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)

    with cupti.teardown_requested():
        assert os.environ["TEARDOWN_CUPTI"] == "1"
        os.environ["TEARDOWN_CUPTI"] = "0"  # as torch does with CUDA graphs

    assert "TEARDOWN_CUPTI" not in os.environ


def test_a_users_own_choice_on_teardown_is_respected(monkeypatch):
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")

    with cupti.teardown_requested():
        assert os.environ["TEARDOWN_CUPTI"] == "0"

    assert os.environ["TEARDOWN_CUPTI"] == "0"


@pytest.mark.parametrize("name", ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"])
def test_nsight_systems_is_seen_by_its_environment(monkeypatch, name):
    assert cupti.other_user() is None
    monkeypatch.setenv(name, "x")

    assert name in (cupti.other_user() or "")


@pytest.mark.parametrize(
    ("cuda", "safe"), [("12.6", True), ("13.0", True), ("12.5", False), ("11.8", False), (None, False)]
)
def test_cupti_is_detached_by_force_only_where_cuda_graphs_survive_it(cuda, safe):
    assert cupti._finalize_is_safe(cuda) is safe


def test_forced_detaching_calls_the_loaded_library_after_waiting_for_the_device(monkeypatch):
    calls = []

    class Library:
        def cuptiFinalize(self):
            calls.append("finalize")
            return 0

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(cupti, "_loaded_library", lambda stem: "/lib/libcupti.so.13")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Library())

    assert cupti.finalize()
    assert calls == ["synchronize", "finalize"]


def test_nothing_is_detached_where_no_cupti_is_loaded(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(cupti, "_loaded_library", lambda stem: None)

    assert not cupti.finalize()


def test_a_loaded_library_is_found_by_its_name():
    path = cupti._loaded_library("libc.so") or cupti._loaded_library("libc-")

    assert path
    assert os.path.exists(path)
    assert cupti._loaded_library("libno_such_thing") is None
