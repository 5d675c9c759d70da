"""Mismatches of torch, torchrec and fbgemm are diagnosed from package metadata."""

import subprocess
import sys
from pathlib import Path

import pytest

from cpr import versions as compatibility
from cpr.versions import FBGEMM_BUILDS, PAIRINGS, IncompatiblePackagesError, check_versions

FITTING_CPU = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
FITTING_CUDA = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes only the given packages findable, by metadata alone: nothing of them can be imported."""

    def install(packages: dict[str, str]) -> None:
        for name, version in packages.items():
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.setattr(compatibility, "import_module", _refuse_import)

    return install


def _refuse_import(name: str) -> None:
    raise ImportError(f"undefined symbol in {name}")


def test_the_installed_packages_fit():
    check_versions("cpu")


@pytest.mark.parametrize(
    ("device", "change", "problem", "remedy"),
    [
        ("cpu", {"torch": None}, "torch not installed", "torch~=2.13.0"),
        ("cpu", {"torchrec": None}, "torchrec not installed", "--no-deps"),
        ("cpu", {"fbgemm-gpu-cpu": None}, "no build of fbgemm", "fbgemm-gpu-cpu~=1.8.0"),
        (
            "cpu",
            {"fbgemm-gpu": "1.8.0"},
            "both builds of fbgemm",
            "pip uninstall --yes fbgemm-gpu-cpu fbgemm-gpu\n",
        ),
        ("cpu", {"torch": "2.12.1"}, "do not belong together", "fbgemm-gpu-cpu~=1.7.0"),
        ("cpu", {"torchrec": "1.7.0"}, "do not belong together", "torchrec~=1.8.0"),
        ("cpu", {"fbgemm-gpu-cpu": "1.6.0"}, "do not belong together", "fbgemm-gpu-cpu~=1.8.0"),
        ("cpu", {"torch": "2.14.1"}, "do not belong together", "torch~=2.13.0"),
        ("cuda", {}, "fbgemm-gpu-cpu is the build of fbgemm for CPUs", "fbgemm-gpu~=1.8.0"),
        (
            "cuda",
            {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"},
            "torch 2.13.0+cpu is a build",
            "--yes torch ",
        ),
    ],
)
def test_a_mismatch_is_named_with_its_remedy(installed, device, change, problem, remedy):
    packages = {**FITTING_CPU, **change}
    installed({name: version for name, version in packages.items() if version})
    with pytest.raises(IncompatiblePackagesError) as raised:
        check_versions(device)
    message = str(raised.value)
    assert problem in message.splitlines()[0]
    assert remedy in message
    assert f"make install DEVICE={device}" in message


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("device", FBGEMM_BUILDS)
def test_every_supported_pairing_passes_the_metadata(installed, pairing, device):
    installed(
        {
            "torch": f"{pairing.torch}.1",
            "torchrec": f"{pairing.torchrec}.0",
            FBGEMM_BUILDS[device]: f"{pairing.torchrec}.0",
        }
    )
    # Past the metadata comes the import, which the fixture refuses.
    with pytest.raises(IncompatiblePackagesError, match=r"operators cannot be loaded .*undefined symbol"):
        check_versions(device)


def _import_without_driver(name: str) -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize("arguments", [["cuda"], ["cpu"], []], ids=str)
def test_a_missing_driver_is_reported_as_such(installed, monkeypatch, capsys, arguments):
    installed(FITTING_CUDA)
    monkeypatch.setattr(compatibility, "import_module", _import_without_driver)
    assert compatibility.main(arguments) == 1
    told = capsys.readouterr().err
    assert "needs the NVIDIA driver" in told
    assert "The packages are right: use a machine with a GPU" in told
    assert "pip" not in told


def test_a_missing_driver_is_no_excuse_for_packages_that_fit_no_gpu(installed, monkeypatch):
    installed({**FITTING_CUDA, "torch": "2.13.0+cpu"})
    monkeypatch.setattr(compatibility, "import_module", _import_without_driver)
    with pytest.raises(IncompatiblePackagesError, match=r"operators cannot be loaded .*libcuda") as raised:
        check_versions("cpu")
    assert "make install DEVICE=cpu" in str(raised.value)


def test_an_operator_that_is_not_there_is_noticed(monkeypatch):
    monkeypatch.setattr(compatibility, "OPERATORS", (*compatibility.OPERATORS, "no_such_operator"))
    with pytest.raises(IncompatiblePackagesError, match="no_such_operator"):
        check_versions("cpu")


def test_metadata_is_checked_before_torch_is_imported():
    code = (
        "import sys\n"
        "from cpr.versions import check_versions\n"
        "try: check_versions('cuda')\n"
        "except RuntimeError as error: print(type(error).__name__, 'torch' in sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in {"IncompatiblePackagesError False", ""}  # silent where CUDA is installed


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="choose one of cpu, cuda"):
        check_versions("tpu")
