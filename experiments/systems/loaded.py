"""Engines that are loaded by the clock: any system on our engine, with fewer slots than adapters, or adapters in
folders.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from experiments.benches import page_cache
from experiments.facts.systems import SYSTEMS
from experiments.systems.engine_systems import MOST_ADAPTERS, EngineSystem
from experiments.systems.open_loop import DISK, MEMORY, SLOT
from experiments.systems.serving import class_of
from experiments.systems.stream import Job, timeline_of
from experiments.systems.world import World
from experiments.workload import released_lengths
from punica.adapters import LoRAModel, LoRARequest, write_random_adapter
from punica.config import LoRAConfig
from punica.engine import EngineConfig, Request

FOLDERS = 4
"""Different adapters on disk, where nothing says more; others are further ids of the same folders."""
LONGEST_PROMPT = int(released_lengths(1000).prompt.max())
"""Tokens, of the stream's requests at 2,048 tokens: most prompt rows of a step with at most one prompt."""


def takes_many(admission: str) -> bool:
    """Check whether steps under this rule take as many prompts as there is room for."""
    return timeline_of([Job((0,), 1, 1)] * 2, admission, 2).stretches[0].joined > 1


class Loaded(EngineSystem):
    """The system called `name`, with adapters in host memory.

    `slots` None: as many as a batch can use. Adapters beyond the different ones of a `World` share their memory.
    """

    def __init__(self, world: World, name: str, slots: int | None = None, in_memory: int = MOST_ADAPTERS) -> None:
        self._slots, self._in_memory = slots, in_memory
        if not issubclass(class_of(name), EngineSystem):
            raise ValueError(f"{name} does not run on our engine: choose a system that does")
        super().__init__(world, SYSTEMS.get(name))
        # arrivals decide which steps occur: all that can have their CUDA graphs
        most = self.engine.config.max_num_batched_tokens
        self.engine.capture_graphs(most if takes_many(self.facts.admission) else min(LONGEST_PROMPT, most))

    def lora_config(self, config: EngineConfig) -> LoRAConfig:
        slots = self._slots or config.full_slots
        return config.lora_config(self.world.rank, max_loras=slots, max_cpu_loras=max(slots, self._in_memory))

    def _capture_for(self, jobs: Sequence[Job]) -> None:
        """Capture nothing: all graphs are there."""

    def hold(self, adapter_ids: Collection[int]) -> None:
        """Put these adapters where the system has them before it is loaded; no slot is used."""
        self._register(adapter_ids)

    def requests(self, jobs: Sequence[Job]) -> list[Request]:
        """Build a new request for each of `jobs`."""
        return [self._request(job) for job in jobs]

    def place_of(self, request: Request) -> str:
        """Return the place of a request's adapter: `SLOT`, `MEMORY` or `DISK`."""
        manager = self.engine.manager
        if manager is None or manager.is_active(request.adapter_id):
            return SLOT
        return DISK if manager.get_adapter(request.adapter_id) is None else MEMORY


class FromFolders(Loaded):
    """`Loaded` with adapters in PEFT folders below `root`, `in_memory` of which host memory holds.

    `cached`: share of the folders' bytes in the system's page cache when the system was last loaded, after it was told
    to forget them.
    """

    def __init__(
        self, world: World, name: str, slots: int | None, in_memory: int, root: Path, folders: int = FOLDERS
    ) -> None:
        super().__init__(world, name, slots, in_memory)
        self.cached = 1.0
        self._read: dict[str, LoRAModel] = {}
        self._folders = [root / str(index) for index in range(min(folders, world.sets))]
        for index, folder in enumerate(self._folders):
            if not folder.exists():
                write_random_adapter(  # the world's own weights, which the reference has
                    folder, world.config, world.rank, world.seed + index,
                    alpha=world.alpha, dtype=world.dtype, device=world.device,
                )  # fmt: skip

    def hold(self, adapter_ids: Collection[int]) -> None:
        """Put the most popular of these adapters into host memory; the others are on the drive, as far as it lets."""
        super().hold(adapter_ids)
        page_cache.drop(self._folders)
        self.cached = page_cache.cached_share(self._folders)

    def _register(self, adapter_ids: Collection[int]) -> None:
        """Put the first, most popular ones into host memory, as after a long time; copies share their tensors."""
        manager = self.engine.manager
        if manager is None:
            return
        manager.remove_all_adapters()
        for adapter_id in reversed(sorted(adapter_ids)[: self._in_memory]):  # the least popular one is evicted first
            adapter = self._adapter(adapter_id)
            if adapter.lora_path not in self._read:
                manager.add_adapter(adapter)
                self._read[adapter.lora_path] = manager.list_adapters()[adapter_id]
                manager.remove_adapter(adapter_id)
            manager.restore_adapter(self._read[adapter.lora_path].clone(adapter_id), adapter)

    def _request(self, job: Job) -> Request:
        return Request(f"request-{next(self._names)}", job.prompt, job.new_tokens, self._adapter(job.adapter_id))

    def _adapter(self, adapter_id: int) -> LoRARequest:
        folder = self._folders[self.world.adapter_set(adapter_id) % len(self._folders)]
        return LoRARequest(f"adapter-{adapter_id}", adapter_id, str(folder))
