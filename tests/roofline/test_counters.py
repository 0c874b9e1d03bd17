"""Nsight Compute's tables are read in each spelling, locale and unit; what is none says how to make one."""

import gzip
from pathlib import Path

import pytest

from advisor.errors import InputError
from advisor.roofline.counters import Counted, base_name, read_counters

DATA = Path(__file__).parents[1] / "data"
RAW = """==PROF== Connected to process 7 (python)
epoch 0, loss 2.31
"ID","Process ID","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",{metrics}
"","","","","","","","","",{units}
"0","7","void at::native::<unnamed>::fill<float>(float *)","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",{first}
==PROF== Disconnected
"1","7","nvjet_tst_128x256","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",{second}
"""
METRICS = {
    "dram__bytes_read.sum": ("Mbyte", "134.217728", "2.5"),
    "dram__bytes_write.sum": ("Kbyte", "1,024", "n/a"),
    "gpu__time_duration.sum": ("us", "45.5", "1,250"),
    "sm__sass_thread_inst_executed_op_ffma_pred_on.sum": ("inst", "1,000,000", "0"),
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": ("inst", "1,000,000", "0"),
    "sm__sass_thread_inst_executed_op_fadd_pred_on.sum": ("inst", "500,000", "0"),
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum": ("", "0", "274,877,906,944"),
    "sm__ops_path_tensor_src_fp16_dst_fp16.sum": ("", "0", "0"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "74.25", "21"),
    "smsp__something_else.sum": ("", "5", "6"),
}


def raw(metrics):
    def line(place):
        return ",".join(f'"{values[place]}"' for values in metrics.values())

    names = ",".join(f'"{name}"' for name in metrics)
    return RAW.format(metrics=names, units=line(0), first=line(1), second=line(2))


@pytest.fixture
def write(tmp_path):
    def write(text, *, name="ncu.csv", encode=str.encode):
        path = tmp_path / name
        path.write_bytes(encode(text))
        return path

    return write


def test_the_raw_page_is_read_in_base_units_past_a_programs_own_output(write):
    found = read_counters(write(raw(METRICS)))

    fill, gemm = found.launches
    assert fill.kernel == "void at::native::<unnamed>::fill<float>(float *)"
    assert (fill.bytes_read, fill.bytes_written, fill.time_ns) == (134_217_728, 1_024_000, 45_500)
    assert (fill.flops, fill.pipe, fill.dram_pct) == (2_500_000, "vector_fp32", 74.25)
    assert (gemm.bytes_read, gemm.time_ns) == (2_500_000, 1_250_000)
    assert (gemm.flops, gemm.pipe) == (274_877_906_944, "tensor_bf16")
    assert found.skipped == 1


def test_what_was_not_collected_is_none_and_not_nought(write):
    _, gemm = read_counters(write(raw(METRICS))).launches

    assert gemm.bytes_written is None
    assert gemm.bytes is None
    assert gemm.sm_pct is None


@pytest.mark.parametrize(
    "numbers",
    [
        ("134,217,728", "45.5"),
        ("134.217.728", "45,5"),
        ("134 217 728", "45,5"),
        ("134\u202f217\u202f728", "45,5"),
        ("134'217'728", "45.5"),
        ("134217728", "45.5"),
        ("1.34217728e+08", "4.55e1"),
    ],
)
def test_numbers_are_read_as_any_locale_writes_them(write, numbers):
    metrics = {
        "dram__bytes_read.sum": ("byte", numbers[0], "1"),
        "gpu__time_duration.sum": ("usecond", numbers[1], "1"),
    }

    first = read_counters(write(raw(metrics))).launches[0]

    assert (first.bytes_read, first.time_ns) == (134_217_728, 45_500)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: gzip.compress(text.encode()),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.encode("utf-16"),
        lambda text: text.replace("\n", "\r\n").encode(),
    ],
    ids=["gzip", "bom", "utf-16", "crlf"],
)
def test_encodings_and_compression_make_no_difference(write, encode):
    plain = read_counters(write(raw(METRICS)))

    assert read_counters(write(raw(METRICS), name="other.csv", encode=encode)).launches == plain.launches


