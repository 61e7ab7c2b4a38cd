"""What pushes: the OTel resource, by opentelemetry-sdk's own detectors."""

from __future__ import annotations

import os
import uuid

from opentelemetry.sdk.resources import (
    OsResourceDetector,
    ProcessResourceDetector,
    Resource,
    ResourceDetector,
    get_aggregated_resources,
)

from otel_train._version import __version__

_DETECTORS: list[ResourceDetector] = [ProcessResourceDetector(), OsResourceDetector()]
_PRIVATE = {"process.command", "process.command_args", "process.command_line"}
"""Left out: command lines carry secrets, and receivers that make labels of attributes would make long ones."""


def make_resource() -> Resource:
    """Return the resource of this process.

    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_EXPERIMENTAL_RESOURCE_DETECTORS win over what is found here. One process is
    one ``service.instance.id``, which Prometheus takes as ``instance``: ranks must not share it.
    """
    found = get_aggregated_resources(_DETECTORS)
    own: dict[str, str] = {
        "service.name": "otel-train",
        "service.version": __version__,
        "service.instance.id": str(uuid.UUID(bytes=os.urandom(16), version=4)),  # the user's random streams do not move
        "host.name": os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "unknown"),
    }
    public = {name: value for name, value in found.attributes.items() if name not in _PRIVATE}
    told = {name: value for name, value in Resource.create().attributes.items() if name not in own or _is_told(name, value)}
    return Resource({**public, **own, **told})


def _is_told(name: str, value: object) -> bool:
    """Say whether an attribute comes from the user, and is not what the SDK says when it knows nothing."""
    return name != "service.name" or not str(value).startswith("unknown_service")
