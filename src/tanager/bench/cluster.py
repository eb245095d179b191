"""How throughput grows with devices: Amdahl's law, and a model of communication.

The model: a logical step on n devices takes the time one device needs for its examples,
then one all-reduce of the sum of gradients. Nothing overlaps, because devices exchange
once per logical batch, after its last physical batch. Hosts form a ring. The devices of
a host form another ring, which costs nothing unless its bandwidth is given. The model
leaves out waiting for the slowest device and for data.

Compared with the efficiency paper (ViT-Base, 20 hosts of 4 V100, section 7 and figures
7 and A.5), with one number fitted:

- 53.3 % of ideal without privacy at 80 devices gives one effective communication time:
  0.876 of a non-private step.
- In table 2 private steps take 3.21 times as long (909.42 ms and 283.16 ms, on an
  A100). The model then predicts 78.6 % of ideal for private training; 69.2 % was
  measured, a gap of 9.4 points (5.6 to 9.1 with the ratios of 2.6 to 3.17 of section
  4.1). Only a ratio of 1.97 would give 69.2 %: private training lost time to more than
  the all-reduce. The text gives no ratio for ViT-Base on a V100.
- The order of the two, and that both stay near ideal in a host, are as measured. With
  the paper's logical batch, Amdahl's law fitted to the model's curves has p = 99.1 %
  without privacy (paper: 98.9 %) and 99.7 % with it (paper: 99.5 %).
- Amdahl's law at the paper's p gives 53.5 % and 71.7 % at 80 devices: 0.2 and 2.5
  points from the measured shares. Rounding p to 0.1 % explains less than the latter.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self, get_type_hints

from tanager import _validate as validate


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts that are alike, and the links between them.

    Attributes:
        hosts: how many there are.
        devices: of each host.
        bandwidth: of a host's link to other hosts, each way, in GB/s (10⁹ bytes).
        local_bandwidth: of a device's link in its host, likewise; None if
            communication in a host takes no time.
        latency: seconds that each all-reduce between hosts takes, whatever its size.
        logical_batch: examples of a logical batch, divided among all devices; None if
            each device has the same number of examples, however many there are.

    Raises:
        ValueError: a number is out of range.
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
        """Read ``"hosts=20,devices=4,bandwidth=12.5"``; names are the attributes.

        Raises:
            ValueError: an unknown, missing, repeated or impossible entry.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        kinds = get_type_hints(cls)
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            validate.one_of(fields, simulate=name)
            if name in found:
                validate.refuse("simulate", text, f"must give {name} once")
            kind = int if kinds[name] in (int, int | None) else float
            try:
                found[name] = kind(value)
            except ValueError:
                what = "a whole number" if kind is int else "a number"
                validate.refuse(f"simulate: {name}", value, f"must be {what}")
        for name, field in fields.items():
            if field.default is dataclasses.MISSING and name not in found:
                validate.refuse(
                    "simulate",
                    text,
                    f"must give {name}",
                    "for example hosts=20,devices=4,bandwidth=12.5",
                )
        return cls(**found)


def doubling(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … below `most`, and `most`."""
    validate.whole(most=most, at_least=1)
    return (*(2**power for power in range((most - 1).bit_length())), most)


def ring_seconds(members: int, size: float, bandwidth: float) -> float:
    """Return the seconds of an all-reduce on a ring: 2 (n − 1)/n · bytes / bandwidth.

    Args:
        members: n.
        size: bytes that every member has, and wants the sum of.
        bandwidth: of each link, each way, in GB/s.

    References:
        Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters
        of workstations".
    """
    return 2 * (members - 1) / members * size / (1e9 * bandwidth)


def communicating_seconds(cluster: Cluster, hosts: int, size: float) -> float:
    """Return the seconds of communication in a logical step.

    Args:
        cluster: the links.
        hosts: how many of its hosts take part, with all their devices.
        size: bytes of the sum of gradients.
    """
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

    Args:
        cluster: hosts and links.
        step_seconds: of a whole logical step on one device, alone.
        examples: of that logical step. With `Cluster.logical_batch` the seconds are
            taken as proportional to the examples.
        size: bytes of the sum of gradients.

    Returns:
        Rows with `hosts`, `devices` (of all of them), `computing_seconds`,
        `communicating_seconds`, `examples_per_second` and `share_of_ideal` (throughput
        over devices × that of one).

    Raises:
        ValueError: a number is out of range.
    """
    validate.positive(step_seconds=step_seconds, parameter_bytes=size)
    validate.whole(examples=examples, at_least=1)
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

    That is 1 − p = Σ x y / Σ x², with x = 1 − 1/n and y = 1/S(n) − 1/n.

    Args:
        speedups: throughput over that of one device, by number of devices n.

    Returns:
        p: below 0 if several devices are slower than one, above 1 if they are faster
        than ideal; None if no n is above 1.
    """
    several = {n: speedup for n, speedup in speedups.items() if n > 1}
    if not several:
        return None
    xs: Sequence[float] = [1 - 1 / n for n in several]
    ys: Sequence[float] = [1 / speedup - 1 / n for n, speedup in several.items()]
    serial = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
    return 1 - serial
