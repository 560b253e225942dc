"""Does each member see all others, how soon, at what cost, and what if a third of them dies or a cable is cut?

    python -m bench.directory --shape gossip|dht [--quick]

The back-ends of the directory in virtual time (tests/swarm/overlay.py): one-way delays of 5 to 80 ms, records from real
announcers, signed; bytes are bodies and 90 per message below them. A signature is checked once per statement and process
(checking is a pure function), else 300 nodes would mostly measure Ed25519. Deaths are silent: no link says goodbye.

gossip    10, 100, 300 nodes that all host a span. Seconds until every view is whole after the last join; idle traffic over
          60 s; a crash and a third of the nodes dying, until gone from every view; halves apart for 30 s, until whole again.
dht       100, 1,000, 10,000 nodes that join within a minute; a tenth hosts (100 per model at most) and a tenth asks for one
          model each. The same, parted for 60 s, and lookups by nodes that never asked, just after a third died. 10,000
          nodes are measured for 30 s only, and not parted: a virtual minute of theirs is half a real one.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.report import finish, measuring, note
from manyhands.core import ModelId, NodeAddr, NodeId, Span, SpanInfo, SpanLoad
from manyhands.swarm import record_store
from manyhands.swarm.announce import Announcer, Profile
from manyhands.swarm.dht import store as dht_store
from manyhands.swarm.dht.backend import Dht
from manyhands.swarm.dht.query import Finished
from manyhands.swarm.dht.store import model_key
from manyhands.swarm.dht.table import K, number
from manyhands.swarm.directory import Backend, Peer
from manyhands.swarm.gossip import Gossip
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.record import BEAT_S, Record
from manyhands.swarm.statement import check_signature, read
from tests.swarm.overlay import Network, Overlay

SIZES = {"gossip": (10, 100, 300), "dht": (100, 1_000, 10_000)}
QUICK = {"gossip": (10, 30), "dht": (100, 300)}
IDLE_S = 60.0  # the time from one signature of a record to the next: a shorter one misses or hits the dear part
APART_S = {"gossip": 30.0, "dht": 60.0}  # beyond the silence of a link (10 s) and all freshness
TARGETS: dict[str, dict[str, float]] = {
    "gossip": {"bytes_per_node_s_at_100": 2048, "gone_s": 20, "heal_s": 60},
    "dht": {"hosts_found_while_a_third_dies": 0.99, "lookups_whole": 0.95, "gone_s": 120, "heal_s": 180},
}


def check_once() -> None:
    """Let every statement be read and verified once in this process, and remembered: both are pure functions."""
    verified: set[bytes] = set()
    known: dict[bytes, tuple[Record, int]] = {}

    def check(record: Record, signed: bytes) -> None:
        if signed not in verified:
            check_signature(record, signed)
            verified.add(signed)

    def read_once(data: bytes) -> tuple[Record, int]:
        if data not in known:
            known[data] = read(data)
        return known[data]

    for module in (record_store, dht_store):
        vars(module).update(check_signature=check, read=read_once)


class World:
    """`count` nodes; those in `hosts` say every 5 s that they host a span of their model."""

    def __init__(
        self, count: int, backend: Callable[[int, NodeId, Random], Backend], join_s: float, tick_s: float
    ) -> None:
        self.rng = Random(count)
        self.overlay = Overlay(self.rng, Network(tick_s=tick_s))
        self.keys = [NodeKey(Ed25519PrivateKey.from_private_bytes(self.rng.randbytes(32))) for _ in range(count)]
        self.peers = [Peer(key.node_id, (_address(i, key.node_id),)) for i, key in enumerate(self.keys)]
        self.alive = set(range(count))
        for index in range(count):
            made = backend(index, self.peers[index].node, self.rng)
            self.overlay.at(join_s * index / count, partial(self._join, index, made))
        self.overlay.run(join_s)

    @cached_property
    def names(self) -> dict[NodeId, int]:
        return {peer.node: index for index, peer in enumerate(self.peers)}

    def _join(self, index: int, backend: Backend) -> None:
        self.overlay.add(self.peers[index], backend)
        if index:
            self.overlay.link(self.peers[index].node, self.peers[self.rng.randrange(index)].node)

    def host(self, index: int, model: ModelId, num_layers: int = 24) -> None:
        """Start to announce a span, at a random phase of the beat."""
        announcer = Announcer(self.keys[index], _profile(self.peers[index]), self.rng.randbytes, self.overlay.now)
        info = _info(model, index % num_layers, num_layers)

        def announce() -> None:
            if index in self.alive:
                for data in announcer.announce([(info, SpanLoad())], self.overlay.now):
                    self.overlay.publish(self.peers[index].node, data)
                self.overlay.at(BEAT_S, announce)

        self.overlay.at(self.rng.uniform(0, BEAT_S), announce)

    def view(self, index: int, model: ModelId) -> set[int]:
        """Whom node `index` sees hosting `model`."""
        records = self.overlay.backend(self.peers[index].node).records(self.overlay.now)
        return {self.names[r.node] for r in records if r.info is not None and r.info.model == model}

    def kill(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            self.overlay.kill(self.peers[index].node, silent=True)
        self.alive -= set(indexes)

    def seconds_until(self, holds: Callable[[], bool], limit_s: float = 300.0) -> float:
        """Virtual seconds until `holds`, looked at every second; `limit_s` if it never does."""
        begin = self.overlay.now
        while not holds() and self.overlay.now - begin < limit_s:
            self.overlay.run(1.0)
        return round(self.overlay.now - begin, 1)

    def traffic(self, seconds: float) -> list[tuple[float, float]]:
        """Messages a minute and bytes a second that every node sends, over the next `seconds`."""
        before = [self.overlay.traffic(p.node) for p in self.peers]
        counted = [(t.messages_sent, t.bytes_sent) for t in before]
        self.overlay.run(seconds)
        after = [self.overlay.traffic(p.node) for p in self.peers]
        return [
            ((t.messages_sent - m) * 60 / seconds, (t.bytes_sent - b) / seconds)
            for t, (m, b) in zip(after, counted, strict=True)
        ]

    def split(self) -> None:
        self.overlay.partition([self.peers[i].node for i in self.alive if i % 2])


def _address(index: int, node: NodeId) -> NodeAddr:
    return NodeAddr(f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}", 4000, node)


def _profile(peer: Peer) -> Profile:
    return Profile(f"node-{peer.node[:6]}", peer.addresses, None, "lan", 16 << 30, 8, "cpu")


def _info(model: ModelId, layer: int, num_layers: int) -> SpanInfo:
    span, arithmetic = Span(layer, layer + 1), "cpu/amx-bf16/torch-2.13"
    return SpanInfo(model, "qwen2.5-0.5b", span, num_layers, "bf16", arithmetic, 896, 4096, False, 65536, 32)


def _model(index: int) -> ModelId:
    return ModelId(f"{index + 1:064x}")


def _sums(traffic: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        "messages_per_node_min": round(statistics.mean(m for m, _ in traffic), 1),
        "bytes_per_node_s": round(statistics.mean(b for _, b in traffic)),
        "bytes_busiest_node_s": round(max(b for _, b in traffic)),
    }


def gossip(count: int) -> dict[str, Any]:
    """All figures of one size."""
    model = _model(0)
    world = World(count, lambda _, node, rng: Gossip(node, rng), join_s=min(10.0, count / 10), tick_s=0.5)
    for index in range(count):
        world.host(index, model)

    def is_whole() -> bool:
        return all(world.view(i, model) == world.alive for i in world.alive)

    world.overlay.run(BEAT_S)  # the last has spoken
    figures: dict[str, Any] = {"converged_s": world.seconds_until(is_whole)}
    world.overlay.run(30.0)
    figures |= _sums(world.traffic(IDLE_S))
    world.kill([count // 2])
    figures["crash_gone_s"] = world.seconds_until(is_whole)
    world.kill(world.rng.sample(sorted(world.alive), count // 3))
    figures["third_gone_s"] = world.seconds_until(is_whole)
    world.split()
    world.overlay.run(APART_S["gossip"])
    world.overlay.heal()
    figures["heal_s"] = world.seconds_until(is_whole)
    return figures


def dht(count: int) -> dict[str, Any]:
    """All figures of one size."""
    num_hosts, num_models = count // 10, max(1, count // 1000)
    finished: list[Finished] = []
    hosts = {i: _model(i % num_models) for i in range(num_hosts)}
    askers = {i: _model(i % num_models) for i in range(num_hosts, 2 * num_hosts)}

    def backend(index: int, node: NodeId, rng: Random) -> Dht:
        return Dht(node, rng, [askers[index]] if index in askers else (), finished.append)

    world = World(count, backend, join_s=60.0, tick_s=0.5 if count <= 1_000 else 1.0)
    for index, model in hosts.items():
        world.host(index, model)

    def missing() -> int:
        """Hosts that live and some living asker does not see, and dead ones that one sees."""
        living = {m: {i for i in world.alive if hosts.get(i) == m} for m in set(askers.values())}
        return sum(len(world.view(i, m) ^ living[m]) for i, m in askers.items() if i in world.alive)

    world.overlay.run(BEAT_S)
    figures: dict[str, Any] = {"converged_s": world.seconds_until(lambda: not missing())}
    world.overlay.run(15.0)
    finished.clear()
    traffic = world.traffic(IDLE_S if count <= 1_000 else IDLE_S / 2)
    figures |= _sums(traffic) | {
        "bytes_per_asker_s": round(statistics.mean(traffic[i][1] for i in askers)),
        "bytes_per_other_s": round(statistics.mean(b for _, b in traffic[2 * num_hosts :])),
        **_lookups("idle", finished, world),
    }
    world.kill(world.rng.sample(range(count), count // 3))
    figures |= _ask_anew(world, hosts, num_models, finished)
    figures["third_gone_s"] = round(world.seconds_until(lambda: not missing()) + 20, 1)
    if count <= 1_000:
        world.split()
        world.overlay.run(APART_S["dht"])
        world.overlay.heal()
        figures["heal_s"] = world.seconds_until(lambda: not missing(), 600)
    return figures


def _ask_anew(world: World, hosts: dict[int, ModelId], num_models: int, finished: list[Finished]) -> dict[str, Any]:
    """Up to 100 living nodes ask for a model for the first time, in the 10 s after the deaths; 10 s later, who sees what?"""
    new = world.rng.sample([i for i in sorted(world.alive) if i >= 2 * len(hosts)], min(100, len(world.alive) // 4))
    finished.clear()
    for index in new:
        asker, model = world.overlay.backend(world.peers[index].node), _model(index % num_models)
        assert isinstance(asker, Dht)
        world.overlay.at(world.rng.uniform(0, 10), partial(asker.watch, model))
    world.overlay.run(20.0)
    found = []
    for index in new:
        living = {i for i in world.alive if hosts.get(i) == _model(index % num_models)}
        found.append(len(world.view(index, _model(index % num_models)) & living) / len(living))
    keys = {model_key(_model(i)) for i in range(num_models)}
    return {
        "hosts_found_while_a_third_dies": round(statistics.mean(found), 4),
        "lookups_whole": round(sum(share == 1 for share in found) / len(found), 3),
        **_lookups("dying", [f for f in finished if f.target in keys], world),
    }


def _lookups(name: str, finished: Sequence[Finished], world: World) -> dict[str, Any]:
    """How lookups went, and how many of the true nearest K they found, of up to 100."""
    ids = [number(world.peers[i].node) for i in world.alive]
    exact = []
    for lookup in finished[:: max(1, len(finished) // 100)]:
        asker = number(lookup.asker)
        nearest = set(sorted((i for i in ids if i != asker), key=lambda i: i ^ lookup.target)[:K])
        exact.append(len(nearest & {number(n) for n in lookup.nearest}) / len(nearest))
    return {
        f"lookups_{name}": len(finished),
        f"nearest_found_{name}": round(statistics.mean(exact), 4),
        f"hops_{name}": round(statistics.mean(f.hops for f in finished), 2),
        f"asked_{name}": round(statistics.mean(f.num_asked for f in finished), 1),
        f"seconds_{name}": round(statistics.median(f.seconds for f in finished), 2),
    }


def holds(shape: str, sizes: dict[int, dict[str, Any]]) -> dict[str, bool]:
    target, rows = TARGETS[shape], list(sizes.values())
    heals = all(row["heal_s"] <= target["heal_s"] for row in rows if "heal_s" in row)
    if shape == "dht":
        return {
            "gone": all(row["third_gone_s"] <= target["gone_s"] for row in rows),
            "heal": heals,
            "found": all(
                row[name] >= target[name]
                for row in rows
                for name in ("hosts_found_while_a_third_dies", "lookups_whole")
            ),
        }
    gone = all(max(row["crash_gone_s"], row["third_gone_s"]) <= target["gone_s"] for row in rows)
    idle = all(row["bytes_per_node_s"] <= target["bytes_per_node_s_at_100"] for n, row in sizes.items() if n <= 100)
    return {"bytes": idle, "gone": gone, "heal": heals}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SIZES), default="gossip", help="which back-end")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    args = parser.parse_args()
    check_once()
    gc.set_threshold(500_000, 20, 100)  # millions of small values live long here
    sizes: dict[int, dict[str, Any]] = {}
    for count in (QUICK if args.quick else SIZES)[args.shape]:
        with measuring(f"{args.shape} {count}"):
            begin = time.process_time()
            sizes[count] = gossip(count) if args.shape == "gossip" else dht(count)
            sizes[count]["cpu_s"] = round(time.process_time() - begin, 1)
        note(f"{args.shape} {count}: {sizes[count]}")
    return finish("directory", {"backend": args.shape, "nodes": sizes}, TARGETS[args.shape], holds(args.shape, sizes))


if __name__ == "__main__":
    sys.exit(main())
