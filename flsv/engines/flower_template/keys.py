"""Makes what TLS and the sites' authentication need, for a trial on one machine: python keys.py Boston Lyon Osaka

Keys of a real federation: every site makes its own and sends the public half; the server's certificate comes from your
organisation.
"""

import datetime
import ipaddress
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

FOLDER = Path("keys")


def write(name: str, data: bytes) -> None:
    path = FOLDER / name
    path.touch(mode=0o600)
    path.write_bytes(data)


def private(key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())


def certificate(name, key, issuer, issuer_key, *extensions) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=365))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, hashes.SHA256())


def named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def main(sites: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority, server = named("trial authority"), named("localhost")
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = certificate(
        *(authority, ca_key, authority, ca_key),
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (identifier, False),
        (usage, True),
    )
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = certificate(
        *(server, server_key, authority, ca_key),
        (names, False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
    )
    write("ca.pem", ca.public_bytes(serialization.Encoding.PEM))
    write("server.pem", signed.public_bytes(serialization.Encoding.PEM))
    write("server.key", private(server_key, serialization.PrivateFormat.PKCS8))
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())
        write(site, private(key, serialization.PrivateFormat.OpenSSH))
        public = serialization.PublicFormat.OpenSSH
        write(f"{site}.pub", key.public_key().public_bytes(serialization.Encoding.OpenSSH, public))


if __name__ == "__main__":
    main(sys.argv[1:])
