"""XLA is asked for what is fast on a CPU, and nothing where it would not know it."""

import gc
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tanager
from tanager import compiling


def work(image, kernel):
    output = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return output, jnp.sum(jnp.square(image), axis=(1, 2, 3))


ARRAYS = jnp.ones((2, 16, 16, 8)), jnp.ones((3, 3, 8, 8))


def test_convolutions_stay_with_xla():
    options = tanager.compiler_options()
    assert options
    jitted = jax.jit(work, compiler_options=options)
    text = str(jitted.lower(*ARRAYS).compile().as_text())
    outside = text[text.index("ENTRY") :]
    assert " convolution(" in outside


def test_the_results_are_the_same():
    draw = np.random.default_rng(0)
    arrays = [jnp.asarray(draw.standard_normal(a.shape, np.float32)) for a in ARRAYS]
    for one, other in zip(
        compiling.jit(work)(*arrays), jax.jit(work)(*arrays), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_caller_may_add_to_them():
    tanager.compiler_options()["mine"] = "1"
    assert "mine" not in tanager.compiler_options()


def test_what_the_user_says_stands(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert tanager.compiler_options() == {}


def test_other_flags_do_not_matter(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert tanager.compiler_options()


def test_a_tpu_is_asked_for_nothing(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert tanager.compiler_options() == {}


def test_a_gpu_is_asked_to_leave_out_what_takes_minutes(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}
    assert tanager.compiler_options() == options
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce")
    assert tanager.compiler_options() == {}


def test_an_xla_that_does_not_know_them_is_asked_for_nothing(monkeypatch):
    options = {"cpu": {"xla_cpu_no_such_option": "1"}}
    monkeypatch.setattr(compiling, "_OPTIONS", options)
    with pytest.warns(UserWarning, match="xla_cpu_no_such_option"):
        assert tanager.compiler_options() == {}
    assert int(compiling.jit(lambda: jnp.int32(3))()) == 3


def test_a_function_of_arrays_and_others_is_compiled_with_them():
    double = compiling.filter_jit(lambda tree: (tree["x"] * 2, tree["name"]))
    value, name = double({"x": jnp.arange(3), "name": "kept"})
    assert value.tolist() == [0, 2, 4]
    assert name == "kept"


def test_equal_constants_of_other_kinds_are_other_constants():
    kept = compiling.filter_jit(lambda x, number: (x, number))
    for number in (1, 1.0, True):
        _, same = kept(jnp.zeros(1), number)
        assert type(same) is type(number)


def test_a_function_that_nobody_holds_is_freed_with_its_program():
    def double(tree):
        return tree["x"] * 2, tree["name"]

    dead = weakref.ref(double)
    compiling.filter_jit(double)({"x": jnp.arange(3), "name": "kept"})
    del double
    gc.collect()
    assert dead() is None


def test_inside_another_program_its_options_hold():
    inner = compiling.jit(lambda x: jnp.sum(jnp.square(x)))
    outer = compiling.jit(lambda x: inner(x) + 1)
    assert float(outer(jnp.ones(3))) == 4
    assert float(jax.jit(outer)(jnp.ones(3))) == 4
    assert jax.eval_shape(outer, jnp.ones(3)).shape == ()
    np.testing.assert_array_equal(jax.grad(outer)(jnp.ones(3)), 2 * np.ones(3))


def test_donated_arrays_are_given_away():
    double = compiling.jit(lambda x: 2 * x, donate_argnums=0)
    given = jnp.ones(3)
    double(given)
    assert given.is_deleted()
    assert "stablehlo" in double.lower(jnp.ones(3)).as_text()


def test_arithmetic_of_finite_numbers_alone_is_refused(monkeypatch):
    """A NaN would not be left out of the sum, and no clipping would hold."""
    compiling.require_nans.__wrapped__()
    fast = {
        "xla_cpu_enable_fast_math": True,
        "xla_cpu_fast_math_honor_nans": False,
        "xla_cpu_fast_math_honor_infs": False,
        "xla_backend_optimization_level": 3,
    }
    emitters = "xla_cpu_use_fusion_emitters"
    if emitters in os.environ["XLA_FLAGS"]:  # which these tests turn off
        fast[emitters] = True
    monkeypatch.setattr(compiling, "compiler_options", lambda: fast)
    with pytest.raises(ValueError, match=r"XLA_FLAGS .* take what is not finite"):
        compiling.require_nans.__wrapped__()
