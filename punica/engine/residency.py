"""Adapters on demand (section 5.2 of the paper): those of a step are made active just before it runs.

Beside that, two promises to tenants. An id stands for one folder as long as somebody uses it or has pinned it, and for
nothing afterwards. And a request is computed with one *version* of its adapter from its first token to its last,
whatever is loaded under that id meanwhile:

    version 1 of adapter 7, id 7     r1 ========= joined ===================> end: its memory and slot are free
                                     load_inplace: version 1 is renamed, here to -3; r1.weights_id is -3
    version 2 of adapter 7, id 7               r2 (weights_id -3 while it waits) joins, loads, has 7 =======>
"""

import itertools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest
from punica.adapters.request import check_same_source
from punica.checks import clip
from punica.engine.readers import FolderReaders
from punica.scheduling import RequestState

_LOOKED_AT = 64  # waiting requests; beyond them the ones whose adapters have to be read are not looked for


@dataclass(eq=False)
class _Version:
    """Weights that unfinished requests were begun with, the request they were loaded for, and how many use them."""

    lora: LoRAModel
    source: LoRARequest | None
    users: int = 0


class AdapterResidency:
    """Between the engine and the manager: checks adapters when a request arrives, activates them when it is admitted.

    An adapter is loaded at admission, or beside the step before if there is a slot to spare, not at arrival, since
    thousands may be queued while few are registered. An adapter that was registered in memory
    (``manager.add_adapter(LoRAModel)``) is used as it is; its request's path is never read while it stays registered,
    so give ``max_cpu_loras`` room for all of those.

    ``load_inplace`` asks for what the folder holds after the request has arrived: of several that wait for the same
    folder the first one loads it for all. What was read for a request that has begun is kept in host memory until the
    request leaves, even if the manager needs its place.

    With ``reads_beside`` folders are read by threads of their own: a request whose adapter is not in host memory waits
    for it in the queue, while those that run go on. As soon as one waits, the next in the queue are read too, up to
    ``READERS`` at once and unused; who waits for the same folder shares one reading. It is for a device that computes
    meanwhile, and for one rank. Only a ``load_inplace`` is read between two steps.
    """

    def __init__(self, manager: LoRAModelManager, *, reads_beside: bool = False) -> None:
        self.manager = manager
        self._reads_beside, self._readers = reads_beside, FolderReaders(manager)
        self._waiting: dict[str, RequestState] = {}  # who has not begun, in order of arrival
        self._users: dict[int, dict[str, RequestState]] = {}  # of each id, who is not done, in order of arrival
        self._versions: dict[int, _Version] = {}  # in use, by weights_id
        self._new_ids = itertools.count(-1, -1)
        self._prefetched: str | None = None  # the waiting request that was last tried
        self._settled: tuple[list[RequestState], int] = ([], -1)  # whose adapters are active, as of which use

    # --- arrival and departure ---------------------------------------------------------------------------------------

    def check(self, adapter: object) -> None:
        """Refuse an adapter by its type and slot; :meth:`check_folder` looks at its id and into its folder.

        TypeError: not a LoRARequest. RuntimeError: every slot is pinned for another adapter, so it could wait for ever.
        """
        if not isinstance(adapter, LoRARequest):
            raise TypeError(f"adapter must be a LoRARequest or None, got {type(adapter).__name__} {clip(adapter)}")
        pinned = self.manager.pinned_adapters
        if adapter.lora_int_id not in pinned and len(pinned) >= self.manager.lora_slots:
            raise RuntimeError(
                f"no slot for adapter {adapter.lora_name!r} (id {adapter.lora_int_id}): all {len(pinned)} slots are "
                f"pinned, for adapters {sorted(pinned)}; call manager.unpin_adapter first, or raise max_loras"
            )

    def check_folder(self, adapter: object) -> None:
        """Refuse an adapter that is neither registered nor in a legal PEFT folder; reads all but the numbers.

        FileNotFoundError, ValueError, TypeError: what the folder is or holds. ValueError: its id stands for another.
        """
        if not isinstance(adapter, LoRARequest):
            return  # an engine that ignores adapters
        if not adapter.load_inplace:
            check_same_source(self._known(adapter.lora_int_id), adapter)
        if not adapter.load_inplace and self._is_held(adapter):
            return
        try:
            self.manager.check_adapter(adapter)
        except FileNotFoundError as error:
            registered = sorted(self.manager.list_adapters())
            raise FileNotFoundError(
                f"adapter {adapter.lora_name!r} (id {adapter.lora_int_id}) is not registered (registered ids: "
                f"{clip(registered)}): {error}; pass the path of its PEFT folder, or register it with "
                "manager.add_adapter"
            ) from error

    def add(self, request: RequestState) -> None:
        """A request whose adapter was checked is queued: until it leaves, the adapter's id stands for that folder."""
        if isinstance(request.adapter, LoRARequest):
            self._users.setdefault(request.adapter_id, {})[request.request_id] = request
            self._waiting[request.request_id] = request
            if request.adapter.load_inplace or self._replaces(request.adapter):
                request.weights_id = next(self._new_ids)

    def release(self, request: RequestState) -> None:
        """A request has left, for whatever reason; a version that only it used is forgotten if there is a newer one."""
        self._waits_no_more(request)
        users = self._users.get(request.adapter_id, {})
        if _loads_anew(request):
            self._hand_on(request, list(users.values()))
        if users.pop(request.request_id, None) is not None and not users:
            del self._users[request.adapter_id]
        if request.has_weights:
            version = self._versions[request.weights_id]
            version.users -= 1
            if version.users == 0:
                del self._versions[request.weights_id]
                if request.weights_id < 0:
                    self.manager.remove_adapter(request.weights_id)

    # --- steps -------------------------------------------------------------------------------------------------------

    def running_first(self, requests: Iterable[RequestState]) -> list[RequestState]:
        """The order in which the adapters of running requests must be made active: those that still are registered
        first, so that none of them makes room for one that somebody removed meanwhile and that is brought back.
        """
        return sorted(requests, key=lambda request: self.manager.get_adapter(request.weights_id) is None)

    def are_active(self, requests: list[RequestState]) -> bool:
        """Whether :meth:`note_active` was called for these last, and no adapter was used or changed by anybody since:
        then to make them active again would change nothing, and most steps are those.
        """
        return self._settled == (requests, self.manager.uses)

    def note_active(self, requests: list[RequestState]) -> None:
        """The adapters of all these were made active just now, in this order."""
        self._settled = requests, self.manager.uses

    def activate(self, request: RequestState) -> None:
        """Make the adapter of a request active: of one that joins the newest version, loading it if need be, of one
        that has begun its own version.

        An adapter that cannot be loaded raises (FileNotFoundError, ValueError, TypeError) and leaves the others active.
        """
        if not isinstance(request.adapter, LoRARequest):
            return  # the plain backbone
        self._make_active(request, request.adapter)
        if not request.has_weights:
            version = self._versions.get(request.weights_id)
            if version is None:
                lora = self.manager.list_adapters()[request.weights_id]
                version = self._versions[request.weights_id] = _Version(lora, self.manager.request_of(lora.id))
            version.users += 1
            request.has_weights = True
            self._waits_no_more(request)

    def prefetch(self, request: RequestState) -> None:
        """Make the adapter of a waiting request active, beside the step that is running.

        For a request whose adapter can have a slot now; tried once for each. One that cannot be loaded stays as it is:
        the error belongs to the step in which the request joins. Not between two steps: only those who run in this one
        have just used their adapters, so that none of them makes room.
        """
        adapter, tried = request.adapter, self._prefetched == request.request_id
        if not isinstance(adapter, LoRARequest) or _loads_anew(request) or tried:
            return
        if not self._is_read(request, adapter) or self._read_failed(request):
            return  # and is tried again in the next step
        self._prefetched = request.request_id
        with suppress(Exception):
            self._make_active(request, adapter)

    def is_resident(self, request: RequestState) -> bool:
        """Whether the weights that a request would run with lie in a slot, or are on their way into one.

        Not while somebody waits for the same adapter to be loaded anew: who came later counts on that load.
        """
        if not isinstance(request.adapter, LoRARequest):
            return True
        return self.manager.is_active(request.weights_id) and not self._is_loaded_anew(request.adapter_id)

    def is_loaded(self, request: RequestState) -> bool:
        """Whether a waiting request can join without those who run having to wait for its folder; if not, that is read
        from now on. The copy into a slot it may join with: the step comes behind it on the device, by 2 ms at most.

        What cannot be read counts as loaded: the error belongs to the step in which the request joins.
        """
        adapter = request.adapter
        if not self._reads_beside or not isinstance(adapter, LoRARequest) or _loads_anew(request):
            return True
        return self._is_read(request, adapter)

    def slots(self) -> dict[int, int]:
        """Slot of the active adapters by ``weights_id``."""
        return {
            adapter_id: slot for slot, adapter_id in enumerate(self.manager.lora_index_to_id) if adapter_id is not None
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _is_read(self, request: RequestState, adapter: LoRARequest) -> bool:
        """Whether the adapter of a waiting request needs no reading by a thread, or that is done; else it is read from
        now on, and those of the next requests with it.
        """
        if not self._reads_beside or self._is_in_memory(request):
            return True
        reading = self._readers.begin(request.request_id, adapter)
        self._read_ahead()
        return reading.done()

    def _is_in_memory(self, request: RequestState) -> bool:
        return request.weights_id in self._versions or self.manager.get_adapter(request.weights_id) is not None

    def _read_ahead(self) -> None:
        """Read the next adapters of the queue while there is room for what nobody uses yet.

        Not that of an id that somebody waits to load anew: that load comes first, and gives all the others theirs.
        """
        for request in itertools.islice(self._waiting.values(), _LOOKED_AT):
            if not self._readers.has_room:
                return
            adapter = request.adapter
            if (
                isinstance(adapter, LoRARequest)
                and not self._is_in_memory(request)
                and self._readers.find(request.request_id, adapter) is None
                and not self._is_loaded_anew(request.adapter_id)
            ):
                self._readers.begin(request.request_id, adapter)

    def _waits_no_more(self, request: RequestState) -> None:
        self._waiting.pop(request.request_id, None)
        self._readers.drop(request.request_id)

    def _is_loaded_anew(self, adapter_id: int) -> bool:
        """Whether somebody waits to load the folder of this id again: who came later counts on that."""
        return any(_loads_anew(other) for other in self._users.get(adapter_id, {}).values())

    def _read_failed(self, request: RequestState) -> bool:
        """Of one whose reading is done."""
        reading = self._readers.readings.get(request.request_id)
        return reading is not None and reading.exception() is not None

    def _known(self, adapter_id: int) -> LoRARequest | None:
        """What an id stands for: the folder that the last unfinished request named, or that of a pinned adapter."""
        users = self._users.get(adapter_id)
        last = next(reversed(users.values())).adapter if users else None
        if isinstance(last, LoRARequest):
            return last
        return self.manager.request_of(adapter_id) if adapter_id in self.manager.pinned_adapters else None

    def _hand_on(self, leaver: RequestState, users: list[RequestState]) -> None:
        """A load that was asked for and not made is made for the next one who counts on it: who came later for the same
        folder, while the id still has, or will have, the weights of another one.
        """
        sources = {self._held_source(leaver.adapter_id), *map(_source_of, users)} - {None, _source_of(leaver)}
        later = (other for other in users[users.index(leaver) + 1 :] if _source_of(other) == _source_of(leaver))
        heir = next(later, None) if sources else None
        if heir is not None and not heir.has_weights and heir.weights_id > 0:
            heir.weights_id = next(self._new_ids)

    def _replaces(self, adapter: LoRARequest) -> bool:
        """Whether its id, that nobody else uses, is still registered for another folder."""
        alone = len(self._users[adapter.lora_int_id]) == 1 and adapter.lora_int_id not in self.manager.pinned_adapters
        return alone and self._held_source(adapter.lora_int_id) not in {None, adapter.source}

    def _held_source(self, adapter_id: int) -> tuple | None:
        """Where the weights under an id came from; ``None`` if there are none, or they came from memory."""
        version = self._versions.get(adapter_id)
        held = self.manager.request_of(adapter_id) if version is None else version.source
        return None if held is None else held.source

    def _is_held(self, adapter: LoRARequest) -> bool:
        """Whether nothing has to be loaded for it."""
        if adapter.lora_int_id in self._versions:
            return True
        registered = self.manager.get_adapter(adapter.lora_int_id) is not None
        return registered and self._held_source(adapter.lora_int_id) in {None, adapter.source}

    def _make_active(self, request: RequestState, adapter: LoRARequest) -> None:
        if _loads_anew(request):
            self._load_new_version(request, adapter)
            return
        self._settle(request.weights_id)
        if request.has_weights:
            self._settle(request.weights_id)  # under an id of its own, if somebody took its place
        if self.manager.get_adapter(request.weights_id) is None:
            reading = self._readers.find(request.request_id, adapter)
            if reading is None:
                self.manager.add_adapter(adapter)
            else:
                self.manager.add_read_adapter(adapter, reading.result())
                self._readers.drop(request.request_id)
                self._read_ahead()
            return
        if not request.has_weights:
            check_same_source(self.manager.request_of(request.weights_id), adapter)
        self.manager.activate_adapter(request.weights_id)

    def _settle(self, weights_id: int) -> None:
        """Let the manager hold under `weights_id` what requests began with: brought back if it was evicted or removed,
        set apart from what somebody registered in its place.
        """
        version, registered = self._versions.get(weights_id), self.manager.get_adapter(weights_id)
        if version is None or registered is version.lora:
            return
        if registered is None:
            self.manager.restore_adapter(version.lora, version.source)
        else:
            self._set_apart(weights_id, next(self._new_ids))

    def _load_new_version(self, request: RequestState, adapter: LoRARequest) -> None:
        """Load the folder again under the adapter's id. Who runs with the version before keeps it, under the id that
        `request` had; if the load fails, nothing has changed.
        """
        adapter_id, old_id = request.adapter_id, request.weights_id
        version = self._versions.get(adapter_id)
        renamed = version is not None and self.manager.get_adapter(adapter_id) is version.lora
        if version is not None and renamed:
            version.lora = self.manager.rename_adapter(adapter_id, old_id)
        try:
            self.manager.add_adapter(replace(adapter, load_inplace=True))
        except BaseException:
            if version is not None and renamed:
                self.manager.remove_adapter(adapter_id)  # if it was its copy into the slot that failed
                version.lora = self.manager.rename_adapter(old_id, adapter_id)
            raise
        self._set_apart(adapter_id, old_id)
        if old_id in self.manager.pinned_adapters:  # the pin is the adapter's, not the version's
            self.manager.unpin_adapter(old_id)
            self.manager.pin_adapter(adapter_id)
        for other in self._users[adapter_id].values():
            if _source_of(other) == adapter.source and not other.has_weights:
                other.weights_id = adapter_id
                self._readers.drop(other.request_id)  # what was read is older than this load, on which it counts

    def _set_apart(self, adapter_id: int, old_id: int) -> None:
        """From now on, those who began with the version under `adapter_id` have it under `old_id`."""
        version = self._versions.pop(adapter_id, None)
        if version is None:
            return
        if version.lora.id != old_id:
            version.lora = version.lora.renamed(old_id)
        self._versions[old_id] = version
        for request in self._users[adapter_id].values():
            if request.has_weights and request.weights_id == adapter_id:
                request.weights_id = old_id


def _source_of(request: RequestState) -> tuple | None:
    return request.adapter.source if isinstance(request.adapter, LoRARequest) else None


def _loads_anew(request: RequestState) -> bool:
    """Whether it waits to load its folder again, under an id that others have."""
    return request.weights_id < 0 and not request.has_weights
