"""Comparison of two exported models on the same test rows."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.pipeline.export.package.libraries import HUGGING_FACE
from slipstream.pipeline.export.package.opened import OpenedPackage
from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.export.package.samples import as_spelled_by, decode_rows, iso_texts, undecided_rows
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import PromotionPointer, Registry, manifest_digest, package_version
from slipstream.shared.artifacts.prepared.card import CARD, NAMED
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData
from slipstream.shared.artifacts.prepared.token_rows import FILES
from slipstream.shared.artifacts.results.evaluation import Evaluation
from slipstream.shared.artifacts.results.export import GIVEN, HELD_OUT, DeployedSignature, Holdout
from slipstream.shared.artifacts.results.scoring import Promotion, PromotionDecision
from slipstream.shared.comparison.baseline import baseline_wins
from slipstream.shared.comparison.quality import in_words, paired_loss, predicted_answers
from slipstream.shared.logs import logger
from slipstream.shared.models.decision import with_threshold
from slipstream.shared.models.predict import held_out_rows, predict_records
from slipstream.shared.source.columns.identity import comparable_rules
from slipstream.shared.source.columns.spelling import rule_of
from slipstream.shared.source.columns.value_types import TIME

LOG = logger("promote")
#: Entries of ``statistics.json`` that decide how raw columns become tensors.
ENCODING = ("types", "missing", "numeric", "categorical", "documents", "text_length")


#: Settings of a ``Holdout`` outside ``data.split``, in the user's words.
HELD_OUT_BY = {
    "column": "data.time",
    "columns": "rows known by",
    "decimal": "data.decimal",
    "thousands": "data.thousands",
    "missing": "data.missing",
    "types": "columns of the types",
    "type": "data.time of the type",
}
#: Values of settings in packages that are too old to record them.
UNTOLD = {"row_hash": 1, "type": "time"}


class Incomparable(Exception):
    """Error if no rows can compare both models; the message gives the reason."""


@dataclass(frozen=True)
class ComparedPackage(OpenedPackage):
    """Exported model that is compared, with all that decides how it encodes raw columns."""

    @property
    def encoding(self) -> dict[str, object]:
        targets = self.signature.target
        encoding = {name: self.statistics.get(name) for name in ENCODING}
        types = {name: kind for name, kind in (encoding["types"] or {}).items() if name != targets}
        # Packages of earlier versions have no rule of spelling.
        categories = [
            {**each, "spelling": each.get("spelling") or rule_of(each["vocabulary"])}
            for each in encoding["categorical"] or ()
        ]
        return {**encoding, "types": types, "categorical": categories, "inputs": self.signature.inputs}

    @property
    def columns(self) -> RawColumns | str:
        return read_columns(self.statistics)

    @property
    def tokenizer(self) -> dict[str, bytes]:
        """Contents of the tokenizer's files, by name."""
        found = {name: self.read_file(f"{HUGGING_FACE}/{name}") for name in FILES}
        return {name: content for name, content in found.items() if content is not None}


@dataclass(frozen=True)
class PairedPredictions:
    """Predictions of both models and the truth on the same rows.

    They are float64 ``[rows]``: class numbers of the new model, or values in units of the target. For tokens the
    predictions are bool ``[rows, length]``, True where the token is right.
    """

    truth: np.ndarray
    new: np.ndarray
    old: np.ndarray
    #: Number of skipped test rows, for which the old model's inputs in service cannot be reconstructed.
    left_out: int


def paired_predictions(new: ComparedPackage, old: ComparedPackage, data: PreparedData) -> PairedPredictions:
    """Run both models on the test rows of ``data``, which ``new`` was exported with. Raises ``Incomparable``."""
    check_same_question(new.signature, old.signature)
    check_both_run(new.signature, old.signature)
    if new.signature.task == "next token":
        check_same_tokens(new, old)
    check_unseen(new.signature.holdout, old.signature.holdout)
    records = held_out_rows(data)
    if new.encoding == old.encoding:
        decided, theirs = records, on_tensors(old, data, records)
    else:
        here, there = columns_of(new, old)
        decided = records[~undecided_rows(here, there, records)]
        if not len(decided):
            raise Incomparable("every test row holds a text that the promoted model may know from training")
        theirs = on_raw(old, there, as_spelled_by(there, here, decode_rows(here, decided)))
    ours = on_tensors(new, data, decided)
    truth = decided[TARGET].astype(np.float64)
    return PairedPredictions(truth, numbered(ours, data), numbered(theirs, data), len(records) - len(decided))


def check_same_question(new: DeployedSignature, old: DeployedSignature) -> None:
    for name in ("target", "task"):
        ours, theirs = getattr(new, name), getattr(old, name)
        if ours != theirs:
            raise Incomparable(
                f"the promoted model has the {name} {theirs!r}, but this one {ours!r}; promote it in a registry of "
                "its own"
            )
    if set(new.classes) != set(old.classes):
        different = sorted(set(new.classes) ^ set(old.classes))[0]
        where = "the promoted model" if different in old.classes else "this model"
        raise Incomparable(f"the class {different!r} is known to {where} only; promote it in a registry of its own")


