import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tanager.bench.scaling import exchanged
from tanager.parallel.layout import AXIS, Layout


LINE = '  %{0}.1 = {1} {0}(%p), channel_id=1, metadata={{op_name="a = b/psum(c)"}}\n'


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ("f32[16,24]{1,0}", 4 * 16 * 24),
        ("f32[]", 4),
        ("bf16[8]{0:T(256)}", 16),
        ("pred[3]", 3),
        ("f8e4m3fn[5]", 5),
        ("(f32[2,3]{1,0}, s32[], f64[4]{0})", 24 + 4 + 32),
    ],
)
def test_bytes_are_of_the_results(shapes, size):
    assert exchanged(LINE.format("all-reduce", shapes)) == {"all-reduce": size}


def test_kinds_are_counted_apart_and_started_ones_once():
    program = (
        LINE.format("all-reduce", "f32[10]")
        + LINE.format("all-reduce", "s32[]")
        + LINE.format("reduce-scatter", "f32[4]")
        + "  %all-reduce-start.2 = f32[5]{0} all-reduce-start(%p)\n"
        + "  %done = f32[5]{0} all-reduce-done(%all-reduce-start.2)\n"
        + "  %use = f32[5]{0} fusion(%all-reduce.1), calls=%all-reduce\n"
    )
    assert exchanged(program) == {"all-reduce": 64, "reduce-scatter": 16}


def test_a_real_program_shows_what_its_devices_exchange():
    layout = Layout(2)

    def compiled(function):
        mapped = jax.shard_map(
            function,
            mesh=layout.mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(AXIS),
            check_vma=False,
        )
        return jax.jit(mapped).lower(jnp.ones((6, 5))).compile().as_text() or ""

    assert exchanged(compiled(lambda x: 2 * x)) == {}
    assert exchanged(compiled(lambda x: lax.psum(x, AXIS))) == {"all-reduce": 60}
