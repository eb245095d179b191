"""TensorFlow's record of one example, ``tf.train.Example``, without TensorFlow."""

import functools
from typing import Any


_IMAGES = ("image", "image/encoded")
_LABEL = "label"
_LABEL_FROM_1 = "image/class/label"

# Of tensorflow/core/example/{example,feature}.proto, what is used here.
_SCHEMA = """
name: "example.proto" package: "tf" syntax: "proto3"
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL
          type: TYPE_MESSAGE type_name: ".tf.Features" }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED
          type: TYPE_MESSAGE type_name: ".tf.Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL
            type: TYPE_MESSAGE type_name: ".tf.Feature" }
  }
}
message_type {
  name: "Feature"
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL
          type: TYPE_MESSAGE type_name: ".tf.BytesList" }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL
          type: TYPE_MESSAGE type_name: ".tf.Int64List" }
}
message_type {
  name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
"""


def parse(record: bytes) -> tuple[bytes, int]:
    """Return the encoded image and the label of a record.

    Images are under ``image`` or ``image/encoded``. Labels are under ``label``, counted
    from 0 as TFDS writes them; or under ``image/class/label``, which TensorFlow's own
    records of ImageNet count from 1.

    Args:
        record: a serialised ``tf.train.Example``.

    Raises:
        ValueError: it is no such record, or lacks the image or the label.
    """
    from google.protobuf.message import DecodeError

    example = _message_class()()
    try:
        example.ParseFromString(record)
    except DecodeError as error:
        raise ValueError(f"it is not a tf.train.Example: {error}") from error
    features = example.features.feature
    present = [name for name in _IMAGES if name in features]
    labels = [name for name in (_LABEL, _LABEL_FROM_1) if name in features]
    if not present or not labels:
        wanted = _IMAGES if not present else (_LABEL, _LABEL_FROM_1)
        raise ValueError(
            f"it has no feature {' or '.join(map(repr, wanted))}: it has "
            f"{sorted(features)}"
        )
    images = features[present[0]].bytes_list.value
    numbers = features[labels[0]].int64_list.value
    if len(images) != 1 or len(numbers) != 1:
        raise ValueError(
            f"it has {len(images)} images and {len(numbers)} labels, one each is wanted"
        )
    label = numbers[0] - (labels[0] == _LABEL_FROM_1)
    return images[0], label


@functools.cache
def _message_class() -> Any:
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
        text_format,
    )

    file = text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto())
    # A pool of its own: TensorFlow, if it is there too, registers the same messages.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))