def check_both_run(new: DeployedSignature, old: DeployedSignature) -> None:
    for which, signature in (("this model", new), ("the promoted model", old)):
        if signature.no_onnx:
            raise Incomparable(
                f"{which} has no ONNX model: {signature.no_onnx}; raise that setting and export it again, or promote "
                "in a registry of its own"
            )


def check_same_tokens(new: ComparedPackage, old: ComparedPackage) -> None:
    """Raise ``Incomparable`` unless both models have the same row length, vocabulary size and tokenizer.

    If a package has no tokenizer, tokenizers are not compared.
    """
    (_, length, vocabulary), theirs = (each.signature.outputs[0].shape for each in (new, old))
    if theirs[1:] != (length, vocabulary):
        raise Incomparable(
            f"the promoted model takes rows of {theirs[1]} tokens from {theirs[2]:,}, this one of {length} from "
            f"{vocabulary:,}; promote it in a registry of its own"
        )
    ours, promoted = new.tokenizer, old.tokenizer
    if ours and promoted and ours != promoted:
        name = next(name for name in sorted({*ours, *promoted}) if ours.get(name) != promoted.get(name))
        raise Incomparable(f"the promoted model has another tokenizer ({name}); promote it in a registry of its own")


def check_unseen(new: Holdout | None, old: Holdout | None) -> None:
    """Raise ``Incomparable`` if the old model may have been trained on the new model's test rows.

    Rows are held out by a stable hash, so models with the same split never train on each other's test rows. Splits are
    the same if all settings that the hash depends on are equal. In a split by time, test rows must be later than the
    old model's training rows. Given test splits must have equal rows. A package without this information is trusted.
    """
    if new is None or old is None:
        return
    ours, theirs = ({**UNTOLD, **each.settings} for each in (new, old))
    if new.by == old.by == GIVEN and not (HELD_OUT in ours and HELD_OUT in theirs):
        LOG.warning("the given split is trusted: a package of an earlier version does not say which rows are its test")
        for each in (ours, theirs):
            each.pop(HELD_OUT, None)
    for rules, by in ((ours, new.by), (theirs, old.by)):
        rules["row_hash"] = comparable_rules(rules["row_hash"], by not in ("id", "group"))
    if new.by == old.by and ours == theirs:
        if new.cuts and old.cuts and new.cuts[1] < old.cuts[0]:
            raise Incomparable(
                "the promoted model was trained on rows from the time of these test rows; use later test rows"
            )
        return
    if new.by != old.by:
        raise Incomparable(
            f"the promoted model's test rows were held out by {old.by}, these by {new.by}: it may have been trained "
            "on them; split the data the same way"
        )
    name = next(name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name))
    if name == HELD_OUT:
        raise Incomparable(
            "the given test split of the promoted model had other rows than these: it may have been trained on them; "
            "keep the rows of the test split, or promote in a registry of its own"
        )
    if name == "row_hash":
        raise Incomparable(
            "the promoted model's test rows were held out by the rules of another version: it may have been trained on "
            "these; promote in a registry of its own"
        )
    setting = HELD_OUT_BY.get(name, f"data.split.{name}")
    raise Incomparable(
        f"the promoted model was trained with {setting} {theirs.get(name)}, this one with {ours.get(name)}: it may "
        "have been trained on these test rows; split the data the same way, or promote in a registry of its own"
    )


def columns_of(new: ComparedPackage, old: ComparedPackage) -> tuple[RawColumns, RawColumns]:
    """Return both packages' raw columns. Raises ``Incomparable`` unless the new model has all of the old model's."""
    here, there = new.columns, old.columns
    if not isinstance(here, RawColumns) or not isinstance(there, RawColumns):
        raise Incomparable(
            "the promoted model has other inputs or another preparation, and cannot start from raw columns "
            f"({old.signature.no_raw or new.signature.no_raw}); prepare the data with data.earlier"
        )
    for name, kind in there.types.items():
        if here.types.get(name) != kind:
            difference = f"is {here.types[name]}" if name in here.types else "is not an input"
            raise Incomparable(f"the promoted model takes the column {name!r} as {kind}; here it {difference}")
    return here, there


def numbered(names: np.ndarray, data: PreparedData) -> np.ndarray:
    """Return class names as class numbers in ``data``, because the two models may order classes differently."""
    places = {name: number for number, name in enumerate(data.signature.classes)}
    if places:
        return np.array([places[name] for name in names], np.float64)
    return names if names.dtype == bool else names.astype(np.float64)


