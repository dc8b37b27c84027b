"""`FolderReaders`: a thread pool that reads adapters' folders while the device computes."""

from concurrent.futures import Future, ThreadPoolExecutor

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest
from punica.threads import compute_alone

READERS = 4
"""Threads, and most adapters that are read ahead of the turn of their request, in host memory beside those that are
registered.
"""


class FolderReaders:
    """Futures of read adapters, ``readings`` by request; requests for one folder and id share a reading."""

    def __init__(self, manager: LoRAModelManager) -> None:
        self.readings: dict[str, Future[LoRAModel]] = {}
        self._adapters: dict[str, LoRARequest] = {}  # of those requests
        self._manager = manager
        self._pool = ThreadPoolExecutor(READERS, "punica-adapters", compute_alone)

    @property
    def has_room(self) -> bool:
        """True while fewer than ``READERS`` adapters are read, or being read, and unused."""
        return len(set(self.readings.values())) < READERS

    def begin(self, request_id: str, adapter: LoRARequest) -> Future[LoRAModel]:
        """Return the reading that a request waits for, shared or begun now."""
        if request_id not in self.readings:
            self.readings[request_id] = self.shared(adapter) or self.read(adapter)
            self._adapters[request_id] = adapter
        return self.readings[request_id]

    def read(self, adapter: LoRARequest) -> Future[LoRAModel]:
        """Begin a reading that no request waits for; from any thread."""
        return self._pool.submit(self._manager.read_adapter, adapter)

    def find(self, request_id: str, adapter: LoRARequest) -> Future[LoRAModel] | None:
        """Return the reading that the request, or another one for the same adapter, waits for, if there is one."""
        return self.readings.get(request_id) or self.shared(adapter)

    def shared(self, adapter: LoRARequest) -> Future[LoRAModel] | None:
        """Return a reading of this adapter, but for one that failed: the folder may have been repaired since."""
        for request_id, reading in self.readings.items():
            other = self._adapters[request_id]
            same = (other.lora_int_id, other.source) == (adapter.lora_int_id, adapter.source)
            if same and not (reading.done() and reading.exception()):
                return reading
        return None

    def drop(self, request_id: str) -> None:
        """Forget the reading of a request; one without requests is cancelled unless it has begun."""
        reading = self.readings.pop(request_id, None)
        self._adapters.pop(request_id, None)
        if reading is not None and reading not in self.readings.values():
            reading.cancel()
