"""Identity of a training: the values that must equal a checkpoint's to resume it.

It covers data, model, settings, the user's model code, the base, the order of the samples and :data:`STEP_VERSION`. It
has no code version, so a training resumes after code edits. The digests of all modules are stored separately, so that
logs can name changed modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.versions import code_version, module_digests
from slipstream.models.config import ModelConfig
from slipstream.models.factory_code import model_code
from slipstream.settings import to_dict
from slipstream.stages import STAGES
from slipstream.train.applied_tuning import AppliedTuning
from slipstream.train.checkpoint.restore import MANIFESTS
from slipstream.train.config import STEP_VERSION, TrainingConfig, resume_settings
from slipstream.train.data_order import ORDER_VERSION

#: Maximum number of changed modules that a log line names.
NAMED = 5


def run_identity(
    data: PreparedData,
    model: ModelConfig,
    training: TrainingConfig,
    applied: AppliedTuning | None = None,
    base_digest: str = "",
) -> dict[str, object]:
    """Return the values that must equal a checkpoint's to resume it.

    They are everything that determines the result, and the applied tuning, but not the number of micro-batches, the
    checkpoint interval or the code. A base and initial adapters count by their digests. On disks the same files have
    the same digest at every path. In a store the digest follows the store's metadata, so a copy of the files may count
    as another base.
    """
    code = model_code(model)
    return {
        "data": data.artifact.content,
        "model": to_dict(model.without_addresses()),
        **({"model_code": code} if code else {}),
        **({"base": base_digest} if base_digest else {}),
        "order": ORDER_VERSION,
        "step": STEP_VERSION,
        "training": resume_settings(training),
        **({"network": asdict(applied)} if applied else {}),
    }


def in_older_form(identity: Mapping[str, object], model: ModelConfig) -> dict[str, object]:
    """Return an identity as releases before :data:`STEP_VERSION` wrote it, without the fields :data:`MANIFESTS`.

    Only needed for checkpoint directories that ``training.checkpoint_uri`` names; remove it with the next release.
    """
    code = model_code(model, by_bytes=True)
    older = {name: value for name, value in identity.items() if name not in (*MANIFESTS, "model_code")}
    return older | ({"model_code": code} if code else {})


def training_code() -> tuple[str, dict[str, str]]:
    """Return the code version of this process and the digest of every module used in training."""
    return code_version("train"), module_digests(STAGES["train"].engines)


def describe_other_code(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a log line that names modules changed since a checkpoint; empty without changes."""
    changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if not changed:
        return ""
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    return f"training resumes a checkpoint of other code: {', '.join(changed[:NAMED])}{more} changed since"
