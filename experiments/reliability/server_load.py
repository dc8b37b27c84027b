"""Load: a server in a process of its own, whose clients vanish and whose adapters are loaded again."""

import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass

import httpx2

from experiments.reliability.server import BASE, Served, serving, wait_until
from experiments.reliability.trial import Outcome, Setting, trial
from experiments.reliability.use import Use, drift
from experiments.reliability.world import Wish, World, draw_wishes, make_world
from punica.engine import GenerationResult

SLOTS, ADAPTERS, KINDS, CLIENTS = 4, 40, 160, 24
WINDOWS, WARM = 20, 4
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Most threads of asyncio's pool, which it starts when calls meet."""
VANISH, RELOAD = 0.1, 0.02
"""Parts of the requests whose client leaves, and before which an adapter is loaded again."""


@dataclass
class Clients:
    """Clients of a server that send requests one after the other."""

    http: httpx2.AsyncClient
    world: World
    choose: random.Random
    expected: dict[Wish, GenerationResult]
    outcome: Outcome

    async def run(self, count: int) -> float:
        """Send ``count`` requests; return the requests per second, those that clients left among them."""
        begun, left = time.perf_counter(), [count]

        async def client() -> None:
            while left[0] > 0:
                left[0] -= 1
                await self.one()

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return count / (time.perf_counter() - begun)

    async def one(self) -> None:
        """Send a request: a client that vanishes leaves it during its stream, any other checks the text."""
        wish = self.choose.choice(list(self.expected))
        adapter = self.world.adapter(wish)
        if adapter is not None and self.choose.random() < RELOAD:
            self.outcome.injected += 1
            body = {"lora_name": adapter.lora_name, "lora_path": adapter.lora_path, "load_inplace": True}
            answer = await self.http.post("/v1/load_lora_adapter", json=body)
            self.outcome.expect(answer.status_code == 200, f"reload: {answer.status_code} {answer.text}")
        body = {
            "model": BASE if adapter is None else adapter.lora_name, "prompt": list(wish.prompt),
            "max_tokens": wish.new, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        if self.choose.random() < VANISH:
            self.outcome.injected += 1
            async with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                if self.choose.random() < 0.5:
                    await anext(response.aiter_lines())
            return
        answer = await self.http.post("/v1/completions", json=body)
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        self.outcome.expect(text == self.expected[wish].text, f"{answer.status_code} {text}")


async def _soak(clients: Clients, served: Served, count: int) -> dict[str, tuple[float, str]]:
    async with clients.http:
        for _ in range(WARM):
            await clients.run(count // WINDOWS)
        before = Use.of(served.process.pid)
        rates = [await clients.run(count // WINDOWS) for _ in range(WINDOWS - WARM)]
        idle = await asyncio.to_thread(wait_until, served.is_idle, 60)
        clients.outcome.expect(idle, "requests are left in the server after their clients have gone")
    after = Use.of(served.process.pid)
    leaks = after.leaks(before, POOL)
    clients.outcome.expect(not leaks, f"left over: {leaks}")
    growth = after.growth(before)
    del growth["device_memory_growth"]
    return growth | {"throughput": (statistics.median(rates), "request/s"), "throughput_drift": (drift(rates), "%")}


@trial("load", smoke=60, laptop=1_500, full=20_000, seconds=90)
def server_soak(setting: Setting) -> Outcome:
    """Requests to a server over ten times more adapters than slots, with clients that vanish and reloads."""
    choose, outcome = random.Random(setting.seed), Outcome()
    world = make_world(setting.folder, ADAPTERS, setting.seed, setting.device)
    expected = world.undisturbed(draw_wishes(world, min(KINDS, setting.count), choose))
    with serving(world, "--max-loras", str(SLOTS)) as served:
        http = httpx2.AsyncClient(base_url=served.url, timeout=120, trust_env=False)
        clients = Clients(http, world, choose, expected, outcome)
        outcome.values |= asyncio.run(_soak(clients, served, setting.count))
    return outcome
