import shutil
import ssl
import subprocess

import pytest
from helpers.web import Answer, Script, serving

from recast_lightning.rewards.remote.client import JsonClient, RequestFailedError

CLIENT = JsonClient(timeout=5.0, retries=3, backoff=0.01)


def test_redirects_and_proxies_of_the_environment_are_not_followed(monkeypatch):
    with serving(Script()) as elsewhere, serving(Script()) as server:
        server.script += [Answer({"fine": True}), Answer({}, 307, {"Location": elsewhere.url})]
        for name in ("HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, elsewhere.url)
        assert CLIENT.ask(server.url) == {"fine": True}
        with pytest.raises(RequestFailedError, match="the server answered 307 Temporary Redirect"):
            CLIENT.ask(server.url)
    assert elsewhere.requests == []


def test_a_compressed_reply_is_not_unpacked():
    packed = Answer(b"\x1f\x8b\x08\x00", headers={"Content-Encoding": "gzip"})
    server = Script(packed)
    with serving(server), pytest.raises(RequestFailedError, match="the reply is not JSON"):
        CLIENT.ask(server.url)
    assert server.requests[0][2]["accept-encoding"] == "identity"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_certificate_that_is_not_trusted_is_final(tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Script()
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with serving(server), pytest.raises(RequestFailedError) as stop:
        CLIENT.ask(f"https://127.0.0.1:{server.server_port}/")
    assert str(stop.value) == "the server's certificate is not trusted: self-signed certificate"  # not "tried 4x"
