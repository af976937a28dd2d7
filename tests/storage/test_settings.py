"""Account settings of a client: where they are found, and the error without any."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.storage import (
    MissingObject,
    azure,
    list_objects,
    open_reader,
    s3,
    storage_for,
)
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import ACCOUNT_KEY
from tests.support.wording import refuses


@pytest.mark.parametrize(
    ("uri", "package"),
    [
        ("gs://bucket/key", "gcsfs.core"),
        ("abfs://bucket/key", "adlfs"),
    ],
)
def test_a_missing_package_names_the_extra(uri: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("slipstream.shared.storage.gcs", "slipstream.shared.storage.azure"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with refuses(UserError):
        list_objects(uri)


def test_what_the_user_has_to_mend_is_one_line(store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(UserError):
        storage_for("s3://nowhere/x").put("key", b"data")
    with refuses(UserError):
        list_objects("s3://nowhere/x")
    with pytest.raises(MissingObject, match=r"s3://bucket/absent\.csv"):
        open_reader("s3://bucket/absent.csv")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/absent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/absent")
    s3.client_of.cache_clear()
    with refuses(UserError):
        list_objects("s3://bucket/x")


def test_no_credentials_is_one_line(
    monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None], tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_", "FLYTE_AZURE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    forgotten()
    with refuses(UserError) as google:
        list_objects("gs://bucket/x")
    with refuses(UserError) as microsoft:
        list_objects("abfs://bucket/x")
    assert "\n" not in f"{google.value}{microsoft.value}"


def test_the_account_stands_in_the_address_or_in_flytes_variables(
    monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLYTE_AZURE_STORAGE_ACCOUNT_NAME", "flytes")
    monkeypatch.setenv("FLYTE_AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    forgotten()
    for name, account in {"bucket": "flytes", "bucket@mine.dfs.core.windows.net": "mine"}.items():
        blob = azure.AzureContainer(name)._blob("a/key")
        assert blob.url == f"https://{account}.blob.core.windows.net/bucket/a/key"
    forgotten()


def test_the_variables_that_flyte_gives_its_pods_suffice(store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", store.url)
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "minio")
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "secret")
    s3.client_of.cache_clear()
    storage_for("s3://bucket/flyte").put("key", b"data")
    assert any(line.startswith("PUT /bucket/flyte/key") for line in store.requests)
