"""A world in which a leader and its shards have a hard time: clocks that run apart, messages that are late, connections
that are cut, processes that are stopped and killed, shards and leaders that are started twice. Four promises are held
at each step:

    barrier   no generation is written behind an answered pause, until somebody asks to go on
    one       no two instances of a shard may act at the same time
    store     a turn that was answered is in what the next instance of its shard reads
    leader    engines are told nothing by a leader once a later one has told them something

and a fifth at the end, where nothing fails any more: all shards act, and a pause is answered.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from miles_router.shards.protocol import NEVER, Ack, Follower, Join, Leader, LeaderMessage, LeaseRenewal

SHARDS, LEASE = 3, 8.0
#: Seconds between two beats, of trouble, and until all is well behind that.
BEAT, TROUBLE, CALM = 1.0, 90.0, 80.0
#: How far clocks run apart: within the tenth that is allowed, and beyond it.
RATES, WILD = (0.955, 1.045), (0.8, 1.2)
PAUSED, RUNNING = {"paused": True}, {"paused": False}


class Broken(Exception):
    """A promise was broken; it says which."""


class World:
    """Time, the register, the store, and all processes. `without` names one rule that is left out."""

    def __init__(self, seed: int, without: str = "") -> None:
        self.random = random.Random(seed)
        self.without = without
        self.now = 0.0
        self.calm = False
        #: The register: the last leader's term.
        self.term = 0
        #: The store: what was decided last, and of each shard the epoch and the turns.
        self.stored: tuple[tuple[int, int], Any] = ((0, 0), RUNNING)
        self.epochs = [0] * SHARDS
        self.turns: list[list[int]] = [[] for _ in range(SHARDS)]
        self.answered: list[list[int]] = [[] for _ in range(SHARDS)]
        self.paused_at: float | None = None
        #: The greatest term of a leader that has told engines something.
        self.told = 0
        self.counts: Counter[str] = Counter()
        self.nodes: list[Node] = []
        self.cut: set[frozenset[Node]] = set()
        self._events: list[tuple[float, int, Node | None, Callable[[], None]]] = []
        self._last: dict[tuple[Node, Node], float] = defaultdict(float)

    @property
    def leaders(self) -> list[LeaderNode]:
        return [each for each in self.nodes if isinstance(each, LeaderNode) and not each.dead]

    def instances(self, shard: int | None = None) -> list[InstanceNode]:
        found = [each for each in self.nodes if isinstance(each, InstanceNode) and not each.dead]
        return [each for each in found if shard in (None, each.shard)]

    def later(self, delay: float, work: Callable[[], None], node: Node | None = None) -> None:
        """Do something then; if it is a node's, as soon as that runs, and never where it is dead."""
        heapq.heappush(self._events, (self.now + delay, len(self._last) + self.counts["events"], node, work))
        self.counts["events"] += 1

    def send(self, connection: Connection, sender: Node, receiver: Node, work: Callable[[], None]) -> None:
        """One message: late, in order, or lost with its connection and all behind it."""
        way = frozenset((sender, receiver))

        def arrives() -> None:
            connection.lost |= way in self.cut
            if not connection.lost:
                work()

        quick = self.calm or self.random.random() < 0.97
        delay = self.random.choice((0.002, 0.01, 0.05, 0.3)) if quick else self.random.uniform(0.5, 6)
        at = self._last[sender, receiver] = max(self.now + delay, self._last[sender, receiver])
        self.later(at - self.now, arrives, receiver)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            at, number, node, work = heapq.heappop(self._events)
            self.now = max(self.now, at)
            if node is not None and node.dead:
                continue
            if node is not None and node.stopped_until > self.now:
                heapq.heappush(self._events, (node.stopped_until, number, node, work))
                continue
            work()
            for shard in range(SHARDS):
                if sum(each.follower.may_act(each.clock()) for each in self.instances(shard)) > 1:
                    raise Broken("one")
        self.now = until

    def trouble(self) -> None:
        """Something goes wrong, or somebody pauses; and again soon."""
        if self.calm:
            return
        dice, instances, leaders = self.random, self.instances(), self.leaders
        kinds = ("cut", "cut", "stop", "stop", "stop leader", "kill", "kill leader", "twice", "second leader")
        kind = "pause" if dice.random() < 0.25 else dice.choice(kinds)
        if kind == "cut" and instances and leaders:
            way = frozenset((dice.choice(leaders), dice.choice(instances)))
            self.cut.add(way)
            self.later(dice.uniform(0.5, 25), lambda: self.cut.discard(way))
        elif kind == "stop" and instances:
            dice.choice(instances).stop(dice.choice((0.5, 4, 7, 9, 20)))
        elif kind == "stop leader" and leaders:
            dice.choice(leaders).stop(dice.choice((0.5, 4, 7, 9, 20)))
        elif kind == "kill" and instances:
            dice.choice(instances).end(dice.uniform(0.1, 3))
        elif kind == "kill leader" and leaders:
            dice.choice(leaders).dead = True
            self.later(dice.uniform(0.1, 3), lambda: LeaderNode(self).begin())
        elif kind == "twice":  # whoever starts processes takes one for dead
            InstanceNode(self, dice.randrange(SHARDS)).begin()
        elif kind == "second leader":
            LeaderNode(self).begin()
        elif leaders:
            dice.choice(leaders).pause()
        self.later(dice.expovariate(0.5), self.trouble)

    def play(self) -> Counter[str]:
        LeaderNode(self).begin()
        for shard in range(SHARDS):
            InstanceNode(self, shard).begin()
        self.later(3, self.trouble)
        self.run(TROUBLE)
        self.calm = True
        self.cut.clear()
        for node in self.nodes:
            node.stopped_until = min(node.stopped_until, self.now)
        if not any(each.term == self.term for each in self.leaders):
            LeaderNode(self).begin()
        self.run(CALM)
        leader = next((each for each in self.leaders if each.term == self.term and each.core.open), None)
        if leader is None:
            raise Broken("progress: no leader is open")
        self.paused_at, leader.pausing, answered = None, False, self.counts["pauses"]
        leader.decide(RUNNING)
        self.run(10)
        if any(
            sum(each.follower.may_act(each.clock()) for each in self.instances(shard)) != 1 for shard in range(SHARDS)
        ):
            raise Broken("progress: a shard does not act")
        leader.pause()
        self.run(20)
        if self.counts["pauses"] == answered:
            raise Broken("progress: a pause is not answered")
        return self.counts


