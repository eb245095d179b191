"""How throughput grows with devices: Amdahl's law, and a model of communication.

The model: a logical step on n devices takes the time one device needs for its examples,
then one all-reduce of the sum of gradients, with which nothing overlaps. Hosts form a
ring. The devices of a host form another ring, which costs nothing unless its bandwidth
is given. The model leaves out waiting for the slowest device and for data.

Fitted to the share of ideal without privacy that the efficiency paper measured (53.3 %,
ViT-Base on 20 hosts of 4 V100, section 7), it predicts 78.6 % for private training;
69.2 % was measured. Amdahl's law fitted to its curves has p = 99.1 % without privacy
(paper: 98.9 %) and 99.7 % with it (paper: 99.5 %).
"""

import dataclasses
from collections.abc import Mapping
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
        logical_batch: examples of a logical batch, divided among all devices; None if
            each device has the same number of examples, however many there are.
    """

    hosts: int
    devices: int
    bandwidth: float
    local_bandwidth: float | None = None
    latency: float = 0.0
    logical_batch: int | None = None

    def __post_init__(self):
        validate.whole(hosts=self.hosts, devices=self.devices, at_least=1)
        validate.positive(bandwidth=self.bandwidth)
        validate.not_negative(latency=self.latency)
        if self.local_bandwidth is not None:
            validate.positive(local_bandwidth=self.local_bandwidth)
        if self.logical_batch is not None:
            validate.whole(logical_batch=self.logical_batch, at_least=1)

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
            kind = int if kinds[name] in (int, int | None) else float
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


def predict(
    cluster: Cluster, step_seconds: float, examples: int, size: float
) -> list[dict[str, Any]]:
    """Predict throughput on 1, 2, 4, … of the cluster's hosts.

    `step_seconds` is the time of a logical step of `examples` examples on one device.
    With `Cluster.logical_batch` it is taken as proportional. `size` is the bytes of the
    sum of gradients.
    """
    rows = []
    for hosts in doubling(cluster.hosts):
        devices = hosts * cluster.devices
        together = cluster.logical_batch or devices * examples
        computing = step_seconds * together / (devices * examples)
        communicating = communicating_seconds(cluster, hosts, size)
        rows.append(
            {
                "hosts": hosts,
                "devices": devices,
                "computing_seconds": computing,
                "communicating_seconds": communicating,
                "examples_per_second": together / (computing + communicating),
                "share_of_ideal": computing / (computing + communicating),
            }
        )
    return rows


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
