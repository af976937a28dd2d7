"""The packaged promotion on a rehearsed cluster signs with a key that only the promoting pods have, as a file."""

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from slipstream.operations.proofs.rehearsal.rehearsal import CONFIG, TARGET, literal, rehearsal, write_table
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.package.files import SIGNATURE
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.shared.profiles.profile import parse_profile
from tests.support.small_disk import small_disks

__all__ = ["small_disks"]

WORKFLOW = "workflows.training.train_and_promote"
#: Tasks of the stage that has the secret.
PODS = {"open_registry", "judge", "put_in_service"}
SECRET, MOUNTED = "Signing/private.pem", "/etc/flyte/secrets/signing/private.pem"
PROFILE = {"stages": {"promote": {"secrets": [{"group": "Signing", "key": "private.pem"}]}}}


@pytest.mark.prove
@pytest.mark.usefixtures("small_disks")
def test_a_promotion_signs_with_a_mounted_key_that_is_in_no_other_file(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    secret = text.splitlines()[1].encode()
    config = replace(CONFIG, promotion=PromotionConfig(signing_key=MOUNTED))
    with rehearsal(tmp_path, parse_profile("signing", PROFILE)) as place:
        registry = place.bucket.uri("registry")
        inputs = {"data": literal(write_table(place.bucket)), "target": literal(TARGET), "config": literal(config)}
        execution = place.execution("signed", secrets={SECRET: text})
        execution.run(WORKFLOW, {**inputs, "registry": literal(registry)})
        (signature,) = [key for key in place.bucket.keys("registry/") if key.endswith(SIGNATURE)]
        version = place.bucket.download(place.bucket.uri(signature.rpartition("/")[0]), tmp_path / "version")
        stored = [place.bucket.read(name) for name in place.bucket.keys("")]
    public = tmp_path / "public.pem"
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    check_package(version, public)
    assert not Path(MOUNTED).exists()
    held = [path for path in execution.workdir.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert {path.name for path in held} == {"private.pem"}
    with_key = {next(pod.log.parent for pod in execution.pods if path.is_relative_to(pod.log.parent)) for path in held}
    promoting = {
        pod.log.parent for attempt in execution.record.attempts for pod in attempt.pods if attempt.task in PODS
    }
    assert with_key == promoting and not [content for content in stored if secret in content]