def test_semicolons_separate_columns_too(write):
    text = 'ID;Kernel Name;dram__bytes_read.sum\n;;byte\n0;"f<int, 4>(int)";1.000.000,0\n'

    assert read_counters(write(text)).launches == [Counted("f<int, 4>(int)", bytes_read=1e6)]


def test_the_details_page_has_a_row_a_metric(write):
    rows = [
        '"0","7","fill","Command line profiler metrics","dram__bytes_read.sum","byte","1,000"',
        '"0","7","fill","Command line profiler metrics","gpu__time_duration.sum","ns","2,500"',
        '"1","7","gemm","Command line profiler metrics","dram__bytes_read.sum","Gbyte","2"',
    ]
    head = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'

    found = read_counters(write("\n".join([head, *rows])))

    assert found.launches == [
        Counted("fill", bytes_read=1000.0, time_ns=2500.0),
        Counted("gemm", bytes_read=2e9),
    ]


def test_parts_of_a_tensor_dtype_are_added_and_the_whole_wins_over_them(write):
    prefix = "sm__ops_path_tensor_src_"
    metrics = {
        f"{prefix}fp16_dst_fp16.sum": ("", "3e9", "0"),
        f"{prefix}fp16_dst_fp32.sum": ("", "4e9", "0"),
        f"{prefix}fp8.sum": ("", "5e9", "0"),
        f"{prefix}fp8_dst_fp32.sum": ("", "5e9", "0"),
        f"{prefix}tf32_dst_fp32_sparsity_off.sum": ("", "6e9", "0"),
        f"{prefix}tf32_dst_fp32_sparsity_on.sum": ("", "1e9", "0"),
    }

    assert read_counters(write(raw(metrics))).launches[0].tensor_flops == {
        "fp16": 7e9,
        "fp8": 5e9,
        "tf32": 7e9,
    }


def test_matrix_units_at_work_on_an_uncounted_dtype_leave_the_flops_unknown():
    gemm = Counted("implicit_gemm_f16", instructions={"ffma": 10.0}, tensor_instructions=1e6)

    assert gemm.flops is None
    assert gemm.pipe is None


def test_half_precision_instructions_count_pairs():
    kernel = Counted("f", instructions={"hfma": 10.0, "dmul": 3.0, "fadd": 1.0})

    assert kernel.vector_flops == {"fp16": 40.0, "fp64": 3.0, "fp32": 1.0}
    assert kernel.pipe == "vector_fp16"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no header row"),
        ("a,b\n1,2\n", "no header row"),
        ('"ID","Kernel Name","dram__bytes_read.sum"\n', "no kernel launch"),
        ('"ID","Kernel Name","launch__grid_size"\n"0","f","4"\n', "no launch has the metrics"),
        ("\x00\x01\x02", "no header row"),
    ],
)
def test_a_file_without_counters_says_how_to_make_one(write, text, reason):
    with pytest.raises(InputError, match=reason) as error:
        read_counters(write(text))

    assert "ncu --csv --page raw" in str(error.value)


def test_a_missing_file_and_a_damaged_gzip_are_named(tmp_path, write):
    with pytest.raises(InputError, match=r"absent\.csv: cannot be read"):
        read_counters(tmp_path / "absent.csv")
    packed = gzip.compress(raw(METRICS).encode())
    with pytest.raises(InputError, match="damaged gzip"):
        read_counters(write("", encode=lambda _: packed[: len(packed) // 2]))


@pytest.mark.parametrize(
    ("traced", "counted"),
    [
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*, int)",
            "void native::<unnamed>::cunn_SoftMaxForward<8, float>(T1 *, int)",
        ),
        ("nvjet_sm90_tst_256x128", "nvjet_sm90_tst_256x128"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(int)", "cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(int)"),
    ],
)
def test_both_tools_spellings_of_a_kernel_have_one_base_name(traced, counted):
    assert base_name(traced) == base_name(counted)


def test_nsight_computes_own_raw_page_and_the_captures_table_say_the_same():
    # GIVEN the first 12 launches of a capture as Nsight Compute prints them, all 349 columns
    raw_page = read_counters(DATA / "ncu_raw_page.csv.gz").launches
    # THEN they are those of the table that was made of the whole capture
    assert len(raw_page) == 12
    assert raw_page == read_counters(DATA / "zoo_counters.csv.gz").launches[:12]
