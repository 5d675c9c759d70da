"""Check at start-up that torch, torchrec and fbgemm fit together, and what to install if they do not.

FBGEMM is compiled against one minor version of torch, and torchrec is written for one of FBGEMM; other
mixtures fail late and obscurely. FBGEMM also comes as two packages, `fbgemm-gpu` and `fbgemm-gpu-cpu`, that
overwrite each other's files. Package metadata is checked first, which takes milliseconds and works when
nothing can be imported; then operators are looked up. On the command line: `python -m cpr.versions
cpu`.
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
    """Minor versions of torch, torchrec and fbgemm that work together."""

    torch: str
    """Such as `2.13`."""
    torchrec: str
    """Of torchrec and of fbgemm, which are always equal, such as `1.8`."""

    def commands(self, device: str) -> str:
        """Commands that install this pairing for `device`, as indented lines."""
        torch, torchrec = f"torch~={self.torch}.0", f"torchrec~={self.torchrec}.0"
        fbgemm = f"{FBGEMM_BUILDS[device]}~={self.torchrec}.0"
        remove = f"    pip uninstall --yes {' '.join(FBGEMM_BUILDS.values())}\n"
        if device == "cuda":
            # pip would keep an installed CPU build of torch
            remove = remove.replace("--yes", "--yes torch")
            return f'{remove}    pip install "{torch}" "{torchrec}" "{fbgemm}"'
        return (
            f'{remove}    pip install "{torch}" "{fbgemm}" {" ".join(TORCHREC_NEEDS)}\n'
            f'    pip install --no-deps "{torchrec}"'
        )


PAIRINGS: Final = (Pairing("2.13", "1.8"), Pairing("2.12", "1.7"), Pairing("2.11", "1.6"))
"""The supported pairings, the preferred one first."""

FBGEMM_BUILDS: Final = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
"""Package that brings FBGEMM, by device."""

TORCHREC_NEEDS: Final = ("tensordict", "torchmetrics==1.0.3", "pyre-extensions", "tqdm")
"""Dependencies of torchrec except fbgemm-gpu, whose CUDA build must not be installed for a CPU."""

OPERATORS: Final = (
    "asynchronous_complete_cumsum",
    "split_embedding_codegen_lookup_rowwise_adagrad_function_pt2",
)
"""FBGEMM operators that every step needs: one of the input exchange, one of the tables."""

DRIVER_LIBRARIES: Final = ("libcuda.", "libnvidia-ml.")
"""Libraries that come with NVIDIA's driver and with no Python package."""


class IncompatiblePackagesError(RuntimeError):
    """The installed torch, torchrec and fbgemm cannot work together; the message says what to install."""


def check_versions(device: str) -> None:
    """Check that torch, torchrec and fbgemm fit together for `device`, `"cpu"` or `"cuda"`.

    Call it before torchrec is imported. It does not check for a GPU.

    Raises:
        IncompatiblePackagesError: names the versions found and the commands to type.
        ValueError: no such device.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not known; choose one of {', '.join(DEVICES)}")
    problem = _missing_or_duplicate() or _mismatch(device) or _loading_failure(device)
    if problem:
        raise IncompatiblePackagesError(
            f"{problem}.\nInstalled: {installed_text()}.\n"
            f"In a clone of this project: `rm -rf .venv && make install DEVICE={device}`. Elsewhere:\n"
            f"{_best_pairing().commands(device)}"
        )


def _missing_or_duplicate() -> str | None:
    """A sentence about a package that is missing or installed twice, or None."""
    missing = [package for package in ("torch", "torchrec") if installed_version(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    builds = [build for build in FBGEMM_BUILDS.values() if installed_version(build)]
    if not builds:
        return "no build of fbgemm is installed, and torchrec does not work without"
    if len(builds) > 1:
        return "both builds of fbgemm are installed, and one has overwritten files of the other"
    return None


def _mismatch(device: str) -> str | None:
    """A sentence about packages that do not fit each other or the device, or None."""
    torch, torchrec = installed_version("torch") or "", installed_version("torchrec") or ""
    build = next(build for build in FBGEMM_BUILDS.values() if installed_version(build))
    fbgemm = installed_version(build) or ""
    if Pairing(_minor(torch), _minor(torchrec)) not in PAIRINGS or _minor(fbgemm) != _minor(torchrec):
        return f"torch {torch}, torchrec {torchrec} and {build} {fbgemm} do not belong together"
    if device == "cuda" and build != FBGEMM_BUILDS["cuda"]:
        return f"the device is cuda, but {build} is the build of fbgemm for CPUs"
    if device == "cuda" and torch.endswith("+cpu"):
        return f"the device is cuda, but torch {torch} is a build for CPUs"
    return None


def _loading_failure(device: str) -> str | None:
    """A sentence about packages that cannot be loaded, or None.

    Raises:
        IncompatiblePackagesError: the packages fit CUDA but the machine has no driver.
    """
    try:
        logging.disable()  # fbgemm logs the same error at length
        torch = import_module("torch")
        import_module("fbgemm_gpu")
        for operator in OPERATORS:
            getattr(torch.ops.fbgemm, operator)
    # broken binaries raise any of these: a missing library, symbol or operator
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error.__cause__ or error)
        if reason.startswith(DRIVER_LIBRARIES) and _mismatch("cuda") is None:
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
    """The pairing of the installed torch, else the preferred one."""
    torch = _minor(installed_version("torch") or "")
    return next((pairing for pairing in PAIRINGS if pairing.torch == torch), PAIRINGS[0])


def installed_text() -> str:
    """Versions of the installed torch, torchrec and fbgemm, for messages."""
    packages = ("torch", "torchrec", *FBGEMM_BUILDS.values())
    return ", ".join(f"{package} {installed_version(package) or '(none)'}" for package in packages)


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    """The first two numbers of a version: `2.13` of `2.13.0+cpu`."""
    return ".".join(re.findall(r"\d+", version)[:2])


def main(arguments: list[str]) -> int:
    """Check for the device in `arguments` (default cpu) and print the result."""
    device = arguments[0] if arguments else "cpu"
    try:
        check_versions(device)
    except (IncompatiblePackagesError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Fit together for {device}: {installed_text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
