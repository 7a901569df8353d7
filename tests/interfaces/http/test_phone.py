"""A phone over HTTPS: a browser as the phone, and a real Caddy, configured as in the docs, before a real server."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
from anyio import to_thread
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from approving_kit import authenticator
from browser_kit import Window, browsing
from doors import answer, gpuwarden, quick_warden
from gpuwarden.ledger.events import ApprovalGranted, PasskeyRegistered, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.teardown.passkeys import allow, allowed, register
from load_kit import served
from paths import ROOT
from real_parts import need
from waiting import PATIENCE, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.prove, pytest.mark.real("caddy")]
CADDY = shutil.which("caddy")
HOST = "gpu.example.org"
DOCS = ROOT / "docs" / "serving.md"
PHONE = ("light", 360)


def certificate(folder: Path) -> str:
    """Write a certificate and its key for the host. Return the digest that makes a browser trust the certificate."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "key.pem").write_bytes(pem)
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(public).digest()).decode()


@contextmanager
def proxied(folder: Path, public: int, port: int) -> Iterator[None]:
    """Run Caddy with the docs' configuration and the test's certificate, so that it doesn't fetch one."""
    need("caddy", CADDY is not None)
    (shown,) = re.findall(r"```caddyfile\n(.*?)```", DOCS.read_text(), re.DOTALL)
    own = f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\nhttps://{HOST}:{public} {{\n\tbind 127.0.0.1\n"
    own += f"\ttls {folder}/cert.pem {folder}/key.pem\n"
    assert shown.startswith(f"{HOST} {{\n") and "127.0.0.1:8741" in shown
    config = own + shown.removeprefix(f"{HOST} {{\n").replace("127.0.0.1:8741", f"127.0.0.1:{port}")
    (folder / "Caddyfile").write_text(config)
    argv = [str(CADDY), "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with (folder / "caddy.log").open("w") as log, subprocess.Popen(argv, env=env, stdout=log, stderr=log) as caddy:

        def listens() -> bool:
            assert caddy.poll() is None, (folder / "caddy.log").read_text()
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", public)) == 0

        try:
            eventually(listens)
            yield
        finally:
            caddy.terminate()
            caddy.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def asking(ctx: Context) -> None:
    """Add a receipt whose price the user must approve."""
    ask = ReceiptIssued(
        spec_digest="e" * 71, facts_digest="e" * 71, expires_at=ctx.clock.now() + 3_600, name="mixtral-sft",
        platform="runpod", price=23.92, worst_cost=287.0, ask="above the cap of $100.00 for a job",
    )  # fmt: skip
    ctx.ledger.add("receipt/r7mixt", ask)


async def test_a_phone_reads_over_https_and_approves_with_a_passkey_of_that_host(tmp_path: Path) -> None:
    need("caddy", CADDY is not None)
    home, public = tmp_path / "home", free_port()
    pictures = Path(os.environ.get("GPUWARDEN_PICTURES") or tmp_path)
    ctx, base = quick_warden(home), f"https://{HOST}:{public}"
    asking(ctx)
    # A passkey for the laptop's own page, which is valid for that page only.
    register(
        ctx,
        allowed(ctx, allow(ctx, "laptop", "user x")),
        PasskeyRegistered(credential="Y3JlZA", public_key="a2V5", site="localhost"),
    )
    trusted = certificate(tmp_path)
    flags = (f"--host-resolver-rules=MAP {HOST} 127.0.0.1", f"--ignore-certificate-errors-spki-list={trusted}")
    with served(home, more=("--public-url", base)) as (_, port), proxied(tmp_path, public, port):
        async with browsing(PHONE, flags=flags) as page:
            window = Window(page, base)
            page.set_default_timeout(60_000 * PATIENCE)
            link = await to_thread.run_sync(lambda: gpuwarden(home, "dashboard", "--public").stdout.strip())
            assert link.startswith(f"{base}/enter?link=")
            await page.goto(link)
            await page.wait_for_selector("li[data-key=r7mixt]")
            (cookie,) = await page.context.cookies()
            kept = (cookie["domain"], cookie["secure"], cookie["httpOnly"], cookie["sameSite"])
            assert kept == (HOST, True, True, "Strict")

            # Without a passkey for this host, the phone can only read.
            await page.click("li[data-key=r7mixt] a[href*=approve]")
            assert "$23.92/h" in await page.inner_text(".facts-text")
            assert await page.locator("[data-sign]").count() == 0
            refused = await page.evaluate(
                """() => fetch("/approve/r7mixt/challenge.json", {method: "POST", body: '{"digest": "x"}',
                    headers: {"content-type": "application/json"}}).then((answer) => answer.status)"""
            )
            assert refused == 403 and ctx.ledger.last("receipt/r7mixt", ApprovalGranted) is None
            window.wrong.clear()  # the browser's console message about the 403
            await page.screenshot(path=pictures / "phone-reads.png", full_page=True)

            await authenticator(window)
            await page.goto(f"{base}/passkeys")
            await page.fill("[name=code]", allow(ctx, "phone", "user x"))
            await page.click("[data-register] button")
            await page.wait_for_selector("[data-outcome]:text('phone')")
            await page.goto(f"{base}/approve/r7mixt")
            await page.screenshot(path=pictures / "phone-asks.png", full_page=True)
            await page.click("[data-sign]")
            await page.wait_for_selector("[data-sign][hidden]", state="attached")
            assert not window.wrong, window.wrong

        # The server refuses another host name, and the proxy's host name with another origin.
        async with httpx2.AsyncClient(verify=False, timeout=60 * PATIENCE) as http:  # a self-signed certificate
            for headers, status in (({"Host": "evil.example"}, 421), ({"Origin": "https://evil.example"}, 403)):
                shown = {"Host": f"{HOST}:{public}"} | headers
                direct = await http.get(f"http://127.0.0.1:{port}/", headers=shown)
                assert direct.status_code == status, direct.text
    granted = ctx.ledger.last("receipt/r7mixt", ApprovalGranted)
    assert granted is not None and (granted.data.channel, granted.data.by) == ("page", "passkey phone")
    assert answer(gpuwarden(home, "dashboard", "--public", "--json"))["code"] == "not_found"
