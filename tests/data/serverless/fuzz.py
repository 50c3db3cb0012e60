"""`make test-fuzz`: schemathesis draws requests from a served function's description and checks the answers against it.

schemathesis lives in an environment of its own; this program starts the server and calls it. Its check that requests
with undescribed headers are refused is left out: HTTP lets anybody add headers.
"""

import os
import subprocess
import sys

from tests.data.serverless.served import serving


def main() -> int:
    with serving("echo", "--max-body-bytes", "20000") as server:
        words = ["run", f"{server.url}/openapi.json", "--exclude-checks", "negative_data_rejection", *sys.argv[2:]]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.data.serverless.fuzz_media", "PYTHONPATH": "."}
        return subprocess.run([sys.argv[1], *words], env=os.environ | hooks, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
