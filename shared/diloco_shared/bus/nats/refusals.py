"""What is told of a connection that did not come about: who answered, if anybody, and what to do.

A server that answers and lets nobody in is there: whoever is sent to look whether it runs, or at
its port, loses time.
"""

import ssl

# Of OpenSSL: what is wrong with a server's certificate.
_NOT_YET, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
# How the library begins an error that the server has put into words, which come in quotation marks;
# and how it names a refused login.
SERVER_SAID = ("nats: '", "nats: authorization failed")
# Raised by client.py, before anything is said to such a server.
NO_TLS = "the server offers no TLS, and this process demands it"


def tells_more(error: Exception) -> bool:
    """Whether an error is a server's word, or one about certificates: it says more than the reset
    that follows it."""
    text = str(error)
    return isinstance(error, ssl.SSLError) or text.startswith(SERVER_SAID) or text == NO_TLS


def not_connected(url: str, within_s: float, error: Exception | None, otherwise: str) -> str:
    """One sentence. `error`: one of which `tells_more` is true, if there was one; `otherwise`: what
    else is known."""
    if error is None:
        return (
            f"no NATS server at {url} within {within_s:g} s ({otherwise}); is it running, is the "
            "port right?"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the NATS server at {url} is not believed: {error}; {_of_its_certificate(error)}"
    if str(error) == NO_TLS:
        return (
            f"the NATS server at {url} is told nothing: {error}; give the hub a certificate, and "
            "if it has one, find out who takes it out on the way"
        )
    if isinstance(error, ssl.SSLError):
        what = _of_our_certificate(str(error))
    else:
        what = (
            "its identity may be revoked, or its key or token be an old one: 'diloco site list' at "
            "the hub shows who may connect"
        )
    return f"the NATS server at {url} did not let this process in: {error}; {what}"


def _of_our_certificate(said: str) -> str:
    """A server's answer has a name and nothing else; of two kinds the name is clear."""
    if "CERTIFICATE_REQUIRED" in said:
        return (
            "the hub demands a certificate: name the file that it gave to this site in "
            "DILOCO_NATS_CLIENT_CERT"
        )
    another = "'diloco site rotate NAME' at the hub makes another"
    if "CERTIFICATE_EXPIRED" in said:
        return (
            f"the certificate that DILOCO_NATS_CLIENT_CERT names has ended, and {another}; else a "
            "clock is wrong, here or at the hub"
        )
    return (
        "the hub may not take the certificate that DILOCO_NATS_CLIENT_CERT names: 'diloco doctor' "
        f"says what is wrong, and {another}"
    )


def _of_its_certificate(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code == _EXPIRED:
            return (
                "have it renewed at the hub ('diloco hub renew FOLDER' where the hub made it), or "
                "set the clock of this machine"
            )
        case code if code == _NOT_YET:
            return "set the clock of this machine, or that of the one that made the certificate"
        case code if code in (_OTHER_NAME, _OTHER_ADDRESS):
            return "use the name that the certificate is for, or have one made for this name"
    return "name the file of the hub's authority in DILOCO_NATS_CA"
