"""A user's device table adds rows, overrides figures, and is told off precisely when it is wrong."""

from pathlib import Path

import pytest

from advisor.errors import InputError, UsageError
from advisor.roofline.device_table import builtin_rows
from advisor.roofline.devices import find_device

CARD = """
[device.my-card]
title = "My Card"
match = ['my card( ti)?']
memory_gib = 24
bandwidth_bytes_per_s = 1e12
host_link = "pcie4-x16"
source = "our bench, June"
[device.my-card.peaks]
tensor_bf16 = 200e12
"""


@pytest.fixture
def table(tmp_path: Path):
    def write(text: str, name: str = "mine.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_users_row_is_matched_by_its_patterns_with_its_own_sources(table) -> None:
    device = find_device({"name": "NVIDIA My-Card Ti"}, user_toml=table(CARD))
    assert (device.matched, device.roofs) == ("my-card", "user")
    assert device.ridge("tensor_bf16") == 200
    assert device.peak_sources["tensor_bf16"] == "our bench, June"
    assert device.link_bytes_per_s == pytest.approx(31.5e9, rel=0.001)
    assert "PCI" in device.link_source


def test_overriding_one_figure_keeps_the_others_and_their_sources(table) -> None:
    path = table("[device.h200]\nbandwidth_bytes_per_s = 4.3e12\n")
    device, shipped = find_device({"name": "NVIDIA H200"}, user_toml=path), find_device(override="h200")
    assert device.bandwidth_bytes_per_s == 4.3e12
    assert device.bandwidth_source == str(path)
    assert device.peaks == shipped.peaks
    assert device.peak_sources == shipped.peak_sources
    assert device.roofs == "user"
    # The shipped table is as it was.
    assert find_device({"name": "NVIDIA H200"}).bandwidth_bytes_per_s == 4.8e12


def test_a_row_may_start_from_a_shipped_one(table) -> None:
    path = table(
        "[device.slow]\nlike = 'h100-sxm'\nunknown = ['tensor_fp8']\n"
        "[device.slow.peaks]\ntensor_bf16 = 5e14\n"
    )
    device = find_device(override="slow", user_toml=path)
    assert device.peaks["tensor_bf16"] == 5e14
    assert device.peaks["vector_fp32"] == 66.9e12
    assert "tensor_fp8" not in device.peaks
    # It does not take the shipped row's names with it.
    assert find_device({"name": "NVIDIA H100 80GB HBM3"}, user_toml=path).matched == "h100-sxm"


def test_a_slice_of_a_device_may_have_a_row_of_the_users(table) -> None:
    path = table(
        "[device.slice]\nlike = 'h100-sxm'\nmatch = ['h100 80gb hbm3 mig 3g\\.40gb']\n"
        "memory_gib = 40\nsms = 60\n"
    )
    device = find_device({"name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "numSms": 60}, user_toml=path)
    assert device.matched == "slice"


def test_a_path_given_as_device_uses_its_only_row_whatever_the_trace_says(table) -> None:
    device = find_device({"name": "ARTEMIS"}, override=str(table(CARD)))
    assert (device.name, device.matched) == ("ARTEMIS", "my-card")


def test_a_path_with_several_rows_picks_the_one_that_matches_or_says_so(table) -> None:
    path = table(CARD + "[device.other]\nmatch = ['other']\nbandwidth_bytes_per_s = 1e12\n")
    assert find_device({"name": "other"}, override=str(path)).matched == "other"
    with pytest.raises(UsageError, match="several devices"):
        find_device({"name": "third"}, override=str(path))


def test_the_environment_variable_and_the_config_folder_are_read(table, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRAINING_ADVISOR_DEVICES", str(table(CARD)))
    assert find_device({"name": "my card"}).matched == "my-card"
    monkeypatch.setenv("TRAINING_ADVISOR_DEVICES", str(tmp_path / "gone.toml"))
    with pytest.raises(InputError, match=r"gone\.toml.*TRAINING_ADVISOR_DEVICES"):
        find_device({"name": "my card"})
    monkeypatch.delenv("TRAINING_ADVISOR_DEVICES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "training-advisor").mkdir()
    table(CARD, "training-advisor/devices.toml")
    assert find_device({"name": "my card"}).matched == "my-card"


@pytest.mark.parametrize(
    ("text", "table_name", "key"),
    [
        ("[device.x]\nbandwith = 1\n", "device.x", "bandwith"),
        ("[device.x]\nbandwidth_bytes_per_s = '2TB'\n", "device.x", "bandwidth_bytes_per_s"),
        ("[device.x]\nbandwidth_bytes_per_s = 0\n", "device.x", "bandwidth_bytes_per_s"),
        ("[device.x]\nbandwidth_bytes_per_s = nan\n", "device.x", "bandwidth_bytes_per_s"),
        (f"[device.x]\nbandwidth_bytes_per_s = {'9' * 400}\n", "device.x", "bandwidth_bytes_per_s"),
        ("[device.x]\nbandwidth_bytes_per_s = 5e-324\n", "device.x", "bandwidth_bytes_per_s"),
        ("[device.x]\nbandwidth_bytes_per_s = inf\n", "device.x", "bandwidth_bytes_per_s"),
        ("".join(f"[device.x{i}]\nlike = 'x{i + 1}'\n" for i in range(2000)), "device.x33", "like"),
        ("[device.x]\nsms = true\n", "device.x", "sms"),
        ("[device.x.peaks]\nbf16 = 1e12\n", "device.x.peaks", "bf16"),
        ("[device.x.peaks]\ntensor_bf16 = -1\n", "device.x.peaks", "tensor_bf16"),
        ("[device.x]\nhost_link = 'pcie9'\n", "device.x", "host_link"),
        ("[device.x]\nmatch = 'x'\n", "device.x", "match"),
        ("[device.x]\nmatch = ['(']\n", "device.x", "match"),
        ("[device.x]\nlike = 'nothing'\n", "device.x", "like"),
        ("[device.x]\nlike = 'y'\n[device.y]\nlike = 'x'\n", "device.x", "like"),
        ("[device.x]\nunknown = ['fp8']\n", "device.x", "unknown"),
        ("[device.x]\ntitle = 3\n", "device.x", "title"),
        ("[device.x.derived]\nfp8 = 'guess'\n", "device.x.derived", "fp8"),
        ("[link.x]\nrate = 3\n", "link.x", "rate"),
        ("[link.x]\nsource = 'x'\n", "link.x", "bytes_per_s"),
    ],
)
def test_a_mistake_is_named_with_file_table_and_key(table, text: str, table_name: str, key: str) -> None:
    path = table(text)
    with pytest.raises(InputError) as error:
        find_device({"name": "x"}, user_toml=path)
    assert str(path) in str(error.value)
    assert f"[{table_name}] {key}:" in str(error.value)


@pytest.mark.parametrize(
    "text", ["[devices.x]\n", "device = 3\n", "[device]\nx = 3\n", "= broken", f"a = {'[' * 5000}"]
)
def test_a_file_of_another_shape_is_refused_by_name(table, text: str) -> None:
    path = table(text)
    with pytest.raises(InputError, match=r"mine\.toml"):
        find_device({"name": "x"}, user_toml=path)


def test_a_missing_or_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.toml"):
        find_device({"name": "x"}, user_toml=tmp_path / "no.toml")
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"bin\.toml"):
        find_device({"name": "x"}, override=str(tmp_path / "bin.toml"))


def test_no_two_shipped_rows_answer_to_the_same_name() -> None:
    names = [name for row in builtin_rows().values() for name in (row.key, *row.aliases)]
    assert len(names) == len(set(names))


def test_how_devices_are_joined_is_one_of_three_words_and_comes_from_the_row_that_is_resembled(table) -> None:
    path = table(CARD + '[device.ours]\nlike = "h100-sxm"\n')
    assert find_device(override="ours", user_toml=path).peer_fabric == "switch"
    assert builtin_rows()["a100-sxm-80gb"].peer_fabric == "switch"
    assert builtin_rows()["a100-pcie-80gb"].peer_fabric == "bridge"
    assert find_device(override="my-card", user_toml=path).peer_fabric == ""
    with pytest.raises(InputError, match="peer_fabric: must be one of switch, mesh, bridge, not 'string'"):
        find_device(user_toml=table('[device.x]\npeer_fabric = "string"\n'))


def test_every_shipped_link_between_devices_says_how_it_joins_them() -> None:
    rows = builtin_rows().values()
    assert [row.key for row in rows if "peer_bytes_per_s" in row.figures and not row.peer_fabric] == []
