"""Adapters on demand (section 5.2 of the paper): those of a step are made active just before it runs.

Two guarantees come with it. An id belongs to one folder while a request uses it or a pin keeps it, and is free then.
And a request is computed with one *version* of its adapter, from its first token to its last:

    version 1 of adapter 7      r1 ========= joined ===================> end: its memory and slot are free
                                     load_inplace: version 2 is registered, r1 still holds version 1
    version 2 of adapter 7                r2 (waits, reloads) joins, holds version 2 =======>
"""

import itertools
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from punica.adapters import LoadedAdapter, LoRAModel, LoRAModelManager, LoRARequest, activation_start
from punica.adapters.request import check_same_source
from punica.checks import clip
from punica.parallel import all_ranks_agree, get_tensor_model_parallel_world_size
from punica.scheduling import Mixture, PrefixKey, RequestState, adapters_of
from punica.threads import compute_alone

READERS = 4
"""Threads that read folders, and most adapters read ahead of their requests: in host memory beside registered ones."""
_MIXED = "mixtures take plain LoRA of linear layers and head, in 16 or 32 bits and not fully sharded"
_MOST_READ_AHEAD = 64  # waiting requests whose adapters are looked for


class FolderReaders:
    """Threads that read adapters' folders while the device computes.

    ``readings``: futures of adapters by request; requests for one folder and id share one.
    """

    def __init__(self, manager: LoRAModelManager, *, digests: bool = False) -> None:
        self.readings: dict[str, Future[LoRAModel]] = {}
        self._latest: dict[tuple[int, object], Future[LoRAModel]] = {}  # by id and folder: those that requests wait for
        self._manager, self._digests = manager, digests
        self._pool = ThreadPoolExecutor(READERS, "punica-adapters", compute_alone)

    @property
    def has_room(self) -> bool:
        """True while fewer than ``READERS`` adapters are read, or being read, and unused."""
        return len(set(self.readings.values())) < READERS

    def begin(self, request_id: str, adapter: LoRARequest) -> Future[LoRAModel]:
        if request_id not in self.readings:
            reading = self.readings[request_id] = self.find(request_id, adapter) or self.read(adapter)
            self._latest[adapter.lora_int_id, adapter.source] = reading
        return self.readings[request_id]

    def read(self, adapter: LoRARequest) -> Future[LoRAModel]:
        """Begin a reading that no request waits for, from any thread."""

        def load() -> LoRAModel:
            found = self._manager.read_adapter(adapter)
            if self._digests:
                found.content_hash()  # it is kept
            return found

        return self._pool.submit(load)

    def find(self, request_id: str, adapter: LoRARequest) -> Future[LoRAModel] | None:
        """Return the reading of a request, or another of its adapter unless that failed: the folder may be repaired."""
        if request_id in self.readings:
            return self.readings[request_id]
        reading = self._latest.get((adapter.lora_int_id, adapter.source))
        return None if reading is not None and reading.done() and reading.exception() else reading

    def drop(self, request_id: str) -> None:
        """Forget the reading of a request; one without requests is cancelled unless it has begun."""
        reading = self.readings.pop(request_id, None)
        if reading is not None and reading not in self.readings.values():
            self._latest = {folder: one for folder, one in self._latest.items() if one is not reading}
            reading.cancel()  # last: nobody finds a cancelled one, whose error would be raised, after an interrupt


