"""The part of the capture that drives Nsight Compute, with a stand-in for it."""

import argparse
import stat
import sys

import pytest

from benchmarks.counters import capture

STAND_IN = """#!{python}
import pathlib, sys
args = sys.argv[1:]
if args[0] == "--query-metrics":
    print("Device NVIDIA Toy")
    for name in {listed!r}:
        print(name.ljust(60), "Counter", "something")
elif args[0] == "--import":
    part = pathlib.Path(args[1])
    print('"ID","Kernel Name","dram__bytes_read.sum"')
    print('"","","byte"')
    for i, name in enumerate(part.read_text().split()):
        print(f'"{{i}}","{{name}}","1,000"')
else:
    out = pathlib.Path(args[args.index("--out") + 1])
    with (out / "log").open("a") as log:
        print(args[args.index("--metrics") + 1], file=log)
    if {refuses!r} and {refuses!r} in " ".join(args):
        sys.exit(1)
    done = []
    with (out / "progress.txt").open("a") as progress:
        for case in pathlib.Path(args[args.index("--cases") + 1]).read_text().split():
            print("start", case, file=progress)
            if case == "crash":
                break
            print("done", case, file=progress)
            done.append(f"kernel_of_{{case}}")
    pathlib.Path(args[args.index("--export") + 1]).write_text(" ".join(done))
    sys.exit(139 if case == "crash" else 0)
"""


@pytest.fixture
def stand_in(tmp_path):
    def write(listed=("dram__bytes_read", "gpu__time_duration"), refuses=""):
        path = tmp_path / "ncu"
        path.write_text(STAND_IN.format(python=sys.executable, listed=list(listed), refuses=refuses))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return argparse.Namespace(
            ncu=str(path), out=tmp_path, budget_s=300, device="cuda", only="", tiny=False, name="zoo"
        )

    return write


def test_counters_of_all_cases_come_back_in_order(stand_in, tmp_path):
    counted, done, command = capture.count(stand_in(), ["a", "b"])

    assert [one.kernel for one in counted] == ["kernel_of_a", "kernel_of_b"]
    assert done == {"a", "b"}
    assert command.startswith("ncu --target-processes")
    assert str(tmp_path) not in command
    assert (tmp_path / "zoo_raw_sample.csv").read_text().startswith('"ID"')


def test_a_case_that_ends_the_process_is_left_out_and_the_rest_run_again(stand_in):
    counted, done, _ = capture.count(stand_in(), ["a", "crash", "b", "c"])

    assert [one.kernel for one in counted] == ["kernel_of_a", "kernel_of_b", "kernel_of_c"]
    assert done == {"a", "b", "c"}


def test_metrics_that_the_device_lacks_are_not_asked_for(stand_in):
    args = stand_in(
        (
            "gpu__time_duration",
            "dram__bytes_read",
            "smsp__sass_thread_inst_executed_op_ffma_pred_on",
            "sm__ops_path_tensor_src_fp8",
            "sm__ops_path_tensor_src_fp8_dst_fp32",
            "sm__ops_path_tensor_src_fp16_dst_fp16",
            "sm__ops_path_tensor_src_fp16_dst_fp32",
            "sm__ops_path_tensor_src_int1",
            "sm__inst_executed_pipe_tensor_op_hmma",
        )
    )

    metrics = capture.available_metrics(args.ncu)

    assert "dram__bytes_write.sum" not in metrics
    assert "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum" in metrics
    assert [m for m in metrics if "tensor" in m] == [
        "sm__ops_path_tensor_src_fp16_dst_fp16.sum",
        "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
        "sm__ops_path_tensor_src_fp8.sum",
        "sm__inst_executed_pipe_tensor_op_hmma.sum",
    ]


def test_when_the_full_list_is_refused_a_short_one_is_tried(stand_in, tmp_path):
    args = stand_in(refuses="op_dmul")

    counted, _, _ = capture.count(args, ["a"])

    assert [one.kernel for one in counted] == ["kernel_of_a"]
    asked = (tmp_path / "log").read_text().splitlines()
    assert len(asked) == 2
    assert "op_dmul" not in asked[1]
    assert "dram__bytes_read.sum" in asked[1]
