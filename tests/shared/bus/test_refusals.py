"""A connection that did not come about: who is to blame, and what to do."""

import ssl

import nats.errors
import pytest

from diloco_shared.bus.nats.refusals import NO_TLS, not_connected, tells_more


def unbelieved(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = code
    return error


def alert(name: str) -> ssl.SSLError:
    return ssl.SSLError(1, f"[SSL: {name}] in other words")


@pytest.mark.parametrize(
    ("error", "said", "todo"),
    [
        (unbelieved(10), "is not believed", "'diloco hub renew FOLDER'"),
        (unbelieved(9), "is not believed", "set the clock"),
        (unbelieved(62), "is not believed", "use the name that the certificate is for"),
        (unbelieved(64), "is not believed", "use the name that the certificate is for"),
        (unbelieved(20), "is not believed", "DILOCO_NATS_CA"),
        (alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "did not let", "demands a certificate"),
        (alert("SSLV3_ALERT_CERTIFICATE_EXPIRED"), "did not let", "'diloco site rotate NAME'"),
        (alert("TLSV1_ALERT_UNKNOWN_CA"), "did not let", "may not take the certificate"),
        (nats.errors.AuthorizationError(), "did not let", "'diloco site list'"),
        (nats.errors.Error("nats: 'Authorization Violation'"), "did not let", "revoked"),
        (nats.errors.Error(NO_TLS), "is told nothing", "give the hub a certificate"),
    ],
    ids=str,
)
def test_a_server_that_answers_is_not_said_to_be_away(
    error: Exception, said: str, todo: str
) -> None:
    assert tells_more(error)
    text = not_connected("hub:4222", 10.0, error, "connection reset")
    assert text.startswith(f"the NATS server at hub:4222 {said}") and todo in text
    assert str(error) in text and "is it running" not in text


def test_where_nobody_answered_the_port_is_doubted() -> None:
    for error in (ConnectionRefusedError(), TimeoutError(), nats.errors.NoServersError()):
        assert not tells_more(error)
    text = not_connected("hub:4222", 2.0, None, "no answer")
    assert text == (
        "no NATS server at hub:4222 within 2 s (no answer); is it running, is the port right?"
    )
