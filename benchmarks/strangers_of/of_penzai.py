"""Models of the documentation of Penzai."""

from typing import Any

import jax
from penzai import pz
from penzai.models import simple_mlp
from strangers_of.drawn import Stranger, classify, draw, labels


def mlp() -> Stranger:
    """The network of the first tutorial, on named axes."""
    model = simple_mlp.MLP.from_config(jax.random.key(0), [784, 256, 256, 10])
    unbound, params = pz.unbind_params(model, freeze=True)
    params = {variable.label: variable.value for variable in params}

    def apply(p: Any, x: jax.Array) -> jax.Array:
        frozen = [pz.ParameterValue(label=name, value=v) for name, v in p.items()]
        bound = pz.bind_variables(unbound, frozen)
        found = bound(pz.nx.wrap(x, "features"))
        return found.unwrap("features")

    return classify(apply), params, (*draw(3, (64, 784)), labels(64))


MODELS = {"penzai_mlp": mlp}