class AdapterResidency:
    """Checks the adapters of requests that arrive, and activates them at admission.

    An adapter is loaded at admission, or beside the step before if a slot is free, since thousands of requests may be
    queued while few adapters are registered. One that was registered in memory (``manager.add_adapter(LoRAModel)``) is
    used as it is, and its request's path not read while it stays registered: give ``max_cpu_loras`` room for all.

    ``load_inplace`` asks for the folder's content at some time after the request arrived: of several requests that wait
    for one folder, the first loads it for all. Tensors in memory are loaded again only in place of others. Weights that
    a request began with stay in host memory until it leaves, even if the manager evicts them.

    With ``reads_beside``, for one rank and a device that computes meanwhile, folders are read by threads: a request
    whose adapter is not in host memory waits in the queue while others run, and the next in the queue are read too, up
    to ``READERS`` unused ones. Only a folder's reload is read between two steps. ``digests``: the threads compute the
    digests of adapters, for a prefix cache.
    """

    def __init__(self, manager: LoRAModelManager, reads_beside: bool = False, digests: bool = False) -> None:
        self.manager = manager
        self._reads_beside, self._readers = reads_beside, FolderReaders(manager, digests=digests)
        self._waiting: dict[str, RequestState] = {}  # requests that have not begun, in order of arrival
        self._users: dict[int, dict[str, RequestState]] = {}  # unfinished requests of each id, in order of arrival
        self._prefetched: str | None = None  # the waiting request that was last tried
        # requests made active last, in order, and `manager.uses` then: while both are the same, nothing has to be done
        self.settled: tuple[list[RequestState], int] = ([], -1)

    def check(self, adapter: object) -> None:
        """Refuse an adapter by its type and slots; :meth:`check_folder` checks its id and folder."""
        parts, slots = adapters_of(adapter), self.manager.lora_slots
        for one in parts:
            if not isinstance(one, LoRARequest):
                raise TypeError(f"adapter must be a LoRARequest or None, got {type(one).__name__} {clip(one)}")
        if isinstance(adapter, Mixture) and not any(layer.mixes for layer in self.manager.modules.values()):
            raise ValueError(f"this engine serves no mixtures: {_MIXED}")
        names, ids = ", ".join(repr(one.lora_name) for one in parts), sorted({one.lora_int_id for one in parts})
        if not len(parts) == len(ids) <= slots:
            raise ValueError(
                f"a mixture has {len(parts)} adapters, {clip(names)}, of ids {ids}; give distinct ones, at most one "
                f"for each of the {slots} slots (max_loras)"
            )
        pinned = self.manager.pinned_adapters
        if len(pinned.union(ids)) > slots:
            raise RuntimeError(
                f"no slot for adapter {names} (id {', '.join(map(str, ids))}): {len(pinned)} of {slots} slots are "
                f"pinned, for adapters {sorted(pinned)}; call manager.unpin_adapter first, or raise max_loras"
            )

    def check_folder(self, adapter: object, mixed: bool = False) -> None:
        """Refuse what is neither registered nor in a legal PEFT folder, or cannot be mixed; reads all but numbers."""
        if isinstance(adapter, Mixture):
            for one in adapter.adapters:
                self.check_folder(one, mixed=not self._awaits_reload(one.lora_int_id))  # else at the reload
        if not isinstance(adapter, LoRARequest):
            return  # an engine that ignores adapters
        if not adapter.load_inplace:
            check_same_source(self._known(adapter.lora_int_id), adapter)
            held = self._held(adapter.lora_int_id)
            if held is not None and (held.users or _source_of(held.request) in {None, adapter.source}):
                return self._check_mixed(adapter, held.lora.loras, held.lora.invocation) if mixed else None
        awaited = replace(adapter, load_inplace=True) if self._awaits_reload(adapter.lora_int_id) else adapter
        try:
            found = self.manager.check_adapter(awaited)
        except FileNotFoundError as error:
            registered = sorted(self.manager.list_adapters())
            raise FileNotFoundError(
                f"adapter {adapter.lora_name!r} (id {adapter.lora_int_id}) is not registered (registered ids: "
                f"{clip(registered)}): {error}; pass the path of its PEFT folder, or register it with "
                "manager.add_adapter"
            ) from error
        if mixed:
            self._check_mixed(adapter, found.layers, found.invocation)

    def add(self, request: RequestState) -> None:
        """Note a queued request, whose adapter was checked: its id belongs to that folder until the request leaves."""
        for part in request.mixed:
            self.add(part)
        if isinstance(request.adapter, LoRARequest):
            users = self._users.setdefault(request.adapter_id, {})
            last = next(reversed(users.values())).adapter if users else None
            if request.adapter.tensors is None:
                request.reloads = request.adapter.load_inplace
            else:  # these tensors are what they were: only others are loaded
                request.reloads = last is not None and _source_of(last) != request.adapter.source
            if not users:
                self._mark_reloads(request.adapter_id, [request])
            users[request.request_id] = self._waiting[request.request_id] = request

    def release(self, request: RequestState) -> None:
        """Forget a request that has left, for whatever reason, and its version of the adapter if no other holds it."""
        for part in request.mixed:
            self.release(part)
        self._leave_queue(request)
        users = self._users.get(request.adapter_id, {})
        users.pop(request.request_id, None)
        if not users:
            self._users.pop(request.adapter_id, None)
        if request.reloads:
            self._mark_reloads(request.adapter_id, users.values())
        if request.weights is not None:
            weights, request.weights = request.weights, None
            self.manager.release(weights)

    def restore(self, unfinished: Iterable[RequestState]) -> None:
        """Release what others than ``unfinished`` requests hold, after an error anywhere."""
        known = {part: part.weights for request in unfinished for part in request.parts}
        for request in [one for users in self._users.values() for one in users.values() if one not in known]:
            self.release(request)
        self.manager.count_users([*known.values()])

    def activate(self, request: RequestState) -> None:
        """Make the adapter of a request active: its own version if it has begun, else the newest, loaded if need be.

        An adapter that cannot be loaded raises (FileNotFoundError, ValueError, TypeError) and leaves the others active;
        so does one that cannot be mixed.
        """
        for part in request.mixed:
            self.activate(part)
            self._check_mixed(part.adapter, part.weights.lora.loras, part.weights.lora.invocation)
        if not isinstance(request.adapter, LoRARequest):
            return  # the plain backbone
        self._make_active(request, request.adapter)
        if request.weights is None:
            weights = self.manager.hold(request.adapter_id)
            request.activation = _activation_of(request, weights.lora)
            self._leave_queue(request)
            request.weights = weights  # last: before, it has not begun

    def prefetch(self, request: RequestState) -> None:
        """Make the adapter of a waiting request active, beside a running step; tried once for each.

        An error is left to the step in which the request joins. Never call it between two steps: only the requests of a
        running step have just used their adapters, so that none of these is evicted.
        """
        adapter, tried = request.adapter, self._prefetched == request.request_id
        if not isinstance(adapter, LoRARequest) or request.reloads or tried:
            return
        if not self.is_loaded(request):
            return  # and is tried again in the next step
        if (reading := self._readers.readings.get(request.request_id)) is not None and reading.exception() is not None:
            return
        self._prefetched = request.request_id
        with suppress(Exception):
            self._make_active(request, adapter)

    def prefix_key(self, request: RequestState, waits: bool) -> PrefixKey | None:
        """Return what decides the keys and values of a request; ``None`` if its weights are not known yet.

        ``waits``: for the thread that reads its folder. Several ranks, which have to agree on errors of a reading, know
        only adapters in host memory.
        """
        adapter, base = request.adapter, PrefixKey.of_base(request)
        if request.mixed:
            keys = [self.prefix_key(part, waits) for part in request.mixed]
            contents = [key.weights for key in keys if key is not None]
            content = b"".join(contents) + repr(request.adapter.weights).encode()
            return None if len(contents) < len(keys) else PrefixKey(0, content, base.salt)
        if not isinstance(adapter, LoRARequest):
            return base
        if request.weights is not None:
            lora = request.weights.lora
        elif self._awaits_reload(request.adapter_id):
            return None
        elif (held := self._held(request.adapter_id)) is not None:
            lora = held.lora
        elif get_tensor_model_parallel_world_size() > 1:
            return None
        else:
            reading = self._readers.begin(request.request_id, adapter)
            if (self._reads_beside and not waits and not reading.done()) or reading.exception() is not None:
                return None
            lora = reading.result()
        start = _activation_of(request, lora) if request.weights is None else request.activation
        return base if start is None else PrefixKey(start, lora.content_hash(), base.salt)

    def is_resident(self, request: RequestState) -> bool:
        """Tell if the weights that a request would run with are in a slot, or being copied into one.

        False while a request waits to reload the adapter: later arrivals take the weights of that load.
        """
        if not isinstance(request.adapter, LoRARequest):
            return all(self.is_resident(part) for part in request.mixed)
        held = request.weights or self.manager.loaded(request.adapter_id)
        return held is not None and held.slot is not None and not self._awaits_reload(request.adapter_id)

    def is_loaded(self, request: RequestState) -> bool:
        """Tell if a request can join without delaying others by reading its folder; if not, read it and the next ones.

        A folder that cannot be read counts as loaded: the error belongs to the step in which the request joins.
        """
        adapter = request.adapter
        if not self._reads_beside or not isinstance(adapter, LoRARequest):
            return all([self.is_loaded(part) for part in request.mixed])  # a list: all begin to be read
        if (request.reloads and adapter.tensors is None) or self._is_in_memory(request):
            return True
        reading = self._readers.begin(request.request_id, adapter)
        self._read_ahead()
        return reading.done()

    def _check_mixed(self, adapter: LoRARequest, layers: Iterable[str], invocation: tuple[int, ...] | None) -> None:
        with all_ranks_agree():  # not all may have experts of the adapter
            if bad := [name for name in layers if invocation or not self.manager.modules[name].mixes]:
                what = "is activated LoRA, of alora_invocation_tokens" if invocation else "has weights of"
                what = f"adapter {clip(adapter.lora_name)} {what} {clip([*invocation] if invocation else bad)}"
                raise ValueError(f"{what}, and cannot be mixed: {_MIXED}; serve it alone")

    def _is_in_memory(self, request: RequestState) -> bool:
        return request.weights is not None or (not request.reloads and self._held(request.adapter_id) is not None)

    def _read_ahead(self) -> None:
        """Read the next adapters of the queue while there is room, but none that awaits a reload, which serves all."""
        for request in itertools.islice(self._waiting.values(), _MOST_READ_AHEAD):
            if not self._readers.has_room:
                return
            adapter = request.adapter
            if (
                isinstance(adapter, LoRARequest)
                and not self._is_in_memory(request)
                and self._readers.find(request.request_id, adapter) is None
                and not self._awaits_reload(request.adapter_id)
            ):
                self._readers.begin(request.request_id, adapter)

    def _leave_queue(self, request: RequestState) -> None:
        self._waiting.pop(request.request_id, None)
        self._readers.drop(request.request_id)

    def _known(self, adapter_id: int) -> LoRARequest | None:
        """Return the owner of an id: the adapter of the last unfinished request, or a pinned one."""
        if users := self._users.get(adapter_id):
            last: LoRARequest = next(reversed(users.values())).adapter
            return last
        return self.manager.request_of(adapter_id) if adapter_id in self.manager.pinned_adapters else None

    def _held(self, adapter_id: int) -> LoadedAdapter | None:
        """Return the version of an adapter in memory: registered, or evicted while requests still hold it."""
        versions = [request.weights for request in self._users.get(adapter_id, {}).values()]
        in_use = (version for version in versions if version is not None and not version.superseded)
        return self.manager.loaded(adapter_id) or next(in_use, None)

    def _awaits_reload(self, adapter_id: int) -> bool:
        return any(request.reloads for request in self._users.get(adapter_id, {}).values())

    def _mark_reloads(self, adapter_id: int, requests: Iterable[RequestState]) -> None:
        """Mark each waiting request whose folder differs from that of the weights before it, loaded or not yet."""
        held = self._held(adapter_id)
        before = None if held is None else _source_of(held.request)
        for request in requests:
            if request.weights is None:
                source = _source_of(request.adapter)
                request.reloads |= before not in {None, source}
                before = source

    def _make_active(self, request: RequestState, adapter: LoRARequest) -> None:
        if request.reloads:
            self._reload(request, adapter)
            return
        held = request.weights or self._held(request.adapter_id)
        if held is None:
            reading = self._readers.find(request.request_id, adapter)
            if reading is None:
                self.manager.add_adapter(adapter)
            else:
                self.manager.add_read_adapter(adapter, reading.result())
                self._readers.drop(request.request_id)
                self._read_ahead()
            return
        if request.weights is None:
            check_same_source(held.request, adapter)
        self.manager.activate(held)

    def _reload(self, request: RequestState, adapter: LoRARequest) -> None:
        reading = None if adapter.tensors is None else self._readers.find(request.request_id, adapter)
        if reading is None:
            self.manager.add_adapter(replace(adapter, load_inplace=True))
        else:
            self.manager.add_read_adapter(adapter, reading.result())
        for other in self._users[request.adapter_id].values():
            if other.weights is None and _source_of(other.adapter) == adapter.source:
                other.reloads = False
                self._readers.drop(other.request_id)  # its reading is older than this load
        self._mark_reloads(request.adapter_id, self._users[request.adapter_id].values())


def _activation_of(request: RequestState, lora: LoRAModel) -> int | None:
    return 0 if lora.invocation is None else activation_start(request.prompt_token_ids, lora.invocation)


def _source_of(adapter: object) -> tuple[str, str] | None:
    return adapter.source if isinstance(adapter, LoRARequest) else None
