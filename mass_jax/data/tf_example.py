"""The wire format of ``tf.train.Example``, declared without TensorFlow.

TFDS stores examples as this protobuf message, whose Python class ships only with
TensorFlow. TFDS's own reader spends as long around each record as Pillow does in
decoding it, so bulk reading parses records here.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_FieldSpec = tuple[str, int, int, bool, str]  # name, number, type, repeated, message type


def _declare() -> Any:
    schema = descriptor_pb2.FileDescriptorProto(
        name="mass_jax/tf_example.proto", package="mass_jax", syntax="proto3"
    )
    _message(schema.message_type, "BytesList", ("value", 1, _Field.TYPE_BYTES, True, ""))
    _message(schema.message_type, "Int64List", ("value", 1, _Field.TYPE_INT64, True, ""))
    _message(
        schema.message_type,
        "Feature",
        ("bytes_list", 1, _Field.TYPE_MESSAGE, False, ".mass_jax.BytesList"),
        ("int64_list", 3, _Field.TYPE_MESSAGE, False, ".mass_jax.Int64List"),
    )
    entry_type = ".mass_jax.Features.FeatureEntry"
    features = _message(
        schema.message_type, "Features", ("feature", 1, _Field.TYPE_MESSAGE, True, entry_type)
    )
    entry = _message(
        features.nested_type,
        "FeatureEntry",
        ("key", 1, _Field.TYPE_STRING, False, ""),
        ("value", 2, _Field.TYPE_MESSAGE, False, ".mass_jax.Feature"),
    )
    entry.options.map_entry = True
    _message(
        schema.message_type,
        "Example",
        ("features", 1, _Field.TYPE_MESSAGE, False, ".mass_jax.Features"),
    )
    pool = descriptor_pool.DescriptorPool()  # its own: TensorFlow's may be loaded too
    pool.Add(schema)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("mass_jax.Example"))


def _message(parent: Any, name: str, *fields: _FieldSpec) -> Any:
    message = parent.add(name=name)
    for field, number, kind, repeated, message_type in fields:
        label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
        message.field.add(
            name=field, number=number, type=kind, label=label, type_name=message_type or None
        )
    return message


_Example = _declare()


def parse_image_example(record: bytes) -> tuple[bytes, bytes, int]:
    """Id (empty if there is none), encoded image and label of one record."""
    features = _Example.FromString(record).features.feature
    identity = features["id"].bytes_list.value
    return (
        identity[0] if identity else b"",
        features["image"].bytes_list.value[0],
        features["label"].int64_list.value[0],
    )
