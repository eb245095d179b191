"""What the cost model expects of convolutions, beside what they take.

    python benchmarks/costs.py

A row for each way to form the gradients of B examples at a convolution of H×H×C, k×k,
with stride s, in G groups: milliseconds measured, and expected by
`clipping/planning/cost.py`, whose figures were fitted to this table.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tanager.clipping.analysis.reading import read_loss
from tanager.clipping.planning import autotune, cost
from tanager.clipping.planning.choices import norm_groups


# H, channels in, channels out, k, G, s, B
SHAPES = [
    # depthwise: MobileNetV2, ConvNeXt
    (8, 32, 32, 3, 32, 1, 4),
    (8, 32, 32, 3, 32, 1, 16),
    (8, 128, 128, 3, 128, 1, 4),
    (16, 32, 32, 3, 32, 2, 4),
    (16, 96, 96, 3, 96, 1, 8),
    (16, 96, 96, 3, 96, 2, 8),
    (14, 384, 384, 3, 384, 1, 4),
    (8, 48, 48, 7, 48, 1, 8),
    (16, 48, 48, 7, 48, 1, 8),
    (7, 384, 384, 7, 384, 1, 4),
    # in groups of several channels: ResNeXt, ShuffleNet
    (8, 32, 64, 3, 32, 1, 4),
    (8, 32, 32, 3, 8, 1, 4),
    (8, 32, 32, 3, 8, 1, 16),
    (8, 32, 32, 3, 2, 1, 4),
    (16, 64, 64, 3, 8, 2, 4),
    (8, 64, 64, 1, 8, 1, 4),
    # in one group
    (16, 64, 64, 3, 1, 1, 16),
    (32, 64, 64, 3, 1, 1, 16),
    (8, 256, 256, 3, 1, 1, 16),
]


def main() -> None:
    """Print the table."""
    print("   H   in  out  k    G  s   B  method     measured  expected")
    for side, into, out, k, groups, stride, rows in SHAPES:

        def loss(
            w: jax.Array, x: jax.Array, stride: int = stride, groups: int = groups
        ) -> jax.Array:
            layout = ("NHWC", "HWIO", "NHWC")
            options = {"dimension_numbers": layout, "feature_group_count": groups}
            y = lax.conv_general_dilated(x[None], w, (stride,) * 2, "SAME", **options)
            return jnp.sum(y**2)

        w = jnp.ones((k, k, into // groups, out))
        program = read_loss(loss, w, jnp.ones((side, side, into)))
        (group,) = norm_groups(program)
        bench = autotune._Bench(group, rows)
        for name in group.gradients():
            method = cost.Method(name, cost.RETAINED)
            expected = cost.estimate(group, method, rows).seconds
            seconds = bench.seconds(f"retained:{name}")
            print(
                f"{side:4} {into:4} {out:4} {k:2} {groups:4} {stride:2} {rows:3}  "
                f"{name:8} {1e3 * seconds:10.2f} {1e3 * expected:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
