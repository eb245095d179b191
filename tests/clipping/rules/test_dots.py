"""Products of matrices, by every method, against explicit gradients in float64."""

import jax.numpy as jnp
import pytest
from jax import lax
from oracle import check, draw
from rule_cases import BOTH, ROWS, curve, only_group

from cases import in_full


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


MORE = [
    *("matrix times column", "matrix on the left", "to heads"),
    *("batched without positions", "several contracted axes", "matrix on the right"),
    *("batched, parameter first", "one matrix per head"),
]


@pytest.mark.parametrize("name", in_full(PRODUCTS, *MORE))
def test_products(name):
    apply, weight, data = PRODUCTS[name]
    w, x = draw(0, weight, (ROWS, *data))
    group = only_group(lambda w, x: curve(apply(w, x)), w, x)
    assert (group.rule.name, group.grams()) == ("dot", ("gram",))
    narrow = name in ("row times matrix", "batched", "through moves and a scale")
    dtypes = BOTH if narrow else ("float64",)
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True, dtypes=dtypes)


def test_a_narrowed_product_is_widened_for_the_norm():
    w, x = draw(0, (3, 4), (ROWS, 5, 3))

    def loss(w, x):
        y = lax.dot(x, w, preferred_element_type=jnp.result_type(x))
        return curve(y)

    check(loss, w, x, methods=True)
