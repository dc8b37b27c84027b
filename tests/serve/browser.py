"""Chromium, driven by its debugging protocol over a pipe, without a further package."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --remote-debugging-pipe"


class Browser:
    """One tab. ``faults``: exceptions and violations of the page's policy, so far."""

    def __init__(self, profile: Path) -> None:
        (theirs, to), (back, answers) = os.pipe(), os.pipe()
        command = f"exec {CHROMIUM} {FLAGS} '--user-data-dir={profile}' 3<&{theirs} 4>&{answers}"
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(theirs, answers), stderr=subprocess.DEVNULL)
        for end in (theirs, answers):
            os.close(end)
        self._to, self._from = os.fdopen(to, "wb", 0), os.fdopen(back, "rb")
        self._count, self.faults, self._session = 0, [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        order = {"id": self._count, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(order).encode() + b"\0")
        while (message := json.loads(b"".join(iter(lambda: self._from.read(1), b"\0")))).get("id") != self._count:
            told = message.get("params", {})
            if "exceptionDetails" in told or told.get("entry", {}).get("source", "network") != "network":
                self.faults.append(told)
        return message["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")
