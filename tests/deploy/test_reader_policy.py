"""The real loader under the reader's policy: what it may do, what it is refused, and which calls of S3 it makes.

The policies are copies of what ``terraform/modules/reader-policy`` makes, which `.ci/deploy` holds them against.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import yaml
from botocore.exceptions import ClientError
from typer.testing import CliRunner, Result

import streamer
from streamer.artifacts.metadata import pull
from streamer.cli.app import app
from streamer.config import StreamConfig
from streamer.errors import AccessDeniedError, ObjectNotFoundError, StreamError
from tests.deploy.guarded_store import GuardedStore, start_guarded_store
from tests.deploy.policies import golden
from tests.files import entry, raw_file

BUCKET = "example-weights"
VALUES = [[1.0, 2.0], [3.0, 4.0]]
WEIGHTS = raw_file({"weight": entry("F32", [2, 2], 0, 16)}, torch.tensor(VALUES).numpy().tobytes())
PARTS = "org/llama/in-parts"
OURS, THEIRS = "org/llama", ("org/llama-secret", "org", "private", "")
#: Of buckets rather than objects; a condition on the prefix refuses them all.
NEVER = {"HeadBucket", "GetBucketLocation", "ListBuckets"}


def upload_in_parts(client: Any, key: str) -> None:
    where = {"Bucket": BUCKET, "Key": key}
    upload = client.create_multipart_upload(**where, ChecksumAlgorithm="CRC32")["UploadId"]
    part = client.upload_part(**where, UploadId=upload, PartNumber=1, Body=WEIGHTS, ChecksumAlgorithm="CRC32")
    parts = [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumCRC32": part["ChecksumCRC32"]}]
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})


@pytest.fixture(scope="module")
def store() -> Iterator[GuardedStore]:
    with start_guarded_store() as started:
        client = started.admin("s3")
        client.create_bucket(Bucket=BUCKET)
        client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        for folder in (OURS, "org/llama-secret", "private"):
            client.put_object(Bucket=BUCKET, Key=f"{folder}/config.json", Body=b"{}")
            client.put_object(Bucket=BUCKET, Key=f"{folder}/model.safetensors", Body=WEIGHTS, ChecksumAlgorithm="CRC32")
        upload_in_parts(client, f"{PARTS}/model.safetensors")
        yield started


@pytest.fixture(params=["native", "sdk"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Role:
    """The process, with the credentials of a role that has one of the policies."""

    def __init__(self, store: GuardedStore, credentials: dict[str, str]) -> None:
        self.store = store
        self.credentials = credentials
        store.calls()

    def load(self, url: str, **options: Any) -> torch.nn.Linear:
        model = torch.nn.Linear(2, 2, bias=False)
        streamer.load(model, url, {"endpoint_url": self.store.url, **options})
        return model

    def command(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--endpoint-url", self.store.url, "--quiet"])

    def calls(self) -> set[str]:
        """Return which operations there were, all of which must have been allowed, in our folder."""
        calls = self.store.calls()
        refused = [call for call in calls if not call[3]]
        assert not refused
        for name, resource, prefix, _ in calls:
            assert resource.startswith(f"arn:aws:s3:::{BUCKET}/{OURS}/") or prefix.startswith(f"{OURS}/"), (
                name,
                resource,
            )
        names = {name for name, *_ in calls}
        assert not names & NEVER
        return names


def role(store: GuardedStore, policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    with store.enforcing(policy) as credentials:
        for name, value in credentials.items():
            monkeypatch.setenv(name, value)
        yield Role(store, credentials)


@pytest.fixture
def reader(store: GuardedStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    yield from role(store, golden("plain")["reader"], monkeypatch)


@pytest.fixture
def checker(store: GuardedStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    yield from role(store, golden("everything")["reader"], monkeypatch)


@pytest.fixture
def publisher(store: GuardedStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    yield from role(store, golden("everything")["publisher"], monkeypatch)


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_load_lists_and_reads(reader: Role, transport: str, ending: str) -> None:
    model = reader.load(f"s3://{BUCKET}/{OURS}{ending}", transport=transport)
    assert torch.equal(model.weight, torch.tensor(VALUES))
    assert reader.calls() == {"ListObjectsV2", "GetObject"}


def test_a_load_of_versions_asks_for_each_once(reader: Role, transport: str) -> None:
    model = reader.load(f"s3://{BUCKET}/{OURS}", transport=transport, pin="version")
    assert torch.equal(model.weight, torch.tensor(VALUES))
    assert reader.calls() == {"ListObjectsV2", "HeadObject", "GetObjectVersion"}


def test_checksums_of_whole_files_take_nothing_more(reader: Role) -> None:
    model = reader.load(f"s3://{BUCKET}/{OURS}", integrity="checksums")
    assert torch.equal(model.weight, torch.tensor(VALUES))
    assert reader.calls() == {"ListObjectsV2", "GetObject", "HeadObject"}


def test_checksums_of_parts_take_a_permission_of_their_own(checker: Role) -> None:
    with pytest.raises(StreamError, match="does not give the checksums of its parts"):  # moto keeps none
        checker.load(f"s3://{BUCKET}/{PARTS}", integrity="checksums")
    assert checker.calls() == {"ListObjectsV2", "GetObject", "HeadObject", "GetObjectAttributes"}


def test_checksums_of_parts_without_it_name_it(reader: Role) -> None:
    with pytest.raises(StreamError, match="s3:GetObjectAttributes"):
        reader.load(f"s3://{BUCKET}/{PARTS}", integrity="checksums")


def test_inspect(reader: Role) -> None:
    done = reader.command("inspect", f"s3://{BUCKET}/{OURS}")
    assert done.exit_code == 0, done.output
    assert reader.calls() == {"ListObjectsV2", "GetObject"}


def test_metadata_of_a_model(reader: Role) -> None:
    pulled = pull(f"s3://{BUCKET}/{OURS}", StreamConfig.resolve({"endpoint_url": reader.store.url}))
    assert (pulled.folder / "config.json").read_text() == "{}"
    assert reader.calls() == {"ListObjectsV2", "GetObject"}


def fetch_commands() -> list[list[str]]:
    """Return how the manifests run ``s3stream fetch``, as far as it is the same wherever it runs."""
    examples = Path(__file__).parent.parent.parent / "examples"
    patches = [yaml.safe_load(path.read_text()) for path in examples.glob("kubernetes/components/*/patch.yaml")]
    found = [patch["spec"]["template"]["spec"]["initContainers"][0]["args"] for patch in patches]
    container = yaml.safe_load((examples / "kserve" / "clusterstoragecontainer.yaml").read_text())["spec"]["container"]
    return [*found, [*container["command"][1:], f"s3stream://{BUCKET}/{OURS}/", "/mnt/models"]]


@pytest.mark.skipif(
    "fetch" not in {str(getattr(command.callback, "__name__", "")) for command in app.registered_commands},
    reason="this version has no `s3stream fetch`",
)
@pytest.mark.parametrize("arguments", fetch_commands(), ids=" ".join)
def test_fetch_as_the_manifests_run_it(reader: Role, arguments: list[str], tmp_path: Path) -> None:
    moved = [argument.replace("$(MODEL_URL)", f"s3://{BUCKET}/{OURS}/") for argument in arguments]
    moved = [str(tmp_path / "model") if argument.startswith("/") else argument for argument in moved]
    done = reader.command(*moved)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    assert (tmp_path / "model" / "model.safetensors").exists() == ("all" in arguments)
    assert reader.calls() == {"ListObjectsV2", "GetObject"}


@pytest.mark.parametrize("folder", THEIRS)
def test_other_folders_are_refused(reader: Role, folder: str, transport: str) -> None:
    with pytest.raises(AccessDeniedError) as caught:
        reader.load(f"s3://{BUCKET}/{folder}", transport=transport)
    assert caught.value.status == 403
    calls = reader.store.calls()
    assert {(name, allowed) for name, _, _, allowed in calls} == {("ListObjectsV2", False)}


def test_the_command_line_says_denied(reader: Role) -> None:
    done = reader.command("inspect", f"s3://{BUCKET}/private")
    assert done.exit_code == 5, done.output
    assert f"s3://{BUCKET}/private/" in done.stderr.replace("\n", "")


def test_what_is_missing_is_missing_and_not_denied(reader: Role) -> None:
    with pytest.raises(ObjectNotFoundError, match="no objects"):
        reader.load(f"s3://{BUCKET}/{OURS}/v2")


def test_a_reader_cannot_write(reader: Role) -> None:
    done = reader.command("verify", f"s3://{BUCKET}/{OURS}", "--write", "--option", "integrity=store")
    assert done.exit_code == 5, done.output


def test_a_publisher_writes_the_manifest(publisher: Role) -> None:
    done = publisher.command("verify", f"s3://{BUCKET}/{PARTS}", "--write")
    assert done.exit_code == 0, done.output
    assert publisher.calls() == {"ListObjectsV2", "GetObject", "HeadObject", "GetObjectAttributes", "PutObject"}


REFUSED: dict[str, dict[str, Any]] = {
    "head_bucket": {},
    "get_bucket_location": {},
    "list_objects_v2": {},
    "list_objects_v2 elsewhere": {"Prefix": "private/"},
    "list_objects_v2 beside": {"Prefix": f"{OURS}-secret/"},
    "list_object_versions": {"Prefix": f"{OURS}/"},
    "get_object": {"Key": "private/config.json"},
    "put_object": {"Key": f"{OURS}/x", "Body": b""},
    "delete_object": {"Key": f"{OURS}/config.json"},
}


def test_the_store_enforces(reader: Role) -> None:
    """Else the tests above would pass with any policy."""
    client = boto3.client(
        "s3",
        endpoint_url=reader.store.url,
        region_name="us-east-1",
        aws_access_key_id=reader.credentials["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=reader.credentials["AWS_SECRET_ACCESS_KEY"],
        aws_session_token=reader.credentials["AWS_SESSION_TOKEN"],
    )
    for call, arguments in REFUSED.items():
        with pytest.raises(ClientError) as caught:
            getattr(client, call.split()[0])(Bucket=BUCKET, **arguments)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403, call
    with pytest.raises(ClientError, match="AccessDenied"):
        client.list_buckets()


def test_a_policy_without_the_slash_would_reach_the_neighbour(
    store: GuardedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What `llama*` in place of `llama/*` opens: the mistake that the tests above must be able to notice."""
    policy = golden("plain")["reader"]
    policy["Statement"][0]["Condition"]["StringLike"]["s3:prefix"] = [f"{OURS}*"]
    policy["Statement"][1]["Resource"] = [f"arn:aws:s3:::{BUCKET}/{OURS}*"]
    for wide in role(store, policy, monkeypatch):
        wide.load(f"s3://{BUCKET}/{OURS}-secret")
        with pytest.raises(AssertionError):
            wide.calls()
