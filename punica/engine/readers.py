"""Folders of adapters, read by threads of their own while the device computes."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from punica.adapters import LoRAModel, LoRAModelManager, LoRARequest

READERS = 4
"""Threads that read folders. At most so many adapters are read, or being read, ahead of the turn of their request: each
takes host memory beside those that are registered.
"""


class FolderReaders:
    """``readings`` by the requests that wait for them; who waits for the same folder under the same id shares one."""

    def __init__(self, manager: LoRAModelManager) -> None:
        self.readings: dict[str, Future[LoRAModel]] = {}
        self._adapters: dict[str, LoRARequest] = {}  # what those requests wait for
        self._manager = manager
        self._pool = ThreadPoolExecutor(READERS, "punica-adapters", _compute_alone)

    @property
    def has_room(self) -> bool:
        """Whether fewer than ``READERS`` are read, or being read, and not used yet."""
        return len(set(self.readings.values())) < READERS

    def begin(self, request_id: str, adapter: LoRARequest) -> Future[LoRAModel]:
        """The reading that a request waits for from now on, if it does not already."""
        if request_id not in self.readings:
            self.readings[request_id] = self.shared(adapter) or self._pool.submit(self._manager.read_adapter, adapter)
            self._adapters[request_id] = adapter
        return self.readings[request_id]

    def find(self, request_id: str, adapter: LoRARequest) -> Future[LoRAModel] | None:
        """The reading that the request waits for, or that others do for the same adapter; ``None``: nobody does."""
        return self.readings.get(request_id) or self.shared(adapter)

    def shared(self, adapter: LoRARequest) -> Future[LoRAModel] | None:
        """The reading of this adapter that some request waits for, unless it is known to have failed: then the folder
        may have been repaired since.
        """
        for request_id, reading in self.readings.items():
            other = self._adapters[request_id]
            same = (other.lora_int_id, other.source) == (adapter.lora_int_id, adapter.source)
            if same and not (reading.done() and reading.exception()):
                return reading
        return None

    def drop(self, request_id: str) -> None:
        """The request waits no more; what nobody waits for is not begun."""
        reading = self.readings.pop(request_id, None)
        self._adapters.pop(request_id, None)
        if reading is not None and reading not in self.readings.values():
            reading.cancel()


_starts = threading.Lock()


def _compute_alone() -> None:
    """Have this thread compute on one core: each reader would else have a team as large as the machine, for copies of
    100 KB, and the teams would take the cores from one another and from the thread that runs the steps.

    torch takes the number for the threads that begin later, so another thread sets theirs again.
    """
    with _starts:
        common = torch.get_num_threads()  # a thread takes the common number when it first asks, and then keeps its own
        torch.set_num_threads(1)
        others = threading.Thread(target=torch.set_num_threads, args=(common,))
        others.start()
        others.join()
