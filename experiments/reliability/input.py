"""Bad input, drawn by Hypothesis: adapter folders, guided by how far they get, and calls of operators."""

import json
import math
import random
import re
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, target
from hypothesis import strategies as st
from transformers import AutoConfig

from experiments.benches.engine_steps import lora_manager
from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.world import MAX_RANK, make_world
from punica.adapters import LoRARequest
from punica.adapters.peft_config import CONFIG_FILE
from punica.adapters.read import WEIGHTS_FILE
from punica.adapters.synthetic import llama_module_shapes
from punica.engine import Engine
from punica.ops import reference, torch_ops

CLEAR = (ValueError, TypeError, FileNotFoundError)
ADAPTER_ID = 10_001
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5,
)  # fmt: skip
KEYS = (
    "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "peft_type", "use_dora",
    "modules_to_save", "layers_to_transform", "fan_in_fan_out",
)  # fmt: skip
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "F64": 8, "F31": 4}
CHUNK = 50
"""Inputs of one example: Hypothesis takes longer to draw a folder than the loader to read it."""
NUMBERS = (b"-1", b"0", b"7", b"4294967296", b"18446744073709551616", b"1e99", b"0.5", b"null", b"true", b'"1"', b"[]")
CALLS = 5
"""Operator calls of one example."""
Files = tuple[bytes, bytes]


def drawn(count: int) -> Any:
    """Return settings of ``count`` examples, without a database or a second run of any."""
    return settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.target],
    )  # fmt: skip


def folders(shapes: dict[str, tuple[int, int]]) -> st.SearchStrategy[Files]:
    """Draw config and weights of an adapter of modules with these ``(inputs, outputs)``; most are nearly valid."""

    @st.composite
    def one(draw: Any) -> Files:
        rank = draw(st.integers(1, MAX_RANK))
        config = {
            "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"],
            "bias": "none",
        }  # fmt: skip
        config |= draw(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=draw(st.sampled_from([0, 0, 1, 2]))))
        text = json.dumps(config).encode()
        header: dict[str, Any] = {}
        data = bytearray()
        for module in draw(st.lists(st.sampled_from(sorted(shapes)), min_size=1, max_size=2, unique=True)):
            inputs, outputs = shapes[module]
            for side, shape in (("A", [rank, inputs]), ("B", [outputs, rank])):
                _add(draw, header, data, f"base_model.model.{module}.lora_{side}.weight", shape)
        body = json.dumps(header).encode()
        weights = len(body).to_bytes(8, "little") + body + bytes(data)
        return _spoilt(draw, text), _spoilt(draw, weights)

    return one()


