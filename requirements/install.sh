#!/bin/sh
# Makes .venv in the current folder and installs the lock of DEVICE and the tools into it. Called by make.
#
#   DEVICE=cpu|cuda PYTHON=python3.12 requirements/install.sh
#
# Two steps, because of two traps that requirements/README.md explains. First torch by itself with its
# dependencies: whichever build of it pip finds here then works. Then everything else without dependencies,
# because torchrec declares the CUDA build of fbgemm even where the CPU build is wanted.
set -eu
locks=$(dirname "$0")
venv=.venv
device=${DEVICE:-cpu}
unfinished=$venv/unfinished

die() { echo "install: $*" >&2 && exit 1; }

is_usable() { # an interpreter that this project runs on and that can make a virtual environment with pip
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no usable Python among: ${PYTHON:-python3, python3.13, python3.12, python3.11}.
  It takes Python 3.11, 3.12 or 3.13 with its modules venv and ensurepip (on Debian and Ubuntu: the package
  python3-venv). Name another with \`make PYTHON=/path/to/python3.12 ...\`."
}

# Only errors of pip are worth a line; --no-input because there may be nobody to ask.
quiet_pip() {
    PIP_ROOT_USER_ACTION=ignore "$venv/bin/python" -m pip --disable-pip-version-check --no-input -qq "$@"
}

[ "$(uname -s)" = Linux ] || die "the wheels of fbgemm exist for Linux only; this is $(uname -s). Use a container"

# Half an installation, one of the other device or one whose Python has gone cannot be mended: start again.
other=$([ "$device" = cpu ] && echo cuda || echo cpu)
if [ -e "$unfinished" ] || [ -e "$venv/installed-$other" ] || ! is_usable "$venv/bin/python"; then
    python=$(find_python)
    rm -rf "$venv"
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
rm -f "$venv"/installed-*
touch "$unfinished"

# `===` compares the text: it refuses labelled builds such as 2.13.0+cpu, which cannot use a GPU.
same=$([ "$device" = cuda ] && echo '===' || echo '==')
version=$(sed -n 's/^torch==//p' "$locks/$device.lock")
echo "Installing torch $version for $device (the longest step of the first time: several minutes)"
quiet_pip install --constraint "$locks/cuda.lock" "torch$same$version"
echo "Installing requirements/$device.lock and requirements/dev.lock"
quiet_pip install --no-deps -r "$locks/$device.lock" -r "$locks/dev.lock"
# Images for machines with a GPU are often made on one without: training checks again, so go on.
"$venv/bin/python" -m cpr.versions "$device" || [ "$device" = cuda ]

rm "$unfinished"
touch "$venv/installed-$device"
