"""Digest of the structure of registered entities, for their version.

flytekit's version is a hash of the code, the image and its own settings. The same code creates other tasks and launch
plans under another profile or other schedules, on a machine with GPUs or with another torch, and Flyte refuses those
under an existing version. So the entities are first serialised without a version and added to the hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flytekit import FlyteContextManager
from flytekit.configuration import SerializationSettings
from flytekit.tools.serialize_helpers import get_registrable_entities
from google.protobuf.message import Message

from slipstream.operations.doctor.archive import workflow_nodes


def structure_digest(settings: SerializationSettings) -> str:
    """Return a digest of the loaded tasks, workflows and launch plans in the form that Flyte compares."""
    serialising = FlyteContextManager.current_context().with_serialization_settings(replace(settings, version=""))
    with FlyteContextManager.with_context(serialising) as context:
        entities = [entity.to_flyte_idl() for entity in get_registrable_entities(context)]
    return hashlib.sha256(b"".join(sorted(map(canonical_bytes, entities)))).hexdigest()


def canonical_bytes(spec: Message) -> bytes:
    """Serialise equal entities to the same bytes, although flytekit lists upstream nodes in random order."""
    if isinstance(spec, WorkflowSpec):
        for template in (spec.template, *spec.sub_workflows):
            for _, node in workflow_nodes(template):
                node.upstream_node_ids.sort()
    return spec.SerializeToString(deterministic=True)
