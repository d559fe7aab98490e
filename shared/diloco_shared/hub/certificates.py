"""A hub's own authority, and the certificates that it signs: PEM text, and no files.

Needs the package `cryptography`, which the extra `nats` installs where a message server runs: sites
present certificates, and make none.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Nobody replaces an authority's certificate without visiting every site; those that sites see, or
# present, are replaced by one command, and `diloco doctor` says when it is time. What only the
# hub's own machines present to each other nobody would look at before it ends: it is good for as
# long as an authority.
AUTHORITY_DAYS = 3650
DAYS = 398
# Clocks differ: a certificate is good from this long before it was made.
BEFORE = timedelta(hours=1)
# Names of one hub: more in a certificate would be a mistake.
HOSTS_MAX = 32


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, both PEM; the key has no password, since no person starts
    processes. `repr` does not show it."""

    certificate: str
    key: str = field(repr=False)

    @property
    def document(self) -> str:
        """Both, as one file."""
        return self.certificate + self.key


def new_authority(now: datetime) -> Pair:
    """An authority that signs for one hub and its sites, and for no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "diloco hub authority")])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    built = (
        _begun(name, name, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return _pair(built.sign(key, hashes.SHA256()), key)


def for_hub(authority: Pair, hosts: Sequence[str], now: datetime, days: int = DAYS) -> Pair:
    """Of a message server that is reached under these names or addresses. Raises ValueError."""
    if not hosts or len(hosts) > HOSTS_MAX:
        raise ValueError(f"give 1 to {HOSTS_MAX} names or addresses of the hub, not {len(hosts)}")
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    # Servers of a cluster are clients of each other.
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _signed(authority, hosts[0], uses, names, now, days)


def for_site(authority: Pair, name: str, now: datetime, days: int = DAYS) -> Pair:
    """Of an identity that connects to the hub. Raises ValueError for an authority that is none."""
    return _signed(authority, name, [ExtendedKeyUsageOID.CLIENT_AUTH], None, now, days)


def ends_at(certificate: str) -> datetime:
    """Until when a certificate (PEM) is good. Raises ValueError."""
    return x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc


def names_of(certificate: str) -> list[str]:
    """The names and addresses that a certificate (PEM) is for. Raises ValueError."""
    found = x509.load_pem_x509_certificate(certificate.encode())
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(n.value) for n in names if isinstance(n, (x509.DNSName, x509.IPAddress))]


# --------------------------------------------------------------------------------------------------


def _signed(
    authority: Pair,
    name: str,
    uses: Sequence[x509.ObjectIdentifier],
    names: x509.SubjectAlternativeName | None,
    now: datetime,
    days: int,
) -> Pair:
    above = x509.load_pem_x509_certificate(authority.certificate.encode())
    signing = serialization.load_pem_private_key(authority.key.encode(), password=None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not one that 'diloco hub init' made")
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name has 64 letters at most; who looks at names looks at the alternative ones.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    built = (
        _begun(subject, above.subject, key, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()),
            critical=False,
        )
    )
    if names is not None:
        built = built.add_extension(names, critical=False)
    return _pair(built.sign(signing, hashes.SHA256()), key)


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - BEFORE)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    none = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(**(none | allowed))


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return Pair(certificate.public_bytes(pem).decode(), secret)
