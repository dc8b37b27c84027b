"""Engines that are loaded by the clock: systems of Figure 11, rules of admission that it does not have, fewer slots
than adapters, adapters in folders.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from experiments.systems.engine_systems import MOST_ADAPTERS, EngineSystem
from experiments.systems.open_loop import DISK, MEMORY, SLOT
from experiments.systems.stream import Job
from experiments.systems.world import World
from punica.adapters import LoRAModel, LoRARequest, write_random_adapter
from punica.config import LoRAConfig
from punica.engine import EngineConfig, Request
from punica.workload import released_lengths

ADMISSIONS = {
    "punica": "fcfs",
    "punica_many": "fcfs_many",
    "punica_resident_first": "resident_first",
    "continuous_batching": "single_adapter",
    "static_batching": "static",
}
"""System -> its rule of admission. `punica_many` is Punica without the limit of one prefill per step."""
BASELINES = ("continuous_batching", "static_batching")
"""One adapter at a time, without LoRA: see `engine_systems`."""
FOLDERS = 4
"""So many different adapters on disk; more are further ids of the same folders, which cost a load each all the same."""
LONGEST_PROMPT = int(released_lengths(1000).prompt.max())
"""Tokens, of the stream's requests at 2,048 tokens: most rows of prompts in a step with at most one."""
MANY_PROMPTS = ("punica_many", "static_batching")
"""Systems whose steps take as many prompts as there is room for."""


class Loaded(EngineSystem):
    """The system called `name`, with adapters in host memory.

    `slots` None: as many as are of use. Adapters beyond the different ones of a `World` share their memory, also
    the page-locked one of a GPU, so that thousands fit; what loading one costs is that of its bytes.
    """

    def __init__(self, world: World, name: str, slots: int | None = None, in_memory: int = MOST_ADAPTERS) -> None:
        self.admission, self.lora = ADMISSIONS[name], name not in BASELINES
        self._slots, self._in_memory = slots, in_memory
        super().__init__(world)
        # who decodes beside a prompt, if anybody, depends on the clock: all steps that can come have their CUDA graphs
        most = self.engine.config.max_num_batched_tokens
        self.engine.capture_graphs(most if name in MANY_PROMPTS else min(LONGEST_PROMPT, most))

    def lora_config(self, config: EngineConfig) -> LoRAConfig | None:
        if not self.lora:
            return None
        slots = self._slots or config.full_slots
        return config.lora_config(self.world.rank, max_loras=slots, max_cpu_loras=max(slots, self._in_memory))

    def _capture_for(self, jobs: Sequence[Job]) -> None:
        """They are captured already: when requests arrive is not known before."""

    def hold(self, adapter_ids: Collection[int]) -> None:
        """These adapters where the system has them before it is loaded, and no slot used."""
        self._register(adapter_ids)

    def requests(self, jobs: Sequence[Job]) -> list[Request]:
        """A new request for each of `jobs`."""
        return [self._request(job) for job in jobs]

    def place_of(self, request: Request) -> str:
        """Where a request's adapter is."""
        manager = self.engine.manager
        if manager is None or manager.is_active(request.adapter_id):
            return SLOT
        return DISK if manager.get_adapter(request.adapter_id) is None else MEMORY


class FromFolders(Loaded):
    """The same with adapters in PEFT folders below `root`, `in_memory` of which host memory holds."""

    def __init__(self, world: World, name: str, slots: int | None, in_memory: int, root: Path) -> None:
        super().__init__(world, name, slots, in_memory)
        self._read: dict[str, LoRAModel] = {}
        self._folders = [root / str(index) for index in range(min(FOLDERS, world.limits.max_batch_size))]
        for index, folder in enumerate(self._folders):
            if not folder.exists():
                write_random_adapter(  # the world's own weights, which the reference has
                    folder, world.config, world.rank, world.seed + index,
                    alpha=world.alpha, dtype=world.dtype, device=world.device,
                )  # fmt: skip

    def _register(self, adapter_ids: Collection[int]) -> None:
        """The first, most popular ones in host memory, as after a long time; they share what they have."""
        manager = self.engine.manager
        if manager is None:
            return
        manager.remove_all_adapters()
        for adapter_id in reversed(sorted(adapter_ids)[: self._in_memory]):  # the least popular one goes first
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
