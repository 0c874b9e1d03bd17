"""`advisor devices` lists the rows and shows one with its sources."""

import json

import pytest

from advisor.cli import main
from advisor.roofline.device_table import builtin_rows


@pytest.fixture(autouse=True)
def no_table_of_the_user(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TRAINING_ADVISOR_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_table_has_every_row_with_its_ridge_uncut_at_eighty_columns(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["devices"])
    out = capsys.readouterr().out
    assert "…" not in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    for key in builtin_rows():
        assert len(lines[key]) == 11
    assert lines["a100"][9] == "156"
    assert lines["h100"][9] == "296"


def test_json_lists_every_row_with_peaks_ridges_and_sources(capsys) -> None:
    main(["devices", "--json"])
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(builtin_rows())
    bf16 = next(peak for peak in rows["h200"]["peaks"] if peak["pipe"] == "tensor_bf16")
    assert bf16["flops_per_s"] == 989.4e12
    assert bf16["ridge_flops_per_byte"] == pytest.approx(206.1, abs=0.1)
    assert "NVIDIA" in bf16["source"]
    assert rows["t4"]["peer_bytes_per_s"] is None


def test_one_device_is_shown_with_the_source_of_each_figure(capsys) -> None:
    main(["devices", "NVIDIA L4"])
    out = capsys.readouterr().out
    assert "NVIDIA L4 (l4; figures: datasheet)" in out
    assert "sparse figure (242) halved" in out
    assert "PCI Express Base 4.0" in out


def test_rows_of_ones_own_are_added_and_marked(capsys, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[device.mine]\nbandwidth_bytes_per_s = 1e12\n[device.mine.peaks]\ntensor_bf16 = 5e13\n")
    main(["devices", "--table", str(path)])
    out = capsys.readouterr().out
    assert "mine*" in out
    assert "from your own table" in out


@pytest.mark.parametrize(
    ("args", "code", "said"), [(["nonesuch"], 2, "not known"), (["--table", "gone.toml"], 2, "gone.toml")]
)
def test_a_wrong_name_or_path_is_a_usage_error(args: list[str], code: int, said: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["devices", *args])
    assert stop.value.code == code
    assert said in capsys.readouterr().err


def test_a_broken_table_is_unusable_input(capsys, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[device.mine]\nspeed = 3\n")
    with pytest.raises(SystemExit) as stop:
        main(["devices", "--table", str(path)])
    assert stop.value.code == 3
    assert f"{path}: [device.mine] speed" in capsys.readouterr().err
