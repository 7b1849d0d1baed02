"""A Terraform provider that knows its schema and nothing else, so that ``validate`` and mocked tests run offline.

``python -m tests.deploy.schema_provider SCHEMA.json FOLDER`` speaks the plugin protocol, version 6, at a socket to
which Terraform is sent by TF_REATTACH_PROVIDERS, as for debugging a provider
(https://developer.hashicorp.com/terraform/plugin/debugging): one process serves all commands, and nothing is installed.
Every check that is made by a provider's own code passes here: of values that it allows, of arguments that exclude each
other, of plans.
"""

from __future__ import annotations

import json
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from tf.gen import tfplugin_pb2, tfplugin_pb2_grpc

__all__ = ["main"]

_NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _attribute(name: str, value: dict[str, Any]) -> Any:
    flags = {flag: value.get(flag, False) for flag in ("required", "optional", "computed")}
    attribute = tfplugin_pb2.Schema.Attribute(name=name, **flags)
    if shape := value.get("nested_type"):
        kinds = tfplugin_pb2.Schema.Object.NestingMode
        attribute.nested_type.CopyFrom(
            tfplugin_pb2.Schema.Object(
                attributes=[_attribute(key, inner) for key, inner in shape["attributes"].items()],
                nesting=kinds.Value(shape["nesting_mode"].upper()),
            )
        )
    else:
        attribute.type = json.dumps(value["type"]).encode()
    return attribute


def _block(value: dict[str, Any]) -> Any:
    kinds = tfplugin_pb2.Schema.NestedBlock.NestingMode
    return tfplugin_pb2.Schema.Block(
        attributes=[_attribute(name, inner) for name, inner in value["attributes"].items()],
        block_types=[
            tfplugin_pb2.Schema.NestedBlock(
                type_name=name,
                block=_block(inner["block"]),
                nesting=kinds.Value(inner["nesting_mode"].upper()),
                min_items=inner.get("min_items", 0),
                max_items=inner.get("max_items", 0),
            )
            for name, inner in value["block_types"].items()
        ],
    )


def _schema(value: dict[str, Any]) -> Any:
    return tfplugin_pb2.Schema(version=value["version"], block=_block(value["block"]))


class _Provider(tfplugin_pb2_grpc.ProviderServicer):  # type: ignore[misc]  # the stubs have no types
    def __init__(self, schema: dict[str, Any]) -> None:
        answer = tfplugin_pb2.GetProviderSchema.Response(provider=_schema(schema["provider"]))
        for kind in ("resource_schemas", "data_source_schemas"):
            for name, value in schema[kind].items():
                getattr(answer, kind)[name].CopyFrom(_schema(value))
        self._answer = answer

    def GetProviderSchema(self, request: Any, context: Any) -> Any:
        return self._answer

    def ValidateProviderConfig(self, request: Any, context: Any) -> Any:
        return tfplugin_pb2.ValidateProviderConfig.Response()

    def ValidateResourceConfig(self, request: Any, context: Any) -> Any:
        return tfplugin_pb2.ValidateResourceConfig.Response()

    def ValidateDataResourceConfig(self, request: Any, context: Any) -> Any:
        return tfplugin_pb2.ValidateDataResourceConfig.Response()

    def ConfigureProvider(self, request: Any, context: Any) -> Any:
        return tfplugin_pb2.ConfigureProvider.Response()

    def GetFunctions(self, request: Any, context: Any) -> Any:
        return tfplugin_pb2.GetFunctions.Response()

    def StopProvider(self, request: Any, context: Any) -> Any:
        return tfplugin_pb2.StopProvider.Response()


def main(schema: Path, folder: Path) -> None:
    """Serve at a socket in `folder`, and say there that it does, until it is terminated."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=_NO_LIMIT)
    tfplugin_pb2_grpc.add_ProviderServicer_to_server(_Provider(json.loads(schema.read_text())), server)
    address = folder / "socket"
    server.add_insecure_port(f"unix://{address}")
    server.start()
    print(address, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
