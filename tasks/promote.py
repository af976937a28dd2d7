"""Flyte tasks of promotion. None is cached, since the model in production changes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import Evaluated, Exported, Prepared, artifact_uri
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.stage import local_path, map_errors, rows_path
from slipstream.shared.artifacts.results.scoring import Promotion, PromotionDecision, PromotionRequest


@task(**stage_metadata("promote"))
@map_errors
def open_registry(registry: str, config: RunConfig) -> str:
    """Check the registry and the signing key before the training starts."""
    from slipstream.pipeline.export.package.sign import private_key
    from slipstream.pipeline.promote.store import Registry

    Registry(registry).check()
    if config.promotion.signing_key:
        private_key(Path(config.promotion.signing_key))
    return registry


class JudgedPromotion(NamedTuple):
    """Decision of the gate; ``passed`` repeats ``verdict.passed``, as Flyte branches on plain values only.

    ``request`` passes the artifacts' addresses to the branch. If the branch's inputs came from several nodes, flytekit
    would write them in random order, and Flyte would refuse to register the same code again.
    """

    passed: bool
    verdict: PromotionDecision
    request: PromotionRequest


@task(**stage_metadata("promote"))
@map_errors
def judge(
    exported: Exported,
    prepared: Prepared,
    evaluated: Evaluated,
    registry: str,
    config: RunConfig,
) -> JudgedPromotion:
    """Evaluate the gate: compare an exported model with the model in production on the same test rows."""
    from slipstream.pipeline.promote import comparison as promote
    from slipstream.pipeline.promote.store import Registry
    from slipstream.shared.artifacts.prepared.streamed import open_prepared
    from slipstream.shared.artifacts.results.evaluation import read_evaluation

    data = open_prepared(rows_path(prepared))
    verdict = promote.evaluate_promotion(local_path(exported), Registry(registry), data, config.promotion)
    verdict = promote.against_baseline(verdict, read_evaluation(local_path(evaluated)), config.promotion)
    return JudgedPromotion(
        verdict.passed, verdict, PromotionRequest(artifact_uri(exported), artifact_uri(prepared), registry)
    )


@task(**stage_metadata("promote"))
@map_errors
def put_in_service(request: PromotionRequest, config: RunConfig, verdict: PromotionDecision) -> Promotion:
    """Store a model that has passed the gate in the registry, and promote it to production."""
    from slipstream.pipeline.promote import comparison as promote
    from slipstream.pipeline.promote.store import Registry
    from slipstream.shared.artifacts.prepared.streamed import open_prepared

    data = open_prepared(rows_path(FlyteDirectory(request.prepared)))
    package = local_path(FlyteDirectory(request.exported))
    return promote.promote_package(package, Registry(request.registry), data, config.promotion, verdict)


@task(**stage_metadata("promote"))
@map_errors
def leave_in_service(request: PromotionRequest, verdict: PromotionDecision) -> Promotion:
    """Return a promotion that was refused, with the reason."""
    return Promotion(False, request.registry, "", verdict.why)
