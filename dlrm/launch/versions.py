"""The check at start-up that torch, torchrec and fbgemm fit together, and what to install when they do not.

FBGEMM is compiled against one minor version of torch, and torchrec is written for one of FBGEMM. Other
mixtures fail late and obscurely: an undefined symbol, a missing operator, a crash. Besides, FBGEMM comes as
two packages, `fbgemm-gpu` for CUDA and `fbgemm-gpu-cpu`, which write the same files: installed together,
whichever came last has overwritten half of the other. Package metadata is read first, which takes
milliseconds and works when nothing can be imported; only then are operators looked up.

    python -m dlrm.launch.versions cpu
"""

import logging
import re
import sys
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Final

DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True)
class Pairing:
    """Minor versions that belong together."""

    torch: str
    """Minor version of torch, e.g. `2.13`."""
    torchrec: str
    """Minor version of torchrec and, always equal, of fbgemm, e.g. `1.8`."""

    def commands(self, device: str) -> str:
        """What to type to get this pairing for `device`, as indented lines."""
        torch, torchrec = f"torch~={self.torch}.0", f"torchrec~={self.torchrec}.0"
        fbgemm = f"{FBGEMM_BUILDS[device]}~={self.torchrec}.0"
        remove = f"    pip uninstall --yes {' '.join(FBGEMM_BUILDS.values())}\n"
        if device == "cuda":
            # pip would be content with a torch for CPUs that is already there.
            remove = remove.replace("--yes", "--yes torch")
            return f'{remove}    pip install "{torch}" "{torchrec}" "{fbgemm}"'
        return (
            f'{remove}    pip install "{torch}" "{fbgemm}" {" ".join(TORCHREC_NEEDS)}\n'
            f'    pip install --no-deps "{torchrec}"'
        )


PAIRINGS: Final = (Pairing("2.13", "1.8"), Pairing("2.12", "1.7"), Pairing("2.11", "1.6"))
"""The supported pairings, the preferred one first."""

FBGEMM_BUILDS: Final = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
"""Which package brings FBGEMM for which device."""

TORCHREC_NEEDS: Final = ("tensordict", "torchmetrics==1.0.3", "pyre-extensions", "tqdm")
"""What torchrec declares besides fbgemm-gpu, which must not come with it on a CPU."""

OPERATORS: Final = (
    "asynchronous_complete_cumsum",
    "split_embedding_codegen_lookup_rowwise_adagrad_function_pt2",
)
"""FBGEMM operators that every step needs: one of the input exchange, one of the tables."""

DRIVER_LIBRARIES: Final = ("libcuda.", "libnvidia-ml.")
"""What comes with NVIDIA's driver and with no Python package."""


class IncompatiblePackagesError(RuntimeError):
    """torch, torchrec and fbgemm, as installed, cannot work together; the message says what to install."""


def check_versions(device: str) -> None:
    """Check that torch, torchrec and fbgemm fit together for `device`, `"cpu"` or `"cuda"`.

    Call it before anything imports torchrec. It says nothing about whether a GPU is present.

    Raises:
        IncompatiblePackagesError: they do not fit; the message names the versions found and what to type.
        ValueError: no such device.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not known; choose one of {', '.join(DEVICES)}")
    problem = _problem_of_presence() or _problem_of_pairing(device) or _problem_of_operators(device)
    if problem:
        raise IncompatiblePackagesError(
            f"{problem}.\nInstalled: {_describe_installed()}.\n"
            f"In a clone of this project: `rm -rf .venv && make install DEVICE={device}`. Elsewhere:\n"
            f"{_best_pairing().commands(device)}"
        )


def _problem_of_presence() -> str | None:
    """Which package is missing or too many, as a sentence without its full stop."""
    missing = [package for package in ("torch", "torchrec") if _version(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    builds = [build for build in FBGEMM_BUILDS.values() if _version(build)]
    if not builds:
        return "no build of fbgemm is installed, and torchrec does not work without"
    if len(builds) > 1:
        return "both builds of fbgemm are installed, and one has overwritten files of the other"
    return None


def _problem_of_pairing(device: str) -> str | None:
    """Which of the packages, all present, does not fit the others or the device."""
    torch, torchrec = _version("torch") or "", _version("torchrec") or ""
    build = next(build for build in FBGEMM_BUILDS.values() if _version(build))
    fbgemm = _version(build) or ""
    if Pairing(_minor(torch), _minor(torchrec)) not in PAIRINGS or _minor(fbgemm) != _minor(torchrec):
        return f"torch {torch}, torchrec {torchrec} and {build} {fbgemm} do not belong together"
    if device == "cuda" and build != FBGEMM_BUILDS["cuda"]:
        return f"the device is cuda, but {build} is the build of fbgemm for CPUs"
    if device == "cuda" and torch.endswith("+cpu"):
        return f"the device is cuda, but torch {torch} is a build for CPUs"
    return None


def _problem_of_operators(device: str) -> str | None:
    """What is wrong when the packages are really loaded, as a sentence without its full stop.

    Raises:
        IncompatiblePackagesError: the packages are right for `device` but the machine has no driver for them.
    """
    try:
        logging.disable()  # fbgemm logs the same error at length
        torch = import_module("torch")
        import_module("fbgemm_gpu")
        for operator in OPERATORS:
            getattr(torch.ops.fbgemm, operator)
    # Broken binaries show themselves as any of these: a missing library, a symbol, a missing operator.
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error.__cause__ or error)
        if device == "cuda" and reason.startswith(DRIVER_LIBRARIES):
            raise IncompatiblePackagesError(
                f"fbgemm needs the NVIDIA driver, which this machine lacks ({reason}).\n"
                "The packages are right: use a machine with a GPU and its driver, or install for the CPU"
            ) from error
        return f"fbgemm's operators cannot be loaded ({reason})"
    finally:
        logging.disable(logging.NOTSET)
    if device == "cuda" and torch.version.cuda is None:
        return "the device is cuda, but this build of torch has no CUDA"
    return None


def _best_pairing() -> Pairing:
    """The pairing that keeps the installed torch, else the preferred one."""
    torch = _minor(_version("torch") or "")
    return next((pairing for pairing in PAIRINGS if pairing.torch == torch), PAIRINGS[0])


def _describe_installed() -> str:
    packages = ("torch", "torchrec", *FBGEMM_BUILDS.values())
    return ", ".join(f"{package} {_version(package) or '(none)'}" for package in packages)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    """The first two numbers of a version: `2.13` of `2.13.0+cpu`."""
    return ".".join(re.findall(r"\d+", version)[:2])


def main(arguments: list[str]) -> int:
    """Check for the device in `arguments` (default cpu) and say in words what was found."""
    device = arguments[0] if arguments else "cpu"
    try:
        check_versions(device)
    except (IncompatiblePackagesError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Fit together for {device}: {_describe_installed()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
