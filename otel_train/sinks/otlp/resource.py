"""What pushes: the OTel resource, by opentelemetry-sdk's own detectors."""

from __future__ import annotations

import os
import socket
import uuid

from opentelemetry.sdk.resources import (
    OsResourceDetector,
    OTELResourceDetector,
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
    """Return the resource of one monitor in this process.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over what is found here; OTEL_EXPERIMENTAL_RESOURCE_DETECTORS adds to it. One
    monitor is one ``service.instance.id``, which Prometheus takes as ``instance``: ranks and models must not share it.
    """
    found = {name: value for name, value in get_aggregated_resources(_DETECTORS).attributes.items() if name not in _PRIVATE}
    own = {
        "service.name": "otel-train",
        "service.version": __version__,
        "service.instance.id": str(uuid.UUID(bytes=os.urandom(16), version=4)),  # the user's random streams do not move
    }
    told = OTELResourceDetector().detect().attributes
    return Resource({"host.name": socket.gethostname(), **found, **Resource.create().attributes, **own, **told})