class Connection:
    """Between an instance and a leader."""

    lost = False


class Node:
    """A process, with a clock of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = False
        self.stopped_until = NEVER
        self._rate = world.random.uniform(*(WILD if world.without == "clocks that agree" else RATES))
        self._offset = world.random.uniform(-1000, 1000)
        world.nodes.append(self)

    def clock(self) -> float:
        return self._offset + self.world.now * self._rate

    def stop(self, seconds: float) -> None:
        self.stopped_until = self.world.now + seconds


class LeaderNode(Node):
    """A leader, which asks the register before it says anything."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        first = world.term == 0 or world.without == "waiting for leases"
        self.term = world.term = world.term + 1
        self.core = Leader(SHARDS, LEASE, self.term, self.clock(), first=first, stored=world.stored)
        self.pausing = False
        self._shards: dict[str, tuple[InstanceNode, Connection]] = {}

    def begin(self) -> None:
        self.world.later(0.05, self._ask_register, self)

    def _is_last(self) -> bool:
        return self.world.term == self.term or self.world.without == "the register"

    def _ask_register(self) -> None:
        began, dice = self.clock(), self.world.random

        def asked() -> None:
            last = self._is_last()
            self.world.later(dice.uniform(0.001, 0.05), lambda: answered(last), self)

        def answered(last: bool) -> None:
            if not last:
                self.dead = True
                return
            self._deliver(self.core.renew(began, self.clock()))
            self.world.later(BEAT, self._ask_register, self)

        self.world.later(dice.uniform(0.001, 0.05), asked, self)

    def _deliver(self, told: Iterable[tuple[str, LeaderMessage]]) -> None:
        for instance, said in told:
            if instance in self._shards:
                self._say(*self._shards[instance], said)

    def _say(self, node: InstanceNode, connection: Connection, said: LeaderMessage) -> None:
        self.world.send(connection, self, node, lambda: node.hear(connection, said))

    def joined(self, node: InstanceNode, connection: Connection, join: Join) -> None:
        self._shards[join.instance] = node, connection
        self._deliver(self.core.join(join, self.clock()))

    def heard(self, node: InstanceNode, ack: Ack) -> None:
        self.core.record_ack(node.shard, node.name, ack, self.clock())

    def decide(self, state: Any) -> int | None:
        """Commit a state to the store and tell it; None where a later leader has taken that over."""
        if not self._is_last():
            self.dead = True
            return None
        self.world.stored = max(self.world.stored, ((self.term, self.core.number + 1), state), key=lambda each: each[0])
        self._deliver(self.core.decide(state, self.clock()))
        return self.core.number

    def pause(self) -> None:
        """Somebody asks to pause the fleet."""
        if self.core.open and not self.pausing and (number := self.decide(PAUSED)) is not None:
            self.pausing = True
            self._wait_for_all(number)

    def _wait_for_all(self, number: int) -> None:
        if self.world.without != "waiting for shards" and self.core.lagging(number, self.clock()):
            self.world.later(0.05, lambda: self._wait_for_all(number), self)
            return
        if not self._is_last():
            self.dead = True
            return
        self._deliver(self.core.renew(self.clock(), self.clock()))
        if not self.world.calm and self.world.random.random() < 0.2:  # stopped right before the write
            self.stop(25)
            self.world.later(0.5, lambda: LeaderNode(self.world).begin())
            self.world.later(12, lambda: self.world.leaders[-1].pause() if self.world.leaders else None)
        self.world.later(self.world.random.uniform(0.001, 0.01), self._tell_engines, self)

    def _certain(self) -> bool:
        return self.world.without in ("certainty", "the register") or self.core.is_sole_leader(self.clock())

    def _tell_engines(self) -> None:
        self.pausing = self._certain()
        if not self.pausing:
            return
        if self.term < self.world.told:
            raise Broken("leader")
        self.world.told = self.term
        self.world.later(self.world.random.uniform(0.01, 0.3), self._answer, self)

    def _answer(self) -> None:
        self.pausing = self._certain()
        if not self.pausing:  # 503: nobody knows
            return
        if self.world.paused_at is None:
            self.world.paused_at = self.world.now
        self.world.counts["pauses"] += 1
        self.world.later(self.world.random.uniform(1, 6), self._go_on, self)

    def _go_on(self) -> None:
        self.world.paused_at, self.pausing = None, False
        self.decide(RUNNING)


