"""Models of the documentation of Keras, on its JAX backend."""

import os
from typing import Any


os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
from keras import layers
from strangers_of.drawn import (
    Stranger,
    classify,
    draw,
    images,
    labels,
    words,
)


def made(shape: tuple, steps: Any, batch: Any, dtype: str = "float32") -> Stranger:
    """Return a stranger of a list of layers, by `stateless_call`."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *steps])
    params = [jax.numpy.asarray(v.value) for v in model.trainable_variables]
    rest = [jax.numpy.asarray(v.value) for v in model.non_trainable_variables]

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return model.stateless_call(p, rest, x[None], training=False)[0][0]

    return classify(apply), params, batch


def mnist() -> Stranger:
    """`mnist_convnet`."""
    steps = [
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(10),
    ]
    return made((28, 28, 1), steps, images(32, 28, 1))


def bidirectional() -> Stranger:
    """`bidirectional_lstm_imdb`: two bidirectional LSTMs."""
    steps = [
        layers.Embedding(2000, 32),
        layers.Bidirectional(layers.LSTM(32, return_sequences=True)),
        layers.Bidirectional(layers.LSTM(32)),
        layers.Dense(10),
    ]
    return made((32,), steps, (words(8, 32, 2000), labels(8)), "int32")


def series() -> Stranger:
    """`timeseries_classification_from_scratch`, with layer norm."""
    steps = []
    for _ in range(3):
        steps += [layers.Conv1D(64, 3, padding="same"), layers.LayerNormalization()]
        steps += [layers.ReLU()]
    steps += [layers.GlobalAveragePooling1D(), layers.Dense(10)]
    return made((128, 1), steps, (*draw(1, (32, 128, 1)), labels(32)))


def text() -> Stranger:
    """`text_classification_from_scratch`: strided convolutions of an embedding."""
    steps = [
        layers.Embedding(5000, 64),
        layers.Conv1D(64, 7, strides=3, activation="relu"),
        layers.Conv1D(64, 7, strides=3, activation="relu"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]
    return made((128,), steps, (words(16, 128, 5000), labels(16)), "int32")


def separable() -> Stranger:
    """`image_classification_from_scratch`: separable convolutions, group norm."""
    steps = [layers.Conv2D(32, 3, strides=2, padding="same")]
    for _ in range(2):
        steps += [layers.GroupNormalization(8), layers.ReLU()]
        steps += [layers.SeparableConv2D(32, 3, padding="same")]
    steps += [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return made((32, 32, 3), steps, images(8, 32, 3))


MODELS = {
    "keras_bi_lstm": bidirectional,
    "keras_mnist": mnist,
    "keras_separable": separable,
    "keras_series": series,
    "keras_text": text,
}
