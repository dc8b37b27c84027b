"""Cost model of LoRA beside the base model, and of LoRA on GPUs of its own (LoRA servers), for `ext_disaggregated`.

Coupled: each GPU has the base model, KV pages and slots; a step is base products, attention and LoRA, one after the
other. Disaggregated: some of the same GPUs hold adapters alone, cut evenly over them. The others run in lockstep and
send the input of each product to the servers, which return the deltas. A round trip hides behind the base product of
the same input, as far as that lasts: what comes next needs their sum.

    step = rest + layers * sum over inputs of max(base, 2 latency + bytes / bandwidth + LoRA of all GPUs / servers)

Times per byte and per weight are those of `punica.cluster.StepCost` and `LoadCost` of a model that was timed; others
take the same. A server has the link of one GPU, so fewer servers than base GPUs share theirs. Requests are independent
draws of a popularity. Slots keep the most recent adapters (Che's approximation of LRU). Loads queue for the host's link
(M/D/1, with an exponential tail); a LoRA server starts with the first layers of an adapter while the last ones load.

Both sides have the numbers of slots, of servers and of requests in flight that serve most. What is left out favours
LoRA servers: uneven work between them, base GPUs that wait for one another, launches of sends and sums (those of LoRA
are in the base of both). Against them: halves of a batch whose ways there and back overlap, and that routing by adapter
loads some GPUs more than others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from experiments.cluster.adapted_shapes import ITEM, Shape
from punica.cluster import LoadCost, ModelBytes, StepCost

Floats = NDArray[np.float64]
LATE = 0.05
"""Share of requests that may wait longer than the target: InfiniLoRA's is a 95th percentile."""
FLYING, SPLITS = 80, 24
"""Numbers that are tried: of requests in flight on a GPU, and of slots."""


