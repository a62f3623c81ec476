"""A virtual environment with the peers in it; standard library only, since nothing else is there yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TORCH = ("torch==2.14.1", "torchvision==0.29.1")

# Arguments of pip, a step each.  Streaming's own list has numpy<2.2, xxhash<4 and transformers<5, which no other peer
# goes with, and the clients of six clouds: it gets what `import streaming` needs, and the numpy that all sides have.
PEERS: dict[str, list[list[str]]] = {
    "WebDataset": [["webdataset"]],
    "Streaming": [["--no-deps", "mosaicml-streaming"],
                  ["boto3", "brotli", "catalogue<3", "python-snappy<1", "transformers", "zstd<2"]],
    "LitData": [["litdata"]],
    "HF datasets": [["datasets"]],
    "SPDL": [["spdl"]],
    "DALI": [["nvidia-dali-cuda130"]],
}  # fmt: skip


def prepared(folder: Path) -> Path:
    """Make the environment, unless it is there as it should be; return its Python.

    What can't be installed is said on standard error; its sides are then skipped, as they can't be imported.
    """
    python, record = folder / "bin" / "python", folder / "peers.json"
    wanted = json.dumps([TORCH, PEERS])
    if record.exists() and record.read_text() == wanted:
        return python
    if not python.exists():
        venv.create(folder, with_pip=True)
    pins = folder / "constraints.txt"
    ours = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join([*TORCH, *(line for line in ours if not line.startswith("torch=="))]) + "\n")
    for step in ([*TORCH], ["matplotlib", "-e", str(REPOSITORY)]):
        _install(python, [*step, "-c", str(pins)]).check_returncode()
    for name, steps in PEERS.items():
        for step in steps:
            if _install(python, [*step, "-c", str(pins)]).returncode:
                print(f"bench_peers: {name}: pip install {' '.join(step)} failed", file=sys.stderr)
    record.write_text(wanted)
    return python


def _install(python: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], env=quiet, check=False)
