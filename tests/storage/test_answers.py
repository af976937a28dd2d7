"""Meaning of every answer of a store: retry, conflict, or an error that a person has to fix."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from azure.core.exceptions import HttpResponseError
from botocore.exceptions import ClientError
from gcsfs.retry import validate_response

from slipstream.shared.errors import UserError
from slipstream.shared.storage import AlreadyThere, MissingObject, StorageUnavailable, list_objects, s3, storage_for
from slipstream.shared.storage.azure import AzureContainer
from slipstream.shared.storage.gcs import GoogleBucket
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import Remote
from tests.support.wording import refuses, same_wording


def of_s3(status: int, code: str) -> Exception:
    answer = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return s3.explain("s3://bucket/key", ClientError(answer, "PutObject"))


def of_google(status: int, code: str) -> Exception:
    try:
        validate_response(status, json.dumps({"error": {"code": status, "message": code}}), "b/bucket/o/key")
    except Exception as error:
        return GoogleBucket("bucket").explain("gs://bucket/key", error)
    raise AssertionError(f"{status} is no error")


def of_azure(status: int, code: str) -> Exception:
    error = HttpResponseError(f"{code}\nRequestId: 1")
    vars(error).update(status_code=status, error_code=code)
    return AzureContainer("bucket").explain("abfs://bucket/key", error)


@pytest.mark.parametrize(
    ("store", "status", "code", "kind"),
    [
        *[(of_s3, 503, code, StorageUnavailable) for code in ("SlowDown", "ServiceUnavailable")],
        *[(of_s3, 409, code, StorageUnavailable) for code in ("ConditionalRequestConflict", "OperationAborted")],
        (of_s3, 400, "RequestTimeout", StorageUnavailable),
        (of_s3, 408, "408", StorageUnavailable),
        (of_s3, 429, "TooManyRequests", StorageUnavailable),
        (of_s3, 500, "InternalError", StorageUnavailable),
        (of_s3, 412, "PreconditionFailed", AlreadyThere),
        (of_s3, 412, "412", AlreadyThere),
        (of_s3, 404, "NoSuchKey", MissingObject),
        (of_s3, 403, "AccessDenied", UserError),
        (of_s3, 409, "InvalidBucketState", UserError),
        *[(of_google, status, "backendError", StorageUnavailable) for status in (408, 429, 500, 502, 503, 504)],
        (of_google, 412, "conditionNotMet", AlreadyThere),
        (of_google, 404, "notFound", MissingObject),
        (of_google, 403, "forbidden", UserError),
        (of_google, 409, "conflict", UserError),
        *[(of_azure, 503, "ServerBusy", StorageUnavailable), (of_azure, 500, "OperationTimedOut", StorageUnavailable)],
        (of_azure, 408, "RequestTimeout", StorageUnavailable),
        (of_azure, 429, "TooManyRequests", StorageUnavailable),
        # The container is gone in half a minute, and one of this name may be made again.
        (of_azure, 409, "ContainerBeingDeleted", StorageUnavailable),
        (of_azure, 409, "BlobAlreadyExists", AlreadyThere),
        (of_azure, 412, "ConditionNotMet", AlreadyThere),
        # Somebody's lease on a blob says nothing about who wrote it first.
        (of_azure, 412, "LeaseIdMissing", UserError),
        (of_azure, 409, "BlobImmutableDueToPolicy", UserError),
        (of_azure, 404, "BlobNotFound", MissingObject),
    ],
)
def test_what_an_answer_means(
    store: Callable[[int, str], Exception], status: int, code: str, kind: type[Exception]
) -> None:
    assert type(store(status, code)) is kind


def test_a_clock_that_is_wrong_is_no_missing_permission(store: FaultyS3, tmp_path: Path) -> None:
    """A clock that is corrected meanwhile, as after a suspend, causes no error."""
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", *["403 RequestTimeTooSkewed"] * 2)
    storage.put("key", b"data")
    assert len(store.fired) == 2
    same_wording(str(of_s3(403, "RequestTimeTooSkewed")))


def test_credentials_that_were_renewed_while_it_runs_are_used(
    store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = x\n")
    s3.client_of.cache_clear()
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", "400 ExpiredToken")
    with refuses(UserError):
        storage.put("key", b"data")
    file.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = x\n")
    storage.put("key", b"data")
    credentials = s3.client()._request_signer._credentials
    assert (credentials.access_key, store.fired) == ("new", [("PUT", "400 ExpiredToken")])


def test_a_page_of_a_listing_that_is_cut_is_asked_for_again(remote: Remote) -> None:
    keys = [f"{number:02d}" for number in range(12)]
    for key in keys:
        remote.storage.put(key, b"data")
    remote.proxy.inject("GET", "truncate", "reset", "truncate")
    assert [info.uri for info in list_objects(remote.base)] == [f"{remote.base}/{key}" for key in keys]
    assert len(remote.proxy.fired) == 3
