"""`advisor roofline` reproduces textbook figures and refuses what it cannot work out."""

import json

import pytest

from advisor.cli import main


@pytest.fixture(autouse=True)
def no_table_of_the_user(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TRAINING_ADVISOR_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def run(capsys):
    def call(*args: str) -> tuple[int, str, str]:
        try:
            main(["roofline", *args])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--device", "A100"], "ridge point 156 FLOP/byte"),
        (["--device", "H100"], "ridge point 296 FLOP/byte"),
        (["--device", "a100-sxm-80gb"], "ridge point 153 FLOP/byte"),
        (["--peak", "20TFLOP/s", "--bandwidth", "0.3TB/s"], "ridge point 67 FLOP/byte"),
        (["--gemm", "128", "128", "128", "--dtype", "bf16"], "intensity 42.7 FLOP/byte"),
        (["--gemm", "1024", "1024", "1024"], "intensity 341.3 FLOP/byte"),
        (["--gemm", "8192", "8192", "8192"], "intensity 2730.7 FLOP/byte"),
        (["--model-bytes", "14GB", "--bandwidth", "2000GB/s"], "143 tokens/s"),
        (["--model-bytes", "3.5GB", "--bandwidth", "2000GB/s"], "571 tokens/s"),
        (["--model-bytes", "35GB", "--bandwidth", "2000GB/s"], "57 tokens/s"),
        (["--model-bytes", "14GB", "--device", "A100"], "143 tokens/s"),
        (["--gemm", "128", "128", "128", "--device", "A100"], "memory-bound"),
        (["--gemm", "1024", "1024", "1024", "--device", "A100"], "compute-bound"),
        (["--flops", "1e9", "--bytes", "400MB", "--device", "L4"], "intensity 2.5 FLOP/byte"),
        (["--device", "V100"], "tensor_fp16"),
    ],
    ids=" ".join,
)
def test_known_figures_come_out(run, args: list[str], said: str) -> None:
    code, out, _ = run(*args)
    assert code == 0
    assert said in out


def test_json_carries_the_unrounded_figures(run) -> None:
    code, out, _ = run("--gemm", "128", "256", "512", "--dtype", "fp16", "--device", "h200", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["flops"] == 2 * 128 * 256 * 512
    assert found["bytes"] == 2 * (128 * 512 + 512 * 256 + 128 * 256)
    assert found["ridge_flops_per_byte"] == pytest.approx(989.4 / 4.8)
    assert found["bound"] == "memory"
    assert found["attainable_flops_per_s"] == pytest.approx(found["intensity_flops_per_byte"] * 4.8e12)
    assert found["pipe"] == "tensor_fp16"


def test_a_time_adds_what_was_achieved(run) -> None:
    args = ["--flops", "1TFLOP", "--bytes", "1GB", "--peak", "100TFLOP/s", "--bandwidth", "1TB/s"]
    found = json.loads(run(*args, "--time", "20ms", "--json")[1])
    assert found["time_at_roof_us"] == pytest.approx(10_000)
    assert found["achieved_flops_per_s"] == pytest.approx(50e12)
    assert found["efficiency"] == pytest.approx(0.5)


def test_tf32_operands_take_four_bytes(run) -> None:
    found = json.loads(run("--gemm", "64", "64", "64", "--dtype", "tf32", "--json")[1])
    assert found["bytes"] == 3 * 64 * 64 * 4


def test_amd_multiplies_fp32_matrices_on_its_matrix_units(run) -> None:
    found = json.loads(run("--device", "mi210", "--dtype", "fp32", "--json")[1])
    assert found["pipe"] == "tensor_fp32"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "nothing to work out"),
        (["--flops", "1e9"], "--bytes is missing"),
        (["--bytes", "1e9"], "--flops is missing"),
        (["--peak", "1e12"], "--bandwidth is missing"),
        (["--bandwidth", "1e12"], "--peak is missing"),
        (["--gemm", "1", "2", "3", "--flops", "1"], "not both"),
        (["--gemm", "1", "2"], "--gemm"),
        (["--gemm", "0", "2", "3"], "--gemm"),
        (["--device", "T4", "--dtype", "fp8"], "tensor_fp8"),
        (["--device", "H10"], "h100"),
        (["--model-bytes", "14GB"], "--bandwidth"),
        (["--model-bytes", "14Gb", "--bandwidth", "1e12"], "14Gb"),
        (["--model-bytes", "14GB", "--gemm", "1", "2", "3", "--device", "A100"], "alone"),
        (["--device", "A100", "--time", "1ms"], "--time needs work"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_worked_out_is_a_usage_error(run, args: list[str], said: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert said in err
