"""How throughput grows with devices: Amdahl's law, and a model of communication.

The model: a logical step on n devices takes the time one device needs for its examples,
then one all-reduce of the sum of gradients. Hosts form a ring. The devices of a host
form another ring, which costs nothing unless its bandwidth is given. If each device
draws its own examples, all wait for the one that drew most. Without privacy, the
all-reduce can overlap with the last backward pass. With it, it cannot: examples are
clipped when that pass has ended. The model leaves out other waiting.

docs/scale.md compares it with the 80 GPUs of the efficiency paper.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Self, get_type_hints

import numpy as np

from tanager import _validate as validate


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts that are alike, and the links between them.

    Attributes:
        hosts: how many there are.
        devices: of each host.
        bandwidth: of a host's link to other hosts, each way, in GB/s (10⁹ bytes).
        local_bandwidth: of a device's link in its host, likewise; None if free.
        latency: seconds that each all-reduce between hosts takes, whatever its size.
        sample_rate: at which each device draws examples from its own part of the data;
            None if one logical batch is divided evenly, as tanager does.
        overlap: seconds of the last backward pass without privacy, during which
            gradients can be sent already; 0 in tanager.
    """

    hosts: int
    devices: int
    bandwidth: float
    local_bandwidth: float | None = None
    latency: float = 0.0
    sample_rate: float | None = None
    overlap: float = 0.0

    def __post_init__(self):
        validate.whole(hosts=self.hosts, devices=self.devices, at_least=1)
        validate.positive(bandwidth=self.bandwidth)
        validate.not_negative(latency=self.latency, overlap=self.overlap)
        if self.local_bandwidth is not None:
            validate.positive(local_bandwidth=self.local_bandwidth)
        if self.sample_rate is not None:
            validate.fraction(sample_rate=self.sample_rate)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"hosts=20,devices=4,bandwidth=12.5"``; names are the attributes."""
        kinds = get_type_hints(cls)
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            validate.one_of(kinds, simulate=name)
            if name in found:
                validate.refuse("simulate", text, f"must give {name} once")
            kind = int if kinds[name] is int else float
            try:
                found[name] = kind(value)
            except ValueError:
                what = "a whole number" if kind is int else "a number"
                validate.refuse(f"simulate: {name}", value, f"must be {what}")
        for name in ("hosts", "devices", "bandwidth"):
            if name not in found:
                example = "for example hosts=20,devices=4,bandwidth=12.5"
                validate.refuse("simulate", text, f"must give {name}", example)
        return cls(**found)


def doubling(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … below `most`, and `most`."""
    return (*(2**power for power in range((most - 1).bit_length())), most)


def ring_seconds(members: int, size: float, bandwidth: float) -> float:
    """Return the seconds of an all-reduce on a ring (Patarasuk and Yuan 2009).

    `size` is in bytes, `bandwidth` that of each link, each way, in GB/s.
    """
    return 2 * (members - 1) / members * size / (1e9 * bandwidth)


def communicating_seconds(cluster: Cluster, hosts: int, size: float) -> float:
    """Return the seconds of communication in a logical step on some of the hosts."""
    seconds = 0.0
    if cluster.local_bandwidth is not None:
        seconds += ring_seconds(cluster.devices, size, cluster.local_bandwidth)
    if hosts > 1:
        seconds += ring_seconds(hosts, size, cluster.bandwidth) + cluster.latency
    return seconds


def largest_draw(devices: int, examples: float, rate: float) -> float:
    """Return the expected largest of binomial draws, over their mean (Blom 1958).

    `examples` is the mean of all draws together, and `rate` the sampling rate.
    """
    largest = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
    return 1 + largest * ((1 - rate) * devices / examples) ** 0.5


def predict(
    cluster: Cluster,
    step_seconds: float,
    examples: int,
    size: float,
    *,
    strong: bool = False,
    private: bool = True,
) -> list[dict[str, Any]]:
    """Predict throughput on 1, 2, 4, … of the cluster's hosts.

    `step_seconds` is the time of a logical step of `examples` examples on one device.
    If `strong`, all devices divide them; else each device has as many. `size` is the
    bytes of the sum of gradients. `communicating_seconds` are those without overlap.
    """
    rows = []
    for hosts in doubling(cluster.hosts):
        devices = hosts * cluster.devices
        computing = step_seconds / devices if strong else step_seconds
        together = examples if strong else devices * examples
        waiting, communicating = 0.0, communicating_seconds(cluster, hosts, size)
        if cluster.sample_rate is not None:
            drawn = largest_draw(devices, together, cluster.sample_rate)
            waiting = (drawn - 1) * computing
        if not private:
            communicating = max(communicating - cluster.overlap, 0.0)
        seconds = computing + waiting + communicating
        rows.append(
            {
                "hosts": hosts,
                "devices": devices,
                "computing_seconds": computing,
                "waiting_seconds": waiting,
                "communicating_seconds": communicating,
                "examples_per_second": together / seconds,
                "share_of_ideal": computing / seconds,
            }
        )
    return rows


def amdahl(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return Amdahl's p of each strategy, from its rows of one logical batch size."""
    speedups: dict[str, dict[int, float]] = {}
    for row in rows:
        mine = speedups.setdefault(row["strategy"], {})
        if row["share_of_ideal"] is not None:
            mine[row["devices"]] = row["devices"] * row["share_of_ideal"]
    return {name: amdahl_fit(mine) for name, mine in speedups.items()}


def amdahl_fit(speedups: Mapping[int, float]) -> float | None:
    """Return the p of Amdahl's law by least squares of 1/S(n) = (1 − p) + p/n.

    It is below 0 if several devices are slower than one, above 1 if they are faster
    than ideal, and None if no n is above 1.
    """
    several = {n: speedup for n, speedup in speedups.items() if n > 1}
    if not several:
        return None
    n, speedup = np.array([*several.items()], float).T
    x, y = 1 - 1 / n, 1 / speedup - 1 / n
    return float(1 - x @ y / (x @ x))
