"""The locks, the metadata and the installation fit what the code imports."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from cpr.versions import PAIRINGS, TORCHREC_NEEDS

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = ("data", "dlrm", "cpr", "examples", "experiments", "tests")


def pins(lock: str) -> dict[str, str]:
    """The version of every package in a lock."""
    lines = (REQUIREMENTS / lock).read_text().splitlines()
    return dict(re.match(r"([\w.-]+)==([\w.+-]+)", line).groups() for line in lines if line[0] != "#")


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement).group() for requirement in requirements}


def imported_by(package: str) -> set[str]:
    """Top-level modules that the files of a package import."""
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(("left", "right"), [("cpu.lock", "cuda.lock"), ("cuda.lock", "dev.lock")])
def test_a_package_has_one_version_in_all_locks(left, right):
    first, second = pins(left), pins(right)
    assert {name: first[name] for name in first.keys() & second.keys() if first[name] != second[name]} == {}


def test_each_lock_holds_its_own_build_of_fbgemm_and_a_supported_pairing():
    for lock, build, other in (
        ("cpu.lock", "fbgemm-gpu-cpu", "fbgemm-gpu"),
        ("cuda.lock", "fbgemm-gpu", "fbgemm-gpu-cpu"),
    ):
        locked = pins(lock)
        assert other not in locked
        assert locked[build] == locked["torchrec"] == f"{PAIRINGS[0].torchrec}.0"
        assert locked["torch"] == f"{PAIRINGS[0].torch}.0"


def test_the_documented_pairings_are_the_checked_ones():
    rows = re.findall(
        r"^\| (2\.\d+).*? \| (1\.\d+) \| (1\.\d+) \|$", (REQUIREMENTS / "README.md").read_text(), re.M
    )
    assert rows == [(pairing.torch, pairing.torchrec, pairing.torchrec) for pairing in PAIRINGS]


def test_the_cpu_lock_leaves_out_only_what_a_gpu_needs():
    extra = pins("cuda.lock").keys() - pins("cpu.lock").keys()
    assert all(re.match(r"cuda-|nvidia-|triton|fbgemm-gpu", name) for name in extra)


def test_locks_have_what_the_project_declares():
    extras = PROJECT["optional-dependencies"]
    assert names(PROJECT["dependencies"]) <= pins("cpu.lock").keys()
    assert names(extras["cpu"]) <= pins("cpu.lock").keys()
    assert names(extras["cuda"]) <= pins("cuda.lock").keys()
    assert names(extras["dev"]) <= pins("dev.lock").keys()


def test_no_cpu_requirement_brings_the_cuda_build_of_fbgemm():
    """torchrec would; so it must be in no list that a CPU user installs with dependencies."""
    for requirements in (PROJECT["dependencies"], PROJECT["optional-dependencies"]["cpu"]):
        assert not {"torchrec", "fbgemm-gpu"} & names(requirements)


def test_what_torchrec_needs_is_what_it_declares():
    from importlib.metadata import requires  # noqa: PLC0415

    declared = names([line for line in requires("torchrec") if "extra ==" not in line]) - {"fbgemm-gpu"}
    assert declared == names(list(TORCHREC_NEEDS))


@pytest.mark.parametrize(
    ("packages", "extras"),
    [
        (("data", "dlrm", "cpr"), ("cpu", "cluster", "onnx", "kafka")),
        (("experiments", "tests"), ("cpu", "dev")),
    ],
)
def test_everything_imported_is_declared(packages, extras):
    modules = {"scikit-learn": "sklearn", "pillow": "PIL", "markdown-it-py": "markdown_it", "pyyaml": "yaml"}
    declared = names(
        [
            *PROJECT["dependencies"],
            *(each for extra in extras for each in PROJECT["optional-dependencies"][extra]),
        ]
    )
    known = {modules.get(name, name.replace("-", "_")) for name in declared}
    known |= {"torchrec", "fbgemm_gpu", *OURS}
    for package in packages:
        foreign = imported_by(package) - known - set(sys.stdlib_module_names)
        assert not foreign, f"{package} imports {foreign}, which pyproject.toml does not declare"


@pytest.mark.system
@pytest.mark.timeout(120)
def test_the_wheel_holds_code_and_recipes_and_imports_from_elsewhere(tmp_path):
    source = tmp_path / "source"
    # What git knows or would take, so that neither a data set nor a virtual environment is copied.
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path,
            source,
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    expected = {name for name in listed if re.match(r"(data|dlrm|cpr)/.*\.(py|toml)$", name)}
    assert expected <= inside
    assert not [name for name in inside if name.startswith(("examples/", "experiments/", "tests/"))]
    code = "import data, cpr.versions as c; print(c.__file__); c.check_versions('cpu')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))
