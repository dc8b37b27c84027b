"""Weights of one adapter in host memory: `LoRAModel`, and `ModuleWeights` of each module that it touches.

LoRA adds `delta W = scaling * B A` to a layer, A `[r, in]`, B `[out, r]`. The scaling is multiplied into B before an
adapter enters a slot, so that the kernels need no per-adapter scale.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from punica.adapters.check import ModuleEntry, check_finite, check_pair, table_of_contents
from punica.adapters.config import PEFTHelper
from punica.adapters.names import MoEEPSpec, NameMapper, NameRules, lora_names
from punica.adapters.read import AdapterVersion, WeightsFile
from punica.adapters.request import NO_ADAPTER
from punica.checks import check_count
from punica.layers.base import LoRAInput
from punica.layers.packing import LoRAFactor, Slices
from punica.ops.quant import Fp8Matrix
from punica.parallel import gathered_bytes
from punica.threads import map_in_threads

_next_model_id = itertools.count(1)


def _side(index: int) -> property:
    def get(weights: ModuleWeights) -> LoRAInput:
        factors = [pair[index] for pair in weights.slices]
        return factors if weights.is_packed else factors[0]

    def put(weights: ModuleWeights, given: LoRAInput) -> None:
        sides = [list(side) for side in zip(*weights.slices, strict=True)]
        sides[index] = list(cast(Sequence[LoRAFactor], given if weights.is_packed else [given]))
        weights.slices = list(zip(*sides, strict=True))

    return property(get, put, doc=f"{'AB'[index]}; of a packed module a list with one entry per slice.")


@dataclass(eq=False)
class ModuleWeights:
    """A and B of one module of an adapter, or of one layer of the model.

    Args:
        module_name: name in the model, e.g. `model.layers.0.self_attn.q_proj`.
        rank: the largest rank of any slice.
        slices: A and B of every slice, tensors or FP8 with scales; of experts with a leading dimension, `[E, r, in]`
            and `[E, out, r]`; `(None, None)` where the adapter has none.
        scaling: factor of `B A` that is not in B yet.
        lora_alpha: numerator of the scaling in the adapter's config.
    """

    module_name: str
    rank: int
    slices: Slices
    scaling: float = 1
    lora_alpha: float = 1

    lora_a, lora_b = _side(0), _side(1)

    @property
    def is_packed(self) -> bool:
        return len(self.slices) > 1

    def pair(self) -> tuple[LoRAInput, LoRAInput]:
        return self.lora_a, self.lora_b

    def scaled(self) -> Slices:
        """Return the slices with the scaling in B, rounded once, in new tensors. RuntimeError: a shell."""
        if self.slices and self.slices[0][0] is None and not self.is_packed:
            raise RuntimeError(f"module {self.module_name!r}: lora_a and lora_b are not set yet (shell of from_config)")
        return self.slices if self.scaling == 1 else [(a, times(b, self.scaling)) for a, b in self.slices]

    def optimize(self) -> ModuleWeights:
        """Put the scaling into B, as :meth:`scaled`, and set it to 1. Idempotent; returns self."""
        self.slices, self.scaling = self.scaled(), 1
        return self

    def tensors(self) -> list[Tensor | None]:
        """List A and B of every slice, of FP8 ones the values and then the scales."""
        factors = [factor for pair in self.slices for factor in pair]
        split = [[each.values, each.scale] if isinstance(each, Fp8Matrix) else [each] for each in factors]
        return [tensor for parts in split for tensor in parts]

    @property
    def input_dim(self) -> int:
        return cast(Tensor, self.slices[0][0]).shape[-1]

    @property
    def output_dim(self) -> int:
        return cast(Tensor, self.slices[0][1]).shape[-2]


def times(b: LoRAFactor, scaling: float) -> LoRAFactor:
    """Multiply a B in float32, rounded once."""
    if b is None or b.device.type == "meta":  # torch takes long to multiply meta tensors
        return b
    return cast(Tensor, b) * scaling  # torch computes products of half precision in float32


class LoRALayerWeights(ModuleWeights):
    """Weights of one slice, from A `[r, in]` and B `[out, r]`; `None`: a shell. `scaling` is `lora_alpha / rank` unless
    given. ValueError: A and B are not 2-D, or have another rank than `rank`.
    """

    def __init__(
        self, module_name: str, rank: int, lora_alpha: float, lora_a: LoRAFactor, lora_b: LoRAFactor,
        scaling: float | None = None,
    ) -> None:  # fmt: skip
        if lora_a is not None and lora_b is not None:
            check_pair(module_name, cast(Tensor, lora_a), cast(Tensor, lora_b), rank)
        scaling = lora_alpha / rank if scaling is None else scaling
        super().__init__(module_name, rank, [(lora_a, lora_b)], scaling, lora_alpha)

    @classmethod
    def from_config(cls, module_name: str, peft_helper: PEFTHelper) -> LoRALayerWeights:
        """Build a shell without tensors, with the module's own rank, alpha and scaling."""
        rank, alpha = peft_helper.rank_of(module_name), peft_helper.alpha_of(module_name)
        return cls(module_name, rank, alpha, None, None, peft_helper.scaling_of(module_name))

    @classmethod
    def create_dummy_lora_weights(
        cls, module_name: str, input_dim: int, output_dim: int, rank: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> LoRALayerWeights:  # fmt: skip
        """Build zeros with `lora_alpha = 1`: the cost of an adapter of this rank, no change of outputs."""
        a = torch.zeros(rank, input_dim, dtype=dtype, device=device)
        b = torch.zeros(output_dim, rank, dtype=dtype, device=device)
        return cls(module_name, rank, 1, a, b)


class PackedLoRALayerWeights(ModuleWeights):
    """Weights of slices (q, k, v or gate, up), `None` for one without; the scaling is in B. `rank`: the largest."""

    is_packed = True  # type: ignore[assignment]  # also with one slice

    def __init__(self, module_name: str, rank: int, lora_a: Sequence[LoRAFactor], lora_b: Sequence[LoRAFactor]) -> None:
        super().__init__(module_name, rank, list(zip(lora_a, lora_b, strict=True)))

    @classmethod
    def pack(cls, members: Sequence[ModuleWeights | None], module_name: str | None = None) -> PackedLoRALayerWeights:
        """Put the slices of one module together, `None` where the adapter has none; scaling goes into the members' B.
        `module_name`: default the first member's. ValueError: every entry is `None`.
        """
        present = [member for member in members if member is not None]
        if not present:
            raise ValueError(f"pack needs at least one member, got {len(members)} times None")
        slices = [(None, None) if member is None else member.optimize().slices[0] for member in members]
        rank = max(member.rank for member in present)
        return cls(module_name or present[0].module_name, rank, *zip(*slices, strict=True))

    @classmethod
    def pack_moe(
        cls, members: Sequence[ModuleWeights | None], module_name: str, is_non_gated_moe: bool = False
    ) -> PackedLoRALayerWeights:
        """Stack the experts of one layer: lists of three, w1, w2, w3, `A [E, r, in]` and `B [E, out, r]`.

        `members` are (w1, w2, w3) of every expert, one after the other; `None`: zeros, or no projection if no expert
        has it. Ranks are padded to a projection's largest. Without a gate (`is_non_gated_moe`) w3 is w1.
        ValueError: not a multiple of three members, or all of them `None`.
        """
        if len(members) % 3:
            raise ValueError(f"pack_moe needs three members (w1, w2, w3) for every expert, got {len(members)}")
        packed = cls.pack(members, module_name)
        slices = [stack_experts(packed.slices[projection::3]) for projection in range(3)]
        if is_non_gated_moe:
            slices[2] = slices[0]
        return cls(module_name, packed.rank, *zip(*slices, strict=True))


def stack_experts(pairs: Slices) -> tuple[LoRAFactor, LoRAFactor]:
    """Stack one projection of all experts, `A [E, r, in]`, `B [E, out, r]`, r the largest rank. ValueError: sizes."""
    present = {i: (a.shape[1], b.shape[0]) for i, (a, b) in enumerate(pairs) if a is not None and b is not None}
    if not present:
        return None, None
    width, height = next(iter(present.values()))
    for expert, (columns, rows) in present.items():
        if (columns, rows) != (width, height):
            raise ValueError(f"expert {expert}: A has {columns} columns and B {rows} rows, others {width} and {height}")
    rank = max(a.shape[0] for a, _ in pairs if a is not None)
    return _stack([a for a, _ in pairs], rank, width), _stack([b for _, b in pairs], height, rank)


def _stack(matrices: Sequence[LoRAFactor], rows: int, cols: int) -> Tensor:
    """Place each matrix in the top-left corner of its `[rows, cols]`, with zeros around it and for `None`."""
    first = next(matrix for matrix in matrices if matrix is not None)
    stacked = torch.zeros(len(matrices), rows, cols, dtype=first.dtype, device=first.device)
    for own, matrix in zip(stacked, matrices, strict=True):
        if matrix is not None:
            own[: matrix.shape[0], : matrix.shape[1]] = cast(Tensor, matrix)
    return stacked


def _digest(weights: ModuleWeights) -> bytes:
    """Digest the shapes, dtypes and numbers of one module, however they are laid out in memory."""
    digest = blake2b(digest_size=32)
    for tensor in weights.tensors():
        form = None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))
        digest.update(f"{form};".encode())
        if tensor is not None:
            digest.update(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.digest()


class LoRAModel:
    """All modules of one adapter, `{module name: weights}`; `rank`: the largest of any.

    `is_3d_lora_weight`: experts are stored as one pair for all of a layer. `version`: of its folder, if it has one.
    `image`: memory that its tensors are views of, once it is staged for a GPU. `invocation`: tokens from which on it
    works, see :func:`activation_start`; `None`: always, plain LoRA.
    """

    version: AdapterVersion | None = None
    image: Tensor | None = None
    invocation: tuple[int, ...] | None = None
    _content_hash: bytes | None = None

    def __init__(
        self, lora_model_id: int, rank: int, loras: Mapping[str, ModuleWeights], is_3d_lora_weight: bool = False
    ) -> None:
        self.id, self.rank = check_count("lora_model_id", lora_model_id, meaning=NO_ADAPTER), rank
        self.is_3d_lora_weight = is_3d_lora_weight
        self.loras: dict[str, ModuleWeights] = dict(loras)

    def clone(self, lora_model_id: int) -> LoRAModel:
        """Return the same adapter under another id; weights are shared."""
        twin = copy.copy(self)
        twin.id = check_count("lora_model_id", lora_model_id, meaning=NO_ADAPTER)
        return twin

    def get_lora(self, module_name: str) -> ModuleWeights | None:
        return self.loras.get(module_name)

    def slices_of(self, module_name: str) -> Slices | None:
        """Return A and B of every slice of a module, `None` if the adapter does not touch it."""
        weights = self.loras.get(module_name)
        return None if weights is None else weights.slices

    def check_lora_name(self, module_name: str) -> bool:
        return module_name in self.loras

    def tensors(self) -> list[Tensor]:
        """List all matrices, of FP8 ones the values and then the scales."""
        return [tensor for weights in self.loras.values() for tensor in weights.tensors() if tensor is not None]

    def content_hash(self) -> bytes:
        """Return a digest of all that outputs depend on: names of modules, scalings, invocation and numbers; not of id,
        name and folder. Computed once, in threads; about 0.1 s for 100 MB.

        All tensor-parallel ranks call it together, and get one digest of what each has.
        """
        if self._content_hash is None:
            modules = sorted(self.loras.items())
            parts = map_in_threads(_digest, [weights for _, weights in modules])
            form = self.invocation, [(name, weights.scaling) for name, weights in modules]
            own = blake2b(repr(form).encode() + b"".join(parts), digest_size=32).digest()
            self._content_hash = blake2b(b"".join(gathered_bytes(own)), digest_size=32).digest()
        return self._content_hash

    def host_bytes(self) -> int:
        """Return the host memory in bytes: the image, or the distinct storages behind the tensors."""
        if self.image is not None:
            return self.image.numel()
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @classmethod
    def from_lora_tensors(
        cls,
        lora_model_id: int,
        tensors: Mapping[str, Tensor], peft_helper: PEFTHelper,
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None, model_vocab_size: int | None = None,
        weights_mapper: NameMapper | None = None, skip_prefixes: Sequence[str] | None = None,
    ) -> LoRAModel:  # fmt: skip
        """Build an adapter from PEFT-named tensors in memory.

        Args:
            tensors: `{PEFT name: tensor}`.
            device, dtype: of the result; `dtype=None` keeps each tensor's own. Tensors that fit are shared, not copied.
            model_vocab_size: if given, embedding adapters must cover exactly this many ids.
            weights_mapper: renames modules: a function, or a dict whose keys are replaced in order in the names.
            skip_prefixes: modules to leave out.

        TypeError: a value is not a tensor, or of a dtype that cannot be loaded. ValueError: no tensors, A without B,
        shapes or ranks that disagree, NaN or inf, an embedding of another vocabulary.
        """
        names = lora_names(tensors, weights_mapper, skip_prefixes)
        contents = table_of_contents(tensors, names, peft_helper, model_vocab_size)
        model = cls.from_contents(lora_model_id, contents, tensors, device, dtype)
        model.invocation = peft_helper.alora_invocation_tokens
        return model

    @classmethod
    def from_contents(
        cls, lora_model_id: int, contents: Collection[ModuleEntry], tensors: Mapping[str, Tensor],
        device: torch.device | str, dtype: torch.dtype | None, *, finite: bool = False,
    ) -> LoRAModel:  # fmt: skip
        """Build an adapter from tensors of the shapes that `contents`, one entry or more, was made from. ValueError:
        NaN or inf; `finite`: known to hold neither, so that only what a cast changed is checked.
        """
        loras = {}
        for entry in contents:
            pair = []
            for key in (entry.key_a, entry.key_b):
                read = tensors[key].detach()
                placed = read.to(device=device, dtype=dtype or read.dtype)
                if not finite or placed.dtype != read.dtype:
                    check_finite(entry.module, key == entry.key_a, placed, read)
                pair.append(placed)
            a, b = pair
            if entry.is_stacked:
                a, b = _by_expert(a, b, entry.rank)
            loras[entry.module] = ModuleWeights(entry.module, entry.rank, [(a, b)], entry.scaling, entry.lora_alpha)
        is_stacked = any(entry.is_stacked for entry in contents)
        return cls(lora_model_id, max(weights.rank for weights in loras.values()), loras, is_stacked)

    @classmethod
    def from_local_checkpoint(
        cls, lora_dir: str | Path, expected_lora_modules: Collection[str], peft_helper: PEFTHelper,
        *, lora_model_id: int | None = None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
        model_vocab_size: int | None = None, weights_mapper: NameMapper | None = None,
        skip_prefixes: Sequence[str] | None = None, moe_ep_spec: MoEEPSpec | None = None,
    ) -> LoRAModel:  # fmt: skip
        """Load the weights of a PEFT folder, as :meth:`from_lora_tensors`.

        Names are checked before a tensor is read: the last name component of each module must be in
        `expected_lora_modules`. `lora_model_id=None` takes the next number of a process-wide counter. `moe_ep_spec`:
        tensors of experts on other ranks are not read. FileNotFoundError: no folder, or no weights file in it.
        """
        rules = NameRules(expected_lora_modules, moe_ep_spec, skip_prefixes=skip_prefixes)
        with WeightsFile(lora_dir) as file:
            tensors = file.numbers(file.entries(rules, weights_mapper)).tensors
        model_id = next(_next_model_id) if lora_model_id is None else lora_model_id
        if not tensors and moe_ep_spec is not None:  # all of it belongs to experts of other ranks
            lora = cls(model_id, peft_helper.r, {})
            lora.invocation = peft_helper.alora_invocation_tokens
            return lora
        return cls.from_lora_tensors(
            model_id, tensors, peft_helper, device, dtype, model_vocab_size, weights_mapper, skip_prefixes
        )


def _by_expert(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Views `A [E, r, in]` and `B [E, out, r]` of PEFT's `target_parameters`: there A is `[E*r, in]`, expert after
    expert, and B `[out, r*E]`, where column `j*E + e` is rank j of expert e.
    """
    experts = a.shape[0] // rank
    return a.view(experts, rank, a.shape[1]), b.view(b.shape[0], rank, experts).permute(2, 0, 1)
