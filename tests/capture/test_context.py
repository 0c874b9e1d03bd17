from __future__ import annotations

import json
import types

import pytest
import torch

from advisor.capture.context import (
    batch_context,
    device_context,
    dtype_name,
    known,
    loader_context,
    module_context,
    nvidia_driver,
    optimizer_context,
    parameter_context,
    torch_context,
)


def test_parameters_are_listed_in_optimizer_order_with_equal_neighbours_counted():
    a, b, c, d = (torch.nn.Parameter(torch.ones(n)) for n in (4, 4, 2, 4))
    frozen = torch.nn.Parameter(torch.ones(9), requires_grad=False)
    half = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([{"params": [a, b, frozen]}, {"params": [c, d, half]}], lr=0.1)

    assert parameter_context([optimizer]) == [
        {"shape": [4], "dtype": "fp32", "count": 2},
        {"shape": [2], "dtype": "fp32", "count": 1},
        {"shape": [4], "dtype": "fp32", "count": 1},
        {"shape": [4], "dtype": "bf16", "count": 1},
    ]


def test_a_sharded_parameter_is_listed_with_its_local_shape():
    class Sharded:
        requires_grad = True
        _local_tensor = torch.ones(2, 4)

    optimizer = types.SimpleNamespace(param_groups=[{"params": [Sharded()]}])

    assert parameter_context([optimizer]) == [{"shape": [2, 4], "dtype": "fp32", "count": 1}]


def test_optimizer_flags_are_read_and_a_flag_that_does_not_exist_is_unknown():
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight], lr=0.5, foreach=True)
    plain = torch.optim.LBFGS([weight], lr=torch.tensor(0.1))

    assert optimizer_context([adam, plain]) == [
        {
            "class": "AdamW",
            "fused": None,
            "foreach": True,
            "capturable": False,
            "param_groups": 1,
            "lr": 0.5,
        },
        {"class": "LBFGS", "fused": None, "foreach": None, "capturable": None, "param_groups": 1, "lr": None},
    ]


def test_batches_are_described_leaf_by_leaf_without_keeping_them():
    batch = {"x": torch.ones(2, 3, dtype=torch.float16), "y": (torch.ones(2, dtype=torch.int64), "text")}

    assert batch_context(batch) == [[[2, 3], "fp16", "cpu"], [[2], "int64", "cpu"]]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": x}])
def test_a_loaders_settings_are_read_also_from_a_collection(wrap):
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2, pin_memory=False)

    found = loader_context(wrap(loader))

    assert found["class"] == "DataLoader"
    assert (found["batch_size"], found["num_workers"], found["prefetch_factor"]) == (2, 0, None)


def test_no_loader_is_unknown():
    assert loader_context(None) is None
    assert loader_context([]) is None


def test_modules_are_listed_by_path_with_the_compiled_ones_apart():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.compile(torch.nn.Linear(2, 2))})

    assert module_context(model) == {"modules": {"": "ModuleDict", "a": "Linear"}, "compiled_modules": ["b"]}


def test_a_value_that_cannot_be_read_is_unknown():
    assert known(lambda: 1 / 0) is None


def test_the_block_is_plain_json_with_unknown_as_null():
    block = torch_context(torch.device("cpu"))

    assert json.loads(json.dumps(block, allow_nan=False)) == block
    assert block["versions"]["torch"] == torch.__version__
    assert block["device"]["total_memory_bytes"] is None
    assert block["flags"]["deterministic_algorithms"] is False


def test_dtypes_have_the_names_of_the_cost_model():
    assert [dtype_name(d) for d in (torch.bfloat16, torch.float64, torch.int8, torch.bool)] == [
        "bf16", "fp64", "int8", "bool",
    ]  # fmt: skip


def test_a_device_that_is_not_there_is_named_by_its_type_alone():
    assert device_context(torch.device("meta")) == {
        "type": "meta", "name": None, "total_memory_bytes": None, "index": None, "count": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun  6\nGCC version: 12.2.0", "535.54"),
        ("something else", None),
    ],
)
def test_the_driver_version_is_found_for_either_kernel_module(text, version):
    assert nvidia_driver(text) == version


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this PyTorch has one flag for TF32"
)
@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("ieee", False)])
def test_tf32_is_told_where_it_was_set_by_its_newer_name(precision: str, allowed: bool) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = precision
        assert torch_context(torch.device("cpu"))["flags"]["allow_tf32_matmul"] is allowed
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
