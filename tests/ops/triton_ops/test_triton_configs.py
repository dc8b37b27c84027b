"""Tuned tables: look-up, defaults, broken files; and that a configuration never changes a result."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from triton_batches import Batch

from punica.ops.triton_ops import (
    TritonOps,
    clear_config_cache,
    configs,
    get_lora_op_configs,
    load_lora_op_config,
)
from punica.ops.weights import LoRAWeights
from tests.ops.helpers import step

LEAF = {"block_m": 16, "block_n": 16, "block_k": 64, "split_k": 2, "num_warps": 4, "num_stages": 2}
EXPAND_LEAF = {key: value for key, value in LEAF.items() if key != "split_k"}


@pytest.fixture(autouse=True)
def fresh_caches():
    clear_config_cache()
    yield
    clear_config_cache()


def write(folder: Path, op_type: str, table: object, add_inputs: bool | None = None) -> Path:
    path = folder / configs.tuned_file_name(op_type, add_inputs, configs._gpu_name())
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


def nested(*keys: str, leaf: object = None) -> dict:
    node = LEAF if leaf is None else leaf
    for key in reversed(keys):
        node = {key: node}
    return node


def test_file_names():
    name = configs.tuned_file_name
    assert name("shrink", None, "NVIDIA H-200") == "NVIDIA_H_200_SHRINK.json"
    assert [name("expand", add, "A") for add in (True, False, None)] == [
        "A_EXPAND_TRUE.json", "A_EXPAND_FALSE.json", "A_EXPAND_FALSE.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "block_k"),
    [
        ((4, 8, 4096, 16), 64),
        ((4, 12, 4096, 16), 64),
        ((4, 13, 4096, 16), 128),
        ((11, 8, 4096, 16), 256),
        ((4, 8, 11008, 64), 64),
    ],
    ids=["exact", "tie takes the smaller", "nearer above", "other max_loras", "other k and n"],
)
def test_look_up(query, block_k, tmp_path):
    table = {"4": {"1": {"8": {"4096": {"16": LEAF}}, "16": {"4096": {"16": {**LEAF, "block_k": 128}}}}}}
    table["16"] = nested("1", "8", "4096", "16", leaf={**LEAF, "block_k": 256})
    write(tmp_path, "shrink", table)
    assert get_lora_op_configs("shrink", *query, 1, tuned_dir=str(tmp_path))["block_k"] == block_k


def test_rank_comes_before_hidden_size_for_expand(tmp_path):
    ranks = {"16": {"4096": {**EXPAND_LEAF, "block_n": 32}}, "64": {"4096": {**EXPAND_LEAF, "block_n": 64}}}
    table = nested("1", "1", "1", leaf=ranks)
    write(tmp_path, "expand", table, True)
    found = get_lora_op_configs("expand", 1, 1, 4096, 60, 1, add_inputs=True, tuned_dir=str(tmp_path))
    assert found["block_n"] == 64


def test_moe_size_is_one_more_level(tmp_path):
    sizes = {"1024": LEAF, "4096": {**LEAF, "block_k": 128}}
    write(tmp_path, "fused_moe_lora_w13_shrink", nested("4", "1", "8", "16", "4096", leaf=sizes))
    for size, block_k in ((2560, 64), (2561, 128)):
        found = get_lora_op_configs("fused_moe_lora_w13_shrink", 4, 8, 4096, 16, 1, None, size, tuned_dir=str(tmp_path))
        assert found == {**LEAF, "block_k": block_k}


def test_missing_file_and_missing_slices_warn_once(tmp_path):
    default = get_lora_op_configs("shrink", 2, 4, 128, 16, 1)
    with pytest.warns(UserWarning, match="SHRINK"):
        assert get_lora_op_configs("shrink", 2, 4, 128, 16, 1, tuned_dir=str(tmp_path)) == default
    clear_config_cache()
    write(tmp_path, "shrink", nested("2", "1", "4", "128", "16"))
    with pytest.warns(UserWarning, match="3 slices"):
        assert get_lora_op_configs("shrink", 2, 4, 128, 16, 3, tuned_dir=str(tmp_path))["split_k"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_lora_op_configs("shrink", 3, 5, 128, 16, 3, tuned_dir=str(tmp_path))


BROKEN = {
    "broken": ("{", "not valid JSON"),
    "empty": ({}, "max_loras"),
    "empty level": ({"2": {"1": {}}}, "'m'"),
    "missing key": (nested("2", "1", "4", "128", "16", leaf={"block_m": 16}), "block_n"),
    "not a power of two": (nested("2", "1", "4", "128", "16", leaf={**LEAF, "block_m": 48}), "block_m"),
    "unknown key": (nested("2", "1", "4", "128", "16", leaf={**LEAF, "block_z": 8}), "[16]: unknown key 'block_z'"),
    "split 0": (nested("2", "1", "4", "128", "16", leaf={**LEAF, "split_k": 0}), "split_k"),
    "bad key": (nested("2", "1", "four", "128", "16"), "four"),
    "no dict": (nested("2", "1", "4", "128", leaf=3), "'n'"),
    "not where it is looked up": (
        nested("2", "1", "4", "128", "16") | {"99": {"1": {"4": {}}}}, "[99][1][4]: no entries of level 'k'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("table", "text"), BROKEN.values(), ids=tuple(BROKEN))
def test_broken_files_name_file_and_place(table, text, tmp_path):
    path = write(tmp_path, "shrink", table)
    with pytest.raises(ValueError, match="SHRINK") as raised:
        get_lora_op_configs("shrink", 2, 4, 128, 16, 1, tuned_dir=str(tmp_path))
    assert str(path) in str(raised.value)
    assert text in str(raised.value)


def test_keys_of_other_tools_are_not_unknown(tmp_path):
    leaf = {**LEAF, "num_ctas": 1, "group_size_m": 8, "max_nreg": 128}
    write(tmp_path, "shrink", nested("2", "1", "4", "128", "16", leaf=leaf))
    assert get_lora_op_configs("shrink", 2, 4, 128, 16, 1, tuned_dir=str(tmp_path))["split_k"] == 2
    write(tmp_path, "expand", nested("2", "1", "4", "16", "128"))
    with pytest.raises(ValueError, match="unknown key 'split_k'"):
        get_lora_op_configs("expand", 2, 4, 128, 16, 1, tuned_dir=str(tmp_path))


def test_an_edited_table_replaces_the_plans_of_weights_in_use(tmp_path, device):
    batch = Batch([0, 1], 128, (48,), 16, 2, torch.float16, device)
    of_slots, weights = step([0, 1], device, 2), LoRAWeights.of(batch.a, batch.b)
    write(tmp_path, "expand", nested("2", "1", "4", "16", "48", leaf=EXPAND_LEAF), True)
    splits = []
    for split_k in (2, 4):
        write(tmp_path, "shrink", nested("2", "1", "4", "128", "16", leaf={**LEAF, "split_k": split_k}))
        clear_config_cache()
        TritonOps(configs.Options(tuned_dir=str(tmp_path))).linear(batch.y, batch.x, weights, of_slots)
        splits += [plan.partials[0] for plan in weights.plans.values()]
    assert splits == [2, 4]


def test_unknown_op_type():
    for function in (lambda: load_lora_op_config("shrnk", None), lambda: get_lora_op_configs("shrnk", 1, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match="fused_moe_lora_w2_expand"):
            function()


@pytest.mark.parametrize("op_type", configs.OP_TYPES)
def test_defaults_have_the_keys_that_apply_and_are_copies(op_type):
    given = (op_type, 4, 32, 4096, 16, 2, True)
    found = get_lora_op_configs(*given)
    assert {"block_m", "block_n", "block_k", "num_warps", "num_stages"} <= set(found)
    assert ("split_k" in found) == (op_type != "expand")
    found["block_m"] = 0
    assert get_lora_op_configs(*given)["block_m"] > 0


def test_batch_invariant_asks_no_table(tmp_path):
    write(tmp_path, "shrink", nested("2", "1", "4", "128", "16"))
    given = ("shrink", 2, 4, 128, 16, 1, None, None)
    assert get_lora_op_configs(*given, str(tmp_path), True) == get_lora_op_configs(*given, None, True)


def test_a_tuned_file_never_changes_the_result(tmp_path, device):
    leaf = LEAF | {"block_m": 64, "block_k": 128}
    write(tmp_path, "shrink", nested("2", "1", "4", "128", "16", leaf=leaf))
    expand = EXPAND_LEAF | {"block_m": 64, "block_k": 128}
    write(tmp_path, "expand", nested("2", "1", "4", "16", "48", leaf=expand), True)
    batch = Batch([0, 1, -1, 1], 128, (48,), 16, 2, torch.float16, device)
    batch.check(batch.linear(tuned_dir=str(tmp_path)))
