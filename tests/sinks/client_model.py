"""Prometheus' ``io.prometheus.client`` messages, as protobuf's own library reads them: fields as in client_model's metrics.proto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.internal.decoder import _DecodeVarint  # type: ignore[attr-defined]  # the library's own way to read a length

_PACKAGE = "io.prometheus.client"
_TYPES = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "sint64": FieldDescriptorProto.TYPE_SINT64,
    "sint32": FieldDescriptorProto.TYPE_SINT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "int32": FieldDescriptorProto.TYPE_INT32,
}
_MESSAGES = {
    "Timestamp": "1 int64 seconds, 2 int32 nanos",
    "LabelPair": "1 string name, 2 string value",
    "Gauge": "1 double value",
    "Counter": "1 double value, 3 Timestamp created_timestamp",
    "BucketSpan": "1 sint32 offset, 2 uint32 length",
    "Bucket": "1 uint64 cumulative_count, 2 double upper_bound, 4 double cumulative_count_float",
    "Histogram": "1 uint64 sample_count, 2 double sample_sum, 3 Bucket* bucket, 4 double sample_count_float, 5 sint32 schema, "
    "6 double zero_threshold, 7 uint64 zero_count, 8 double zero_count_float, 9 BucketSpan* negative_span, "
    "10 sint64* negative_delta, 11 double* negative_count, 12 BucketSpan* positive_span, 13 sint64* positive_delta, "
    "14 double* positive_count, 15 Timestamp created_timestamp",
    "Metric": "1 LabelPair* label, 2 Gauge gauge, 3 Counter counter, 6 int64 timestamp_ms, 7 Histogram histogram",
    "MetricFamily": "1 string name, 2 string help, 3 MetricType type, 4 Metric* metric, 5 string unit",
}
_TYPE_NAMES = ("COUNTER", "GAUGE", "SUMMARY", "UNTYPED", "HISTOGRAM", "GAUGE_HISTOGRAM")


def _family_class() -> Any:
    file = FileDescriptorProto(name="metrics.proto", package=_PACKAGE, syntax="proto2")
    kinds = file.enum_type.add(name="MetricType")
    for value, kind_name in enumerate(_TYPE_NAMES):
        kinds.value.add(name=kind_name, number=value)
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for number, kind, name in (entry.split(" ") for entry in fields.split(", ")):
            field = made.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
            if kind.endswith("*"):
                field.label = FieldDescriptorProto.LABEL_REPEATED
            if kind.rstrip("*") in _TYPES:
                field.type = _TYPES[kind.rstrip("*")]
                field.options.packed = kind.endswith("*")
            else:
                field.type = FieldDescriptorProto.TYPE_ENUM if kind == "MetricType" else FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.MetricFamily"))


MetricFamily = _family_class()


def families(body: bytes) -> Iterator[Any]:
    """Yield the messages of an exposition; each must be as long as the library would write it, with no field that is not known."""
    at = 0
    while at < len(body):
        length, at = _DecodeVarint(body, at)
        family = MetricFamily.FromString(body[at : at + length])
        assert family.ByteSize() == length <= len(body) - at
        at += length
        yield family


def type_of(family: Any) -> str:
    """Return the type's name in small letters."""
    return _TYPE_NAMES[family.type].lower()


def buckets(spans: Any, deltas: Any) -> dict[int, int]:
    """Return the elements by the bucket's index: bucket i ends at 2^i."""
    found: dict[int, int] = {}
    differences, index, count = iter(deltas), 0, 0
    for span in spans:
        index += span.offset
        for _ in range(span.length):
            count += next(differences)
            found[index] = count
            index += 1
    assert next(differences, None) is None
    return found
