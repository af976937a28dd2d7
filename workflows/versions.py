"""The version that pyflyte gives to what it registers: it follows from all that is registered, not from the code alone.

flytekit hashes the code, the image and its own settings. The same code makes other tasks and launch plans of another
profile, of other schedules, on a machine with GPUs or with another torch, and Flyte refuses those under a version that
it has. So what is about to be registered is serialised first, without a version, and is part of the hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flytekit import FlyteContextManager
from flytekit.configuration import SerializationSettings
from flytekit.remote import FlyteRemote
from flytekit.tools.serialize_helpers import get_registrable_entities
from google.protobuf.message import Message

from slipstream.doctor.archive import nodes_of

flytekits_version = FlyteRemote._version_from_hash


def version_of(
    code: bytes, settings: SerializationSettings, default_inputs: dict[str, Any] | None = None, *context: str
) -> str:
    """flytekit's version, of the structure of all loaded entities, too."""
    return flytekits_version(code, settings, default_inputs, *context, structure(settings))


def structure(settings: SerializationSettings) -> str:
    """A digest of the tasks, workflows and launch plans that are loaded in this process, as Flyte compares them."""
    serialising = FlyteContextManager.current_context().with_serialization_settings(replace(settings, version=""))
    with FlyteContextManager.with_context(serialising) as context:
        entities = [entity.to_flyte_idl() for entity in get_registrable_entities(context)]
    return hashlib.sha256(b"".join(sorted(map(canonical, entities)))).hexdigest()


def canonical(spec: Message) -> bytes:
    """The same bytes for the same entity: flytekit lists the nodes that a node waits for in random order."""
    if isinstance(spec, WorkflowSpec):
        for template in (spec.template, *spec.sub_workflows):
            for _, node in nodes_of(template):
                node.upstream_node_ids.sort()
    return spec.SerializeToString(deterministic=True)


def version_by_structure() -> None:
    """Let ``pyflyte`` compute versions so; calling it again changes nothing."""
    FlyteRemote._version_from_hash = staticmethod(version_of)