class InstanceNode(Node):
    """A process in a shard: it writes generations, and answers turns that the store has."""

    def __init__(self, world: World, shard: int) -> None:
        super().__init__(world)
        self.shard = shard
        self.name = f"{shard}.{len(world.nodes)}"
        self.follower = Follower(shard, self.name, LEASE)
        self._leader: LeaderNode | None = None
        self._connection = Connection()
        self._heard_at = 0.0
        self._loaded: int | None = None
        self._memory: list[int] = []

    def begin(self) -> None:
        for delay, work in ((0.01, self._connect), (0.1, self._generate), (0.3, self._turn), (0.2, self._beat)):
            self.world.later(delay, work, self)

    def end(self, pause: float = 0.5) -> None:
        world, shard = self.world, self.shard
        self.dead = True
        world.later(pause, lambda: None if world.instances(shard) else InstanceNode(world, shard).begin())

    def _connect(self) -> None:
        world = self.world
        if self.follower.replaced:
            self.end()
            return
        reached = [each for each in world.leaders if frozenset((each, self)) not in world.cut]
        newest = [each for each in reached if each.term == world.term]
        if not newest and reached and world.random.random() < 0.3:
            newest = reached[-1:]
        if not newest:
            world.later(0.3, self._connect, self)
            return
        leader, connection = newest[0], Connection()
        self._leader, self._connection, self._heard_at = leader, connection, world.now
        join = self.follower.join_message(self.clock())
        if world.without == "freshness":
            join = join._replace(has_lease=True)
        world.send(connection, self, leader, lambda: leader.joined(self, connection, join))

    def hear(self, connection: Connection, said: LeaderMessage) -> None:
        leader = self._leader
        if leader is None or connection is not self._connection:
            return
        self._heard_at = self.world.now
        if isinstance(said, LeaseRenewal) and self.world.without == "leases from sending":
            said = said._replace(stamp=self.clock())
        ack = self.follower.handle(said, self.clock())
        if ack is not None:
            self.world.send(connection, self, leader, lambda: leader.heard(self, ack))
        if self.follower.replaced:
            self.end()

    def _beat(self) -> None:
        leader, connection = self._leader, self._connection
        if leader is not None:
            ack = self.follower.make_ack(self.clock())
            self.world.send(connection, self, leader, lambda: leader.heard(self, ack))
            if self.world.now - self._heard_at > LEASE / 2:  # silent: it is left
                self._leader = None
                self.world.send(connection, self, leader, lambda: leader.core.disconnect(self.shard, self.name))
                self._connect()
        self.world.later(BEAT, self._beat, self)

    def _may(self) -> bool:
        if self.world.without == "leases":
            return self.follower.epoch is not None and not self.follower.replaced
        return self.follower.may_act(self.clock())

    def _generate(self) -> None:
        if self._may() and self.follower.state == RUNNING:
            if self.world.paused_at is not None:
                raise Broken("barrier")
            self.world.counts["writes"] += 1
        self.world.later(self.world.random.uniform(0.05, 0.4), self._generate, self)

    def _turn(self) -> None:
        world, shard, epoch = self.world, self.shard, self.follower.epoch
        if self._may() and epoch is not None:
            if self._loaded == epoch:
                if not world.calm and world.random.random() < 0.004:  # stopped right before the commit
                    self.stop(20)
                    world.later(0.5, lambda: InstanceNode(world, shard).begin())
                world.later(world.random.uniform(0.001, 0.05), lambda: self._commit(epoch), self)
            elif epoch < world.epochs[shard]:
                self.end()
            else:
                world.epochs[shard], self._loaded, self._memory = epoch, epoch, list(world.turns[shard])
                if set(world.answered[shard]) - set(self._memory):
                    raise Broken("store")
        world.later(world.random.uniform(0.2, 1.0), self._turn, self)

    def _commit(self, epoch: int) -> None:
        world, shard = self.world, self.shard
        if epoch < world.epochs[shard] and world.without != "epochs":
            world.counts["refused"] += 1
            self.end()
            return
        if self._memory != world.turns[shard]:
            raise Broken("store")
        world.counts["turns"] += 1
        for turns in (self._memory, world.turns[shard], world.answered[shard]):
            turns.append(world.counts["turns"])
