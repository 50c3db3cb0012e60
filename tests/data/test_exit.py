import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio
from rollart.data.environment import EnvironmentWorker
from rollart.errors import EnvTimeout

async def main():
    task = {"env": "synthetic", "options": {"hang_rate": 1.0}, "reset_timeout_s": 0.1}
    worker = EnvironmentWorker({"slow": task}, 2)
    try:
        await worker.reset("a", "slow", 1)
    except EnvTimeout as error:
        print(error)

asyncio.run(main())
"""


def test_a_hung_environment_does_not_hold_up_the_end_of_its_process():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reset of task 'slow' did not answer within 0.1 s\n"
