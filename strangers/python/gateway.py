"""The real gateway binary for the Python strangers, on its in-memory log and free ports."""

import base64
import hashlib
import hmac
import json
import os
import pathlib
import subprocess
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BINARY = os.environ.get("TIDEGATE", str(TARGET / "debug" / "tidegate"))
SECRET = "a key of the strangers' tests, long enough for HMAC"


def token(sub: str, **claims: object) -> str:
    """A JWT (HS256), good for an hour."""

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    now = int(time.time())
    head = part(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
    body = f"{head}.{part(json.dumps({'sub': sub, 'iat': now, 'exp': now + 3600, **claims}).encode())}"
    return f"{body}.{part(hmac.new(SECRET.encode(), body.encode(), hashlib.sha256).digest())}"


class Gateway:
    """Serves from construction to `stop`."""

    def __init__(self) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="tidegate-")
        file = pathlib.Path(self._dir.name) / "addresses.json"
        env = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
        env |= {f"GATEWAY_{name}": "127.0.0.1:0" for name in ("LISTEN", "ADMIN_LISTEN", "PROBE_LISTEN")}
        env |= {"GATEWAY_ADDR_FILE": str(file), "GATEWAY_JWT_SECRET": SECRET, "GATEWAY_LOG": "warn"}
        self._process = subprocess.Popen([BINARY, "serve"], env=env, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("the gateway did not start")
            try:
                addresses = json.loads(file.read_text())
                with urllib.request.urlopen(f"http://{addresses['probes']}/startupz"):
                    break
            except (OSError, ValueError):
                time.sleep(0.02)
        self.admin = addresses["admin"]
        self.ws = f"ws://{addresses['public']}/v1/ws"
        self.sse = f"http://{addresses['public']}/v1/sse"

    def publish(self, channel: str, data: object) -> str:
        """Publishes over the admin API; returns the event's id."""
        request = urllib.request.Request(
            f"http://{self.admin}/v1/publish",
            data=json.dumps({"channel": channel, "data": data}).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["id"]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._dir.cleanup()