@dataclass(frozen=True)
class Rates:
    """Seconds per byte that a step reads of ``weights``, ``kv`` cache and adapters (``lora``), or that is loaded over
    the host's ``link``; a ``load`` takes some more. Seconds per weight that a ``row`` of decodes, or of a ``prompt``,
    meets.
    """

    weights: float
    kv: float
    lora: float
    link: float
    load: float
    row: float
    prompt: float

    @classmethod
    def of(cls, cost: StepCost, loads: LoadCost, timed: ModelBytes) -> "Rates":
        """Divide costs of the model ``timed`` by its bytes and weights."""
        weights, kv, lora = (ITEM * elements for elements in (timed.weights, timed.kv, timed.lora))
        row, prompt = cost.row / timed.weights, cost.prefill / timed.weights
        return cls(cost.base / weights, cost.kv / kv, cost.rank / lora, loads.host_rank / lora, loads.host_base, row,
                   prompt)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """Link of a GPU: bytes/s each way, and seconds one way."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Asked:
    """Load, GPUs and targets. Requests have ``prompt`` and ``output`` tokens on average and name one of ``adapters`` of
    ``rank`` by Zipf's law of ``exponent``; at most ``most`` are in flight on one of ``gpus`` of ``memory`` bytes.
    Targets: ``token_s`` of a step, ``wait_s`` for an adapter.
    """

    shape: Shape
    rates: Rates
    rank: int
    adapters: int
    exponent: float
    prompt: float
    output: float
    gpus: int
    memory: float
    most: int
    token_s: float
    wait_s: float

    @property
    def adapter_bytes(self) -> int:
        """Bytes of an adapter."""
        return ITEM * self.rank * self.shape.lora

    @property
    def left(self) -> float:
        """Bytes beside the base model, whose input embedding is as large as its head."""
        return self.memory - ITEM * (self.shape.weights + self.shape.head)

    @property
    def cached(self) -> float:
        """Tokens in the KV cache of a request, on average."""
        return self.prompt + self.output / 2


@dataclass(frozen=True)
class Served:
    """Most requests/s per GPU within the targets (0: none), with so many slots and LoRA servers."""

    rate: float = 0.0
    slots: int = 0
    servers: int = 0


class Seen:
    """Popularity at one GPU: ``part`` of the GPUs have an adapter, ``share`` of the requests there name it."""

    def __init__(self, part: Floats, share: Floats) -> None:
        self.part, self.share = part, share
        absent = (1 - share) ** np.geomspace(1.0, 1e9, 300)[:, None]  # among so many requests
        self._filled, self._absent = (1 - absent) @ part, absent @ (part * share)

    def met(self, requests: Floats, experts: int = 1, top: int = 1) -> Floats:
        """Count the pairs of adapter and expert that so many requests meet, with one expert the adapters."""
        return experts * ((1 - (1 - self.share * top / experts) ** requests[:, None]) @ self.part)

    def missed(self, slots: int) -> float:
        """Return the share of requests whose adapter is not among the ``slots`` most recent ones."""
        return float(np.interp(slots, self._filled, self._absent))


@lru_cache(maxsize=64)
def seen(exponent: float, adapters: int, gpus: int = 1) -> Seen:
    """Route by adapter: each of ``gpus`` has a part of the rare ones, and more have a popular one, until none of them
    gets more than a GPU's share of the requests. With one GPU: requests go anywhere.
    """
    shares = np.arange(1, adapters + 1) ** -exponent
    shares /= shares.sum()
    copies = np.clip(np.ceil(shares * gpus), 1, gpus)
    return Seen(copies / gpus, shares * gpus / copies)


def base_times(asked: Asked, flying: Floats) -> tuple[Floats, list[Floats]]:
    """Time attention and head of a step of ``flying`` requests and the prompts that join them, and the base product of
    each input in a layer.
    """
    shape, rates = asked.shape, asked.rates
    rows = rates.row * flying + rates.prompt * flying * asked.prompt / asked.output
    head = shape.head * (ITEM * rates.weights + rows)
    products = []
    for part in shape.products:
        read = part.experts * (1 - (1 - part.top / part.experts) ** flying)
        products.append(part.weights * (ITEM * rates.weights * read + part.top * rows))
    return head + ITEM * rates.kv * shape.kv * flying * asked.cached, products


def lora_times(asked: Asked, where: Seen, requests: Floats) -> list[Floats]:
    """Time LoRA on each input of a layer: what ``requests`` share of an adapter is read once."""
    per_pair = ITEM * asked.rates.lora * asked.rank
    kinds = {(part.experts, part.top) for part in asked.shape.products}
    met = {kind: where.met(requests, *kind) for kind in kinds}
    return [per_pair * part.lora * met[part.experts, part.top] for part in asked.shape.products]


def trip_times(asked: Asked, flying: Floats, servers: int, link: Link) -> list[Floats]:
    """Time the way to the LoRA servers and back, for each input of a layer."""
    tokens = flying * (1 + asked.prompt / asked.output)
    shared = max(1.0, (asked.gpus - servers) / servers)
    per_element = ITEM * tokens * shared / link.bandwidth
    return [2 * link.latency + per_element * (part.sent + part.returned) for part in asked.shape.products]


def base_step(asked: Asked, flying: Floats) -> Floats:
    """Time a step without LoRA."""
    rest, bases = base_times(asked, flying)
    return rest + asked.shape.layers * sum(bases)


def coupled_step(asked: Asked, flying: Floats, where: Seen) -> Floats:
    """Time a step with LoRA behind each base product."""
    return base_step(asked, flying) + asked.shape.layers * sum(lora_times(asked, where, flying))


def disaggregated_step(asked: Asked, flying: Floats, servers: int, link: Link, loras: Sequence[Floats]) -> Floats:
    """Time a step beside LoRA servers; ``loras``: what one of them takes for the requests of all GPUs."""
    rest, bases = base_times(asked, flying)
    trips = trip_times(asked, flying, servers, link)
    each = [np.maximum(base, trip + lora) for base, trip, lora in zip(bases, trips, loras, strict=True)]
    return rest + asked.shape.layers * sum(each)


def busiest(missed: float, waits: Floats) -> Floats:
    """Find the largest use of the host's link at which no more than `LATE` of the requests wait too long.

    ``missed`` of them load, and have time for ``waits`` loads before theirs; below 0 they are late in any case.
    """
    low, high = np.zeros_like(waits), np.ones_like(waits)
    for _ in range(40):
        middle = (low + high) / 2
        tail = np.where(waits > 0, middle * np.exp(-2 * (1 - middle) * np.maximum(waits, 0)), 1.0)
        low, high = np.where(missed * tail > LATE, low, middle), np.where(missed * tail > LATE, middle, high)
    return low


def coupled(asked: Asked, routed: bool) -> Served:
    """Serve with LoRA on every GPU, requests ``routed`` to where their adapter is, or anywhere."""
    where, flying = seen(asked.exponent, asked.adapters, asked.gpus if routed else 1), _flying(asked)
    step = coupled_step(asked, flying, where)
    most = min(asked.adapters, int(asked.left // asked.adapter_bytes))
    tried = sorted({int(slots) for slots in np.geomspace(1, most, SPLITS).round()}) if most else []
    found = (_best(asked, flying, step, _bound(asked, flying, where, slots), Served(slots=slots)) for slots in tried)
    return max(found, key=_rate, default=Served())


def disaggregated(asked: Asked, links: Sequence[Link]) -> list[Served]:
    """Serve with LoRA servers over each of ``links``, on as many of the GPUs as is best."""
    where, flying, best = seen(asked.exponent, asked.adapters), _flying(asked), [Served() for _ in links]
    for servers in range(1, asked.gpus):
        slots = min(asked.adapters, int(servers * asked.memory // asked.adapter_bytes))
        loras = [lora / servers for lora in lora_times(asked, where, (asked.gpus - servers) * flying)]
        bound, split = _bound(asked, flying, where, slots, servers), Served(slots=slots, servers=servers)
        for i, link in enumerate(links):
            step = disaggregated_step(asked, flying, servers, link, loras)
            best[i] = max(best[i], _best(asked, flying, step, bound, split), key=_rate)
    return best


def _flying(asked: Asked) -> Floats:
    return np.geomspace(1, asked.most, FLYING)


def _rate(served: Served) -> float:
    return served.rate


def _bound(asked: Asked, flying: Floats, where: Seen, slots: int, servers: int = 0) -> Floats:
    """Bound the requests/s per GPU by memory and loads; without ``servers`` every GPU has ``slots`` of its own."""
    missed, rates = where.missed(slots), asked.rates
    load = rates.load + rates.link * asked.adapter_bytes / max(1, servers)
    ahead = base_step(asked, flying) if servers else 0 * flying
    waits = (asked.wait_s - np.maximum(load - ahead, 0)) / load
    pages = asked.left - (0 if servers else slots * asked.adapter_bytes)
    together = asked.gpus - servers if servers else 1  # GPUs that share the slots
    fits = (ITEM * asked.shape.kv * asked.cached * flying <= pages) & (where.met(together * flying) <= slots)
    links = asked.gpus if servers else 1  # GPUs that share a link, or their parts of all links
    return fits * busiest(missed, waits) / max(missed * load * links, 1e-12)


def _best(asked: Asked, flying: Floats, step: Floats, bound: Floats, split: Served) -> Served:
    """Choose the requests in flight that serve most on the base GPUs."""
    rate = (1 - split.servers / asked.gpus) * flying / (asked.output * step)
    rate = np.where(step <= asked.token_s, np.minimum(rate, bound), 0.0)
    return replace(split, rate=float(rate.max())) if rate.max() > 0 else Served()
