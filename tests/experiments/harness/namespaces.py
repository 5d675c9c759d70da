"""The network namespaces that experiments leave on this machine: none, it is hoped."""

import os
import subprocess

from experiments.harness.network import PREFIX


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def own_namespaces():
    return [name for name in namespaces() if name.startswith(f"{PREFIX}-{os.getpid()}-")]
