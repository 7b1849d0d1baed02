"""A Terraform provider that knows its schema and nothing else, so that ``validate`` and mocked tests run offline.

``python -m tests.deploy.schema_provider SCHEMA.json`` speaks the plugin protocol, version 6, as Terraform expects of
programs that it starts (https://github.com/hashicorp/go-plugin/blob/main/docs/internals.md): a line on stdout says
where it listens, and with which certificate. Every check that is made by a provider's own code passes here: of values
that it allows, of arguments that exclude each other, of plans.
"""

from __future__ import annotations

import base64
import datetime
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tf.gen import grpc_controller_pb2, grpc_controller_pb2_grpc, grpc_stdio_pb2_grpc, tfplugin_pb2, tfplugin_pb2_grpc

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


def _certificate() -> tuple[bytes, bytes, bytes]:
    """Return the key and the certificate as PEM, and the latter as DER too."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (
        private,
        certificate.public_bytes(serialization.Encoding.PEM),
        certificate.public_bytes(serialization.Encoding.DER),
    )


def main(schema: Path) -> None:
    """Serve until Terraform says to stop."""
    done = threading.Event()

    class Controller(grpc_controller_pb2_grpc.GRPCControllerServicer):  # type: ignore[misc]
        def Shutdown(self, request: Any, context: Any) -> Any:
            done.set()
            return grpc_controller_pb2.Empty()

    class Output(grpc_stdio_pb2_grpc.GRPCStdioServicer):  # type: ignore[misc]
        def StreamStdio(self, request: Any, context: Any) -> Iterator[Any]:
            done.wait()  # Terraform takes the end of this stream for the end of the provider
            return iter(())

    server = grpc.server(futures.ThreadPoolExecutor(8), options=_NO_LIMIT)
    tfplugin_pb2_grpc.add_ProviderServicer_to_server(_Provider(json.loads(schema.read_text())), server)
    grpc_controller_pb2_grpc.add_GRPCControllerServicer_to_server(Controller(), server)
    grpc_stdio_pb2_grpc.add_GRPCStdioServicer_to_server(Output(), server)
    key, certificate, der = _certificate()
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        server.add_secure_port(f"unix://{address}", grpc.ssl_server_credentials([(key, certificate)]))
        server.start()
        print("1", "6", "unix", address, "grpc", base64.b64encode(der).decode().rstrip("="), sep="|", flush=True)
        done.wait()
        server.stop(grace=0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