def on_tensors(package: ComparedPackage, data: PreparedData, records: np.ndarray) -> np.ndarray:
    """Return the predictions of ``model.onnx`` on prepared rows."""
    signature = package.signature
    outputs = predict_records(onnx_predictor(signature.onnx(package.directory), 1), data.signature, records)
    answers = predicted_answers(signature.task, with_threshold(outputs, signature.threshold))
    return np.array(signature.classes)[answers] if signature.classes else answers


def on_raw(package: ComparedPackage, columns: RawColumns, values: dict[str, np.ndarray]) -> np.ndarray:
    """Return the predictions of ``model.raw.onnx`` on the raw columns ``values``."""
    raw = package.signature.raw
    assert raw, "a model whose columns can be read has a raw model"
    predictor = onnx_predictor(package.directory / raw.model, 1)
    given = dict(zip(columns.types, raw.inputs, strict=True))
    texts = [name for name, kind in columns.types.items() if kind == TIME and given[name].dtype == "string"]
    values = values | {name: iso_texts(values[name]) for name in texts}
    return predictor([values[name][:, None] for name in columns.types])[:, 0]


def evaluate_promotion(
    package: Path, registry: Registry, data: PreparedData, config: PromotionConfig
) -> PromotionDecision:
    """Decide whether to promote an exported model, compared with the promoted one on ``data``, which it was made from.

    Raises ``UserError`` if files of either model are missing or damaged.
    """
    version, served, doubt = package_version(package), registry.promoted(), untested_classes(data)
    if served is None:
        passed = not doubt or config.when_in_doubt == "take"
        why = "it is the first in this registry" if passed else "it cannot be evaluated"
        return PromotionDecision(passed, 1, why + doubt_in_words(doubt, taken=passed))
    number = served.number + 1
    try:
        with tempfile.TemporaryDirectory() as scratch:
            old = registry.fetch(served, Path(scratch, "model"))
            if served.version == version:
                return PromotionDecision(False, number, f"it is version {version}, which is already in service")
            paired = paired_predictions(ComparedPackage(package), ComparedPackage(old), data)
    except Incomparable as reason:
        return PromotionDecision(False, number, f"it cannot be compared with version {served.version}: {reason}")
    return promotion_decision(paired, data.signature.task, served, config, doubt)


def against_baseline(decision: PromotionDecision, evaluation: Evaluation, config: PromotionConfig) -> PromotionDecision:
    """Return the decision, refused if the baseline is better and the settings ask for that."""
    better = baseline_wins(evaluation) if config.worse_than_baseline == "refuse" else ""
    if not (decision.passed and better):
        return decision
    return PromotionDecision(False, decision.number, f"{better} (promotion.worse_than_baseline)")


def untested_classes(data: PreparedData) -> str:
    """Return the classes that training rows have and test rows lack, in words; "" if there are none."""
    classes = data.card["classes"].items() if CARD in data.artifact.files else ()
    untested = [
        f"{name!r} ({rows['train']:,} training rows)" for name, rows in classes if rows["train"] and not rows["test"]
    ]
    more = f" and {len(untested) - NAMED} more" if len(untested) > NAMED else ""
    return f"{', '.join(untested[:NAMED])}{more}" if untested else ""


def doubt_in_words(doubt: str, *, taken: bool) -> str:
    if not doubt:
        return ""
    remedy = "taken anyway (promotion.when_in_doubt)" if taken else "add test rows, or set promotion.when_in_doubt"
    return f"; no test row has class {doubt}; {remedy}"


def promotion_decision(
    paired: PairedPredictions, task: str, served: PromotionPointer, config: PromotionConfig, doubt: str
) -> PromotionDecision:
    loss = paired_loss(task, paired.truth, paired.old, paired.new, config.max_loss)
    answer = loss.answer(config.max_loss)
    if answer == "passed" and doubt:
        answer = "can't tell"
    passed = config.passes(answer)
    why = f"against version {served.version}: {in_words(loss, task, config.max_loss, 'test')}"
    if paired.left_out:
        why += f"; {paired.left_out} rows are skipped because that version may know their texts from training"
    if doubt:
        why += doubt_in_words(doubt, taken=passed)
    elif passed and answer != "passed":
        why += " (taken anyway: promotion.when_in_doubt)"
    return PromotionDecision(passed, served.number + 1, why)


def promote_package(
    package: Path, registry: Registry, data: PreparedData, config: PromotionConfig, passed: PromotionDecision
) -> Promotion:
    """Store the model, and put it in service if the decision ``passed`` is positive.

    If another run has promoted a model meanwhile, the comparison is repeated with that model. A retry accepts the
    promotion by a killed attempt.
    """
    version = registry.add(package, Path(config.signing_key) if config.signing_key else None)
    while passed.passed:
        if registry.point(passed.number, version, manifest_digest(package), passed.why):
            return Promotion(True, registry.uri, version, passed.why)
        served = registry.promoted()
        if served is not None and served.version == version:
            return Promotion(True, registry.uri, version, served.why)
        passed = evaluate_promotion(package, registry, data, config)
    return Promotion(False, registry.uri, version, passed.why)
