"""`LoRAModelManager`: the adapters of one model, loaded, cached and put to use step by step.

Requests may name any number of adapters: they are activated on demand (section 5.2 of the paper); a step has at most as
many as there are slots. Validate first: an adapter is fully loaded, packed and checked, and has a place, before
anything is evicted. A failed call leaves registered adapters, slots and buffers as they were.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from torch import nn

from punica.adapters import wrap
from punica.adapters.cache import AdapterCache, LoadedAdapter
from punica.adapters.load import AdapterLoader, Certificate
from punica.adapters.names import NameRules, last_component
from punica.adapters.pack import AdapterPacker
from punica.adapters.request import LoRARequest, check_same_source, distinct_requests
from punica.adapters.weights import LoRAModel, ModuleWeights
from punica.adapters.write import make_slot_writer
from punica.checks import check_count
from punica.config import LoRAConfig
from punica.layers.utils import base_weight
from punica.metadata import LoRAMapping, MixedRows, RowGroups
from punica.parallel import all_ranks_agree, check_free
from punica.wrapper import get_punica_wrapper


class LoRAModelManager(AdapterCache):
    """Adapters of one model: loading, activation and eviction, and the metadata of each step.

    Building it wraps the model's layers in place. One thread uses a manager. On CUDA slots are written asynchronously:
    no call waits for a copy, and :meth:`begin_step` and :meth:`set_adapter_mapping` order the next step after its own.
    Tensor-parallel ranks make the same calls in the same order; an error on one is raised on all.

    Args:
        model: module tree built from `punica.parallel` layers; may define `packed_modules_mapping` and
            `embedding_modules`.
        max_num_seqs, max_num_batched_tokens: most requests and tokens in one step.
        vocab_size: of the model; embedding adapters must match it.
        lora_config: capacity and switches; `"auto"` takes the dtype of the model's weights.
        device: of the metadata; slots are on the device of the layers' weights.

    Attributes: those of :class:`AdapterCache`; ``punica_wrapper``, shared by all layers.

    ValueError: the model has no layer to wrap, a targeted layer has no LoRA class, or the slots take more memory than
    is free. RuntimeError: it is wrapped already. The model is as it was.
    """

    def __init__(
        self, model: nn.Module, max_num_seqs: int, max_num_batched_tokens: int, vocab_size: int,
        lora_config: LoRAConfig, device: torch.device | str,
    ) -> None:  # fmt: skip
        layers, config = wrap.find_supported_layers(model), replace(lora_config)
        self.model, self.vocab_size = model, vocab_size
        with all_ranks_agree():  # a rank with too little memory must not leave the others with a wrapped model
            weight = base_weight(layers[0].layer)
            config.verify_with_model_config(weight)
            check_free([wrap.slots_need(model, config)], weight.device)
            self.punica_wrapper = get_punica_wrapper(
                max_num_batched_tokens, max_num_seqs, device, max_loras=config.max_loras, lora_config=config
            )
            wrapped = wrap.build_layers(model, layers, config, vocab_size)
            modules = {layer.names[0]: layer.layer for layer in wrapped}
            super().__init__(modules, config, make_slot_writer(modules))
        wrap.put_layers(model, wrapped)
        for layer in self.modules.values():
            layer.set_mapping(self.punica_wrapper)
        fp8 = cast(torch.dtype | None, config.fp8)
        self._packer = AdapterPacker(wrapped, wrap.packed_modules_of(model), config.target_modules, fp8)
        expected, moe_ep_spec = wrap.expected_lora_modules(layers), wrap.moe_ep_spec_of(layers)
        rules = NameRules(expected, moe_ep_spec, self._packer.most_tensors)
        is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
        self._loader = AdapterLoader(self._packer, rules, config, vocab_size, is_tied)
        self._embedding_modules = wrap.embedding_modules_of(model)
        self._dummies: dict[int, LoRAModel] | None = None  # by rank, inside of `dummy_lora_cache`
        self._last_step: tuple = (None, None)  # key of the latest step, and its rows in the wrapper

    def accept_activated_lora(self) -> None:
        """Accept activated LoRA: the caller computes rows before :func:`activation_start` without the adapter."""
        self._packer.takes_activated = True

    def check_adapter(self, request: LoRARequest, *, numbers: bool = False) -> Certificate:
        """Refuse a request's folder as :meth:`add_adapter` would, without `numbers` as far as can be told unread.
        Return the proof of a legal one. Warns where outputs may be wrong.

        Serving calls it when a request arrives, so that a hostile folder costs no time between the steps of others.
        FileNotFoundError, ValueError, TypeError; nothing has changed.
        """
        if not isinstance(request, LoRARequest):
            raise TypeError(f"request must be a LoRARequest, got {type(request).__name__}")
        with all_ranks_agree() as same:
            version, certificate = self._loader.check(request, numbers)
            same.append(self._loader.common_part(version))
            if not request.load_inplace:
                self._check_unchanged(request, version)
        return certificate

    def add_adapter(self, adapter: LoRAModel | LoRARequest) -> bool:
        """Register an adapter; when `max_cpu_loras` are registered, the least recently used unpinned one is removed.

        A `LoRAModel` is packed, checked and registered; a registered id is only marked as just used and gives `False`.
        On a CPU it shares the tensors that need no scaling or casting: do not change them afterwards.

        The folder of a `LoRARequest` is loaded unless the id is registered (with `load_inplace` in any case; a pin
        stays), registered, and activated; always `True`. Without `load_inplace` a folder that has changed since its
        adapter was evicted is refused.

        FileNotFoundError, ValueError, TypeError: it cannot be loaded or does not fit the model. RuntimeError: all that
        could make room are pinned. Nothing has changed.
        """
        if isinstance(adapter, LoRARequest):
            wanted = {adapter.lora_int_id: adapter}
            self._make_active(wanted, reload=set(wanted) if adapter.load_inplace else set())
            return True
        if not isinstance(adapter, LoRAModel):
            raise TypeError(f"adapter must be a LoRAModel or a LoRARequest, got {type(adapter).__name__}")
        if (loaded := self.loaded(adapter.id)) is not None:
            self._use(loaded)
            return False
        with all_ranks_agree():
            packed = self._packer.pack(adapter)
            self._check_place(packed.id)
            staged = self._writer.stage(packed)
        self._register(LoadedAdapter(staged))
        return True

    def read_adapter(self, request: LoRARequest) -> LoRAModel:
        """Read, check, pack and stage a request's folder for :meth:`add_read_adapter`; thread-safe, not on ranks."""
        return self._writer.stage(self._loader.load(request))

    def add_read_adapter(self, request: LoRARequest, read: LoRAModel) -> None:
        """Register and activate a result of :meth:`read_adapter`, as :meth:`add_adapter`; a pin stays."""
        adapter_id = request.lora_int_id
        self._make_active({adapter_id: request}, {adapter_id}, {adapter_id: read})

    def note_read_adapter(self, request: LoRARequest, read: LoRAModel) -> None:
        """Serve a result of :meth:`read_adapter` under a new id: registered, or loaded when it is used."""
        if len(self) < self.capacity or self.loaded(read.id) is not None:
            self._register(LoadedAdapter(read, request))
        else:
            self._note_latest(read.id, request, read.version)

    def set_active_adapters(self, requests: Iterable[LoRARequest | None], mapping: LoRAMapping) -> None:
        """Prepare a step: load missing adapters, make every requested one active, and set the mapping.

        Others are evicted only where room is needed. A request object with `load_inplace` is loaded once, however many
        steps it is passed for. `None` (no adapter) and repetitions among `requests` are fine.

        RuntimeError: more distinct adapters than slots, or than pinned ones leave. ValueError: two requests share an id
        but not name and path, a mapped id is neither requested nor 0, or the mapping does not fit the wrapper's
        buffers; or as :meth:`add_adapter`. Nothing has changed.
        """
        wanted = distinct_requests(requests)
        if len(wanted) > self.lora_slots:
            raise RuntimeError(
                f"{len(wanted)} distinct adapters requested in one step, but there are {self.lora_slots} slots "
                "(max_loras); run fewer distinct adapters together or raise LoRAConfig.max_loras"
            )
        if unknown := sorted(_ids_of(mapping) - {0, *wanted}):
            raise ValueError(f"mapping uses adapter ids {unknown}, which are not requested, as {sorted(wanted)} are")
        # any slots will do: the rules do not depend on them
        self.punica_wrapper.check_metadata(mapping, list(wanted), self.lora_slots + 1, self.vocab_size)
        loaded = {i: self._latest.get(i, (self.request_of(i), None))[0] for i in wanted}
        reload = {i for i, request in wanted.items() if request.load_inplace and loaded[i] is not request}
        self._make_active(wanted, reload)
        self.set_adapter_mapping(mapping)

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Begin the next step: order it after the copies of its adapters, and refill its metadata, unless mapping and
        slots are those of the last call.

        ValueError: an id that is not active, or more rows than the buffers; the previous metadata stay.
        """
        used = _ids_of(mapping)
        placed = {adapter_id: slot for slot, adapter_id in enumerate(self.lora_index_to_id) if adapter_id in used}
        if self._last_step != ((mapping, placed), self.punica_wrapper.batch.rows):
            # one more than the slots, so that "no adapter" encodes as one past the last slot
            self.punica_wrapper.update_metadata(mapping, self.lora_index_to_id, self.lora_slots + 1, self.vocab_size)
            self._last_step = ((mapping, placed), self.punica_wrapper.batch.rows)
        # even for the same slots: one of them may have been written again
        self._writer.begin_step(placed.values())

    def begin_step(
        self, segments: Sequence[tuple[int, int]], sampled_slots: Sequence[int],
        mixtures: Sequence[Sequence[tuple[int, float]]] = (), fan: int = 0, *, is_prefill: bool = False,
    ) -> None:  # fmt: skip
        """Begin the next step as :meth:`set_adapter_mapping`, laid out by slot: `segments` are `(slot, number of rows)`
        of the runs of rows, in row order, `sampled_slots` those of every sampled row; -1: without adapter; -2 - i: with
        the slots and weights of `mixtures[i]`, padded to `fan`.
        """
        if mixtures:
            self._begin_mixed(segments, sampled_slots, mixtures, max(fan, *map(len, mixtures)))
            return
        step = (tuple(map(tuple, segments)), tuple(sampled_slots), is_prefill)
        if self._last_step != (step, self.punica_wrapper.batch.rows):
            tokens = RowGroups.of_runs([slot for slot, _ in segments], [length for _, length in segments])
            sampled = RowGroups.of_runs(sampled_slots, [1] * len(sampled_slots))
            self.punica_wrapper.begin_step(tokens, sampled, self.vocab_size, is_prefill=is_prefill)
            self._last_step = (step, self.punica_wrapper.batch.rows)
        self._writer.begin_step({slot for slot, _ in segments if slot >= 0}.union(sampled_slots) - {-1})

    def _begin_mixed(
        self, segments: Sequence[tuple[int, int]], sampled_slots: Sequence[int],
        mixtures: Sequence[Sequence[tuple[int, float]]], fan: int,
    ) -> None:  # fmt: skip
        table = np.full((2, 1 + len(mixtures), fan), -1.0)  # slots and weights of mixtures; of other rows in place -1
        for i, mixture in enumerate(mixtures):
            table[:, -2 - i, : len(mixture)] = np.transpose(mixture)
        plain, mixed = [], []
        for runs in (segments, [(slot, 1) for slot in sampled_slots]):
            slots, lengths = [slot for slot, _ in runs], [length for _, length in runs]
            plain.append(RowGroups.of_runs([max(slot, -1) for slot in slots], lengths))
            lists, weights = table[:, [min(slot, -1) for slot in slots]]
            mixed.append(MixedRows.of_runs(lists.astype(np.int64), weights, lengths))
        self.punica_wrapper.begin_step(*plain, self.vocab_size)
        self.punica_wrapper.begin_mixtures(*mixed)
        used = {slot for slot, _ in (*segments, *itertools.chain(*mixtures))}.union(sampled_slots)
        self._writer.begin_step({slot for slot in used if slot >= 0})

    def create_dummy_lora(
        self, adapter_id: int, rank: int, embedding_modules: Collection[str] | None = None
    ) -> LoRAModel:
        """Build a zero adapter over all layers, for warm-up and graph capture: real cost, no effect on outputs.

        When fully sharded, the rank is rounded up to a multiple of the tensor-parallel size. `embedding_modules`: which
        of the model's to cover, by last name component; default all.
        """
        config, known = self.lora_config, self._embedding_modules
        if check_count("rank", rank) > config.max_lora_rank:
            raise ValueError(f"rank must be in [1, max_lora_rank={config.max_lora_rank}], got {rank}")
        ranks = max(layer.tp_size for layer in self.modules.values()) if config.fully_sharded_loras else 1
        rank = -(-rank // ranks) * ranks
        wanted = known if embedding_modules is None else set(embedding_modules)
        if unknown := sorted(wanted - known):
            raise ValueError(f"embedding_modules {unknown} are none of the model's, which are {sorted(known)}")
        loras = {
            name: ModuleWeights(name, rank, layer.zero_slices(rank, cast(torch.dtype, config.lora_dtype)))
            for name, layer in self.modules.items() if last_component(name) not in known - wanted
        }  # fmt: skip
        return LoRAModel(adapter_id, rank, loras)

    def add_dummy_lora(self, request: LoRARequest, rank: int) -> bool:
        """Register and activate a zero adapter under the request's id; its path is not read. `False`, and no change, if
        the id is registered. Remove it before the real adapter is to be loaded.
        """
        if not isinstance(request, LoRARequest):
            raise TypeError(f"request must be a LoRARequest, got {type(request).__name__}")
        adapter_id = request.lora_int_id
        if self.loaded(adapter_id) is not None:
            return False
        with all_ranks_agree():
            dummies = {} if self._dummies is None else self._dummies
            if rank not in dummies:
                dummies[rank] = self.create_dummy_lora(adapter_id, rank)
            packed = self._packer.pack(dummies[rank].clone(adapter_id))
            self._check_slots([adapter_id], self.pinned_adapters)
            staged = self._writer.stage(packed)
        self._register(LoadedAdapter(staged, request))
        return self.activate_adapter(adapter_id)

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        """Return a context in which :meth:`add_dummy_lora` builds one zero adapter per rank; nested ones share it."""
        outer = self._dummies
        self._dummies = {} if outer is None else outer
        try:
            yield
        finally:
            self._dummies = outer

    def _make_active(
        self, wanted: Mapping[int, LoRARequest], reload: Collection[int],
        read: Mapping[int, LoRAModel] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Make all of `wanted` registered and active; those in `reload` are loaded again, unless `read` and staged. All
        is loaded, checked and has room, on all tensor-parallel ranks, before anything changes. If a copy into a slot
        fails, versions that requests hold are registered again.
        """
        known = {i: self._registered.peek(i) for i in wanted}
        present = [loaded for loaded in known.values() if loaded is not None]
        for loaded in present:
            if loaded.lora.id not in reload:
                check_same_source(loaded.request, wanted[loaded.lora.id])
        missing = [i for i in wanted if i in reload or known[i] is None]
        staged: list[LoRAModel] = []
        with all_ranks_agree() if missing else nullcontext[list[object]]([]) as same:
            packed = {i: self._loader.load(wanted[i]) for i in missing if i not in read}
            for i in missing:
                version = (read.get(i) or packed[i]).version
                same.append(self._loader.common_part(version))
                if i not in reload or (i in read and not wanted[i].load_inplace):
                    self._check_unchanged(wanted[i], version)
            self._check_slots(wanted, self._registered.pinned.difference(wanted))
            staged = [read[i] if i in read else self._writer.stage(packed[i]) for i in missing]
        pinned = self._registered.pinned.intersection(missing)  # to be pinned again with their new weights
        for loaded in present:  # so that no requested one makes room for another
            self._use(loaded)
        for lora in staged:
            self._register(LoadedAdapter(lora, wanted[lora.id]))
        try:
            for adapter_id in wanted:
                self.activate(cast(LoadedAdapter, self._registered.peek(adapter_id)))
        except BaseException:
            for old in present:
                if old.users and old.lora.id in missing:
                    self._register(old)
                    if old.lora.id in pinned:
                        self.pin_adapter(old.lora.id)
            raise
        for adapter_id in pinned:
            self.pin_adapter(adapter_id)


def _ids_of(mapping: LoRAMapping) -> set[int]:
    """Return the adapter ids in a mapping, with 0 for none. TypeError for anything else."""
    if not isinstance(mapping, LoRAMapping):
        raise TypeError(f"mapping must be a LoRAMapping, got {type(mapping).__name__}")
    return {*mapping.index_mapping, *mapping.prompt_mapping}
