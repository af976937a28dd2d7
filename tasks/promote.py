"""Flyte tasks of promotion. None is cached: the model in service changes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from slipstream.artifacts.results.promotion import Promotion, PromotionDecision, PromotionRequest
from slipstream.config import RunConfig
from tasks.flyte.artifact_types import Exported, Prepared, uri_of
from tasks.flyte.metadata import on
from tasks.flyte.stage import local_path, map_errors, rows_path


@task(**on("promote"))
@map_errors
def open_registry(registry: str, config: RunConfig) -> str:
    """Check the registry and the signing key, so that unusable ones are found before the training."""
    from slipstream.export.package.sign import private_key
    from slipstream.promote.store import Registry

    Registry(registry).check()
    if config.promotion.signing_key:
        private_key(Path(config.promotion.signing_key))
    return registry


class JudgedPromotion(NamedTuple):
    """The decision of the gate; ``passed`` repeats its answer, as Flyte branches on plain values only.

    A branch also gets the evaluated artifacts from here. If its inputs came from several nodes, flytekit would write
    these in random order, and Flyte would refuse the second registration of the same code.
    """

    passed: bool
    verdict: PromotionDecision
    request: PromotionRequest


@task(**on("promote"))
@map_errors
def judge(
    exported: Exported,
    prepared: Prepared,
    registry: str,
    config: RunConfig,
) -> JudgedPromotion:
    """Compare an exported model with the one in service, on the same test rows."""
    from slipstream.artifacts.prepared.streamed import open_prepared
    from slipstream.promote import engine as promote
    from slipstream.promote.store import Registry

    data = open_prepared(rows_path(prepared))
    verdict = promote.judge(local_path(exported), Registry(registry), data, config.promotion)
    return JudgedPromotion(verdict.passed, verdict, PromotionRequest(uri_of(exported), uri_of(prepared), registry))


@task(**on("promote"))
@map_errors
def put_in_service(request: PromotionRequest, config: RunConfig, verdict: PromotionDecision) -> Promotion:
    """Store a model that has passed the gate in the registry, and promote it."""
    from slipstream.artifacts.prepared.streamed import open_prepared
    from slipstream.promote import engine as promote
    from slipstream.promote.store import Registry

    data = open_prepared(rows_path(FlyteDirectory(request.prepared)))
    package = local_path(FlyteDirectory(request.exported))
    return promote.promote(package, Registry(request.registry), data, config.promotion, verdict)


@task(**on("promote"))
@map_errors
def leave_in_service(request: PromotionRequest, verdict: PromotionDecision) -> Promotion:
    """Return the reason why the promoted model stays."""
    return Promotion(False, request.registry, "", verdict.why)
