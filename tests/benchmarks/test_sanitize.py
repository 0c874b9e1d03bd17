"""What compute-sanitizer says, as its outcome."""

import re

import pytest
from advisor.kernels._family import families, sources

from benchmarks.kernels.sanitize import FILTER, parse

CLEAN = "========= COMPUTE-SANITIZER\nright norm\n========= ERROR SUMMARY: 0 errors\n"
FOUND = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _norm_forward_kernel+0x210
=========     by thread (0,0,0) in block (0,0,0)
========= Invalid __global__ write of size 4 bytes
=========     at _norm_forward_kernel+0x210
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _softmax_forward_kernel+0x9d0
=========     and Read access at _softmax_forward_kernel+0xa40 [64 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_a_summary_of_no_errors_is_clean():
    outcome = parse("memcheck", CLEAN, 3.0)
    assert (outcome.verdict, outcome.errors, outcome.findings, outcome.seconds) == ("clean", 0, (), 3.0)
    assert parse("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed", 1.0).verdict == "clean"


def test_errors_are_counted_and_each_kind_is_quoted_once():
    outcome = parse("memcheck", FOUND, 1.0)
    assert (outcome.verdict, outcome.errors) == ("found", 2)
    assert outcome.findings == ("Invalid __global__ write of size 4 bytes",)


def test_a_race_is_found_and_names_the_kernel():
    outcome = parse("racecheck", RACE, 1.0)
    assert (outcome.verdict, outcome.errors) == ("found", 1)
    assert "_softmax_forward_kernel" in outcome.findings[0]


def test_without_a_summary_nothing_was_proven():
    assert parse("memcheck", "========= COMPUTE-SANITIZER\nright norm", 1.0).verdict == "cut off"
    # THEN another tool's summary does not count either
    assert parse("racecheck", CLEAN, 1.0).verdict == "cut off"


def test_a_device_that_the_tool_does_not_take_is_told():
    said = "========= Error: Device not supported.\n========= ERROR SUMMARY: 1 error"
    outcome = parse("memcheck", said, 1.0)
    assert (outcome.verdict, outcome.errors, outcome.findings) == (
        "unusable",
        None,
        ("Device not supported",),
    )


@pytest.mark.parametrize("family", families())
def test_the_filter_takes_every_kernel_that_a_family_launches(family):
    pattern = re.compile(FILTER.removeprefix("kns="))
    launched = re.findall(r"(\w+)\)?\[\(?", "\n".join(path.read_text() for path in sources(family)))
    kernels = {name for name in launched if "kernel" in name}
    assert kernels
    assert [name for name in kernels if not pattern.match(name)] == []


@pytest.mark.parametrize(
    "name", ["_ZN2at6native29vectorized_elementwise_kernelILi4EEE", "ampere_sgemm_128x64_tn"]
)
def test_the_filter_leaves_out_pytorchs_kernels(name):
    assert not re.match(FILTER.removeprefix("kns="), name)
