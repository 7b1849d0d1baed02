"""Writes around the sources under test."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config

from tests.conftest import ACCESS_KEY, SECRET_KEY

__all__ = ["s3_client"]


def s3_client(endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(proxies={}, s3={"addressing_style": "path"}),
    )
