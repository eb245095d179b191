"""Softmax regression on noisy unit vectors, for runs that compile quickly."""

import numpy as np
import optax


def examples(rows, classes, features, seed=0):
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, rows).astype(np.int32)
    centres = np.eye(classes, features)
    x = centres[labels] + 0.2 * random.normal(size=(rows, features))
    return {"x": x.astype(np.float32), "label": labels}


def predict(params, example):
    return params["w"] @ example["x"] + params["b"]


def loss(params, example):
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(params, example), example["label"]
    )
