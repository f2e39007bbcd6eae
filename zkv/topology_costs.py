"""How long an update takes under each topology (`zkv.topology`), and which one is the soonest.

Bytes on links and nothing else, as in `zkv.costs`: each host has one link, which carries as much
one way as the other at the same time, and what stays on a host goes through its memory. All of an
update is on its way at once, sums and what comes of them, so that the busiest link tells the time;
messages that have to wait for each other add their latency. Sizes are in bytes, links in bits per
second, times in seconds. Pure: figures in, a choice with its reasons out.

With N workers, S servers and M bytes: each worker sends M to the servers and gets M; of a host one
contribution of M travels, whatever it has of workers; on a ring each sends 2(N − 1)/N · M to the
next, and M/N to the servers, which send as much.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zkv.aggregation_costs import ring_sent_bytes
from zkv.costs import BITS_PER_BYTE, TINY, checked, transfer_s
from zkv.reduction_choice import WORTH
from zkv.topology import HIERARCHICAL, NAMES, ONE_SERVER, RING, Member, alone, in_ring, topology

MEMORY_BITS_PER_S = 5e9 * BITS_PER_BYTE
"""What goes from worker to worker through a host's memory, if nobody says better."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where workers and servers are. Hosts are numbered from 0.

    Raises:
        ValueError: there is no worker, no server, or no link of a host that is named.
    """

    workers: tuple[int, ...]
    """The host of each, by rank."""
    servers: tuple[int, ...]
    """The host of each."""
    links: tuple[float, ...]
    """Of each host: bits per second, one way."""
    memory: float = MEMORY_BITS_PER_S
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        checked("workers (how many)", len(self.workers), 1)
        checked("servers (how many)", len(self.servers), 1)
        for host in (*self.workers, *self.servers):
            checked("host (counted from 0; each has a link)", host, 0, len(self.links) - 1)
        for link in (*self.links, self.memory):
            checked("link (bits per second)", link, TINY)
        checked("latency_s", self.latency_s, 0)

    @property
    def members(self) -> list[Member]:
        """The workers as members of an update."""
        return [Member(rank, str(host)) for rank, host in enumerate(self.workers)]


Flows = defaultdict[tuple[int, int], float]
"""Bytes of an update, from host to host."""


def flows(name: str, site: Site, size_bytes: float) -> Flows:
    """Return what goes from host to host in one update of so many bytes."""
    checked("size_bytes", size_bytes, 0)
    found: Flows = defaultdict(float)
    servers = site.servers[:1] if name == ONE_SERVER else site.servers

    def both_ways(host: int, nbytes: float) -> None:
        for server in servers:
            found[host, server] += nbytes / len(servers)
            found[server, host] += nbytes / len(servers)

    if name == RING:
        ring = [site.workers[rank] for rank in in_ring(site.members)]
        for at, host in enumerate(ring):
            found[host, ring[(at + 1) % len(ring)]] += ring_sent_bytes(size_bytes, len(ring))
            both_ways(host, size_bytes / len(ring))
    elif name == HIERARCHICAL:
        for host, count in Counter(site.workers).items():
            found[host, host] += 2 * (count - 1) * size_bytes
            both_ways(host, size_bytes)
    else:
        for host in site.workers:
            both_ways(host, size_bytes)
    return found


def waits(name: str, site: Site) -> int:
    """Return how many messages of an update wait for each other."""
    if name == RING:
        return 2 * len(site.workers)
    return 4 if name == HIERARCHICAL else 2


@dataclass(frozen=True, slots=True)
class Cost:
    """What one update takes under a topology, and which link tells."""

    name: str
    seconds: float
    host: int
    """Whose link, or memory, is the busiest."""
    way: str
    """"in", "out" or "memory"."""
    nbytes: float
    """What that carries."""
    links_bytes: float
    """What all links between hosts carry."""


def cost(name: str, site: Site, size_bytes: float) -> Cost:
    """Return what one update of so many bytes takes under the topology of this name."""
    found = flows(name, site, size_bytes)
    loads: defaultdict[tuple[int, str], float] = defaultdict(float)
    for (source, target), nbytes in found.items():
        if source == target:
            loads[source, "memory"] += nbytes
        else:
            loads[source, "out"] += nbytes
            loads[target, "in"] += nbytes
    links_bytes = sum(nbytes for (one, two), nbytes in found.items() if one != two)

    def seconds(at: tuple[int, str]) -> float:
        return transfer_s(loads[at], site.memory if at[1] == "memory" else site.links[at[0]])

    busiest = max(sorted(loads), key=seconds)
    spent_s = seconds(busiest) + waits(name, site) * site.latency_s
    return Cost(name, spent_s, *busiest, loads[busiest], links_bytes)


@dataclass(frozen=True, slots=True)
class Choice:
    """The topology that is expected to take the least time, and what was compared."""

    best: Cost
    costs: tuple[Cost, ...]
    left_out: tuple[tuple[str, str], ...]
    """Topologies that bring nothing here, and why."""


def choose(site: Site, size_bytes: float) -> Choice:
    """Return under which topology an update of so many bytes is done soonest.

    One of more parts that have to work together has to be faster by 3 %: servers first.
    """
    costs: list[Cost] = []
    left_out: list[tuple[str, str]] = []
    for name in NAMES:
        why = alone(topology(name), site.members) if topology(name).joint else ""
        if name == ONE_SERVER and len(site.servers) == 1:
            why = "there is one server anyway"
        if why:
            left_out.append((name, why))
        else:
            costs.append(cost(name, site, size_bytes))
    best = costs[0]
    for one in costs[1:]:
        if one.seconds < best.seconds * WORTH:
            best = one
    return Choice(best, tuple(costs), tuple(left_out))


def sentence(choice: Choice, hosts: Sequence[str], told: Sequence[str]) -> str:
    """Return why the topology is chosen.

    `hosts`: their names; `told`: the seconds of each of `choice.costs`, as a person reads them.
    """
    texts = dict(zip((one.name for one in choice.costs), told, strict=True))
    best = choice.best
    where = _where(best, hosts)
    others = [one for one in choice.costs if one.name != best.name]
    if not others:
        return f"{best.name}, as nothing else brings anything here: {texts[best.name]}, {where}"
    second = min(others, key=lambda one: one.seconds)
    if second.seconds * WORTH <= best.seconds:
        return (
            f"{best.name}: {texts[best.name]}, {where}; no other is faster by more than 3 %, and "
            "fewer processes have to work together"
        )
    return (
        f"{best.name}: {texts[best.name]}, {where}; the next, {second.name}, takes "
        f"{texts[second.name]}, {_where(second, hosts)}"
    )


def _where(one: Cost, hosts: Sequence[str]) -> str:
    mb = f"{one.nbytes / 1e6:,.4g} MB"
    if one.way == "memory":
        return f"as {mb} go through the memory of {hosts[one.host]}"
    return f"as the link of {hosts[one.host]} carries {mb} {one.way}"
