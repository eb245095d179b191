"""Every rule, by every one of its methods, against explicit gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import cast, check, draw, read

from tanager.clipping import clipped_grad
from tanager.clipping.analysis.standardise import standardise
from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.convolutions import Convolution
from tanager.clipping.rules.factors import clip_factors


ROWS = 3
BOTH = ("float64", "float32")


def curve(y):
    """A scalar whose gradient differs in every entry of y and every example."""
    return jnp.sum(jnp.sin(y)) + 0.1 * jnp.sum(y * y)


def only_cell(loss, params, batch):
    (group,) = read(loss, params, batch)[1]
    return group


def einsum(text):
    return lambda w, x: jnp.einsum(text, x, w)


PRODUCTS = {
    "row times matrix": (lambda w, x: x @ w, (3, 4), (3,)),
    "matrix times column": (lambda w, x: w @ x, (4, 3), (3,)),
    "matrix times transposed": (lambda w, x: x @ w.T, (4, 3), (5, 3)),
    "matrix on the right": (lambda w, x: x @ w, (3, 4), (5, 3)),
    "matrix on the left": (lambda w, x: w @ x, (4, 3), (3, 5)),
    "inner product": (lambda w, x: w @ x, (6,), (6,)),
    "outer product": (
        lambda w, x: lax.dot_general(w, x, (((), ()), ((), ()))),
        (3,),
        (4,),
    ),
    "scores of positions": (einsum("ti,ti->t"), (5, 3), (5, 3)),
    "batched": (einsum("gti,gio->gto"), (2, 3, 4), (2, 5, 3)),
    "batched without positions": (einsum("gi,gio->go"), (2, 3, 4), (2, 3)),
    "batched, parameter first": (
        lambda w, x: lax.dot_general(w, x, (((1,), (2,)), ((0,), (0,)))),
        (2, 3, 4),
        (2, 5, 3),
    ),
    "batched twice in odd order": (
        einsum("agti,igao->tgao"),
        (3, 2, 4, 5),
        (4, 2, 6, 3),
    ),
    "one matrix per head": (einsum("thd,hde->the"), (2, 3, 4), (5, 2, 3)),
    "to heads": (einsum("td,dhe->the"), (3, 2, 4), (5, 3)),
    "from heads": (einsum("the,hed->td"), (2, 3, 4), (5, 2, 3)),
    "free axes on both sides": (einsum("abi,icd->abcd"), (3, 2, 4), (2, 5, 3)),
    "several contracted axes": (einsum("itj,jio->to"), (3, 2, 4), (2, 5, 3)),
    "mixing positions": (einsum("td,st->sd"), (6, 5), (5, 3)),
    "quadratic form": (lambda w, x: x @ w @ x, (3, 3), (3,)),
    "through moves and a scale": (
        lambda w, x: x @ (-0.25 * w.reshape(4, 3)[::-1].T / 2.0),
        (2, 6),
        (5, 3),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    apply, weight, data = PRODUCTS[name]
    w, x = draw(0, weight, (ROWS, *data))
    group = only_cell(lambda w, x: curve(apply(w, x)), w, x)
    assert (group.rule.name, group.grams()) == ("dot", ("gram",))
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True, dtypes=BOTH)


def test_a_narrowed_product_is_widened_for_the_norm():
    w, x = draw(0, (3, 4), (ROWS, 5, 3))

    def loss(w, x):
        y = lax.dot(x, w, preferred_element_type=jnp.result_type(x))
        return curve(y)

    check(loss, w, x, methods=True)


def conv(x, w, layout, strides, padding, spread=None, dilation=None, groups=1, packs=1):
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        padding,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
        batch_group_count=packs,
    )


FLAT, PLANE, SOLID = (
    ("NWC", "WIO", "NWC"),
    ("NHWC", "HWIO", "NHWC"),
    ("NHWDC", "HWDIO", "NHWDC"),
)
CONVOLUTIONS = {
    # name: (image, kernel, layout, strides, padding, further arguments)
    "1-D, stride 2": ((1, 9, 2), (3, 2, 3), FLAT, (2,), "SAME", {}),
    "1-D, dilated": ((1, 9, 2), (3, 2, 3), FLAT, (1,), "VALID", {"dilation": (2,)}),
    "same": ((1, 5, 4, 2), (3, 3, 2, 3), PLANE, (1, 1), "SAME", {}),
    "valid, strides and dilations": (
        (1, 7, 6, 2),
        (2, 3, 2, 3),
        PLANE,
        (2, 1),
        "VALID",
        {"dilation": (3, 2)},
    ),
    "strides that skip the last pixels": (
        (1, 6, 7, 2),
        (2, 2, 2, 3),
        PLANE,
        (3, 3),
        "VALID",
        {},
    ),
    "asymmetric padding": (
        (1, 4, 4, 2),
        (3, 2, 2, 3),
        PLANE,
        (1, 2),
        ((2, 0), (0, 3)),
        {},
    ),
    "negative padding": (
        (1, 6, 6, 2),
        (3, 3, 2, 3),
        PLANE,
        (1, 1),
        ((-1, 0), (1, -2)),
        {},
    ),
    "3-D": ((1, 3, 4, 3, 2), (2, 2, 2, 2, 3), SOLID, (1, 2, 1), "SAME", {}),
    "groups": ((1, 4, 4, 4), (3, 3, 2, 6), PLANE, (1, 1), "SAME", {"groups": 2}),
    "depthwise": ((1, 4, 4, 3), (3, 3, 1, 6), PLANE, (2, 2), "SAME", {"groups": 3}),
    "batch groups": ((2, 4, 4, 3), (3, 3, 3, 4), PLANE, (1, 1), "SAME", {"packs": 2}),
    "transposed": (
        (1, 3, 3, 2),
        (3, 3, 2, 3),
        PLANE,
        (1, 1),
        ((1, 2), (2, 2)),
        {"spread": (2, 3)},
    ),
    "transposed, negative padding, groups": (
        (1, 4, 4, 4),
        (2, 2, 2, 2),
        PLANE,
        (2, 1),
        ((-1, 1), (0, -2)),
        {"spread": (2, 2), "groups": 2},
    ),
    "channels first": (
        (1, 2, 5, 4),
        (3, 2, 3, 3),
        ("NCHW", "OIHW", "NCHW"),
        (2, 1),
        "SAME",
        {},
    ),
    "odd layouts": (
        (5, 4, 2, 1),
        (4, 3, 2, 3),
        ("HWCN", "OHIW", "CHNW"),
        (1, 2),
        ((1, 1), (0, 1)),
        {},
    ),
    "odd layouts, groups": (
        (5, 4, 4, 1),
        (4, 2, 3, 3),
        ("HWCN", "OIWH", "CHNW"),
        (1, 2),
        ((1, 1), (0, 1)),
        {"groups": 2},
    ),
    "several images": ((3, 4, 4, 2), (2, 2, 2, 3), PLANE, (1, 1), "SAME", {}),
    "pointwise": ((1, 4, 3, 2), (1, 1, 2, 5), PLANE, (1, 1), "SAME", {}),
    "pointwise, strided": ((1, 5, 4, 2), (1, 1, 2, 5), PLANE, (2, 2), "VALID", {}),
    "patch embedding": ((1, 6, 4, 3), (2, 2, 3, 5), PLANE, (2, 2), "VALID", {}),
    "patches, some pixels left over, groups": (
        (2, 7, 5, 4),
        (3, 2, 2, 4),
        PLANE,
        (3, 2),
        ((0, 1), (0, 0)),
        {"groups": 2},
    ),
    "patches, channels first": (
        (1, 2, 5, 4),
        (3, 2, 3, 2),
        ("NCHW", "OIHW", "NCHW"),
        (3, 2),
        "SAME",
        {},
    ),
    "patches with gaps": (
        (1, 6, 6, 2),
        (2, 2, 2, 3),
        PLANE,
        (2, 2),
        "VALID",
        {"dilation": (2, 1)},
    ),
    "one position": ((1, 3, 3, 2), (3, 3, 2, 4), PLANE, (1, 1), "VALID", {}),
}


def convolution(name, rows=ROWS):
    image, kernel, layout, strides, padding, rest = CONVOLUTIONS[name]
    w, x = draw(1, kernel, (rows, *image))

    def apply(w, x):
        return conv(x, w, layout, strides, padding, **rest)

    return apply, 0.4 * w, x


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    apply, w, x = convolution(name)
    group = only_cell(lambda w, x: curve(apply(w, x)), w, x)
    batch_groups = name == "batch groups"
    assert group.rule.name == ("general" if batch_groups else "convolution")
    assert bool(group.grams()) != batch_groups
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True)


@pytest.mark.parametrize("name", ["same", "groups", "patch embedding"])
def test_convolutions_in_float32(name):
    apply, w, x = convolution(name)
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True, dtypes=("float32",))


def test_both_gram_methods_of_a_convolution_are_tried():
    offered = {}
    for name in CONVOLUTIONS:
        apply, w, x = convolution(name)
        group = only_cell(lambda w, x, apply=apply: curve(apply(w, x)), w, x)
        for method in (*group.grams(), *group.gradients(), *group.totals()):
            offered.setdefault(method, []).append(name)
    assert set(offered) == {
        *("gram", "shifted gram", "patch gram"),
        *("vmap", "patches", "crossed"),
    }
    assert all(len(names) >= 2 for names in offered.values())


@pytest.mark.parametrize("name", ["same", "groups", "several images"])
def test_gradients_that_are_formed_a_few_examples_at_a_time(name, monkeypatch):
    monkeypatch.setattr(Convolution, "chunk", lambda self, method, rows: 2)
    apply, w, x = convolution(name, rows=5)
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True)


@pytest.mark.parametrize("name", ["same", "groups", "asymmetric padding"])
def test_norms_whose_gradients_are_dropped_group_by_group(name, monkeypatch):
    monkeypatch.setattr(Convolution, "chunk", lambda self, method, rows: 2)
    apply, w, x = convolution(name, rows=5)
    with jax.enable_x64(True):
        w, x = jnp.asarray(w), jnp.asarray(x)
        dy = jnp.asarray(draw(2, jax.vmap(apply, (None, 0))(w, x).shape)[0])
        program, (group,) = read(lambda w, x: curve(apply(w, x)), w, x)
        one = jax.grad(lambda w, x, dy: jnp.sum(apply(w, x) * dy))
        wanted = jax.jit(jax.vmap(one, (None, 0, 0)))(w, x, dy).reshape(5, -1)
        assert {"patches", "crossed"} <= set(group.gradients())
        for method in group.gradients():

            @jax.jit
            def squared(w, x, dy, method=method):
                seen = [TapValues([x], [dy], [dy], program.evaluate_prologue([w]))]
                squares, held = group.squares(method, seen, [w], retain=False)
                assert held.gradients is None
                return squares

            expected = np.sum(np.square(wanted), axis=1)
            np.testing.assert_allclose(squared(w, x, dy), expected, rtol=1e-10)


@pytest.mark.parametrize("method", ["patches", "crossed"])
def test_kept_gradients_are_added_up_before_they_are_brought_to_the_kernel(
    method, monkeypatch
):
    brought = []
    once = Convolution._at_anchor

    def counting(self, gradient):
        brought.append(gradient.size)
        return once(self, gradient)

    monkeypatch.setattr(Convolution, "_at_anchor", counting)
    monkeypatch.setattr(Convolution, "chunk", lambda self, method, rows: 2)
    apply, w, x = convolution("same", rows=5)
    w, x = jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)
    program, (group,) = read(lambda w, x: curve(apply(w, x)), w, x)
    dy = jax.vmap(apply, (None, 0))(w, x)
    seen = [TapValues([x], [dy], [dy], program.evaluate_prologue([w]))]
    squares, held = group.squares(method, seen, [w], retain=True)
    assert held.gradients is not None
    assert len(held.gradients[0].chunks) == 3
    weights = clip_factors(jnp.sqrt(squares), jnp.ones(5, bool), 1.0)
    assert not brought
    group.total("retained", seen, held, weights)
    assert brought == [w.size]


def test_groups_keep_copies_in_the_cache_and_programs_short():
    w, x = draw(1, (3, 3, 64, 64), (ROWS, 32, 32, 64))

    def loss(w, x):
        return curve(conv(x[None], w, PLANE, (1, 1), "SAME"))

    rule = only_cell(loss, w, x).rule
    assert isinstance(rule, Convolution)
    copied = {name: rule.copied(name) for name in rule.gradients()}
    assert copied == {"vmap": 0, "patches": 9 * 2**16, "crossed": 6 * 2**16}
    assert rule.chunk("vmap", 16) == 16
    assert rule.chunk("patches", 16) * 4 * copied["patches"] <= 4e6
    assert rule.chunk("crossed", 16) == 1
    for name in ("patches", "crossed"):
        for rows in (1, 63, 64, 65, 1000):
            assert -(-rows // rule.chunk(name, rows)) <= 64


def test_large_patches_side_by_side_are_formed_without_a_slice_for_each_pixel():
    w, x = draw(1, (12, 12, 2, 3), (ROWS, 25, 24, 2))

    def patches(stride):
        def loss(w, x):
            return curve(conv(x[None], w, PLANE, (stride, stride), "VALID"))

        return loss

    assert "patches" not in only_cell(patches(11), w, x).gradients()
    rule = only_cell(patches(12), w, x).rule
    assert isinstance(rule, Convolution)
    assert "patches" in rule.gradients()
    assert "slice" not in str(jax.make_jaxpr(rule.patches)(x[:, None, :24, :, None]))
    check(patches(12), w, x, methods=True)


def test_crossed_products_want_a_first_axis_of_stride_one():
    offered = []
    for name in CONVOLUTIONS:
        apply, w, x = convolution(name)
        group = only_cell(lambda w, x, apply=apply: curve(apply(w, x)), w, x)
        if "crossed" in group.gradients():
            offered.append(name)
    assert {"same", "groups", "several images"} <= set(offered)
    assert not {"pointwise", "patch embedding", "batch groups"} & set(offered)


def test_a_kernel_that_is_made_of_moved_and_scaled_entries():
    w, x = draw(2, (2, 3, 9), (ROWS, 4, 4, 2))

    def loss(w, x):
        kernel = 0.5 * jnp.transpose(w.reshape(2, 3, 3, 3), (3, 2, 0, 1))
        return curve(conv(x[None], kernel[::-1], PLANE, (1, 1), "SAME"))

    assert only_cell(loss, w, x).grams()
    check(loss, w, x, methods=True)


def test_an_image_that_is_a_parameter():
    # The parameter is convolved with the example: the general rule.
    w, x = draw(3, (1, 5, 5, 2), (ROWS, 3, 3, 2, 2))
    check(lambda w, x: curve(conv(w, x, PLANE, (1, 1), "SAME")), w, x, methods=True)


ELEMENTWISE = {
    "bias": (lambda w, x: x + w, (3,), (3,)),
    "bias at positions": (lambda w, x: x + w[None, :], (3,), (5, 3)),
    "scalar bias": (lambda w, x: x + w, (), (5, 3)),
    "position embedding": (lambda w, x: x + w, (5, 3), (5, 3)),
    "scale": (lambda w, x: x * w[None, :], (3,), (5, 3)),
    "scale of channels": (lambda w, x: x * w[:, None, None], (3,), (3, 4, 2)),
    "divided by": (lambda w, x: x / (3.0 + w[None]), (3,), (5, 3)),
    "divides": (lambda w, x: w[None] / (3.0 + x * x), (3,), (5, 3)),
    "divided by directly": (lambda w, x: jnp.sin(x) / w, (), (5,)),
    "power": (lambda w, x: (1.5 + jnp.sin(x)) ** w, (3,), (3,)),
    "maximum": (lambda w, x: jnp.maximum(x, w[None]), (3,), (5, 3)),
    "selected by data": (
        lambda w, x: jnp.where(x > 0, jnp.broadcast_to(w, x.shape), x),
        (),
        (5, 3),
    ),
    "class token": (lambda w, x: jnp.concatenate([w[None], x]), (3,), (5, 3)),
    "written into data": (lambda w, x: x.at[2].set(w), (3,), (5, 3)),
    "subtracted": (lambda w, x: w[None] - x, (3,), (5, 3)),
    "nonlinear before data": (
        lambda w, x: x * jax.nn.softplus(w)[None],
        (3,),
        (5, 3),
    ),
    "triangular solve": (
        lambda w, x: jax.scipy.linalg.solve_triangular(
            jnp.tril(w) + 3.0 * jnp.eye(3, dtype=w.dtype), x, lower=True
        ),
        (3, 3),
        (3,),
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_and_other_equations(name):
    apply, weight, data = ELEMENTWISE[name]
    w, x = draw(4, weight, (ROWS, *data))
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True)


def test_group_normalisation_with_scale_and_bias():
    scale, bias, x = draw(5, (4,), (4,), (ROWS, 3, 3, 4))

    def loss(params, x):
        grouped = x.reshape(9, 2, 2)
        mean = jnp.mean(grouped, axis=(0, 2), keepdims=True)
        variance = jnp.var(grouped, axis=(0, 2), keepdims=True)
        normal = ((grouped - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return curve(normal * params["scale"] + params["bias"])

    def strict(params, x):
        wide = {k: v[None, None, :] for k, v in params.items()}
        return loss(wide, x)

    params = {"scale": scale, "bias": bias}
    check(strict, params, x, methods=True, dtypes=BOTH)


TABLE = (5, 3)
LOOKUPS = {
    "one row": (lambda t, i: t[i[0]], TABLE),
    "rows": (lambda t, i: t[i], TABLE),
    "rows of rank 2": (lambda t, i: t[i.reshape(2, 3)], TABLE),
    "rows of a rank 3 table": (lambda t, i: t[i], (5, 2, 3)),
    "numbers of a vector": (lambda t, i: t[i], (5,)),
    "take": (lambda t, i: jnp.take(t, i, axis=0, mode="clip"), TABLE),
    "take columns": (lambda t, i: jnp.take(t, i, axis=1, mode="clip"), (3, 5)),
    "promise": (lambda t, i: t.at[i].get(mode="promise_in_bounds"), TABLE),
    "one row by slicing": (lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 2), TABLE),
    "pairs": (lambda t, i: t[i, i[::-1] % 3], TABLE),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_embeddings(name):
    look_up, shape = LOOKUPS[name]
    (table,) = draw(6, shape)
    indices = np.random.default_rng(6).integers(0, 5, (ROWS, 6))
    indices[0, 1:4] = indices[0, 0]  # repeated

    def loss(table, indices):
        return curve(look_up(table, indices))

    fast = name not in ("one row", "take columns", "one row by slicing", "pairs")
    assert (only_cell(loss, table, indices).rule.name == "gather") == fast
    check(loss, table, indices, methods=True, dtypes=BOTH)


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_embeddings_of_indices_out_of_bounds(mode):
    (table,) = draw(7, TABLE)
    indices = np.array([[0, 5, 7, 2], [1, 1, 1, 1], [-1, -9, 4, 4]])

    def loss(table, indices):
        return curve(table.at[indices].get(mode=mode, fill_value=0.5))

    check(loss, table, indices, methods=True)


def test_embeddings_of_narrow_indices():
    (table,) = draw(7, (100, 3))
    batch = {
        "u": np.array([[0, 99], [1, 1], [255, 7]], np.uint8),
        "i": np.array([[0, -1], [1, 1], [99, -100]], np.int8),
    }

    def loss(table, example):
        return curve(table[example["u"]]) + curve(table[example["i"]] ** 2)

    check(loss, table, batch, methods=True)


STANDARDISED = {
    "plain": ("same", True),
    "strided": ("valid, strides and dilations", True),
    "groups": ("groups", True),
    "depthwise": ("depthwise", True),
    "transposed": ("transposed", True),
    "several images": ("several images", True),
    "pointwise": ("pointwise", True),
    "batch groups": ("batch groups", False),
}


@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize("name", STANDARDISED)
def test_standardised_convolutions(name, gained):
    layer, has_gram = STANDARDISED[name]
    apply, w, x = convolution(layer)
    params = {"w": w + 0.3}
    if gained:
        params["gain"] = draw(8, (w.shape[-1],))[0]

    def loss(params, x):
        # eps so large that the variance is far from s².
        kernel = standardise(params["w"], params.get("gain"), eps=0.05)
        return curve(2.0 * apply(kernel, x))

    group = only_cell(loss, params, x)
    assert group.unit.kind == "standardised"
    assert bool(group.grams()) == has_gram
    check(loss, params, x, methods=True)


@pytest.mark.parametrize("gain", [(1.1, -0.9, 1.0), (1.1, 0.0, -0.9)])
def test_a_standardised_convolution_in_float32(gain):
    apply, w, x = convolution("same")

    def loss(params, x):
        return curve(apply(standardise(params["w"], params["gain"]), x))

    params = {"w": w, "gain": np.array(gain)}
    check(loss, params, x, methods=True, dtypes=("float32",))


@pytest.mark.parametrize(
    ("backend", "precision", "dtype", "exact"),
    [
        ("cpu", None, "float32", True),
        ("cpu", None, "bfloat16", False),
        ("gpu", None, "float32", False),
        ("gpu", "highest", "float32", True),
        ("gpu", "highest", "bfloat16", False),
    ],
)
def test_whether_outputs_are_exact(monkeypatch, backend, precision, dtype, exact):
    apply, w, x = convolution("same")
    w, x = cast((w, x), np.float32)

    def loss(w, x):
        return curve(apply(standardise(w).astype(dtype), x.astype(dtype)))

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with jax.default_matmul_precision(precision):
        rule = only_cell(loss, w, x).rule
    assert isinstance(rule, Convolution)
    assert rule.exact == exact


@pytest.mark.parametrize("gained", [False, True])
def test_a_standardised_kernel_times_a_number(gained):
    apply, w, x = convolution("same")
    params = {"w": w + 0.3}
    if gained:
        params["gain"] = draw(11, (w.shape[-1],))[0]

    def loss(params, x):
        kernel = standardise(params["w"], params.get("gain"), eps=0.05)
        return curve(apply(-1.7 * kernel, x))

    group = only_cell(loss, params, x)
    assert group.unit.kind == "standardised"
    assert group.grams() and group.totals()
    check(loss, params, x, methods=True)


def test_a_standardised_dense_layer_and_a_moved_standardised_kernel():
    w, v, x = draw(9, (4, 3), (3, 3, 2, 3), (ROWS, 4, 4, 2))

    def dense(w, x):
        return curve(x[0, :2].reshape(1, 4) @ standardise(w, eps=0.05))

    def moved(v, x):
        kernel = jnp.transpose(standardise(v, eps=0.05), (3, 2, 0, 1))
        return curve(conv(x[None], kernel, ("NHWC", "OIHW", "NHWC"), (1, 1), "SAME"))

    for loss, params in ((dense, w), (moved, v)):
        assert only_cell(loss, params, x).unit.kind == "standardised"
        check(loss, params, x, methods=True)


def test_a_standardised_kernel_that_is_used_twice():
    apply, w, x = convolution("same")

    def loss(w, x):
        kernel = standardise(w, eps=0.05)
        return curve(apply(kernel, x)) + curve(apply(kernel, x * x))

    check(loss, w, x, methods=True)


def test_a_leaf_that_is_standardised_and_used_directly_too():
    apply, w, x = convolution("same")

    def loss(w, x):
        return curve(apply(standardise(w, eps=0.05), x)) + curve(apply(w, x))

    check(loss, w, x, methods=True)


def test_a_gain_that_two_layers_share():
    apply, w, x = convolution("same")
    v, gain = draw(10, w.shape, (3,))

    def loss(params, x):
        w, v, gain = params
        one = apply(standardise(w, gain, eps=0.05), x)
        return curve(one + apply(standardise(v, gain, eps=0.05), x))

    check(loss, (w, v, gain), x, methods=True)


def test_a_user_function_of_the_same_name_is_not_taken_for_ours():
    @jax.jit
    def _tanager_standardise(weight, eps):
        return weight / (jnp.max(jnp.abs(weight)) + eps)

    apply, w, x = convolution("same")

    def loss(w, x):
        return curve(apply(_tanager_standardise(w, jnp.asarray(0.1, w.dtype)), x))

    assert only_cell(loss, w, x).unit.kind == "general"
    check(loss, w, x, methods=True)


def own_standardisation(w):
    centred = w - jnp.mean(w, axis=(0, 1, 2), keepdims=True)
    return centred * lax.rsqrt(jnp.var(w, axis=(0, 1, 2), keepdims=True) + 0.05)


REPARAMETRISED = {
    "own weight standardisation": lambda p: own_standardisation(p["w"]),
    "weight norm": lambda p: (
        p["g"][None, None, None] * p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2))
    ),
    "low rank adaptation": lambda p: p["w"] + (p["a"] @ p["b"]).reshape(p["w"].shape),
    "spectral norm": lambda p: (
        p["w"] / (p["u"] @ p["w"].reshape(18, 3) @ p["w"].reshape(18, 3).T @ p["u"])
    ),
    "fast Fourier transform": lambda p: jnp.fft.irfft(
        jnp.fft.rfft(p["w"], axis=0) * 0.5, n=3, axis=0
    ),
    "concatenation": lambda p: jnp.concatenate([p["w"][:2], p["w"][:1] * 2.0]),
    "symmetrised": lambda p: p["w"] + p["w"][::-1],
}


@pytest.mark.parametrize("name", REPARAMETRISED)
def test_weights_made_of_parameters(name):
    apply, w, x = convolution("same")
    a, b, g, u = draw(11, (18, 2), (2, 3), (3,), (18,))
    params = {"w": w, "a": a, "b": b, "g": g, "u": u}
    make = REPARAMETRISED[name]
    check(lambda p, x: curve(apply(make(p), x)), params, x, methods=True)


def test_parameters_in_a_complex_transform_of_data():
    # A layer of a Fourier neural operator: complex weights are two real arrays.
    real, imaginary, x = draw(12, (3, 2, 4), (3, 2, 4), (ROWS, 4, 2))

    def loss(params, x):
        modes = jnp.fft.rfft(x, axis=0)
        weights = lax.complex(*params)
        weights = weights * (0.5 + 0.5j)
        mixed = jnp.einsum("ki,kio->ko", modes, weights)
        return curve(jnp.fft.irfft(mixed * weights[:, 0] / 2, n=4, axis=0))

    check(loss, (real, imaginary), x, methods=True)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16])
def test_rows_by_numbers_that_count_fewer_than_the_table_has(dtype, mode):
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    rows = np.random.default_rng(0).integers(0, 100, (4, 5)).astype(dtype)

    def loss(w, rows):
        taken = lax.gather(w, rows[:, None], dimensions, (1, 3), mode=mode)
        return jnp.sum(jnp.tanh(taken))

    (w,) = draw(0, (300, 3))
    w = jnp.float32(w)
    # JAX itself takes other gradients of rows by narrow numbers.
    expected = clipped_grad(loss, clip_norm=0.5)(w, rows.astype(np.int32))
    for strategy in ("bk", "bk_mixopt"):
        found = clipped_grad(loss, clip_norm=0.5, strategy=strategy)(w, rows)
        np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
        np.testing.assert_allclose(found.sum, expected.sum, rtol=1e-5, atol=1e-6)