def _add(draw: Any, header: dict[str, Any], data: bytearray, name: str, shape: list[int]) -> None:
    """Append a tensor to header and data; one in eight has another name, dtype, shape, place or number."""
    kind, number = "F32", 0.5
    mistake = draw(st.integers(0, 39))
    if mistake == 0:
        name = draw(st.sampled_from([name.replace("lora_", "lora"), name[:-7], f"{name}.x", name + ".bias", ""]))
    elif mistake == 1:
        kind = draw(st.sampled_from(sorted(SIZES)))
    elif mistake == 2:
        shape = draw(st.lists(st.integers(-1, 3 * MAX_RANK), max_size=3))
    elif mistake == 3:
        number = draw(st.floats(width=32))
    size = SIZES[kind] * max(0, math.prod(shape))
    if mistake == 4:
        size = max(0, size + draw(st.integers(-8, 8)))
    header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + size]}
    element = torch.tensor([number]).numpy().tobytes()
    data += (element * (size // 4 + 1))[:size]


def _spoilt(draw: Any, content: bytes) -> bytes:
    """Return the content, one in sixteen cut, with other bytes, or others altogether."""
    match draw(st.integers(0, 47)):
        case 0:
            return content[: draw(st.integers(0, len(content)))]
        case 1:
            place, piece = draw(st.integers(0, len(content))), draw(st.binary(min_size=1, max_size=4))
            return content[:place] + piece + content[place + len(piece) :]
        case 2:
            return draw(st.binary(max_size=40))
    return content


def neighbour(files: Files, choose: random.Random) -> Files:
    """Return files with one or two small changes of the config, the header or the data."""
    config, weights = files
    size = int.from_bytes(weights[:8], "little")
    for _ in range(choose.choice((1, 1, 1, 2))):
        match choose.randrange(8):
            case 0 | 1:
                config = _changed(config, choose)
            case 2 | 3:
                weights = weights[: 8 + size] + _overwritten(weights[8 + size :], choose)
            case _:
                header = _changed(weights[8 : 8 + size], choose)
                weights = len(header).to_bytes(8, "little") + header + weights[8 + size :]
                size = len(header)
    return config, weights


def _changed(content: bytes, choose: random.Random) -> bytes:
    """Return content with another number or byte, without a piece, or with a piece of it twice."""
    start = choose.randint(0, len(content))
    stop = min(len(content), start + choose.choice((1, 2, 8, 60)))
    match choose.randrange(4):
        case 0 if numbers := list(re.finditer(rb"-?\d+", content)):
            start, stop = choose.choice(numbers).span()
            return content[:start] + choose.choice(NUMBERS) + content[stop:]
        case 1:
            return content[:start] + content[stop:]
        case 2:
            return content[:stop] + content[start:]
    return _overwritten(content, choose)


def _overwritten(content: bytes, choose: random.Random) -> bytes:
    """Return content with another byte at one place, or a byte more at its end."""
    start = choose.randint(0, len(content))
    return content[:start] + choose.randbytes(1) + content[start + 1 :]


def _state(engine: Engine) -> tuple[Any, ...]:
    manager = lora_manager(engine)
    return (
        sorted(manager.list_adapters()), list(manager.lora_index_to_id), manager.pinned_adapters,
        engine.blocks.num_free, engine.has_unfinished(),
    )  # fmt: skip


@trial("input", smoke=100, laptop=50_000, full=1_000_000, seconds=60)
def adapter_folders(setting: Setting) -> Outcome:
    """Random adapter folders and near ones, guided by how far they get: finite numbers, or one clear error."""
    outcome, read = Outcome(), [0]
    world = make_world(setting.folder, 1, setting.seed, setting.device)
    engine = world.engine()
    before = _state(engine)
    shapes = llama_module_shapes(AutoConfig.from_pretrained(world.checkpoint), ("q_proj", "v_proj"))
    place = setting.folder / "drawn"
    place.mkdir()

    def load(files: Files) -> int:
        (place / CONFIG_FILE).write_bytes(files[0])
        (place / WEIGHTS_FILE).write_bytes(files[1])
        error, stage = _load(engine, LoRARequest("drawn", ADAPTER_ID, str(place)))
        read[0] += error is None
        clear = error is None or (isinstance(error, CLEAR) and bool(str(error)))
        outcome.expect(clear and _state(engine) == before, f"{error!r} of {files[0][:200]!r} {files[1][:400]!r}")
        return stage

    @seed(setting.seed)
    @drawn(max(1, setting.count // CHUNK))
    @given(folders(shapes), st.integers(0, 1 << 32))
    def run(files: Files, start: int) -> None:
        choose = random.Random(start)
        target(float(load(files)))
        for _ in range(CHUNK - 1):
            load(neighbour(files, choose))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules without tensors, once per folder
        run()
    outcome.injected = outcome.tried - read[0]
    outcome.values["read"] = (read[0], "count")
    return outcome


def _load(engine: Engine, request: LoRARequest) -> tuple[Exception | None, int]:
    """Check and read a folder; return the error, and the stage that came to: check, reading, none."""
    stage = 0
    try:
        lora_manager(engine).check_adapter(request)
        stage = 1
        lora_manager(engine).read_adapter(request)
    except Exception as error:  # any: what is no clear error is counted as lost
        return error, stage
    return None, 2


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """Draw a call of a paper operator: sizes, dtypes and slots of which some do not fit."""
    dtypes = st.sampled_from([torch.float32] * 6 + [torch.float16, torch.bfloat16, torch.int32, torch.float64])
    rows, inner, outer, slots = (draw(st.integers(0, 9)), draw(st.integers(1, 40)), draw(st.integers(1, 40)),
                                 draw(st.integers(1, 4)))  # fmt: skip
    wrong = draw(st.integers(0, 7))
    return {
        "shrink": draw(st.booleans()), "start": draw(st.integers(0, 1 << 32)),
        "x": (rows, inner + (wrong == 0)), "weights": (slots, outer, inner), "y": (rows + (wrong == 1), outer),
        "lowest": -1 - (wrong == 2), "highest": slots - (wrong != 3),
        "dtypes": [draw(dtypes)] * 3 if wrong != 4 else [draw(dtypes) for _ in range(3)],
        "factor": draw(st.sampled_from([0.5, 1.0] if wrong != 5 else [math.nan, math.inf, 1])),
    }  # fmt: skip


@trial("input", smoke=60, laptop=10_000, full=100_000, seconds=35)
def operator_calls(setting: Setting) -> Outcome:
    """Random calls of the paper's operators: the result of the definition, or its error with the output unchanged."""
    outcome = Outcome()
    make = torch.Generator().manual_seed(setting.seed)

    @seed(setting.seed)
    @drawn(max(1, setting.count // CALLS))
    @given(calls())
    def run(call: dict[str, Any]) -> None:
        choose = random.Random(call["start"])
        for _ in range(CALLS):
            indices = [choose.randint(call["lowest"], call["highest"]) for _ in range(call["x"][0])]
            compare({**call, "indices": indices}, make, outcome)

    run()
    return outcome


def compare(call: dict[str, Any], make: torch.Generator, outcome: Outcome) -> None:
    """Count one call of an operator with new numbers: the result or the error of the definition."""
    x, weights, y = (
        torch.randn(call[name], generator=make).to(kind)
        for name, kind in zip(("x", "weights", "y"), call["dtypes"], strict=True)
    )
    found, expected = y.clone(), y.clone()
    error, right = (_call(ops, call, x, weights, out) for ops, out in ((torch_ops, found), (reference, expected)))
    outcome.injected += error is not None
    if error is not None:
        same = isinstance(error, (ValueError, TypeError)) and type(error) is type(right) and torch.equal(found, y)
    else:
        bound = 1e-4 if found.dtype in (torch.float32, torch.float64) else 0.1
        same = right is None and torch.allclose(found.double(), expected.double(), bound, bound)
    outcome.expect(same, f"{call}: {error!r}, and by the definition {right!r}")


def _call(ops: Any, call: dict[str, Any], x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> Exception | None:
    indices = torch.tensor(call["indices"], dtype=torch.int64)
    try:
        if call["shrink"]:
            ops.bgmv_shrink(x, weights, y, indices, call["factor"])
        else:
            ops.bgmv_expand(x, weights, y, indices, call["factor"] == 1.0)
    except Exception as error:  # any: the caller compares
        return error
    return None
