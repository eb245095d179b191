"""Kill a run at random moments and see that it ends as if nothing had happened.

    python benchmarks/kill_and_resume.py --kills 20

Trains the same recipe twice with the same fixed seed: once undisturbed, once killed
(SIGKILL) again and again at random times and started anew with the same command. Prints
whether the final parameters are the same to the last bit, and what the ledger says.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tanager.privacy.ledger import Ledger


def command(out: Path, steps: int) -> list[str]:
    """Return the command that is killed and repeated."""
    fields = ["--steps", str(steps), "--seed", "0", "--checkpoint-seconds", "0.5"]
    words = ["-m", "tanager.cli", "train", "digits", *fields, "--out", str(out)]
    return [sys.executable, *words]


def charged(out: Path) -> int:
    """Return how many steps the ledger claims while a process may be writing it."""
    path = out / "ledger.jsonl"
    return Ledger.read(path).steps() if path.exists() else 0


def main() -> int:
    """Run the comparison; the exit status is 0 when nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--most-seconds", type=float, default=25.0)
    options = parser.parse_args()
    moments = random.Random()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        subprocess.run(
            command(whole, options.steps), check=True, stdout=subprocess.DEVNULL
        )
        history = []
        while len(history) < options.kills and not (killed / "result.json").exists():
            process = subprocess.Popen(
                command(killed, options.steps), stdout=subprocess.DEVNULL
            )
            time.sleep(moments.uniform(0.5, options.most_seconds))
            alive = process.poll() is None
            process.kill()
            process.wait()
            if alive:
                history.append(charged(killed))
        print(f"killed {len(history)} times, with these steps charged: {history}")
        assert history == sorted(history), "the ledger shrank"
        subprocess.run(
            command(killed, options.steps), check=True, stdout=subprocess.DEVNULL
        )
        same = all(
            (whole / name).read_bytes() == (killed / name).read_bytes()
            for name in ("model.safetensors", "model-ema.safetensors")
        )
        results = [
            json.loads((out / "result.json").read_text()) for out in (whole, killed)
        ]
        print(f"final parameters bit-identical: {same}")
        for name, result in zip(("undisturbed", "killed"), results, strict=True):
            print(f"{name}: {result['steps']} steps, ε = {result['epsilon']}")
        right = same and results[0]["epsilon"] == results[1]["epsilon"]
        return 0 if right and charged(killed) == options.steps else 1


if __name__ == "__main__":
    sys.exit(main())
